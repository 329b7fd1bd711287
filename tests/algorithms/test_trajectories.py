"""Every method against its oracle, under every dispatch, on both engines."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from offbeat import (
    AdaMasFL,
    Asynchronous,
    Cycle,
    Dropout,
    Epochs,
    Equal,
    Exponential,
    FedOpt,
    Hinge,
    InputError,
    Poisson,
    Polynomial,
    RoundRefill,
    Sequential,
    Setting,
    Steps,
    Synchronous,
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
from offbeat.core import AnyAlgorithm
from offbeat.schedule.dispatch import Phases, Queues
from offbeat.schedule.staleness import StalenessWeights
from oracles.adamasfl import adamasfl, theorem_2
from oracles.ca2fl import ca2fl
from oracles.cadence import cadence
from oracles.defedavg import defedavg
from oracles.dude import dude
from oracles.fadas import equation_4, equation_77
from oracles.fadas import fadas as fadas_oracle
from oracles.fafed import fafed
from oracles.fedams import fedams, fedams_additive
from oracles.fedasync import fedasync
from oracles.fedavg import fedavg, fedavgm, fedavgm_ema
from oracles.fedavg_m import fedavg_m, fedavg_m_vr
from oracles.fedbuff import fedbuff
from oracles.fedopt import fedadagrad, fedadam, fedyogi
from oracles.fedsps import fedsps
from oracles.masfl import masfl, masfl_theory
from oracles.mime import mime
from oracles.momentum_approximation import (
    arrivals,
    full,
    light,
    light_momentum_approximation,
    momentum_approximation,
    relative_error,
)
from oracles.padamfed import padamfed, padamfed_theory, padamfed_vr, padamfed_vr_theory
from oracles.scaffold import scaffold
from oracles.scaffold_m import scaffold_m, scaffold_m_vr
from oracles.server_rules import adagrad, adam, amsgrad, identity
from oracles.softmax import Softmax
from oracles.weight_prediction import weight_prediction
from oracles.weights import constant, hinge, polynomial
from worlds import make_world, play, trace


class Case(NamedTuple):
    method: str
    given: dict[str, Any]
    oracle: Callable[..., list[np.ndarray]]
    known: dict[str, Any]
    weights: StalenessWeights = Equal()
    prompt: bool = False  # whether the method is defined without staleness alone
    limit: float = float("inf")  # the largest staleness that is let in
    only: frozenset[str] = frozenset()  # dispatches that are enough for this case; none: all

    def build(self) -> AnyAlgorithm:
        return build(self.method, Setting(3, 3, 8), self.given)

    def meets(self, dispatch: str) -> bool:
        return dispatch == "synchronous" if self.prompt else not self.only or dispatch in self.only


RATES = {"local_lr": 0.2, "server_lr": 0.5}
ADAPTIVE = {"local_lr": 0.2, "server_lr": 0.03}
SYSTEM = {"local_steps": 3}
CASES = {
    "fedavg": Case("fedavg", RATES, fedavg, RATES),
    "fedavgm": Case("fedavgm", RATES | {"beta": 0.7}, fedavgm, RATES | {"beta": 0.7}),
    "fedavgm averaged": Case("fedavgm", RATES | {"averaged": True}, fedavgm_ema, RATES),
    "fedadam": Case("fedadam", ADAPTIVE, fedadam, ADAPTIVE),
    "fedadam unbiased": Case(
        "fedadam", ADAPTIVE | {"unbiased": True}, fedadam, ADAPTIVE | {"correct": True, "v0": 0.0}
    ),
    "fedyogi": Case("fedyogi", ADAPTIVE | {"eps": 0.02}, fedyogi, ADAPTIVE | {"tau": 0.02}),
    "fedyogi unbiased": Case(
        "fedyogi", ADAPTIVE | {"unbiased": True}, fedyogi, ADAPTIVE | {"correct": True, "v0": 0.0}
    ),
    "fedadagrad": Case("fedadagrad", ADAPTIVE | {"beta1": 0.4}, fedadagrad, ADAPTIVE | {"beta1": 0.4}),
    "fedams": Case("fedams", ADAPTIVE, fedams, ADAPTIVE),
    "fedams unbiased": Case("fedams", ADAPTIVE | {"unbiased": True}, fedams, ADAPTIVE | {"correct": True}),
    "fedams additive": Case(
        "fedams", ADAPTIVE | {"floor": 0.0, "eps": 1e-4}, fedams_additive, ADAPTIVE | {"eps": 1e-4}
    ),
    "fedbuff": Case("fedbuff", RATES, fedbuff, RATES | {"weight": constant}),
    "fedbuff fading": Case("fedbuff", RATES, fedbuff, RATES | {"weight": polynomial(0.5)}, Polynomial(0.5)),
    "fedasync": Case("fedasync", {"alpha": 0.7}, fedasync, {"local_lr": 0.1, "alpha": 0.7}),
    "fedasync proximal": Case(
        "fedasync",
        {"rho": 0.3},
        fedasync,
        {"local_lr": 0.1, "rho": 0.3, "weight": polynomial(0.5)},
        Polynomial(0.5),
    ),
    "fedasync hinge": Case("fedasync", {}, fedasync, {"local_lr": 0.1, "weight": hinge(10, 1)}, Hinge(10, 1)),
    "fadas": Case("fadas", ADAPTIVE, fadas_oracle, ADAPTIVE),
    "fadas unbiased": Case(
        "fadas", ADAPTIVE | {"unbiased": True}, fadas_oracle, ADAPTIVE | {"correct": True}
    ),
    "fadas-da": Case("fadas-da", ADAPTIVE, fadas_oracle, ADAPTIVE | {"rate": equation_77(1)}),
    "fadas-da capped": Case(
        "fadas-da",
        ADAPTIVE | {"server_lr": 0.6, "capped": True},
        fadas_oracle,
        ADAPTIVE | {"server_lr": 0.6, "rate": equation_4(1)},
    ),
    "adamasfl": Case("adamasfl", {}, adamasfl, theorem_2(3, 3, 8)._asdict()),
    "cadence": Case("cadence", {}, cadence, SYSTEM),
    "cadence without variates": Case("cadence", {"variates": False}, cadence, SYSTEM | {"variates": False}),
    "cadence for noise": Case("cadence", {"noisy": True}, cadence, SYSTEM | {"noisy": True}),
    "adamasfl small beta": Case(
        "adamasfl", {"beta": 0.3}, adamasfl, theorem_2(3, 3, 8)._asdict() | {"beta": 0.3}
    ),
}
MOMENTUM = {"local_lr": 0.2, "server_lr": 0.3, "beta": 0.4}
CASES |= {
    "masfl": Case("masfl", MOMENTUM, masfl, MOMENTUM),
    "padamfed": Case("padamfed", {}, padamfed, padamfed_theory(3, 3, 8)._asdict(), prompt=True),
    "padamfed-vr": Case("padamfed-vr", {}, padamfed_vr, padamfed_vr_theory(3, 3, 8)._asdict()),
    "scaffold I": Case("scaffold", RATES | {"whole": True}, scaffold, RATES | {"option": 1}),
    "scaffold II": Case("scaffold", RATES, scaffold, RATES | {"option": 2}),
    "scaffold-m": Case("scaffold-m", MOMENTUM, scaffold_m, MOMENTUM, prompt=True),
    "scaffold-m-vr": Case("scaffold-m-vr", MOMENTUM, scaffold_m_vr, MOMENTUM),
    "fedavg-m": Case("fedavg-m", MOMENTUM, fedavg_m, MOMENTUM),
    "fedavg-m-vr": Case("fedavg-m-vr", MOMENTUM, fedavg_m_vr, MOMENTUM),
    "ca2fl": Case("ca2fl", RATES, ca2fl, RATES),
    "dude": Case("dude", RATES, dude, RATES),
    "defedavg": Case("defedavg", RATES, defedavg, RATES),
    "fedsps": Case("fedsps", {"bound": 0.4}, fedsps, {"bound": 0.4}),
    "mimelite": Case("mimelite", RATES, mime, RATES | {"lite": True}, prompt=True),
    "fafed": Case(
        "fafed",
        {"local_lr": 0.02, "alpha": 0.3},
        fafed,
        {"lr": 0.02, "alpha": 0.3, "rho_v": 0.9, "eps": 1e-3},
        prompt=True,
    ),
}
MA = {"beta": 0.8, "penalty": 1e-3, "span": 5}
MA_LIGHT = {"beta": 0.8, "span": 5}
LATE = frozenset({"asynchronous everybody"})
SCALES = {  # by the method underneath: its parameters, the oracle's rule, whether rates are small
    "fedavgm": ({}, identity, RATES),
    "fedadam": ({"beta2": 0.95, "eps": 0.02}, adam(0.95, 0.02), ADAPTIVE),
    "fedadagrad": ({"eps": 0.02}, adagrad(0.02), ADAPTIVE),
    "fadas": ({"beta2": 0.95, "eps": 1e-4}, amsgrad(0.95, 1e-4), ADAPTIVE),
}
CASES |= {
    f"ma-{name}": Case(
        f"ma-{name}",
        rates | MA | given,
        momentum_approximation,
        rates | MA | {"rule": rule},
        limit=4,
        only=frozenset() if name == "fedavgm" else LATE,
    )
    for name, (given, rule, rates) in SCALES.items()
}
CASES |= {
    f"ma-light-{name}": Case(
        f"ma-light-{name}",
        rates | MA_LIGHT | given,
        light_momentum_approximation,
        rates | MA_LIGHT | {"rule": rule},
        limit=4,
        only=LATE,
    )
    for name, (given, rule, rates) in SCALES.items()
}
CASES |= {
    "ma-fedavgm by default": Case("ma-fedavgm", RATES, momentum_approximation, RATES, limit=20, only=LATE),
    "ma-fedavgm truncated": Case(
        "ma-fedavgm",
        RATES | {"rcond": 0.1},
        momentum_approximation,
        RATES | {"rcond": 0.1},
        limit=9,
        only=LATE,
    ),
    "ma-fedavgm windowed": Case(
        "ma-fedavgm", RATES | {"window": 3}, momentum_approximation, RATES | {"window": 3}, limit=9, only=LATE
    ),
    "ma-fedadam fading": Case(
        "ma-fedadam",
        ADAPTIVE | {"beta2": 0.95, "eps": 0.02} | MA,
        momentum_approximation,
        ADAPTIVE | MA | {"rule": adam(0.95, 0.02), "weight": polynomial(0.5)},
        Polynomial(0.5),
        limit=4,
        only=LATE,
    ),
    "ma-light-fedavgm fading": Case(
        "ma-light-fedavgm",
        RATES | MA_LIGHT,
        light_momentum_approximation,
        RATES | MA_LIGHT | {"weight": polynomial(0.5)},
        Polynomial(0.5),
        limit=4,
        only=LATE,
    ),
}
PREDICTED = ADAPTIVE | {"beta": 0.7}
CASES |= {
    "weight-prediction": Case("weight-prediction", RATES, weight_prediction, RATES, limit=20),
    "weight-prediction remembered": Case(
        "weight-prediction",
        RATES | {"remembered": True, "alpha": 0.6},
        weight_prediction,
        RATES | {"previous": True, "decay": 0.6},
        limit=20,
        only=LATE,
    ),
    "weight-prediction fedadam": Case(
        "weight-prediction",
        PREDICTED | {"rule": "fedadam", "beta2": 0.95, "eps": 0.02},
        weight_prediction,
        PREDICTED | {"rule": adam(0.95, 0.02)},
        only=LATE,
    ),
    "weight-prediction fading": Case(
        "weight-prediction",
        PREDICTED | {"rule": "fedadam"},
        weight_prediction,
        PREDICTED | {"rule": adam(0.99, 0.01), "weight": polynomial(0.5)},
        Polynomial(0.5),
        limit=3,
        only=LATE,
    ),
}
DISPATCH = {
    "synchronous": Synchronous(3),
    "asynchronous before": Asynchronous(5, eager=True),
    "asynchronous after": Asynchronous(5, eager=False),
    "asynchronous everybody": Asynchronous(8, eager=True),
    "rounds": RoundRefill(5),
    "poisson": Poisson(0.4),
    "queues": Queues(6),
}
ENGINES = {"sequential": Sequential, "vectorised": Vectorised}
WORK = {"steps": Steps(3, 4), "epochs": Epochs(1, 4)}


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("case", "dispatch"),
    [(case, dispatch) for case in CASES for dispatch in DISPATCH if CASES[case].meets(dispatch)],
)
def test_a_run_equals_its_oracle(case: str, dispatch: str, engine: str, work: str) -> None:
    world = make_world(work=WORK[work])
    made = ENGINES[engine](world.problem, world.population, Exponential(1.0))
    weights, limit = CASES[case].weights, CASES[case].limit
    shots = play(CASES[case].build(), made, DISPATCH[dispatch], weights=weights, limit=limit)
    models = CASES[case].oracle(world.oracle, 8, shots[0].x.numpy(), trace(shots), **CASES[case].known)
    assert len(models) == len(shots) == 9
    for shot, model in zip(shots, models, strict=True):
        np.testing.assert_allclose(shot.x.numpy(), model, rtol=0, atol=1e-10)
    assert np.abs(models[-1] - models[0]).max() > 1e-3


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "case", ["adamasfl", "fadas-da", "fedbuff fading", "ma-fedadam fading", "weight-prediction remembered"]
)
def test_losses_drops_and_absences_do_not_break_a_method(case: str, engine: str) -> None:
    world = make_world()
    made = ENGINES[engine](world.problem, world.population, Exponential(1.0), Cycle(5.0, 0.6), Dropout(0.2))
    shots = play(CASES[case].build(), made, Asynchronous(6), rounds=20, weights=CASES[case].weights, limit=2)
    models = CASES[case].oracle(world.oracle, 8, shots[0].x.numpy(), trace(shots), **CASES[case].known)
    np.testing.assert_allclose(shots[-1].x.numpy(), models[-1], rtol=0, atol=1e-10)
    assert shots[-1].counts.lost > 0
    assert shots[-1].counts.dropped > 0


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
    shots = play(algorithm, made, Asynchronous(8), rounds=60, limit=3, weights=Polynomial(0.5))
    assert shots[-1].counts.dropped > 0
    known = RATES | given | {"weight": polynomial(0.5)}
    models = oracle(world.oracle, 8, shots[0].x.numpy(), trace(shots), **known)
    for shot, model in zip(shots, models, strict=True):
        np.testing.assert_allclose(shot.x.numpy(), model, rtol=0, atol=1e-10)


@pytest.mark.parametrize("foresight", [Foreseen(), Remembered()])
def test_prediction_by_the_servers_own_steps_equals_its_oracle(foresight: Foresight) -> None:
    world = make_world()
    made = Vectorised(world.problem, world.population, Exponential(1.0))
    algorithm = WeightPrediction(FedOpt(0.2, 0.03, Ema(0.7), Adam(0.95, 0.02)), StepDrift(0.6), foresight)
    shots = play(algorithm, made, Asynchronous(8))
    known = PREDICTED | {"rule": adam(0.95, 0.02), "decay": 0.6, "stepwise": True}
    known |= {"previous": foresight == Remembered()}
    models = weight_prediction(world.oracle, 8, shots[0].x.numpy(), trace(shots), **known)
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


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("engine", ENGINES)
def test_mime_equals_its_oracle_with_two_server_steps_a_round(engine: str, work: str) -> None:
    world = make_world(work=WORK[work])
    made = ENGINES[engine](world.problem, world.population, Exponential(1.0))
    shots = play(build("mime", Setting(3, 3, 8), RATES), made, Phases(3))
    rounds = [
        [(client, version // 2, visit) for client, version, visit in step] for step in trace(shots)[1::2]
    ]
    models = mime(world.oracle, 8, shots[0].x.numpy(), rounds, **RATES)
    for shot, model in zip(shots[::2], models, strict=True):
        np.testing.assert_allclose(shot.x.numpy(), model, rtol=0, atol=1e-10)


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
        models = oracle(world.oracle, 8, shots[0].x.numpy(), trace(shots), **known)
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
    models = LAZY[method](Shifted(world.oracle), 8, shots[0].x.numpy(), steps, **MOMENTUM)
    for shot, model in zip(shots, models, strict=True):
        np.testing.assert_allclose(shot.x.numpy(), model, rtol=0, atol=1e-10)


def test_a_beta_above_one_is_capped_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert AdaMasFL.tuned(10, 50, 400).beta == 1.0
    assert "beta for AdaMasFL is 1.12, above 1" in caplog.text
