"""FADAS and delay-adaptive FADAS (Wang et al. 2024, Algorithm 1): AMSGrad over late changes.

The rate of a step depends on the largest staleness in its buffer: eq. 77 is what the paper's
experiments use, eq. 4 what it analyses. `correct` adds the bias correction of the authors' code,
which eq. 3 has not.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from oracles.cases import ADAPTIVE, LATE, Case
from oracles.replay import Run, Vector, begin, mean_change
from oracles.weights import Weight, constant

Rate: TypeAlias = Callable[[float, int], float]  # server_lr, largest staleness -> rate of this step


def steady(server_lr: float, staleness: int) -> float:
    """Plain FADAS: delay does not matter."""
    return server_lr


def equation_77(threshold: float) -> Rate:
    """Above the threshold, the rate is divided by the largest staleness."""

    def rate(server_lr: float, staleness: int) -> float:
        if staleness <= threshold:
            return server_lr
        return min(server_lr, server_lr / staleness)

    return rate


def equation_4(threshold: float) -> Rate:
    """Above the threshold, the rate is at most one over the largest staleness."""

    def rate(server_lr: float, staleness: int) -> float:
        if staleness <= threshold:
            return server_lr
        return min(server_lr, 1 / staleness)

    return rate


def fadas(
    run: Run,
    *,
    local_lr: float,
    server_lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-8,
    correct: bool = False,
    rate: Rate = steady,
    weight: Weight = constant,
) -> list[Vector]:
    """Delay-adaptive with rate=equation_77(threshold) or rate=equation_4(threshold)."""
    problem, _, x0, steps = run
    x = np.array(x0, dtype=np.float64)
    models = begin(x0)
    m, v, vhat = 0.0 * x, 0.0 * x, 0.0 * x
    for t, step in enumerate(steps):
        delta = mean_change(problem, models, step, local_lr, weight)
        m = beta1 * m + (1 - beta1) * delta
        v = beta2 * v + (1 - beta2) * delta * delta
        vhat = np.maximum(vhat, v)
        direction, scale = m, np.sqrt(vhat)
        if correct:
            direction = m / (1 - beta1 ** (t + 1))
            scale = np.sqrt(vhat) / np.sqrt(1 - beta2 ** (t + 1))
        latest = max(t - version for _, version, _ in step)
        x = x + rate(server_lr, latest) * direction / (scale + eps)
        models.append(x)
    return models


CASES = {
    "fadas": Case("fadas", ADAPTIVE, fadas, ADAPTIVE),
    "fadas unbiased": Case("fadas", ADAPTIVE | {"unbiased": True}, fadas, ADAPTIVE | {"correct": True}),
    "fadas-da": Case("fadas-da", ADAPTIVE, fadas, ADAPTIVE | {"rate": equation_77(1)}),
    "fadas-da capped": Case(
        "fadas-da",
        ADAPTIVE | {"server_lr": 0.6, "capped": True},
        fadas,
        ADAPTIVE | {"server_lr": 0.6, "rate": equation_4(1)},
    ),
    "fadas-da above 2": Case(
        "fadas-da",
        ADAPTIVE | {"tau_c": 2.0},
        fadas,
        ADAPTIVE | {"rate": equation_77(2)},
        only=LATE,
    ),
    "fadas-da capped above 2": Case(
        "fadas-da",
        ADAPTIVE | {"server_lr": 0.6, "capped": True, "tau_c": 2.0},
        fadas,
        ADAPTIVE | {"server_lr": 0.6, "rate": equation_4(2)},
        only=LATE,
    ),
}
