"""FedSPS (Mukherjee, Loizou, Stich; read second-hand): Polyak's step size in every local step.

eta = min((loss - lower) / (c |gradient|^2), bound), both on the minibatch at hand. `lower` must not
exceed any loss. Where the gradient is zero nothing moves, whatever eta is.
"""

import numpy as np

from oracles.cases import Case
from oracles.replay import Run, Vector, begin


def fedsps(
    run: Run, *, c: float = 0.5, lower: float = 0.0, bound: float = 1.0, server_lr: float = 1.0
) -> list[Vector]:
    """x <- x - server_lr (1/M) sum (x_v - x_i)."""
    problem, _, x0, steps = run
    models = begin(x0)
    for step in steps:
        total = np.zeros_like(models[0])
        for client, version, visit in step:
            y = models[version]
            for k in range(problem.steps(client, visit)):
                gradient = problem.gradient(client, visit, k, y)
                square = float(gradient @ gradient)
                loss = problem.loss(client, visit, k, y)
                eta = bound if square == 0 else min((loss - lower) / (c * square), bound)
                y = y - eta * gradient
            total += models[version] - y
        models.append(models[-1] - server_lr * total / len(step))
    return models


CASES = {"fedsps": Case("fedsps", {"bound": 0.4}, fedsps, {"bound": 0.4})}
