"""Computing tasks ahead of their buffer changes nothing but rounding."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from offbeat import (
    AdaMasFL,
    Asynchronous,
    Dropout,
    Exponential,
    FedOpt,
    LogNormal,
    Population,
    Problem,
    Queues,
    Sequential,
    Steps,
    Vectorised,
    train,
)
from offbeat.aggregate.uploads import clients_read_staleness
from offbeat.core import AnyAlgorithm, Task
from offbeat.engines.local import Executor, SequentialExecutor, TaskResults, TaskStart
from offbeat.engines.vmap import VmapExecutor
from offbeat.schedule.dispatch import Dispatch
from offbeat.schedule.rng import KeyedRng
from worlds import make_world, play

METHODS: dict[str, AnyAlgorithm] = {"adamasfl": AdaMasFL(0.05, 0.1, 0.5), "fedavg": FedOpt(0.1, 1.0)}


@pytest.mark.parametrize("dispatch", [Asynchronous(5), Asynchronous(8, eager=False), Queues(8)])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ahead", [1, 4, 50])
def test_the_trajectory_is_that_of_the_sequential_engine(method: str, dispatch: Dispatch, ahead: int) -> None:
    world = make_world()
    plain = Sequential(world.problem, world.population, Exponential(1.0), dropout=Dropout(0.2))
    forward = Vectorised(world.problem, world.population, Exponential(1.0), dropout=Dropout(0.2), ahead=ahead)
    for one, other in zip(
        play(METHODS[method], plain, dispatch), play(METHODS[method], forward, dispatch), strict=True
    ):
        torch.testing.assert_close(one.x, other.x, rtol=0, atol=1e-10)


def test_fewer_and_larger_groups_are_computed() -> None:
    world = make_world()
    sizes: dict[int, list[int]] = {}
    for ahead in (0, 6):
        engine = Vectorised(world.problem, world.population, Exponential(1.0), ahead=ahead)
        sizes[ahead] = []

        class Counting:
            def __init__(self, sizes: list[int]) -> None:
                self.sizes = sizes

            def executor(self, problem, population):  # type: ignore[no-untyped-def]
                from offbeat.engines.vmap import VmapExecutor

                inner, sizes = VmapExecutor(problem, population), self.sizes

                class Wrapped:
                    def __call__(self, algorithm, tasks, starts, seed):  # type: ignore[no-untyped-def]
                        sizes.append(len(tasks))
                        return inner(algorithm, tasks, starts, seed)

                    def close(self) -> None:
                        inner.close()

                return Wrapped()

        import dataclasses

        engine = dataclasses.replace(engine, execution=Counting(sizes[ahead]))
        list(train(FedOpt(0.1, 1.0), engine, dispatch=Asynchronous(8), buffer=2, rounds=12))
    assert len(sizes[6]) < len(sizes[0])
    assert max(sizes[6]) > max(sizes[0])


def test_stragglers_do_not_hold_what_was_computed_beside_them() -> None:
    world = make_world(clients=24)
    engine = Vectorised(world.problem, world.population, LogNormal(0.0, 3.0), ahead=16)
    method = FedOpt(0.1, 1.0)
    session = engine.open(method, 0, KeyedRng(0))
    held = []
    for client in range(24):
        session.publish(0, method, method.broadcast(method.init(engine.initial()[0]), 0), {})
        session.start(Task(client, 0, 0))
    for _ in range(11):
        session.gather([session.next().task, session.next().task], 0)
        ready = session._computed
        rows = {id(each.results): len(each.results.uploads.delta) for each in ready.values()}
        held.append((sum(rows.values()), len(ready)))
    assert any(ready for _, ready in held)
    assert all(rows <= 4 * ready for rows, ready in held)


def test_a_dropped_task_that_was_computed_ahead_is_forgotten() -> None:
    world = make_world()
    engine = Vectorised(world.problem, world.population, Exponential(1.0), ahead=4)
    method = AdaMasFL(0.05, 0.1, 0.5, lazy=True)
    session = engine.open(method, 0, KeyedRng(0))
    state = method.init(engine.initial()[0])
    session.publish(0, method, method.broadcast(state, 0), {})
    tasks = [Task(client, 0, 0) for client in range(8)]
    for task in tasks:
        session.start(task)
    used = [session.next().task for _ in range(2)]
    session.gather(used, 0)
    dropped = [session.next().task for _ in range(6)]
    assert set(session.save().facts["ready"]) & set(dropped)
    session.forget(dropped)
    saved = session.save()
    assert not saved.facts["ready"]
    assert not [count for _, count in saved.facts["holders"] if count]
    assert sorted(saved.facts["clients"]) == sorted(task.client for task in used)


@dataclass(frozen=True)
class Undeclared:
    """FedAvg whose clients shorten their step by how late they will be, and do not say so."""

    inner: FedOpt = FedOpt(0.1, 1.0)

    def warmup(self):  # type: ignore[no-untyped-def]
        return None

    def init(self, x):  # type: ignore[no-untyped-def]
        return self.inner.init(x)

    def memory(self, x):  # type: ignore[no-untyped-def]
        return ()

    def broadcast(self, state, version):  # type: ignore[no-untyped-def]
        return self.inner.broadcast(state, version)

    def local(self, message, memory, batches, visit, grad):  # type: ignore[no-untyped-def]
        upload, memory = self.inner.local(message, memory, batches, visit, grad)
        return upload._replace(delta=upload.delta / (1 + visit.staleness)), memory

    def step(self, state, mean, cohort):  # type: ignore[no-untyped-def]
        return self.inner.step(state, mean, cohort)


def test_a_method_whose_clients_read_staleness_is_not_computed_ahead_even_if_it_does_not_say_so() -> None:
    assert clients_read_staleness(Undeclared())
    assert not any(map(clients_read_staleness, METHODS.values()))
    world = make_world()
    runs = [
        play(Undeclared(), kind, Asynchronous(8))[-1].x
        for kind in (
            Sequential(world.problem, world.population, Exponential(1.0)),
            Vectorised(world.problem, world.population, Exponential(1.0), ahead=6),
        )
    ]
    torch.testing.assert_close(*runs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_goes_on_from_a_checkpoint_has_the_same_bits(method: str) -> None:
    world = make_world()
    engine = Vectorised(world.problem, world.population, Exponential(1.0), ahead=6)

    def run(**options: object) -> list[torch.Tensor]:
        shots = train(METHODS[method], engine, dispatch=Asynchronous(7), buffer=2, rounds=10, **options)  # type: ignore[arg-type]
        models = []
        for shot in shots:
            models.append(shot.x)
            if shot.version == 4 and "resume" not in options:
                saved.append(shot.checkpoint())
        return models

    saved: list[object] = []
    whole = run()
    assert any(name.startswith("session.ready") for name in saved[0].tensors)  # type: ignore[attr-defined]
    rest = run(resume=saved[0])
    assert len(rest) == 6
    assert all(torch.equal(one, other) for one, other in zip(whole[5:], rest, strict=True))


class Large:
    """An executor that prefers large groups, as `vmap` recorded on a GPU does; notes their sizes."""

    large = True

    def __init__(self, inner: Executor, sizes: list[int]) -> None:
        self.inner = inner
        self.sizes = sizes

    def __call__(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> TaskResults:
        self.sizes.append(len(tasks))
        return self.inner(algorithm, tasks, starts, seed)

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True)
class LargeGroups:
    """As many tasks at once as on a GPU, without one."""

    sizes: list[int]

    def executor(self, problem: Problem, population: Population) -> Executor:
        return Large(SequentialExecutor(problem, population), self.sizes)


@pytest.mark.parametrize(("method", "most"), [("fedavg", 1), ("adamasfl", 3)])
def test_exponential_delays_make_groups_of_few_sizes(method: str, most: int) -> None:
    """Without memory of clients a buffer of 32 is one group of 32, however many of it are there already."""
    world = make_world(clients=200, work=Steps(1, 2))
    sizes: list[int] = []
    engine = Vectorised(
        world.problem, world.population, Exponential(1.0), execution=LargeGroups(sizes), ahead=64
    )
    steps = list(train(METHODS[method], engine, dispatch=Asynchronous(64), buffer=32, rounds=40))
    usual = sizes[3:]  # once the tasks that are computed ahead have filled up
    shapes = VmapExecutor(world.problem, world.population)
    shapes.expect(32, 40)
    padded = [shapes._padded_count(size) for size in usual]
    assert len(set(padded)) <= most
    assert all(size <= shape <= max(8, 1.5 * size) for size, shape in zip(usual, padded, strict=True))
    plain = Sequential(world.problem, world.population, Exponential(1.0))
    reference = list(train(METHODS[method], plain, dispatch=Asynchronous(64), buffer=32, rounds=40))
    torch.testing.assert_close(steps[-1].x, reference[-1].x, rtol=0, atol=1e-12)
    if most == 1:
        assert set(usual) == {32}
        assert len(sizes) <= len(steps) + 1  # no second wave


@pytest.mark.parametrize("chunk", [None, 20])
def test_few_shapes_hold_every_number_of_tasks(chunk: int | None) -> None:
    world = make_world()
    executor = VmapExecutor(world.problem, world.population, chunk)
    executor.expect(25, 100)
    most = chunk or 64
    shapes = {count: executor._padded_count(count) for count in range(1, most + 1)}
    assert all(count <= shape <= max(1, 1.5 * count) for count, shape in shapes.items())
    assert all(shape <= most for shape in shapes.values())
    assert len(set(shapes.values())) <= 13
    assert chunk or shapes[25] == 25  # of most groups, without padding
