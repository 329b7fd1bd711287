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
from offbeat.core import AnyAlgorithm
from offbeat.schedule.staleness import Weights
from oracles.adamasfl import adamasfl, theorem_2
from oracles.fadas import equation_4, equation_77
from oracles.fadas import fadas as fadas_oracle
from oracles.fedams import fedams, fedams_additive
from oracles.fedasync import fedasync
from oracles.fedavg import fedavg, fedavgm, fedavgm_ema
from oracles.fedbuff import fedbuff
from oracles.fedopt import fedadagrad, fedadam, fedyogi
from oracles.weights import constant, hinge, polynomial
from worlds import make_world, play, trace


class Case(NamedTuple):
    method: str
    given: dict[str, Any]
    oracle: Callable[..., list[np.ndarray]]
    known: dict[str, Any]
    weights: Weights = Equal()

    def build(self) -> AnyAlgorithm:
        return build(self.method, Setting(3, 3, 12), self.given)


RATES = {"local_lr": 0.2, "server_lr": 0.5}
ADAPTIVE = {"local_lr": 0.2, "server_lr": 0.03}
CASES = {
    "fedavg": Case("fedavg", RATES, fedavg, RATES),
    "fedavgm": Case("fedavgm", RATES | {"beta": 0.7}, fedavgm, RATES | {"beta": 0.7}),
    "fedavgm damped": Case("fedavgm", RATES | {"damped": True}, fedavgm_ema, RATES),
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
    "adamasfl": Case("adamasfl", {}, adamasfl, theorem_2(3, 3, 12)._asdict()),
    "adamasfl small beta": Case(
        "adamasfl", {"beta": 0.3}, adamasfl, theorem_2(3, 3, 12)._asdict() | {"beta": 0.3}
    ),
}
DISPATCH = {
    "synchronous": Synchronous(3),
    "asynchronous before": Asynchronous(5, eager=True),
    "asynchronous after": Asynchronous(5, eager=False),
    "asynchronous everybody": Asynchronous(8, eager=True),
    "rounds": RoundRefill(5),
    "poisson": Poisson(0.4),
}
ENGINES = {"sequential": Sequential, "vectorised": Vectorised}
WORK = {"steps": Steps(3, 4), "epochs": Epochs(2, 4)}


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dispatch", DISPATCH)
@pytest.mark.parametrize("case", CASES)
def test_a_run_equals_its_oracle(case: str, dispatch: str, engine: str, work: str) -> None:
    world = make_world(work=WORK[work])
    made = ENGINES[engine](world.problem, world.population, Exponential(1.0))
    shots = play(CASES[case].build(), made, DISPATCH[dispatch], weights=CASES[case].weights)
    models = CASES[case].oracle(world.oracle, 8, shots[0].x.numpy(), trace(shots), **CASES[case].known)
    assert len(models) == len(shots) == 13
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
