"""Tasks that end early, in the middle of their work: the same results as of a task of so many steps."""

from typing import Any

import pytest
import torch
from torch import nn

from offbeat import Setting, build, trees
from offbeat.aggregate.compression import Compressed, TopK
from offbeat.algorithms import CATALOGUE
from offbeat.algorithms.rates import LocallyOptimized
from offbeat.core import AnyAlgorithm, Batch, Task, Visit, traits_of
from offbeat.engines.local import (
    ClientMemory,
    InterruptibleItems,
    SequentialExecutor,
    TaskStart,
    _ItemsState,
    task_key,
)
from offbeat.training.method import parse_local_optimizer
from worlds import CLASSES, FEATURES, SEED, World, make_world

STEPS = 3
TASK = Task(2, 1, 4)


def start_of(world: World, algorithm: AnyAlgorithm, version: int) -> TaskStart:
    x, statistics = world.problem.initial()
    visit = Visit(
        torch.tensor(version),
        torch.tensor(0),
        torch.tensor(0) if traits_of(algorithm).reads_rank else (),
        task_key(algorithm, TASK, SEED),
    )
    memory = ClientMemory.initial(algorithm, world.problem)
    return TaskStart(algorithm.broadcast(algorithm.init(x), version), statistics, memory, visit)


def check(world: World, algorithm: AnyAlgorithm, steps: int, version: int = 1) -> int | None:
    """The steps that it ended after; its results are those of a task that has as many."""
    execute, start = SequentialExecutor(world.problem, world.population), start_of(world, algorithm, version)
    found, done = execute.run_until(algorithm, TASK, start, SEED, lambda so_far: so_far >= steps)
    expected = execute(algorithm, [TASK], [start._replace(steps=done or ())], SEED)
    for left, right in zip(trees.leaves(found), trees.leaves(expected), strict=True):
        assert torch.equal(left, right[0])
    return done


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_method_can_end_after_any_step(name: str) -> None:
    world, algorithm = make_world(), build(name, Setting(3, STEPS, 8), {})
    for version in (0, 1):
        asked = not traits_of(algorithm).two_phases or version % 2  # a phase of MIME takes no steps
        assert check(world, algorithm, 1, version) == (1 if asked else None)
        assert check(world, algorithm, 2, version) == (2 if asked else None)
        assert check(world, algorithm, STEPS, version) is None, "nothing is left of it"


def test_local_optimisers_compression_and_running_statistics_end_early_too() -> None:
    module = nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES), nn.Dropout(0.5)).double()
    world, inner = make_world(module=module), build("fedbuff", Setting(3, STEPS, 8), {})
    wrapped: list[Any] = [
        LocallyOptimized(inner, parse_local_optimizer("momentum:0.9"), 1.0),
        Compressed(inner, TopK(0.3), world.problem.size),
    ]
    for algorithm in wrapped:
        assert [check(world, algorithm, steps) for steps in (1, 2, 9)] == [1, 2, None]


def items(stop_at: int, count: int = 4) -> tuple[InterruptibleItems, list[int]]:
    asked: list[int] = []

    def stop(done: int) -> bool:
        asked.append(done)
        return done == stop_at

    batches = tuple(Batch(torch.tensor(number)) for number in range(count))
    return InterruptibleItems(_ItemsState(batches, stop)), asked


def test_a_second_pass_is_over_what_the_first_one_had() -> None:
    given, asked = items(stop_at=2)
    assert [int(batch.data) for batch in given] == [0, 1]
    assert [int(batch.data) for batch in given] == [0, 1]
    assert len(given) == 2
    assert asked == [1, 2]
    whole, asked = items(stop_at=9)
    assert [int(batch.data) for _ in range(2) for batch in whole] == [0, 1, 2, 3] * 2
    assert asked == [1, 2, 3], "and is not asked to end"


def test_whoever_asks_for_the_number_first_gets_them_all() -> None:
    given, asked = items(stop_at=2)
    assert len(given) == 4
    assert len(list(given)) == 4
    assert asked == []
    during, asked = items(stop_at=2)
    for batch in during:
        if int(batch.data) == 0:
            assert len(during) == 4
    assert asked == []
    last, _ = items(stop_at=2)
    assert int(last[-1].data) == 3
    assert len(list(last)) == 4


def test_the_first_one_and_the_rest_can_be_taken_apart() -> None:
    given, asked = items(stop_at=2)
    assert int(given[0].data) == 0
    assert [int(batch.data) for batch in given[1:]] == [1]
    assert len(given) == 2
    assert asked == [1, 2]
