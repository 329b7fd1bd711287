"""Weight prediction around other methods."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from offbeat import (
    AdaMasFL,
    Asynchronous,
    Constant,
    Exponential,
    FedAsync,
    FedOpt,
    InputError,
    Polynomial,
    Sequential,
    Setting,
    Synchronous,
    Vector,
    Vectorised,
    build,
    train,
)
from offbeat.algorithms.ca2fl import CA2FL
from offbeat.algorithms.fedopt import Adam, Ema
from offbeat.algorithms.masfl import MasFL
from offbeat.algorithms.mime import Mime
from offbeat.algorithms.momentum_approximation import Approximation
from offbeat.algorithms.scaffold import Scaffold
from offbeat.algorithms.weight_prediction import (
    Foreseen,
    InnerStep,
    MeanDrift,
    Remembered,
    StepDrift,
    WeightPrediction,
)
from offbeat.cli.main import main
from offbeat.core import AnyAlgorithm, traits_of
from offbeat.training import checkpoint
from worlds import make_world, play

INNER = {
    "fedavg": FedOpt(0.2, 0.5),
    "fedadam": FedOpt(0.2, 0.03, Ema(0.9), Adam(0.99, 0.01)),
    "momentum approximation": FedOpt(0.2, 0.5, Approximation(0.9, span=9)),
    "fedasync": FedAsync(0.1, 0.6),
    "scaffold": Scaffold(0.1, 1.0),
    "masfl": MasFL(0.1, 0.2, 0.4),
    "adamasfl": AdaMasFL(0.1, 0.2, 0.4),
    "ca2fl": CA2FL(0.1, 0.5),
}


@dataclass(frozen=True)
class Nowhere:
    """No drift at all."""

    def init(self, x: Vector) -> tuple[()]:
        return ()

    def __call__(self, drift: Vector, past: tuple[()], stepped: InnerStep) -> tuple[Vector, tuple[()]]:
        return torch.zeros_like(drift), past


@pytest.mark.parametrize("foresight", [Foreseen(), Remembered()])
@pytest.mark.parametrize("name", INNER)
def test_without_drift_it_is_the_inner_method(name: str, foresight: Foreseen | Remembered) -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    inner = INNER[name]
    for left, right in zip(
        play(inner, engine, Asynchronous(8)),
        play(WeightPrediction(inner, Nowhere(), foresight), engine, Asynchronous(8)),
        strict=True,
    ):
        assert torch.equal(left.x, right.x)


@pytest.mark.parametrize("name", INNER)
def test_without_staleness_it_is_the_inner_method(name: str) -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    left, right = (
        play(each, engine, Synchronous(3)) for each in (INNER[name], WeightPrediction(INNER[name]))
    )
    assert torch.equal(left[-1].x, right[-1].x)


@pytest.mark.parametrize(
    ("name", "foresight"), [*((name, Foreseen()) for name in INNER), ("scaffold", Remembered())]
)
def test_with_drift_and_staleness_it_is_another_method_on_which_engines_agree(
    name: str, foresight: Foreseen | Remembered
) -> None:
    world = make_world()
    alone, together = (
        each(world.problem, world.population, Exponential(1.0)) for each in (Sequential, Vectorised)
    )
    algorithm = WeightPrediction(INNER[name], StepDrift(), foresight)
    first, second = (play(algorithm, engine, Asynchronous(8))[-1].x for engine in (alone, together))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-10)
    assert not torch.allclose(first, play(INNER[name], alone, Asynchronous(8))[-1].x, rtol=0, atol=1e-6)


def test_over_plain_averaging_the_two_drifts_are_the_same() -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    ends = [
        play(WeightPrediction(FedOpt(0.2, 0.5), drift), engine, Asynchronous(8))[-1].x
        for drift in (MeanDrift(0.7), StepDrift(0.7))
    ]
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


def test_the_papers_drift_is_the_rate_times_the_average_mean_over_the_scale() -> None:
    rule = FedOpt(0.2, 0.03, Ema(0.9), Adam(0.99, 0.01))
    algorithm = WeightPrediction(rule, MeanDrift(0.9))
    world = make_world()
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    state = play(algorithm, engine, Asynchronous(8), rounds=5)[-1].state
    h = state.inner.scale.sqrt() + 0.01
    torch.testing.assert_close(state.drift, 0.03 * state.past / h, rtol=1e-12, atol=0)
    assert state.past.abs().max() > 0


def test_what_a_client_remembers_is_how_stale_its_last_update_was() -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    algorithm = WeightPrediction(FedOpt(0.2, 0.5), foresight=Remembered())
    last: dict[int, int] = {}
    for shot in train(algorithm, engine, dispatch=Asynchronous(6), buffer=3, rounds=9):
        if shot.filled:
            last |= {task.client: shot.filled.version - task.version for task in shot.filled.tasks}
        saved = shot.checkpoint()
    facts, kept = saved.facts["session"], saved.tensors["session.memory.0"]
    assert dict(zip(facts["clients"], kept.tolist(), strict=True)) == last
    assert max(last.values()) > 0


@pytest.mark.parametrize("foresight", [Foreseen(), Remembered()])
@pytest.mark.parametrize("name", ["fedadam", "adamasfl"])
def test_a_cut_run_goes_on_with_the_same_bits(
    name: str, foresight: Foreseen | Remembered, tmp_path: Path
) -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    drift = MeanDrift() if name == "fedadam" else StepDrift()
    algorithm = WeightPrediction(INNER[name], drift, foresight)
    options = {"dispatch": Asynchronous(8), "buffer": 3, "rounds": 8}
    whole = list(train(algorithm, engine, **options))
    for shot in train(algorithm, engine, **options):
        if shot.version == 4:
            checkpoint.save(tmp_path / "cut", shot.checkpoint())
    rest = list(train(algorithm, engine, resume=checkpoint.load(tmp_path / "cut"), **options))
    assert torch.equal(whole[-1].x, rest[-1].x)


def test_it_needs_what_its_inner_method_needs() -> None:
    around = traits_of(WeightPrediction(FedOpt(0.1, 1.0, Approximation(0.9, span=5))))
    assert around.reads_staleness
    assert around.span == 5
    assert around.bounds == traits_of(FedOpt(0.1, 1.0)).bounds
    assert traits_of(WeightPrediction(Mime(0.1))).two_phases
    assert traits_of(WeightPrediction(Mime(0.1))).full_pass
    assert not traits_of(WeightPrediction(FedOpt(0.1, 1.0))).two_phases
    assert traits_of(build("padamfed-vr", Setting(3, 3, 8), {})).repeats_batches
    assert traits_of(WeightPrediction(build("padamfed-vr", Setting(3, 3, 8), {}))).repeats_batches
    assert not traits_of(FedOpt(0.1, 1.0)).reads_staleness


def test_the_start_of_the_inner_method_is_kept() -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population, Constant(1.0))
    for inner, drift in ((INNER["adamasfl"], StepDrift()), (INNER["fedavg"], StepDrift())):
        algorithm: AnyAlgorithm = WeightPrediction(inner, drift)
        first, alone = (
            next(train(each, engine, dispatch=Asynchronous(5), buffer=3, rounds=2))
            for each in (algorithm, inner)
        )
        assert first.counts == alone.counts
        assert not first.state.drift.any()


def test_the_papers_drift_is_refused_around_other_rules() -> None:
    with pytest.raises(
        InputError, match="MeanDrift goes with FedOpt, and this is around AdaMasFL: use StepDrift"
    ):
        WeightPrediction(AdaMasFL(0.1, 0.2, 0.4), MeanDrift())
    with pytest.raises(InputError, match="decay of the drift must lie in"):
        StepDrift(1.0)


def test_fading_weights_go_with_foresight_but_not_with_memory() -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    play(WeightPrediction(FedOpt(0.2, 0.5)), engine, Asynchronous(5), weights=Polynomial(0.5))
    with pytest.raises(InputError, match="its clients keep memory"):
        play(
            WeightPrediction(FedOpt(0.2, 0.5), foresight=Remembered()),
            engine,
            Asynchronous(5),
            weights=Polynomial(0.5),
        )


def test_the_catalogue_chooses_the_rule_by_name(capsys, tmp_path: Path) -> None:
    setting = Setting(3, 3, 8)
    assert build("weight-prediction", setting, {}).inner == FedOpt(0.1, 0.1, Ema(0.9))
    adam = build("weight-prediction", setting, {"rule": "fedadam", "remembered": True})
    assert adam.inner.scale == Adam(0.99, 0.01)
    assert adam.foresight == Remembered()
    words = ["run", "weight-prediction", "--rounds", "2", "--local-steps", "1"]
    assert main([*words, "--set", "rule=fedadan", "--out", str(tmp_path / "a")]) == 2
    assert "fedadam" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    assert main([*words, "--set", "rule=fedadam", "--out", str(tmp_path / "b")]) == 0
