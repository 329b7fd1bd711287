"""Clients by recorded graphs, on streams or mapped, with stand-ins for streams and graphs on the CPU."""

import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from offbeat import Epochs, FedOpt, InputError, Problem, Steps, trees
from offbeat.algorithms.fedopt import Message, Upload
from offbeat.algorithms.rates import Scheduled
from offbeat.core import AnyAlgorithm, Batches, Gradient, Task, Visit
from offbeat.data.population import Population
from offbeat.engines import cuda, vmap
from offbeat.engines.cuda import CompilerCache, RecordedGradient, StreamExecutor
from offbeat.engines.execution import announce_compiler
from offbeat.engines.local import (
    ClientMemory,
    Executor,
    SequentialExecutor,
    TaskResults,
    TaskStart,
)
from offbeat.engines.vmap import VmapExecutor
from worlds import SEED, World, make_world

METHOD = FedOpt(0.1, 1.0)


class Stream:
    """Work is done at once, so that there is nothing to wait for."""

    def wait_stream(self, other: "Stream") -> None:
        pass


class Graph:
    """As a recorded one: it reads its own inputs, and the next launch overwrites its outputs."""

    alive: ClassVar[weakref.WeakSet["Graph"]] = weakref.WeakSet()
    room = 10**6  # graphs that fit into memory
    recorded = 0

    def __init__(self, function: Callable[[Any], Any], example: Any, stream: Stream, pool: object) -> None:
        if len(Graph.alive) >= Graph.room:
            raise torch.OutOfMemoryError("no memory is left")
        self._function, self._inputs = function, trees.map(torch.clone, example)
        self._outputs = trees.map(torch.clone, function(self._inputs))
        self.pool = pool
        Graph.alive.add(self)
        Graph.recorded += 1

    def __call__(self, inputs: Any) -> Any:
        for own, given in zip(trees.leaves(self._inputs), trees.leaves(inputs), strict=True):
            own.copy_(given)
        outputs = self._function(self._inputs)
        for own, made in zip(trees.leaves(self._outputs), trees.leaves(outputs), strict=True):
            own.copy_(made)
        return self._outputs


@pytest.fixture(autouse=True)
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # graphs of earlier tests
    for module in (cuda, vmap):
        monkeypatch.setattr(module, "CapturedGraph", Graph)
        monkeypatch.setattr(module, "new_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(Graph, "recorded", 0)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """For the construction of an executor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Problem, "device", property(lambda self: torch.device("cuda")))
        yield


def on_streams(problem: Problem, population: Population, streams: int = 3) -> StreamExecutor:
    with as_on_a_gpu():
        return StreamExecutor(problem, population, streams)


def starts_of(world: World, count: int, method: AnyAlgorithm = METHOD) -> list[TaskStart]:
    """Each from a model of its own."""
    x, statistics = world.problem.initial()
    memory, visit = ClientMemory.initial(METHOD, world.problem), Visit(torch.tensor(0), torch.tensor(0))
    messages = [method.broadcast(method.init(x + 0.1 * place), 0) for place in range(count)]
    return [TaskStart(message, statistics, memory, visit) for message in messages]


