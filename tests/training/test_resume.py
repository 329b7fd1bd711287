"""What a checkpoint must hold, in the configurations where something could be forgotten."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from offbeat import (
    Asynchronous,
    Cycle,
    Dropout,
    Exponential,
    FedOpt,
    InputError,
    Poisson,
    RoundRefill,
    Sequential,
    Setting,
    Vectorised,
    build,
    train,
)
from offbeat.engines.engine import Engine
from offbeat.schedule.dispatch import Dispatch, Phases, Queues
from offbeat.training import checkpoint
from worlds import CLASSES, FEATURES, make_world

MODULES = {
    "batch norm": lambda: nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)),
    "cumulative batch norm": lambda: nn.Sequential(
        nn.Linear(FEATURES, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, CLASSES)
    ),
    "dropout": lambda: nn.Sequential(nn.Linear(FEATURES, 4), nn.Dropout(0.5), nn.Linear(4, CLASSES)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, CLASSES)),
}


def make_engine(module: str, kind: type[Sequential] | type[Vectorised] = Sequential) -> Engine:
    torch.manual_seed(1)
    world = make_world(module=MODULES[module]().double())
    return kind(world.problem, world.population, Exponential(1.0), Cycle(5.0, 0.7), Dropout(0.1))


@pytest.mark.parametrize("kind", [Sequential, Vectorised])
@pytest.mark.parametrize("module", MODULES)
def test_a_cut_run_of_a_module_with_state_goes_on_as_if_uncut(
    module: str, kind: type[Sequential] | type[Vectorised], tmp_path: Path
) -> None:
    options = {"dispatch": Asynchronous(8), "buffer": 3, "rounds": 8, "seed": 3}
    algorithm = build("adamasfl", Setting(3, 3, 8), {})
    engine = make_engine(module, kind)
    whole = list(train(algorithm, engine, **options))
    for shot in train(algorithm, engine, **options):
        if shot.version == 4:
            checkpoint.save(tmp_path / "state.safetensors", shot.checkpoint())
            break
    saved = checkpoint.load(tmp_path / "state.safetensors")
    rest = list(train(algorithm, make_engine(module, kind), resume=saved, **options))
    assert [shot.version for shot in rest] == [5, 6, 7, 8]
    for left, right in zip(whole[5:], rest, strict=True):
        assert torch.equal(left.x, right.x)
        assert left.statistics.keys() == right.statistics.keys()
        assert all(torch.equal(left.statistics[name], right.statistics[name]) for name in left.statistics)
        assert left.filled == right.filled
        assert left.sent == right.sent


@pytest.mark.parametrize(
    ("method", "dispatch"), [("mime", Phases(3)), ("defedavg", Queues(6)), ("ca2fl", Poisson(0.5))]
)
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_two_trips_and_queues_survive_a_cut(method: str, dispatch: Dispatch, cut: int) -> None:
    world = make_world()
    engine = Vectorised(world.problem, world.population, Exponential(1.0))
    algorithm = build(method, Setting(3, 3, 8), {})
    options = {"dispatch": dispatch, "buffer": 3, "rounds": 6}
    whole = list(train(algorithm, engine, **options))
    saved = next(shot.checkpoint() for shot in train(algorithm, engine, **options) if shot.version == cut)
    rest = list(train(algorithm, engine, resume=saved, **options))
    assert torch.equal(whole[-1].x, rest[-1].x)
    assert whole[-1].filled == rest[-1].filled


def test_messages_are_held_for_versions_in_flight_and_no_longer() -> None:
    """Invariant 12: what is counted for a version reaches zero, and its message goes."""
    world = make_world()
    engine = Sequential(world.problem, world.population, Exponential(1.0), dropout=Dropout(0.2))
    shots = train(FedOpt(0.1, 1.0), engine, dispatch=Asynchronous(5), buffer=3, rounds=30, max_staleness=2)
    for shot in shots:
        facts = shot.checkpoint().facts["session"]
        flying = [flight[3] for flight in facts["clock"]["flights"]]
        assert {version for version, count in facts["holders"] if count} == set(flying)
        assert sum(count for _, count in facts["holders"]) == len(flying)
        assert set(facts["versions"]) <= {*flying, shot.version - 1}


def test_a_checkpoint_is_of_its_snapshot_or_refused() -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population)
    shots = list(train(FedOpt(0.1, 1.0), engine, dispatch=Asynchronous(5), buffer=3, rounds=4))
    assert shots[-1].checkpoint().facts["version"] == 4
    with pytest.raises(InputError, match="has left version 2"):
        shots[2].checkpoint()


def test_a_checkpoint_after_a_failed_step_is_refused() -> None:
    world = make_world()
    world.population.data.inputs.fill_(torch.nan)
    engine = Sequential(world.problem, world.population)
    shots = train(FedOpt(0.1, 1.0), engine, dispatch=Asynchronous(5), buffer=3, rounds=9)
    first = next(shots)
    with pytest.raises(ArithmeticError):
        list(shots)
    with pytest.raises(InputError, match="has left version 0"):
        first.checkpoint()


def test_resuming_another_run_names_what_differs() -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population)
    options = {"buffer": 3, "rounds": 4}
    saved = next(train(FedOpt(0.1, 1.0), engine, dispatch=Asynchronous(5), **options)).checkpoint()
    with pytest.raises(InputError, match=r"dispatch was .*Asynchronous.*; seed was 0, now 9"):
        next(train(FedOpt(0.1, 1.0), engine, dispatch=Poisson(0.5), seed=9, resume=saved, **options))


def test_an_engine_can_be_used_again_with_a_module_that_keeps_state() -> None:
    engine = make_engine("spectral norm")
    first, second = (
        list(train(FedOpt(0.1, 1.0), engine, dispatch=Asynchronous(5), buffer=3, rounds=4))[-1].x
        for _ in range(2)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("kind", [Sequential, Vectorised])
@pytest.mark.parametrize("dispatch", [Asynchronous(8), RoundRefill(5)])
def test_a_run_cut_off_in_its_start_goes_on_there(
    dispatch: Dispatch, kind: type[Sequential] | type[Vectorised], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["offbeat.training.loop"], "_MIN_PIECE", 2)
    algorithm = build("adamasfl", Setting(3, 3, 4), {})
    options = {"dispatch": dispatch, "buffer": 3, "rounds": 4}
    engine = make_engine("batch norm", kind)
    seen: list[tuple[int, checkpoint.Checkpoint]] = []
    whole = list(
        train(
            algorithm, engine, observe_start=lambda now: seen.append((now.done, now.checkpoint())), **options
        )
    )
    assert [done for done, _ in seen] == [2, 4, 6]
    for done, saved in seen:
        assert saved.facts["start"] == done
        rest = list(train(algorithm, make_engine("batch norm", kind), resume=saved, **options))
        assert [shot.version for shot in rest] == [0, 1, 2, 3, 4]
        for left, right in zip(whole, rest, strict=True):
            assert torch.equal(left.x, right.x)
            assert torch.equal(left.state.c, right.state.c)
            assert (left.filled, left.sent, left.counts) == (right.filled, right.sent, right.counts)
