"""Every method against its oracle, under every dispatch, on both engines."""

import sys

import numpy as np
import pytest

from offbeat import (
    AdaMasFL,
    Asynchronous,
    Cycle,
    Dropout,
    Epochs,
    Experiment,
    Exponential,
    FedOpt,
    InputError,
    Poisson,
    Polynomial,
    RoundRefill,
    Sequential,
    Setting,
    Steps,
    Synchronous,
    Uniform,
    Vectorised,
    build,
)
from offbeat.algorithms.ca2fl import CA2FL
from offbeat.algorithms.fedopt import Adam, Ema
from offbeat.algorithms.fedsps import FedSPS
from offbeat.algorithms.masfl import MasFL
from offbeat.algorithms.momentum_approximation import Ridge, Solver, Truncated, relative_errors
from offbeat.algorithms.padamfed_vr import PAdaMFedVR
from offbeat.algorithms.scaffold import Scaffold
from offbeat.algorithms.weight_prediction import Foreseen, Foresight, Remembered, StepDrift, WeightPrediction
from offbeat.schedule.dispatch import OpenSlots, Phases, Queues, RandomAllocation, TimedPoisson
from offbeat.schedule.staleness import parse_weights
from offbeat.training.loop import Snapshot
from offbeat.training.method import build_method
from oracles.adamasfl import adamasfl, theorem_2
from oracles.cases import ADAPTIVE, MOMENTUM, RATES, SYSTEM, Case, load_cases
from oracles.masfl import masfl, masfl_theory
from oracles.momentum_approximation import (
    arrivals,
    full,
    light,
    light_momentum_approximation,
    momentum_approximation,
    relative_error,
)
from oracles.padamfed import padamfed, padamfed_vr, padamfed_vr_theory
from oracles.replay import Run
from oracles.scaffold_m import scaffold_m, scaffold_m_vr
from oracles.server_rules import adam
from oracles.softmax import Softmax
from oracles.weight_prediction import weight_prediction
from oracles.weights import polynomial
from worlds import World, make_world, play, trace

CASES = load_cases()
DISPATCH = {
    "synchronous": Synchronous(3),
    "asynchronous before": Asynchronous(5, eager=True),
    "asynchronous after": Asynchronous(5, eager=False),
    "asynchronous everybody": Asynchronous(8, eager=True),
    "round-refill": RoundRefill(5),
    "poisson": Poisson(0.4),
    "queues": Queues(6),
    "phases": Phases(3),
}
ENGINES = {"sequential": Sequential, "vectorised": Vectorised}
WORK = {"steps": Steps(3, 4), "epochs": Epochs(1, 4)}