def compare(
    world: World, executor: Executor, clients: list[int], visit: int, method: AnyAlgorithm = METHOD
) -> None:
    tasks, starts = [Task(client, 0, visit) for client in clients], starts_of(world, len(clients), method)
    expected: TaskResults = SequentialExecutor(world.problem, world.population)(method, tasks, starts, SEED)
    found = executor(method, tasks, starts, SEED)
    for one, other in zip(trees.leaves(expected), trees.leaves(found), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("work", [Steps(3, 4), Epochs(1, 4)], ids=["steps", "epochs"])
def test_groups_of_any_size_give_the_reference_and_each_stream_keeps_few_graphs_in_one_pool(
    work: Steps | Epochs,
) -> None:
    world = make_world(clients=8, work=work)
    executor = on_streams(world.problem, world.population)
    for visit, size in enumerate([8, 1, 2, 3, 5, 8, 7, 4, 8]):
        compare(world, executor, list(range(8))[:size], visit)
    pools = Counter(id(graph.pool) for graph in Graph.alive)
    assert len(pools) == 3
    most = cuda._GRAPHS_PER_STREAM if isinstance(work, Steps) else cuda._GRADIENTS_PER_STREAM
    assert max(pools.values()) <= most
    recorded = Graph.recorded
    for visit in range(9, 12):
        compare(world, executor, list(range(8)), visit)
    assert Graph.recorded == recorded  # which costs several runs
    executor.close()
    gc.collect()
    assert not Graph.alive


def test_more_shapes_of_tasks_than_there_is_room_for_are_computed_by_recorded_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "_GRAPHS_PER_STREAM", 1)
    world = make_world(clients=8, work=Steps(3, 4))
    executor = on_streams(world.problem, world.population)
    for visit, size in enumerate([8, 8, 3, 1, 8]):
        compare(world, executor, list(range(8))[:size], visit)
    recorded = Graph.recorded
    monkeypatch.setattr(StreamExecutor, "_record_tasks", lambda *rest: None)
    for visit in range(5, 8):
        compare(world, executor, list(range(8)), visit)
    assert Graph.recorded == recorded + 3  # one gradient on each stream
    assert not executor.fell_back


def test_only_frequent_sizes_of_minibatches_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(clients=8, work=Epochs(1, 4))
    sizes = Counter(len(batch) for c in range(8) for batch in world.population.indices(c, 0, SEED))
    (usual, most), (_, next_most) = sizes.most_common(2)
    assert usual == 4
    for least in (most, next_most):
        recorded = sum(count >= least for count in sizes.values())
        monkeypatch.setattr(cuda, "_FREQUENT", 0.9 * least / sizes.total())
        monkeypatch.setattr(Graph, "recorded", 0)
        executor = on_streams(world.problem, world.population, streams=1)
        for visit in range(4):
            compare(world, executor, list(range(8)), visit)
        assert Graph.recorded == recorded
        executor.close()


def test_small_clients_of_one_size_are_recorded_though_a_minibatch_could_hold_more() -> None:
    world = make_world(clients=8, work=Epochs(2, 1000))
    population = Population(world.population.data, [np.arange(5), *[np.arange(3)] * 7], Epochs(2, 1000))
    executor = on_streams(world.problem, population, streams=1)
    other = world._replace(population=population)
    for visit in range(3):
        compare(other, executor, list(range(8)), visit)
    assert Graph.recorded == 2


def test_equal_clients_are_recorded_whole_for_epochs_as_well() -> None:
    world = make_world(clients=8)
    population = Population(world.population.data, [np.arange(8)] * 8, Epochs(2, 4))
    executor = on_streams(world.problem, population, streams=1)
    for visit in range(3):
        compare(world._replace(population=population), executor, list(range(8)), visit)
    assert Graph.recorded == 1
    assert len(executor._slots[0].graphs) == 1


def test_tasks_of_unlike_lengths_are_dealt_to_streams_by_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(clients=8, work=Epochs(2, 4))
    executor = on_streams(world.problem, world.population)
    used: list[object] = []
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: used.append(stream) or nullcontext())
    compare(world, executor, list(range(8)), 0)
    lengths = [len(world.population.indices(client, 0, SEED)) for client in range(8)]
    loads: dict[object, int] = dict.fromkeys(dict.fromkeys(used), 0)
    assert len(loads) == 3
    for length, stream in zip(sorted(lengths, reverse=True), used, strict=True):
        assert loads[stream] == min(loads.values())  # the longest that is left goes to who has least
        loads[stream] += length
    assert used != [*used[:3], *used[:3], *used[:2]]  # which turn by turn would give
    assert max(loads.values()) - min(loads.values()) <= min(lengths)


def test_a_minibatch_that_is_short_is_not_padded_so_that_batchnorm_is_exact() -> None:
    world = make_world(clients=8, work=Epochs(1, 4, least=2))
    torch.manual_seed(3)
    features = world.population.data.inputs.shape[1]
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(features), torch.nn.Linear(features, 3)).double()
    problem = Problem(module, world.problem.loss)
    other = world._replace(problem=problem)
    executor = on_streams(problem, world.population)
    for visit in range(3):
        compare(other, executor, list(range(8)), visit)
    assert Graph.recorded
    assert not executor.fell_back


