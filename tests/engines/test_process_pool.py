"""Client work in other processes: the sequential engine's results, whoever dies on the way."""

import contextlib
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lasting import DELAYS, METHODS, Lasting, identical, ragged, same, steps
from offbeat import (
    Asynchronous,
    Epochs,
    FedOpt,
    InputError,
    Problem,
    Sequential,
    Synchronous,
    Task,
    Visit,
    trees,
)
from offbeat.aggregate.mean import PlainSum
from offbeat.cli import main
from offbeat.engines import shared_memory
from offbeat.engines.engine import ClientUpdates
from offbeat.engines.execution import Serial, Vmap
from offbeat.engines.local import ClientMemory, TaskResults, TaskStart
from offbeat.engines.process_pool import ProcessPool, Workers
from offbeat.engines.shared_memory import SegmentPool, TensorSlot
from offbeat.engines.simulation import Simulation
from offbeat.engines.worker_pool import (
    PoolExecutor,
    WorkDone,
    WorkerLost,
    WorkerRuntime,
    WorkFailed,
    WorkOrder,
    attempt,
    even_chunks,
    guided_chunks,
    join_orders,
    pack_worker,
    run_orders,
)
from offbeat.errors import DivergedError
from offbeat.training.build import build_run, resolved_settings
from offbeat.training.experiment import Experiment
from offbeat.training.loop import BufferSum
from worlds import CLASSES, FEATURES, World, make_world, play


@pytest.fixture(scope="module")
def lasting() -> Iterator[tuple[World, Lasting]]:
    """Ragged epochs, a norm with statistics and a module that draws."""
    world = ragged()
    engine = Lasting(world, ProcessPool(pack_worker(world.problem, world.population, Serial()), 2))
    yield world, engine
    engine.pool.close()


@pytest.mark.parametrize("ahead", [0, 6])
@pytest.mark.parametrize("method", METHODS)
def test_workers_give_the_sequential_trajectory_and_repeat_it_to_the_bit(
    method: str, ahead: int, lasting: tuple[World, Lasting]
) -> None:
    _, engine = lasting
    engine.ahead = ahead
    one = play(METHODS[method], engine.engine, Asynchronous(5))
    first, second = (play(METHODS[method], engine, Asynchronous(5)) for _ in range(2))
    same(one, first)
    identical(first, second)


def test_uploads_that_are_added_while_others_are_computed_give_the_bits_of_a_whole_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = ragged()
    engine = Lasting(world, ProcessPool(pack_worker(world.problem, world.population, Serial()), 1))
    monkeypatch.setattr(PlainSum, "piece", lambda self, numbers: 2)
    taken: list[int] = []
    take = BufferSum._take

    def counted(self: BufferSum, updates: ClientUpdates, tasks: tuple[Task, ...]) -> None:
        taken.append(len(tasks))
        take(self, updates, tasks)

    def together(self: Simulation, tasks: Sequence[Task], version: int) -> Iterator[ClientUpdates]:
        yield self.gather(tasks, version)

    monkeypatch.setattr(BufferSum, "_take", counted)
    with contextlib.closing(engine.pool):
        growing = [play(method, engine, Synchronous(5), buffer=5, rounds=4) for method in METHODS.values()]
        assert taken[-12:] == [2, 2, 1] * 4  # of orders of 2, 1, 1 and 1 tasks
        monkeypatch.setattr(Simulation, "gather_growing", together)
        for method, shots in zip(METHODS.values(), growing, strict=True):
            identical(shots, play(method, engine, Synchronous(5), buffer=5, rounds=4))
        assert taken[-4:] == [5] * 4


