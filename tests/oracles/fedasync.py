"""FedAsync (Xie et al. 2019): models are mixed, not descents.

The paper mixes one arrival at a time. With a buffer of M the arrivals mix together,
x <- (1 - alpha wbar) x + alpha (1/M) sum w_i x_i with wbar the mean weight; M = 1 is the paper.
"""

import numpy as np

from oracles.cases import Case
from oracles.replay import Run, Vector, begin
from oracles.weights import Weight, constant, hinge, polynomial


def fedasync(
    run: Run, *, local_lr: float, alpha: float = 0.6, rho: float = 0.0, weight: Weight = constant
) -> list[Vector]:
    """Clients descend F(y) + (rho / 2) |y - x_v|^2 from the x_v they were handed."""
    problem, _, x0, steps = run
    models = begin(x0)
    for t, step in enumerate(steps):
        total_weight = 0.0
        total_model = np.zeros_like(models[0])
        for client, version, visit in step:
            anchor = models[version]
            y = anchor.copy()
            for k in range(problem.steps(client, visit)):
                y = y - local_lr * (problem.gradient(client, visit, k, y) + rho * (y - anchor))
            total_weight += weight(t - version)
            total_model += weight(t - version) * y
        wbar = total_weight / len(step)
        models.append((1 - alpha * wbar) * models[t] + alpha * total_model / len(step))
    return models


CASES = {
    "fedasync": Case("fedasync", {"alpha": 0.7}, fedasync, {"local_lr": 0.1, "alpha": 0.7}),
    "fedasync proximal": Case(
        "fedasync",
        {"rho": 0.3},
        fedasync,
        {"local_lr": 0.1, "rho": 0.3, "weight": polynomial(0.5)},
        "polynomial:0.5",
    ),
    "fedasync hinge": Case("fedasync", {}, fedasync, {"local_lr": 0.1, "weight": hinge(10, 1)}, "hinge:10:1"),
}