class Wandering(FedOpt):
    """It steps from several models in turn, at several rates, and uploads what it stepped in."""

    def local(
        self, message: Message, memory: tuple[()], batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, tuple[()]]:
        x = message.x
        for batch in batches.items:
            x = grad.descend(x, batch, 0.1)
        other = grad.descend(message.x, batches.items[0], 0.1)
        x = grad.descend(x, batches.items[-1], 0.1)
        other = grad.descend(other, batches.items[-1], 0.2)
        x = grad.descend(x, batches.items[0], 0.3)
        last = grad.descend(x, batches.items[-1], torch.tensor(0.1).to(x))
        return Upload(last + grad(other, batches.items[0])), memory


class Keeping(FedOpt):
    """It uploads the model in which it stepped."""

    def local(
        self, message: Message, memory: tuple[()], batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, tuple[()]]:
        x = message.x
        for batch in batches.items:
            x = grad.descend(x, batch, self.local_lr)
        return Upload(x), memory


@pytest.mark.parametrize("kind", [Wandering, Keeping])
def test_steps_in_a_stream_s_own_space_leave_nothing_there_that_is_used_later(kind: type[FedOpt]) -> None:
    world = make_world(clients=8, work=Epochs(2, 4, least=2))
    torch.manual_seed(3)
    features = world.population.data.inputs.shape[1]
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(features), torch.nn.Linear(features, 3)).double()
    problem = Problem(module, world.problem.loss, weight_decay=0.01)
    executor = on_streams(problem, world.population)
    for visit in range(4):
        compare(world._replace(problem=problem), executor, list(range(8)), visit, kind(0.1, 1.0))
    assert Graph.recorded
    assert all(slot.space.x is not None for slot in executor._slots)
    executor.close()
    assert all(slot.space.x is None for slot in executor._slots)


@pytest.mark.parametrize("work", [Steps(3, 4), Epochs(2, 4, least=2)], ids=["steps", "epochs"])
@pytest.mark.parametrize("able", [True, False], ids=["compiles", "falls back"])
def test_compiled_work_on_streams_gives_the_reference_and_the_compiler_s_cache_is_noted_unless_it_fell_back(
    able: bool,
    work: Steps | Epochs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    calls: list[object] = []

    def compiled(objective: Callable[..., Any], **more: object) -> Callable[..., Any]:
        def call(*given: object) -> Any:
            calls.append(given)
            if not able:
                raise RuntimeError("no compiler. More of it")
            return objective(*given)

        return call

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch, "compile", compiled)
    world = make_world(clients=8, work=work)
    with as_on_a_gpu():
        executor = StreamExecutor(world.problem, world.population, 3, compiled=True)
    for visit in range(4):
        compare(world, executor, list(range(8)), visit)
    assert calls
    assert Graph.recorded
    assert executor.fell_back is not able
    said = "this module cannot be compiled, so it runs without the compiler: no compiler"
    assert [record.message for record in caplog.records] == ([] if able else [said])
    caplog.clear()
    caplog.set_level(logging.INFO)
    announce_compiler(executor, METHOD, 8)  # which says nothing of one that fell back
    assert [record.message for record in caplog.records] == ["compiling the model: about 5 s."] * able
    cache = CompilerCache("streamed-compiled", world.problem, world.population)
    assert cache.filled(METHOD, 8) is able


class Twice(FedOpt):
    """It takes two steps with each minibatch, of which the first alone moves personal layers."""

    def local(
        self, message: Message, memory: tuple[()], batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, tuple[()]]:
        x = message.x
        for batch in batches.items:
            x = grad.descend(grad.descend(x, batch, self.local_lr), batch, self.local_lr)
        return Upload(message.x - x), memory


@pytest.mark.parametrize("kind", [FedOpt, Twice])
def test_personal_layers_move_with_each_step_on_streams_as_in_the_reference(kind: type[FedOpt]) -> None:
    world = make_world(clients=8, work=Epochs(2, 4, least=2))
    torch.manual_seed(3)
    features = world.population.data.inputs.shape[1]
    module = torch.nn.Sequential(torch.nn.Linear(features, 4), torch.nn.Linear(4, 3)).double()
    problem = Problem(module, world.problem.loss, personal=["1"], personal_lr=0.2)
    executor = on_streams(problem, world.population)
    for visit in range(4):
        compare(world._replace(problem=problem), executor, list(range(8)), visit, kind(0.1, 1.0))
    assert Graph.recorded


