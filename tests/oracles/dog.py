"""DoG (Ivgi et al. 2023), eq. 1, with the mean change of local SGD in place of a gradient.

eta_t = max(r_eps, max_{i <= t} |x_i - x_0|) / sqrt(eps + sum_{i <= t} |g_i|^2), r_eps = alpha (1 + |x_0|).
"""

import numpy as np

from oracles.cases import Case
from oracles.replay import Run, Vector, begin, mean_change
from oracles.weights import Weight, constant, polynomial


def dog(
    run: Run, *, local_lr: float, alpha: float, eps: float = 1e-8, weight: Weight = constant
) -> list[Vector]:
    """x <- x + eta_t times the mean change."""
    problem, _, x0, steps = run
    models = begin(x0)
    changes: list[Vector] = []
    for step in steps:
        changes.append(mean_change(problem, models, step, local_lr, weight))
        gone = max(float(np.linalg.norm(model - models[0])) for model in models)
        radius = max(alpha * (1 + float(np.linalg.norm(models[0]))), gone)
        models.append(models[-1] + radius / np.sqrt(eps + np.sum(np.square(changes))) * changes[-1])
    return models


GIVEN = {"local_lr": 0.2, "first_move": 0.05}
KNOWN = {"local_lr": 0.2, "alpha": 0.05}
CASES = {
    "dog": Case("dog", GIVEN, dog, KNOWN),
    "dog, larger eps": Case("dog", GIVEN | {"eps": 0.1}, dog, KNOWN | {"eps": 0.1}),
    "dog fading": Case("dog", GIVEN, dog, KNOWN | {"weight": polynomial(0.5)}, "polynomial:0.5"),
}