@pytest.mark.slow
def test_workers_that_are_killed_again_and_again_change_nothing(lasting: tuple[World, Lasting]) -> None:
    _, engine = lasting
    engine.ahead = 0
    whole = play(METHODS["adamasfl"], engine, Asynchronous(5), rounds=12)
    chance = random.Random(1)
    killed = []

    def kill(count: int) -> None:
        for process in forks(engine.pool)[:count]:
            os.kill(process, signal.SIGKILL)
            killed.append(process)

    disturbed = []
    for shot in steps(METHODS["adamasfl"], engine, rounds=12):
        disturbed.append(shot)
        timer = threading.Timer(chance.uniform(0, 0.01), kill, [1 + shot.version % 2])  # one, or both
        timer.start()
    timer.join()
    identical(whole, disturbed)
    assert len(killed) > 12


def forks(pool: ProcessPool) -> list[int]:
    server = pool._forkserver._process.pid
    return [int(word) for word in Path(f"/proc/{server}/task/{server}/children").read_text().split()]


@pytest.mark.slow
def test_a_fork_server_that_is_killed_changes_nothing(lasting: tuple[World, Lasting]) -> None:
    _, engine = lasting
    whole = play(METHODS["fedavg"], engine, Asynchronous(5))
    server, workers = engine.pool._forkserver._process, forks(engine.pool)
    for process in (server.pid, *workers):
        os.kill(process, signal.SIGKILL)
    identical(whole, play(METHODS["fedavg"], engine, Asynchronous(5)))
    assert engine.pool._forkserver._process.pid != server.pid


@pytest.mark.slow
def test_vmap_inside_workers_is_the_same_but_for_rounding() -> None:
    world = make_world(work=Epochs(2, 4))
    engine = Workers(world.problem, world.population, DELAYS, workers=2, execution=Vmap())
    many = play(METHODS["adamasfl"], engine, Asynchronous(5))
    same(
        play(METHODS["adamasfl"], Sequential(world.problem, world.population, DELAYS), Asynchronous(5)), many
    )


class Faulty(nn.Module):
    """Complains as it is told."""

    def __init__(self, kind: type[Exception], *words: str) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES).double()
        self.kind, self.words = kind, words

    def forward(self, inputs: Tensor) -> Tensor:
        raise self.kind(*self.words)


class TwoWordsError(Exception):
    """Cannot be unpickled: its constructor wants other words than it keeps."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


@pytest.mark.parametrize(
    ("module", "kind", "said"),
    [
        (Faulty(InputError, "this is wrong: do that."), InputError, "this is wrong: do that."),
        (Faulty(DivergedError, "it became NaN."), DivergedError, "it became NaN."),
        (Faulty(KeyError, "name"), KeyError, "'name'"),
        (Faulty(TwoWordsError, "quite", "wrong"), RuntimeError, "TwoWordsError: quite wrong"),
    ],
    ids=["input", "diverged", "key", "unpicklable"],
)
def test_an_error_in_a_worker_reaches_the_caller_as_it_is(
    module: nn.Module, kind: type[Exception], said: str
) -> None:
    run, order = _runtime(module), _order()
    failed = run(order)
    assert isinstance(failed, WorkFailed)
    assert type(failed.error) is kind
    assert str(failed.error) == said
    assert "in forward" in "".join(failed.error.__notes__)


def _order() -> WorkOrder:
    return WorkOrder(
        1, METHODS["fedavg"], 0, [Task(0, 0, 0)], [[0, 0]], [], [0], [ClientMemory((), {})], [()]
    )


def _runtime(module: nn.Module) -> Any:
    world = make_world(module=module)
    x, statistics = world.problem.initial()
    algorithm = METHODS["fedavg"]
    message = algorithm.broadcast(algorithm.init(x), 0)
    logger = logging.getLogger("offbeat")
    handlers, propagate = logger.handlers[:], logger.propagate
    runtime = WorkerRuntime(pack_worker(world.problem, world.population, Serial()), torch.device("cpu"))
    logger.handlers, logger.propagate = handlers, propagate
    return lambda order: attempt(order.number, lambda: runtime.run(order, [(message, statistics)]))


def test_what_is_defined_on_the_spot_can_be_sent_and_its_errors_come_back() -> None:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(FEATURES, CLASSES).double()

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.linear(inputs)
            return outputs

    world = make_world()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if float(outputs.detach().abs().max()) > 1e3:
            raise InputError("this is too large: lower the rate.")
        return nn.functional.cross_entropy(outputs, targets)

    problem = Problem(Local(), loss)
    engine = Workers(problem, world.population, DELAYS, workers=2)
    with pytest.raises(InputError, match="this is too large: lower the rate") as caught:
        play(FedOpt(1e4, 1.0), engine, Asynchronous(5))
    assert str(caught.value) == "this is too large: lower the rate."


def test_what_cannot_be_sent_is_one_sentence() -> None:
    world = make_world()
    lock = threading.Lock()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        with lock:
            return nn.functional.cross_entropy(outputs, targets)

    problem = Problem(nn.Linear(FEATURES, CLASSES).double(), loss)
    engine = Workers(problem, world.population, workers=2)
    with pytest.raises(InputError, match=r"cannot be sent to another process \(.*lock.*\): leave out"):
        play(METHODS["fedavg"], engine, Synchronous(3))


def test_numbers_that_cannot_be_are_refused() -> None:
    world = make_world()
    with pytest.raises(InputError, match="the number of workers is 0: give at least 1"):
        Workers(world.problem, world.population, workers=0)


PROGRAM = """
import sys
from offbeat import Asynchronous, FedOpt, train
from offbeat.engines.process_pool import Workers
from worlds import make_world
world = make_world()
run = train(FedOpt(0.1, 1.0), Workers(world.problem, world.population, workers=2),
            dispatch=Asynchronous(5), buffer=3, rounds=10**6)
