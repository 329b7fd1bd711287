"""The loop, as a caller meets it."""

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from offbeat import (
    AdaMasFL,
    Asynchronous,
    Batch,
    Constant,
    DivergedError,
    Exponential,
    FedOpt,
    InputError,
    Mapped,
    Phases,
    Population,
    Problem,
    Sequential,
    Setting,
    Steps,
    Synchronous,
    Vectorised,
    build,
    train,
    trees,
)
from offbeat.aggregate.mean import AggregationContext, Mean, MeanAggregation
from offbeat.core import Cohort
from offbeat.training import checkpoint, loop
from offbeat.trees import Tree
from worlds import make_world, play


def engine(**options: object) -> Vectorised:
    world = make_world()
    return Vectorised(world.problem, world.population, Exponential(1.0), **options)  # type: ignore[arg-type]


def test_snapshots_come_one_a_server_step_from_version_zero() -> None:
    shots = play(FedOpt(0.1, 1.0), engine(), Asynchronous(5), rounds=4)
    assert [shot.version for shot in shots] == [0, 1, 2, 3, 4]
    assert [shot.time for shot in shots] == sorted(shot.time for shot in shots)
    assert torch.equal(shots[0].x, make_world().problem.initial()[0])
    assert [shot.counts.consumed for shot in shots] == [0, 3, 6, 9, 12]


def test_a_snapshot_is_not_changed_by_later_steps() -> None:
    shots = train(AdaMasFL(0.1, 0.1, 0.5), engine(), dispatch=Asynchronous(5), buffer=3, rounds=4)
    first = next(shots)
    x, c = first.x.clone(), first.state.c.clone()
    list(shots)
    assert torch.equal(first.x, x)
    assert torch.equal(first.state.c, c)


def test_an_engine_can_be_used_again() -> None:
    shared = engine()
    first, second = (play(AdaMasFL(0.1, 0.1, 0.5), shared, Asynchronous(5))[-1] for _ in range(2))
    assert torch.equal(first.x, second.x)


def test_seeds_decide() -> None:
    runs = [play(FedOpt(0.1, 1.0), engine(), Asynchronous(5), seed=seed)[-1].x for seed in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@dataclass(frozen=True)
class Times(Mean):
    """The mean, times a number."""

    factor: float = 1.0

    def open(self, opening: AggregationContext) -> MeanAggregation:
        return Multiplied(self.summation.open(opening), private=False, factor=self.factor)


@dataclass(frozen=True)
class Multiplied(MeanAggregation):
    factor: float = 1.0

    def release(self, total: Tree, cohort: Cohort) -> Tree:
        return trees.map(lambda leaf: leaf * self.factor, super().release(total, cohort))


def test_another_aggregate_may_take_the_place_of_the_mean() -> None:
    shots = list(
        train(
            FedOpt(0.1, 1.0),
            engine(),
            dispatch=Synchronous(3),
            buffer=3,
            rounds=2,
            aggregate=Times(factor=0.0),
        )
    )
    assert torch.equal(shots[0].x, shots[-1].x)


def poisoned_engine() -> Sequential:
    """Client 2 has inputs that are not numbers."""
    world = make_world()
    poisoned = world.population.data.inputs.clone()
    poisoned[world.population.parts[2]] = float("nan")
    data = world.population.data._replace(inputs=poisoned)
    return Sequential(world.problem, Population(data, world.population.parts, Steps(3, 4)), Constant(1.0))


def test_an_update_that_is_not_finite_stops_the_run_and_names_the_client_and_the_step() -> None:
    shots = train(FedOpt(0.1, 1.0), poisoned_engine(), dispatch=Synchronous(8), buffer=8, rounds=50)
    assert next(shots).version == 0
    with pytest.raises(DivergedError, match="update of client 2 became NaN or infinite at server step 1"):
        next(shots)


@pytest.mark.parametrize("later", [False, True], ids=["at once", "asynchronously"])
def test_an_update_of_the_start_that_is_not_finite_stops_the_run_before_version_zero(
    later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "works_asynchronously", lambda device: later)
    method = build("padamfed-vr", Setting(3, 3, 8), {})
    shots = train(method, poisoned_engine(), dispatch=Synchronous(3), buffer=3, rounds=8)
    with pytest.raises(DivergedError, match="update of client 2 became NaN or infinite in the start"):
        next(shots)


def test_a_model_that_is_not_finite_stops_the_run() -> None:
    shots = train(
        FedOpt(0.1, 1.0),
        engine(),
        dispatch=Synchronous(3),
        buffer=3,
        rounds=2,
        aggregate=Times(factor=math.inf),
    )
    assert next(shots).version == 0
    with pytest.raises(DivergedError, match="the model became NaN or infinite at server step 1"):
        next(shots)


@pytest.mark.parametrize("first", ["next", "use", "last"])
def test_on_a_device_that_works_asynchronously_a_failure_is_found_before_it_is_used(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "works_asynchronously", lambda device: True)
    shots = train(
        FedOpt(0.1, 1.0),
        engine(),
        dispatch=Synchronous(3),
        buffer=3,
        rounds=1 if first == "last" else 3,
        aggregate=Times(factor=math.inf),
    )
    assert next(shots).version == 0
    said = "the model became NaN or infinite at server step 1"
    if first == "last":
        with pytest.raises(DivergedError, match=said):
            next(shots)
        return
    snapshot = next(shots)
    assert snapshot.version == 1
    if first == "next":
        with pytest.raises(DivergedError, match=said):
            next(shots)
    for use in (lambda: snapshot.x, snapshot.checkpoint, lambda: snapshot.x):
        with pytest.raises(DivergedError, match=said):
            use()


def test_an_update_that_is_not_finite_is_named_each_time_that_its_model_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop, "works_asynchronously", lambda device: True)
    shots = train(FedOpt(0.1, 1.0), poisoned_engine(), dispatch=Synchronous(8), buffer=8, rounds=3)
    assert next(shots).version == 0
    snapshot = next(shots)
    for _ in range(2):
        with pytest.raises(DivergedError, match="update of client 2 became NaN or infinite at server step 1"):
            _ = snapshot.x


