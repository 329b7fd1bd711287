"""FedAdam, FedYogi and FedAdagrad (Reddi et al. 2021, Algorithm 2), which has no bias correction.

tau is the paper's degree of adaptivity. The paper asks for v_{-1} >= tau^2, which is the default
of v0; the common optimisers start from 0 and divide both moments of the n-th step by 1 - beta^n:
`correct` does that.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from oracles.cases import ADAPTIVE, Case
from oracles.replay import Run, Vector, begin, mean_change
from oracles.weights import Weight, constant


def fedopt(
    second: Callable[[Vector, Vector], Vector],
    run: Run,
    *,
    local_lr: float,
    server_lr: float,
    beta1: float = 0.9,
    tau: float = 1e-3,
    v0: float | None = None,
    correct: float | None = None,
    weight: Weight = constant,
) -> list[Vector]:
    """Algorithm 2 with `second` as its line for v, from v and delta^2; `correct` is the beta of v there."""
    problem, _, x0, steps = run
    models = begin(x0)
    m = np.zeros_like(models[0])
    v = np.full_like(models[0], tau**2 if v0 is None else v0)
    for n, step in enumerate(steps, 1):
        delta = mean_change(problem, models, step, local_lr, weight)
        m = beta1 * m + (1 - beta1) * delta
        v = second(v, delta**2)
        a, b = (1.0, 1.0) if correct is None else (1 - beta1**n, 1 - correct**n)
        models.append(models[-1] + server_lr * (m / a) / (np.sqrt(v / b) + tau))
    return models


def fedadam(run: Run, *, beta2: float = 0.99, correct: bool = False, **known: Any) -> list[Vector]:
    """v <- beta2 v + (1 - beta2) delta^2."""

    def second(v: Vector, square: Vector) -> Vector:
        return beta2 * v + (1 - beta2) * square

    return fedopt(second, run, correct=beta2 if correct else None, **known)


def fedyogi(run: Run, *, beta2: float = 0.99, correct: bool = False, **known: Any) -> list[Vector]:
    """v <- v - (1 - beta2) delta^2 sign(v - delta^2)."""

    def second(v: Vector, square: Vector) -> Vector:
        return v - (1 - beta2) * square * np.sign(v - square)

    return fedopt(second, run, correct=beta2 if correct else None, **known)


def fedadagrad(run: Run, **known: Any) -> list[Vector]:
    """v <- v + delta^2, without momentum unless beta1 is given."""
    return fedopt(lambda v, square: v + square, run, **{"beta1": 0.0} | known)


CASES = {
    "fedadam": Case("fedadam", ADAPTIVE, fedadam, ADAPTIVE),
    "fedadam unbiased": Case(
        "fedadam", ADAPTIVE | {"unbiased": True}, fedadam, ADAPTIVE | {"correct": True, "v0": 0.0}
    ),
    "fedyogi": Case("fedyogi", ADAPTIVE | {"eps": 0.02}, fedyogi, ADAPTIVE | {"tau": 0.02}),
    "fedyogi unbiased": Case(
        "fedyogi", ADAPTIVE | {"unbiased": True}, fedyogi, ADAPTIVE | {"correct": True, "v0": 0.0}
    ),
    "fedadagrad": Case("fedadagrad", ADAPTIVE | {"beta1": 0.4}, fedadagrad, ADAPTIVE | {"beta1": 0.4}),
}