for shot in run:
    if shot.version == 1:
        session = run.gi_frame.f_locals["run"].session
        pool = session._executor._pool
        print(*pool.process_ids(), pool._forkserver._process.pid, flush=True)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_one_that_started_it(number: int) -> None:
    """A script without a guard for its main part, interrupted as by Ctrl-C, or killed."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as program:
        assert program.stdout
        processes = [int(word) for word in program.stdout.readline().split()]
        assert len(processes) == 3
        program.send_signal(number)
        program.communicate(timeout=60)
    patience = time.monotonic() + 20
    while any(map(alive, processes)) and time.monotonic() < patience:
        time.sleep(0.02)
    assert not any(map(alive, processes))


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.slow
def test_the_command_line_runs_workers_and_says_so(tmp_path: Path) -> None:
    words = "run fedavg --clients 12 --buffer 3 --rounds 2 --local-steps 1 --engine workers --workers 2"
    assert main([*words.split(), "--out", str(tmp_path / "run")]) == 0
    settings = (tmp_path / "run" / "settings.json").read_text()
    assert '"engine": "workers"' in settings


@pytest.mark.parametrize(
    ("width", "cores", "rounds", "name", "reason"),
    [
        (4000, 2, 200, "workers", "the model has 300,010 weights, more than 50,000, and the machine 2 cores"),
        (4000, 2, 10, "sequential", "the model has 300,010 weights and 300 gradients are too few"),
        (4000, 1, 200, "sequential", "the model has 300,010 weights and the machine one core"),
        (800, 2, 200, "vectorised", "a gradient takes 5.06 million operations, at most 20 million"),
        (800, 8, 200, "workers", "the model has 60,010 weights, more than 50,000, and the machine 8 cores"),
    ],
)
def test_the_engine_suits_the_model_the_work_and_the_cores_and_the_reason_is_told(
    width: int, cores: int, rounds: int, name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "offbeat.nn.models._mlp",
        lambda shape, classes: nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes)
        ),
    )
    monkeypatch.setattr("offbeat.training.build.available_cores", lambda: cores)
    experiment = Experiment.of(clients=12, buffer=3, concurrency=5, rounds=rounds)
    spec = build_run(experiment)
    assert resolved_settings(experiment, spec)["engine"] == name
    assert spec.engine_reason is not None
    assert spec.engine_reason.startswith(reason)
    named = build_run(Experiment.of(clients=12, buffer=3, concurrency=5, rounds=rounds, engine="sequential"))
    assert named.engine_reason is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--engine sequential --workers 2", "the engine 'sequential' has no --workers: use workers or ray."),
        ("--ray-address a:1", "--ray-address is for --engine ray: give that, too."),
        ("--engine workers --workers 0", "--workers must be at least 1 and below 2^31, not 0."),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["run", *words.split(), "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == f"offbeat: {said}\n"
    assert not (tmp_path / "run").exists()


class Clumsy:
    """A pool whose workers die as often as told before each order is done."""

    def __init__(self, workers: int, deaths: dict[int, int], failing: frozenset[int] = frozenset()) -> None:
        self.workers = workers
        self.deaths = deaths
        self.failing = failing
        self.given: dict[int, WorkOrder] = {}
        self.seen: list[int] = []
        self.placed: list[Any] = []
        self.removed: list[int] = []

    def give(self, worker: int, order: WorkOrder) -> None:
        assert worker not in self.given
        self.given[worker] = order

    def wait(self) -> list[Any]:
        worker, order = self.given.popitem()
        if self.deaths.get(order.number, 0):
            self.deaths[order.number] -= 1
            return [WorkerLost(worker, "signal 9")]
        self.seen.append(order.number)
        if order.number in self.failing:
            return [(worker, WorkFailed(order.number, ValueError(str(order.number))))]
        uploads = torch.tensor([float(task.client) for task in order.tasks])
        return [(worker, WorkDone(order.number, TaskResults(uploads, (), {}), ("it is so.",)))]

    def replace(self, worker: int) -> None:
        pass

    def place(self, tree: Any) -> Any:
        self.placed.append(tree)
        return len(self.placed) - 1

    def remove(self, placed: Any) -> None:
        self.removed.append(placed)

    def expect(self, tasks: int) -> None:
        pass

    @property
    def in_place(self) -> bool:
        return False

    def join(self, done: list[WorkDone]) -> Any:
        return join_orders(done)


def orders(count: int) -> list[WorkOrder]:
    return [_order()._replace(number=number) for number in range(count)]


@given(st.integers(1, 4), st.dictionaries(st.integers(0, 9), st.integers(0, 7)), st.integers(0, 10))
def test_every_order_is_done_once_and_in_its_place(workers: int, deaths: dict[int, int], count: int) -> None:
    pool = Clumsy(workers, deaths)
    last = 0
    for done in run_orders(pool, orders(count)):  # type: ignore[arg-type]
        assert [each.number for each in done] == list(range(len(done)))
        assert last < len(done) == next((n for n in range(count) if n not in pool.seen), count)
        last = len(done)
    assert last == count
    assert sorted(pool.seen) == list(range(count))


def test_an_order_that_kills_whoever_has_it_is_given_up_with_one_sentence() -> None:
    with pytest.raises(InputError, match=r"8 workers died in turn at the tasks of client 0 \(signal 9\)"):
        list(run_orders(Clumsy(2, {1: 100}), orders(3)))  # type: ignore[arg-type]


def test_the_first_failure_is_raised_when_nobody_is_at_work() -> None:
    pool = Clumsy(3, {}, frozenset({1, 2}))
    with pytest.raises(ValueError, match="1"):
        list(run_orders(pool, orders(9)))  # type: ignore[arg-type]
    assert not pool.given


def test_a_message_is_placed_once_a_version_and_what_workers_say_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = Clumsy(2, {})
    executor = PoolExecutor(pool, torch.device("cpu"), guided_chunks)  # type: ignore[arg-type]
    old, new, statistics = (torch.zeros(3),), (torch.ones(3),), {"mean": torch.zeros(1)}

    def call(*messages: Any) -> None:
        tasks = [Task(client, 0, 0) for client in range(len(messages))]
        visit = Visit(torch.tensor(0), torch.tensor(0))
        starts = [TaskStart(message, statistics, ClientMemory((), {}), visit) for message in messages]
        results = executor(METHODS["fedavg"], tasks, starts, 0)
        assert results.uploads.tolist() == list(range(len(messages)))

    call(old, new, old, old, new)
    assert pool.placed == [(old, statistics), (new, statistics)]
    call(new, new)
    assert pool.removed == []
    call(new)
    assert pool.removed == [0]
    call(old)  # a straggler's
    assert pool.placed[2:] == [(old, statistics)]
    assert [record.message for record in caplog.records] == ["it is so."]


@given(st.integers(1, 300), st.integers(1, 70))
def test_parts_cover_all_tasks_once(tasks: int, workers: int) -> None:
    for parts in (guided_chunks(tasks, workers), even_chunks(tasks, workers)):
        assert [place for part in parts for place in range(tasks)[part]] == list(range(tasks))
    assert len(even_chunks(tasks, workers)) <= workers


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8]


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=6))
def test_a_packed_tree_comes_back_as_it_was(leaves: list[tuple[torch.dtype, list[int]]]) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [
        torch.randint(0, 2, shape, generator=generator).to(dtype).reshape(shape) for dtype, shape in leaves
    ]
    tree = {"some": tuple(tensors[:2]), "more": tensors[2:]}
    back = shared_memory.read_packed(*shared_memory.pack_tree(tree))
    assert trees.structure(back) == trees.structure(tree)
    assert all(map(torch.equal, trees.leaves(back), trees.leaves(tree)))
    assert [leaf.dtype for leaf in trees.leaves(back)] == [leaf.dtype for leaf in trees.leaves(tree)]


def test_segments_are_used_again() -> None:
    segments = SegmentPool()
    first, _ = segments.put((torch.zeros(1000),))
    second, _ = segments.put((torch.zeros(1000),))
    assert first.number != second.number
    segments.release(first)
    third, slots = segments.put((torch.arange(900.0),))
    assert third.number == first.number
    assert torch.equal(shared_memory.read_packed(slots, third.memory)[0], torch.arange(900.0))
    segments.close()


def test_rows_of_a_stack_are_where_the_stack_has_them() -> None:
    row = (TensorSlot(0, torch.float32, (3,)), {"count": TensorSlot(0, torch.int64, ())})
    slots, size = shared_memory.plan_stack(row, 5)
    memory = torch.zeros(size, dtype=torch.uint8)
    vectors, numbers = shared_memory.read_packed(slots, memory)
    part, counts = shared_memory.read_packed(shared_memory.select_rows(slots, 3, 2), memory)
    part.fill_(7.0)
    counts["count"].copy_(torch.tensor([8, 9]))
    assert vectors.tolist() == [[0.0] * 3] * 3 + [[7.0] * 3] * 2
    assert numbers["count"].tolist() == [0, 0, 0, 8, 9]


def test_a_leased_segment_is_used_again_once_nothing_reads_it() -> None:
    segments = SegmentPool()
    first, memory = segments.lease(1000)
    kept = memory.view(torch.float32)[2:4]
    del memory
    second, other = segments.lease(1000)
    assert second.number != first.number
    kept.fill_(3.0)
    del kept
    third, _ = segments.lease(1000)
    assert third.number == first.number
    del other
    segments.close()


def test_a_method_whose_uploads_change_their_shape_is_written_to_other_rows() -> None:
    world = make_world()
    start = METHODS["adamasfl"]
    plain = play(start, Sequential(world.problem, world.population), Asynchronous(5))
    found = play(start, Workers(world.problem, world.population, workers=2), Asynchronous(5))
    assert start.warmup() is not None  # of another upload than the method's own
    assert all(torch.equal(one.x, other.x) for one, other in zip(plain, found, strict=True))