def test_checks_that_are_read_late_change_nothing_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def last() -> torch.Tensor:
        return play(AdaMasFL(0.02, 0.05, 0.5), engine(), Asynchronous(4))[-1].x

    plain = last()
    monkeypatch.setattr(loop, "works_asynchronously", lambda device: True)
    assert torch.equal(plain, last())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "the number of rounds is 0: give a whole number of at least 1"),
        ({"buffer": 6}, "buffer of 6 exceeds the concurrency of 5"),
        ({"dispatch": Asynchronous(9)}, "concurrency of 9 exceeds the 8 clients"),
        ({"max_staleness": -1}, "largest staleness is -1"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(options: dict[str, object], message: str) -> None:
    settings = {"dispatch": Asynchronous(5), "buffer": 3, "rounds": 4} | options
    with pytest.raises(InputError, match=message):
        next(train(FedOpt(0.1, 1.0), engine(), **settings))  # type: ignore[arg-type]


def test_running_statistics_of_a_step_are_the_mean_over_its_clients() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    world = make_world(module=module)
    shots = play(FedOpt(0.1, 1.0), Sequential(world.problem, world.population), Synchronous(3), rounds=1)
    problem: Problem = world.problem
    x, start = problem.initial()
    left = []
    assert shots[1].filled
    for client, _, visit in shots[1].filled.tasks:
        y, statistics = x, start
        for rows in world.population.indices(client, visit, 6):
            data = world.population.data
            slope, _, statistics = problem.differentiate_by_autograd(
                y, statistics, Batch((data.inputs[rows], data.targets[rows]))
            )
            y = y - 0.1 * slope
        left.append(statistics["1.running_mean"])
    torch.testing.assert_close(
        shots[1].statistics["1.running_mean"], torch.stack(left).mean(0), rtol=0, atol=1e-14
    )


def test_two_trips_a_round_need_phases_and_an_even_number_of_steps() -> None:
    mime = build("mime", Setting(3, 3, 8), {})
    with pytest.raises(InputError, match="use phases dispatch"):
        play(mime, engine(), Synchronous(3))
    with pytest.raises(InputError, match="even number of rounds, not 5"):
        play(mime, engine(), Phases(3), rounds=5)
    with pytest.raises(InputError, match="whole cohort of 5"):
        play(mime, engine(), Phases(5))


def test_nan_in_the_start_is_not_blamed_on_the_rates() -> None:
    world = make_world()
    poisoned = world.population.data.inputs.clone()
    poisoned[world.population.parts[2]] = float("nan")
    data = world.population.data._replace(inputs=poisoned)
    made = Sequential(world.problem, Population(data, world.population.parts, Steps(3, 4)))
    with pytest.raises(DivergedError, match="client 2 became NaN or infinite in the start: check the model"):
        play(AdaMasFL(0.1, 0.1, 0.5), made, Asynchronous(5))


@pytest.mark.parametrize("method", ["scaffold", "ca2fl", "adamasfl"])
def test_memory_in_a_file_can_be_saved_before_anybody_wrote(method: str, tmp_path: Path) -> None:
    world = make_world()
    made = Sequential(world.problem, world.population, memory=Mapped(tmp_path))
    given = {"lazy": True} if method == "adamasfl" else {}
    shots = train(build(method, Setting(3, 3, 8), given), made, dispatch=Asynchronous(5), buffer=3, rounds=2)
    checkpoint.save(tmp_path / "state.safetensors", next(shots).checkpoint())
    assert checkpoint.load(tmp_path / "state.safetensors").facts["version"] == 0


def test_a_given_beta_is_not_said_to_be_capped(caplog: pytest.LogCaptureFixture) -> None:
    build("adamasfl", Setting(10, 10, 4), {"beta": 0.3})
    assert caplog.text == ""
    with pytest.raises(InputError, match="must lie in"):
        build("adamasfl", Setting(10, 10, 4), {"beta": -0.5})