@pytest.mark.parametrize("scheduled", [False, True])
def test_steps_of_any_rate_are_recorded_and_none_is_recorded_again_for_another_rate(
    scheduled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(clients=8, work=Epochs(1, 4))
    executor = on_streams(world.problem, world.population, streams=1)
    monkeypatch.delattr(RecordedGradient, "__call__")  # the gradient by itself, for a step elsewhere
    for visit, rate in enumerate([0.1, 0.1, 0.2, 0.1, 0.3, 0.2]):
        method = Scheduled(FedOpt(0.1, 1.0), lambda version, rate=rate: 10 * rate)  # type: ignore[misc]
        compare(world, executor, list(range(8)), visit, method if scheduled else FedOpt(rate, 1.0))
        if visit == 2:
            recorded = Graph.recorded
    assert Graph.recorded == recorded > 0


def test_fewer_streams_are_used_where_memory_is_short_which_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(clients=8, work=Steps(3, 4))
    executor = on_streams(world.problem, world.population, streams=8)
    monkeypatch.setattr(Graph, "room", 3)
    for visit in range(3):
        compare(world, executor, list(range(8)), visit)
    said = [record.message for record in caplog.records if "memory" in record.message]
    assert said == [f"so many streams do not fit into memory, so {count} are used." for count in (4, 2)]
    monkeypatch.setattr(Graph, "room", 0)
    executor.close()
    gc.collect()
    with pytest.raises(InputError, match="a single client does not fit"):
        compare(world, executor, [0], 3)


def test_what_cannot_be_recorded_is_computed_one_by_one_which_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*rest: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing. More of it")

    world = make_world(clients=8)
    executor = on_streams(world.problem, world.population)
    monkeypatch.setattr(cuda, "CapturedGraph", refuse)
    assert not executor.fell_back
    for visit in range(2):
        compare(world, executor, list(range(8)), visit)
    assert executor.fell_back
    (said,) = [record.message for record in caplog.records]
    assert said == (
        "this module cannot be recorded as a graph, so its clients are computed one by one: "
        "operation not permitted when stream is capturing"
    )


def test_an_error_of_the_module_itself_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*rest: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    world = make_world(clients=8)
    executor = on_streams(world.problem, world.population)
    monkeypatch.setattr(cuda, "CapturedGraph", fail)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        compare(world, executor, [0, 1], 0)


def test_mapped_groups_of_many_sizes_are_padded_to_few_and_none_is_recorded_again_and_again() -> None:
    world = make_world(clients=64)
    with as_on_a_gpu():
        executor = VmapExecutor(world.problem, world.population)
    sizes = [1, 2, 3, 4, 5, 8, 11, 13, 16, 24, 29, 40, 64]  # padded to eleven
    for visit in range(6):
        for size in sizes:
            compare(world, executor, list(range(size)), visit)
    assert Graph.recorded <= vmap._MAX_GRAPHS
    gc.collect()
    assert len(Graph.alive) <= vmap._MAX_GRAPHS
    assert len({id(graph.pool) for graph in Graph.alive}) == 1


def test_a_single_mapped_client_is_computed_without_a_graph_before_memory_is_called_too_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = make_world(clients=8)
    with as_on_a_gpu():
        executor = VmapExecutor(world.problem, world.population)
    monkeypatch.setattr(Graph, "room", 0)
    for visit in range(4):
        compare(world, executor, list(range(8)), visit)
    assert not Graph.recorded


def test_mapped_graphs_are_dropped_before_a_group_that_does_not_fit_is_halved(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(clients=8)
    with as_on_a_gpu():
        executor = VmapExecutor(world.problem, world.population)
    monkeypatch.setattr(Graph, "room", 1)
    for visit, size in enumerate([8, 8, 8, 3, 3, 3, 8]):
        compare(world, executor, list(range(size)), visit)
    assert not [record for record in caplog.records if "memory" in record.message]
    assert Graph.recorded == 3  # of 8 tasks, of 3 in their place, and of 8 again