def assert_equal_models(shots: list[Snapshot], case: Case, world: World) -> None:
    """Every model of a run is the oracle's; where two server steps make a round, every second one."""
    shots, steps = shots[:: 1 + case.two_phases], trace(shots)
    if case.two_phases:
        steps = [[(client, version // 2, visit) for client, version, visit in step] for step in steps[1::2]]
    models = case.oracle(Run(world.oracle, 8, shots[0].x.numpy(), steps), **case.known)
    for shot, model in zip(shots, models, strict=True):
        np.testing.assert_allclose(shot.x.numpy(), model, rtol=0, atol=case.tolerance)
    assert np.abs(models[-1] - models[0]).max() > 1e-3


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("case", "dispatch", "work"),
    [
        (name, dispatch, work)
        for name, case in CASES.items()
        for dispatch in DISPATCH
        if case.meets(dispatch)
        for work in sorted(case.work)
    ],
)
def test_a_run_equals_its_oracle(case: str, dispatch: str, engine: str, work: str) -> None:
    chosen = CASES[case]
    experiment = Experiment.of(algorithm=chosen.method, **chosen.settings)
    world = make_world(work=WORK[work], weight_decay=experiment.weight_decay)
    made = ENGINES[engine](world.problem, world.population, Exponential(1.0))
    weights, limit = parse_weights(chosen.weights), chosen.max_staleness
    algorithm = build_method(experiment, Setting(*SYSTEM), chosen.given)
    shots = play(algorithm, made, DISPATCH[dispatch], weights=weights, max_staleness=limit)
    assert len(shots) == 9
    assert_equal_models(shots, chosen, world)


RARE_DISPATCH = {
    "open-slots": (OpenSlots(5, 2), 3),
    # a sum of timed releases is divided by a nominal cohort: these are of all eight clients, as an oracle's
    "timed poisson": (TimedPoisson(2.0, 1.0, lead=2), 8),
    "allocation": (RandomAllocation(2.0, 1), 8),
}
RULES = (
    *("fedprox fading", "fednova", "feddyn", "local momentum", "local adam", "weight decay"),
    *("clipped gradients", "linear and step", "warm-up, then cosine"),
)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dispatch", RARE_DISPATCH)
@pytest.mark.parametrize("case", RULES)
def test_local_rules_and_schedules_equal_their_oracles_under_the_rarer_dispatches(
    case: str, dispatch: str, engine: str
) -> None:
    chosen = CASES[case]
    experiment = Experiment.of(algorithm=chosen.method, **chosen.settings)
    world = make_world(work=WORK[min(chosen.work)], weight_decay=experiment.weight_decay)
    delays = Exponential(1.0) if dispatch == "open-slots" else Uniform(0.1, 0.9)
    made = ENGINES[engine](world.problem, world.population, delays)
    algorithm = build_method(experiment, Setting(*SYSTEM), chosen.given)
    rule, buffer = RARE_DISPATCH[dispatch]
    shots = play(algorithm, made, rule, weights=parse_weights(chosen.weights), buffer=buffer, rounds=4)
    assert {len(step) for step in trace(shots)} == {buffer}
    assert_equal_models(shots, chosen, world)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "case", ["adamasfl", "fadas-da", "fedbuff fading", "ma-fedadam fading", "weight-prediction remembered"]
)
def test_losses_drops_and_absences_do_not_break_a_method(case: str, engine: str) -> None:
    world, chosen = make_world(), CASES[case]
    made = ENGINES[engine](world.problem, world.population, Exponential(1.0), Cycle(5.0, 0.6), Dropout(0.2))
    algorithm, weights = build(chosen.method, Setting(*SYSTEM), chosen.given), parse_weights(chosen.weights)
    shots = play(algorithm, made, Asynchronous(6), rounds=20, weights=weights, max_staleness=2)
    models = chosen.oracle(Run(world.oracle, 8, shots[0].x.numpy(), trace(shots)), **chosen.known)
    np.testing.assert_allclose(shots[-1].x.numpy(), models[-1], rtol=0, atol=1e-10)
    assert shots[-1].counts.lost > 0
    assert shots[-1].counts.dropped > 0


@pytest.mark.parametrize("case", ["adamasfl", "cadence", "masfl", "padamfed-vr"])
def test_a_start_in_several_pieces_equals_its_oracle(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of all pieces make the start, not those of the last piece."""
    monkeypatch.setattr(sys.modules["offbeat.training.loop"], "_MIN_PIECE", 3)
    world, chosen = make_world(), CASES[case]
    algorithm = build(chosen.method, Setting(*SYSTEM), chosen.given)
    shots = play(algorithm, Vectorised(world.problem, world.population, Exponential(1.0)), Asynchronous(5))
    assert_equal_models(shots, chosen, world)


# One case of each method that divides by the number of local steps.
BY_STEPS = ["adamasfl", "cadence", "dude", "fafed", "fedcm", "fednova", "masfl", "padamfed-vr", "scaffold II"]


@pytest.mark.parametrize("case", [*BY_STEPS, "delta-sgd", "scaffold-m-vr", "local adam", "cosine"])
def test_tasks_long_enough_to_be_padded_equal_their_oracle(case: str) -> None:
    """Tasks of 6 to 26 local steps: the vectorised engine pads the short ones beside the long ones."""
    world, chosen = make_world(work=Epochs(2, 1)), CASES[case]
    made = Vectorised(world.problem, world.population, Exponential(1.0))
    dispatch = "synchronous" if chosen.prompt else "asynchronous everybody"
    experiment = Experiment.of(algorithm=chosen.method, **chosen.settings)
    algorithm = build_method(experiment, Setting(*SYSTEM), chosen.given)
    options = {"weights": parse_weights(chosen.weights), "max_staleness": chosen.max_staleness}
    shots = play(algorithm, made, DISPATCH[dispatch], rounds=4, **options)
    assert_equal_models(shots, chosen, world)


LONG = {
    "ma-fedavgm": ({"beta": 0.8, "window": 6, "span": 4}, momentum_approximation),
    "ma-light-fedavgm": ({"beta": 0.3, "span": 4}, light_momentum_approximation),
}


@pytest.mark.parametrize("method", LONG)
def test_an_approximation_equals_its_oracle_long_after_it_began_to_forget(method: str) -> None:
    """The oracles keep every row; MA-light's weights of versions fade below what can be seen."""
    given, oracle = LONG[method]
    world = make_world()
    made = Vectorised(world.problem, world.population, Exponential(1.0))
    algorithm = build(method, Setting(3, 3, 60), RATES | given)
    shots = play(algorithm, made, Asynchronous(8), rounds=60, max_staleness=3, weights=Polynomial(0.5))
    assert shots[-1].counts.dropped > 0
    known = RATES | given | {"weight": polynomial(0.5)}
    models = oracle(Run(world.oracle, 8, shots[0].x.numpy(), trace(shots)), **known)
    for shot, model in zip(shots, models, strict=True):
        np.testing.assert_allclose(shot.x.numpy(), model, rtol=0, atol=1e-10)


@pytest.mark.parametrize("foresight", [Foreseen(), Remembered()])
def test_prediction_by_the_servers_own_steps_equals_its_oracle(foresight: Foresight) -> None:
    world = make_world()
    made = Vectorised(world.problem, world.population, Exponential(1.0))
    algorithm = WeightPrediction(FedOpt(0.2, 0.03, Ema(0.7), Adam(0.95, 0.02)), StepDrift(0.6), foresight)
    shots = play(algorithm, made, Asynchronous(8))
    known = ADAPTIVE | {"beta": 0.7, "rule": adam(0.95, 0.02), "decay": 0.6, "stepwise": True}
    known |= {"previous": foresight == Remembered()}
    models = weight_prediction(Run(world.oracle, 8, shots[0].x.numpy(), trace(shots)), **known)
    for shot, model in zip(shots, models, strict=True):
        np.testing.assert_allclose(shot.x.numpy(), model, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("span", "window", "solver", "known"),
    [(7, 80, Ridge(1e-4), {"penalty": 1e-4}), (7, 5, Truncated(0.2), {"rcond": 0.2})],
)
def test_the_relative_errors_of_a_schedule_are_those_of_the_oracle(
    span: int, window: int, solver: Solver, known: dict[str, float]
) -> None:
    """The figures of the paper's Table 4; ordinary momentum's weights of the means are M itself."""
    rng = np.random.default_rng(9)
    staleness = [rng.integers(0, min(t, span - 1) + 1, size=4).tolist() for t in range(30)]
    rows = arrivals([[(0, t - s, 0) for s in step] for t, step in enumerate(staleness)], span)
    errors = relative_errors(staleness, 0.8, span, window, solver)
    best = relative_error(full(rows, 0.8, window=window, **known), rows, 0.8)
    assert errors.approximation == pytest.approx(best, rel=1e-9)
    assert errors.light == pytest.approx(relative_error(light(rows, 0.8), rows, 0.8), rel=1e-9)
    naive = full(np.eye(30), 0.8, penalty=0.0)
    assert errors.naive == pytest.approx(relative_error(naive, rows, 0.8), rel=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
def test_without_delay_masfl_is_scaffold_m_and_adamasfl_is_padamfed(engine: str) -> None:
    """Invariant 2, the momentum of SCAFFOLD-M starting as MasFL's does."""
    world = make_world()
    made = ENGINES[engine](world.problem, world.population)
    for algorithm, oracle, known in (
        (MasFL(**MOMENTUM), scaffold_m, MOMENTUM | {"g0": "mean"}),
        (AdaMasFL(**MOMENTUM), padamfed, MOMENTUM),
    ):
        shots = play(algorithm, made, Synchronous(3))
        models = oracle(Run(world.oracle, 8, shots[0].x.numpy(), trace(shots)), **known)
        np.testing.assert_allclose(shots[-1].x.numpy(), models[-1], rtol=0, atol=1e-12)


def test_rates_of_theory_are_those_of_the_oracles() -> None:
    masfl_rates = masfl_theory(2, 3, 1000, 2.0, 3)
    assert MasFL.tuned(2, 3, 1000, 2.0, 3) == MasFL(*masfl_rates)
    vr = PAdaMFedVR.tuned(10, 10, 400)
    assert (vr.local_lr, vr.server_lr, vr.beta) == pytest.approx(
        tuple(padamfed_vr_theory(10, 10, 400)), abs=1e-15
    )
    ca2fl_rates = CA2FL.tuned(cohort=10, steps=5, smoothness=2.0, worst=4)
    assert ca2fl_rates.local_lr == pytest.approx(1 / 720)
    assert ca2fl_rates.local_lr * ca2fl_rates.server_lr == pytest.approx(10 / (36 * 5 * 4 * 16))
    assert FedSPS.tuned(steps=4, smoothness=2.0).bound == pytest.approx(1 / 200)
    scaffold_rates = Scaffold.tuned(cohort=9, steps=4, population=72, smoothness=2.0)
    assert scaffold_rates.server_lr == 3
    assert scaffold_rates.local_lr == pytest.approx(0.25 / (24 * 3 * 4 * 2))
    with pytest.raises(InputError, match="needs more than 100 rounds"):
        MasFL.tuned(10, 10, 100, 1.0, 3)
    with pytest.raises(InputError, match="needs more than 1 rounds"):
        MasFL.tuned(1, 1, 1, 1.0, 0)  # the theorem's margin is exactly 0
    assert 0 < MasFL.tuned(1, 1, 2, 1.0, 0).local_lr < 0.1  # and here it is 2 - sqrt(2)


def test_the_runs_above_meet_staleness_and_a_client_twice_in_one_buffer() -> None:
    """Otherwise the comparisons would prove less than they claim."""
    world = make_world()
    engine = Vectorised(world.problem, world.population, Exponential(1.0))
    shots = play(FedOpt(0.1, 1.0), engine, DISPATCH["asynchronous everybody"])
    steps = trace(shots)
    assert max(shot.cohort.staleness[0] for shot in shots[1:] if shot.cohort) > 1
    assert any(len({client for client, _, _ in step}) < len(step) for step in steps)


@pytest.mark.parametrize("rates", [AdaMasFL.tuned(10, 10, 500), AdaMasFL.tuned(10, 50, 400)])
def test_rates_are_those_of_the_theorem(rates: AdaMasFL) -> None:
    settings = {AdaMasFL.tuned(10, 10, 500): (10, 10, 500), AdaMasFL.tuned(10, 50, 400): (10, 50, 400)}
    known = theorem_2(*settings[rates])
    assert (rates.local_lr, rates.server_lr, rates.beta) == pytest.approx(tuple(known), abs=1e-15)
    assert rates.beta <= 1


class Shifted:
    """A problem whose visit 0 has no slope, and whose later visits are those before."""

    def __init__(self, problem: Softmax) -> None:
        self.problem = problem

    def steps(self, client: int, visit: int) -> int:
        return self.problem.steps(client, max(0, visit - 1))

    def gradient(self, client: int, visit: int, k: int, x: np.ndarray) -> np.ndarray:
        return self.problem.gradient(client, visit - 1, k, x) if visit else 0 * x


LAZY = {"adamasfl": adamasfl, "masfl": masfl, "padamfed-vr": padamfed_vr, "scaffold-m-vr": scaffold_m_vr}


@pytest.mark.parametrize("method", LAZY)
def test_a_lazy_start_is_a_start_from_zero_that_costs_nothing(method: str) -> None:
    world = make_world()
    engine = Vectorised(world.problem, world.population, Exponential(1.0))
    algorithm = build(method, Setting(3, 3, 8), MOMENTUM | {"lazy": True})
    shots = play(algorithm, engine, Asynchronous(5))
    assert shots[0].counts.started == 0
    assert shots[0].time == 0
    steps = [[(client, version, visit + 1) for client, version, visit in step] for step in trace(shots)]
    models = LAZY[method](Run(Shifted(world.oracle), 8, shots[0].x.numpy(), steps), **MOMENTUM)
    for shot, model in zip(shots, models, strict=True):
        np.testing.assert_allclose(shot.x.numpy(), model, rtol=0, atol=1e-10)


def test_a_beta_above_one_is_capped_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert AdaMasFL.tuned(10, 50, 400).beta == 1.0
    assert "beta for AdaMasFL is 1.12, above 1" in caplog.text
