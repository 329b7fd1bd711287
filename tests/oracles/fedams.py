"""FedAMS (Wang et al. 2022), and the form in which the FADAS paper (Wang et al. 2024) states it.

Both keep the largest v seen. The paper's rule keeps it above eps and divides by its root; FADAS's
form adds eps to the root. `correct` divides m and v by 1 - beta^n in the n-th step (n from 1), as
the authors' code does and the papers' equations do not; the maximum is taken before correcting.
"""

from typing import Any

import numpy as np

from oracles.cases import ADAPTIVE, Case
from oracles.replay import Run, Vector, begin, mean_change
from oracles.weights import Weight, constant


def fedams(
    run: Run,
    *,
    local_lr: float,
    server_lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-3,
    correct: bool = False,
    additive: bool = False,
    weight: Weight = constant,
) -> list[Vector]:
    """Max stabilisation: vhat = max(vhat, v, eps), x <- x + server_lr m / sqrt(vhat).

    Additive, as FADAS states it: vhat = max(vhat, v), x <- x + server_lr m / (sqrt(vhat) + eps).
    """
    problem, _, x0, steps = run
    floor, added = (0.0, eps) if additive else (eps, 0.0)
    models = begin(x0)
    m = np.zeros_like(models[0])
    v = np.zeros_like(models[0])
    vhat = np.zeros_like(models[0])
    for n, step in enumerate(steps, start=1):
        delta = mean_change(problem, models, step, local_lr, weight)
        m = beta1 * m + (1 - beta1) * delta
        v = beta2 * v + (1 - beta2) * delta**2
        vhat = np.maximum(np.maximum(vhat, v), floor)
        a, b = (1 - beta1**n, np.sqrt(1 - beta2**n)) if correct else (1.0, 1.0)
        models.append(models[-1] + server_lr * (m / a) / (np.sqrt(vhat) / b + added))
    return models


def fedams_additive(run: Run, **known: Any) -> list[Vector]:
    """With FADAS's eps."""
    return fedams(run, additive=True, **{"eps": 1e-8} | known)


CASES = {
    "fedams": Case("fedams", ADAPTIVE, fedams, ADAPTIVE),
    "fedams unbiased": Case("fedams", ADAPTIVE | {"unbiased": True}, fedams, ADAPTIVE | {"correct": True}),
    "fedams additive": Case(
        "fedams", ADAPTIVE | {"floor": 0.0, "eps": 1e-4}, fedams_additive, ADAPTIVE | {"eps": 1e-4}
    ),
}
