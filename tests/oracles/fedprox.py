"""FedProx (Li et al. 2020), Algorithm 2 with equal client weights and SGD as the local solver.

h_k(w; w^t) = F_k(w) + mu/2 |w - w^t|^2, and w^{t+1} is the mean of the clients' w_k. Under delay w^t is the
version that the client was sent, and the server adds the mean of the clients' changes.
"""

import numpy as np

from oracles.cases import RATES, Case
from oracles.fedavg import fedavg
from oracles.fedbuff import fedbuff
from oracles.replay import Run, Vector, begin
from oracles.weights import Weight, constant, polynomial


def fedprox(
    run: Run, *, local_lr: float, server_lr: float = 1.0, mu: float, weight: Weight = constant
) -> list[Vector]:
    """w <- w + server_lr (1/M) sum of s(staleness) (w_k - w_v)."""
    problem, _, x0, steps = run
    models = begin(x0)
    for t, step in enumerate(steps):
        total = np.zeros_like(models[0])
        for client, version, visit in step:
            w = models[version].copy()
            for k in range(problem.steps(client, visit)):
                w -= local_lr * (problem.gradient(client, visit, k, w) + mu * (w - models[version]))
            total += weight(t - version) * (w - models[version])
        models.append(models[-1] + server_lr * total / len(step))
    return models


FADING = {"weight": polynomial(0.5)}
HELD = {"mu": 0.7}
FREE = {"mu": 0.0}
CASES = {
    "fedprox": Case("fedprox", RATES | HELD, fedprox, RATES | HELD),
    "fedprox fading": Case("fedprox", RATES | HELD, fedprox, RATES | HELD | FADING, "polynomial:0.5"),
    # without the proximal term it is FedAvg, and FedBuff where stale updates fade
    "fedprox is fedavg": Case("fedprox", RATES | FREE, fedavg, RATES, tolerance=1e-12),
    "fedprox is fedbuff": Case(
        "fedprox", RATES | FREE, fedbuff, RATES | FADING, "polynomial:0.5", tolerance=1e-12
    ),
}
