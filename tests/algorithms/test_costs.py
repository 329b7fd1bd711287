"""What is sent and stored is what each method's entry in the catalogue says."""

import sys

import pytest
import torch
from torch import nn

from offbeat import (
    CATALOGUE,
    Asynchronous,
    Dropout,
    Exponential,
    Sequential,
    Setting,
    Synchronous,
    build,
    trees,
)
from offbeat.aggregate.uploads import ConstantGradient
from offbeat.core import Batch, Batches, Visit, traits_of
from offbeat.schedule.dispatch import Phases
from worlds import CLASSES, FEATURES, make_world, play

SIZE = 1009  # of a model to try a method on: as long as nothing else that a method holds


def vectors(tree: trees.Tree) -> int:
    """Leaves of the model's size; an empty one is a place for one."""
    return sum(leaf.numel() in (0, SIZE) for leaf in trees.leaves(tree))


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_cost_in_the_catalogue_is_that_of_the_method_at_work(name: str) -> None:
    algorithm, x = CATALOGUE[name].build(Setting(1, 1, 1)), torch.zeros(SIZE)
    state, memory = algorithm.init(x), algorithm.memory(x)
    batch, visit = Batch((torch.zeros(1),)), Visit(torch.tensor(0), torch.tensor(0))
    messages, uploads = [], []
    for version in range(1 + traits_of(algorithm).two_phases):
        messages.append(algorithm.broadcast(state, version))
        batches = Batches((batch,), (batch,))
        uploads.append(algorithm.local(messages[-1], memory, batches, visit, ConstantGradient(0.0))[0])
    cost = CATALOGUE[name].cost
    assert [vectors(each) for each in (messages, uploads, memory, state)] == list(cost[:4])
    assert trees.numel(messages) == cost.down * SIZE + cost.extra_down
    assert trees.numel(uploads) == cost.up * SIZE + cost.extra_up


@pytest.mark.parametrize("name", CATALOGUE)
def test_what_the_catalogue_says_is_what_a_run_sends(name: str) -> None:
    world, cost = make_world(), CATALOGUE[name].cost
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    size = world.problem.size
    algorithm = build(name, Setting(3, 3, 4), {})
    phases = 1 + traits_of(algorithm).two_phases  # which share the cost of a round
    shot = play(algorithm, engine, Phases(3) if phases == 2 else Synchronous(3), rounds=4)[-1]
    assert shot.sent.down == shot.counts.started * (cost.down * size + cost.extra_down) // phases
    assert shot.sent.up == shot.counts.client_updates * (cost.up * size + cost.extra_up) // phases


def test_running_statistics_are_sent_both_ways_and_counted() -> None:
    module = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)).double()
    world = make_world(module=module)
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    shot = play(build("fedbuff", Setting(3, 3, 4), {}), engine, Synchronous(3), rounds=4)[-1]
    with_statistics = world.problem.size + 4 + 4 + 1  # means, variances, and a count of minibatches
    assert shot.sent.down == shot.counts.started * with_statistics
    assert shot.sent.up == shot.counts.client_updates * with_statistics


def test_lost_tasks_cost_a_download_and_late_ones_both_ways() -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population, Exponential(1.0), dropout=Dropout(0.3))
    shot = play(build("fedbuff", Setting(3, 3, 20), {}), engine, Asynchronous(6), rounds=20, max_staleness=1)[
        -1
    ]
    assert shot.counts.lost > 0
    assert shot.counts.dropped > 0
    assert shot.sent.down == shot.counts.started * world.problem.size
    assert shot.sent.up == shot.counts.client_updates * world.problem.size


def test_the_start_is_counted_also_when_it_is_done_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population)
    algorithm = build("adamasfl", Setting(3, 3, 4), {})
    whole = play(algorithm, engine, Asynchronous(5), rounds=2)
    monkeypatch.setattr(sys.modules["offbeat.training.loop"], "_MIN_PIECE", 3)
    pieces = play(algorithm, engine, Asynchronous(5), rounds=2)
    for left, right in zip(whole, pieces, strict=True):
        assert left.sent == right.sent
        torch.testing.assert_close(left.state, right.state, rtol=0, atol=1e-13)
    assert whole[0].sent == (8 * 2 * world.problem.size, 8 * 2 * world.problem.size)
