"""FedAvg (McMahan et al. 2017) with equal weights, and FedAvgM (Hsu et al. 2019) in both forms."""

from typing import Any

import numpy as np

from oracles.cases import RATES, Case
from oracles.replay import Run, Vector, begin, local_sgd, mean_change
from oracles.weights import Weight, constant


def fedavg(run: Run, *, local_lr: float, server_lr: float = 1.0) -> list[Vector]:
    """x <- x + server_lr * (1/M) sum (x_i - x_v)."""
    problem, _, x0, steps = run
    models = begin(x0)
    for step in steps:
        total = np.zeros_like(models[0])
        for client, version, visit in step:
            total += local_sgd(problem, client, visit, models[version], local_lr) - models[version]
        models.append(models[-1] + server_lr * total / len(step))
    return models


def fedavgm(
    run: Run,
    *,
    local_lr: float,
    server_lr: float = 1.0,
    beta: float = 0.9,
    averaged: bool = False,
    weight: Weight = constant,
) -> list[Vector]:
    """Heavy ball: v <- beta v + delta. Averaged: v <- beta v + (1 - beta) delta."""
    problem, _, x0, steps = run
    models = begin(x0)
    v = np.zeros_like(models[0])
    for step in steps:
        delta = mean_change(problem, models, step, local_lr, weight)
        v = beta * v + (1 - beta) * delta if averaged else beta * v + delta
        models.append(models[-1] + server_lr * v)
    return models


def fedavgm_ema(run: Run, **known: Any) -> list[Vector]:
    """Moving average in place of heavy ball."""
    return fedavgm(run, averaged=True, **known)


CASES = {
    "fedavg": Case("fedavg", RATES, fedavg, RATES),
    "fedavgm": Case("fedavgm", RATES | {"beta": 0.7}, fedavgm, RATES | {"beta": 0.7}),
    "fedavgm averaged": Case("fedavgm", RATES | {"averaged": True}, fedavgm_ema, RATES),
}
