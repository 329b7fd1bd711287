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
from offbeat.algorithms.fedsps import FedSPS
from offbeat.algorithms.masfl import MasFL
from offbeat.algorithms.padamfed_vr import PAdaMFedVR
from offbeat.algorithms.scaffold import Scaffold
from offbeat.core import AnyAlgorithm
from offbeat.schedule.dispatch import Phases, Queues
from offbeat.schedule.staleness import Weights
from oracles.adamasfl import adamasfl, theorem_2
from oracles.ca2fl import ca2fl
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
from oracles.padamfed import padamfed, padamfed_theory, padamfed_vr, padamfed_vr_theory
from oracles.scaffold import scaffold
from oracles.scaffold_m import scaffold_m, scaffold_m_vr
from oracles.softmax import Softmax
from oracles.weights import constant, hinge, polynomial
from worlds import make_world, play, trace


class Case(NamedTuple):
    method: str
    given: dict[str, Any]
    oracle: Callable[..., list[np.ndarray]]
    known: dict[str, Any]
    weights: Weights = Equal()
    prompt: bool = False  # whether the method is defined without staleness alone

    def build(self) -> AnyAlgorithm:
        return build(self.method, Setting(3, 3, 8), self.given)


RATES = {"local_lr": 0.2, "server_lr": 0.5}
ADAPTIVE = {"local_lr": 0.2, "server_lr": 0.03}
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
    [
        (case, dispatch)
        for case in CASES
        for dispatch in DISPATCH
        if dispatch == "synchronous" or not CASES[case].prompt
    ],
)
def test_a_run_equals_its_oracle(case: str, dispatch: str, engine: str, work: str) -> None:
    world = make_world(work=WORK[work])
    made = ENGINES[engine](world.problem, world.population, Exponential(1.0))
    shots = play(CASES[case].build(), made, DISPATCH[dispatch], weights=CASES[case].weights)
    models = CASES[case].oracle(world.oracle, 8, shots[0].x.numpy(), trace(shots), **CASES[case].known)
    assert len(models) == len(shots) == 9
    for shot, model in zip(shots, models, strict=True):
        np.testing.assert_allclose(shot.x.numpy(), model, rtol=0, atol=1e-10)
    assert np.abs(models[-1] - models[0]).max() > 1e-3


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", ["adamasfl", "fadas-da", "fedbuff fading"])
def test_losses_drops_and_absences_do_not_break_a_method(case: str, engine: str) -> None:
    world = make_world()
    made = ENGINES[engine](world.problem, world.population, Exponential(1.0), Cycle(5.0, 0.6), Dropout(0.2))
    shots = play(CASES[case].build(), made, Asynchronous(6), rounds=20, weights=CASES[case].weights, limit=2)
    models = CASES[case].oracle(world.oracle, 8, shots[0].x.numpy(), trace(shots), **CASES[case].known)
    np.testing.assert_allclose(shots[-1].x.numpy(), models[-1], rtol=0, atol=1e-10)
    assert shots[-1].counts.lost > 0
    assert shots[-1].counts.dropped > 0


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
