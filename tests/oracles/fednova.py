"""FedNova (Wang et al. 2020), Algorithm 1 with equal client weights p_i = 1/M and eq. 10 for momentum.

d_i = (x - x_i) / (eta |a_i|_1) with a_i = [(1 - rho^tau), ..., (1 - rho^2), (1 - rho)] / (1 - rho), and
x <- x - tau_eff eta sum_i p_i d_i with tau_eff = sum_i p_i |a_i|_1. A stale update has a weight w_i in both
sums; the second is divided by the sum of the weights.
"""

import numpy as np

from oracles.cases import RATES, Case
from oracles.fedavg import fedavg
from oracles.fedbuff import fedbuff
from oracles.replay import Run, Vector, begin
from oracles.weights import Weight, constant, polynomial


def fednova(
    run: Run, *, local_lr: float, server_lr: float = 1.0, momentum: float = 0.0, weight: Weight = constant
) -> list[Vector]:
    """x <- x - server_lr tau_eff eta sum_i p_i d_i."""
    problem, _, x0, steps = run
    models = begin(x0)
    for t, step in enumerate(steps):
        weights, norms, directions = [], [], []
        for client, version, visit in step:
            tau = problem.steps(client, visit)
            x, buffer = models[version], np.zeros_like(models[0])
            for k in range(tau):
                buffer = momentum * buffer + problem.gradient(client, visit, k, x)
                x = x - local_lr * buffer
            a = [sum(momentum**j for j in range(tau - k)) for k in range(tau)]
            weights.append(weight(t - version))
            norms.append(sum(a))
            directions.append((models[version] - x) / (local_lr * sum(a)))
        tau_eff = np.dot(weights, norms) / sum(weights)
        mean = sum(w * d for w, d in zip(weights, directions, strict=True)) / len(step)
        models.append(models[-1] - server_lr * tau_eff * local_lr * mean)
    return models


FADING = {"weight": polynomial(0.5)}
CASES = {
    "fednova": Case("fednova", RATES, fednova, RATES),
    "fednova momentum": Case("fednova", RATES | {"momentum": 0.6}, fednova, RATES | {"momentum": 0.6}),
    "fednova fading": Case("fednova", RATES, fednova, RATES | FADING, "polynomial:0.5"),
    # with as many steps everywhere it is FedAvg, and FedBuff where stale updates fade
    "fednova is fedavg": Case("fednova", RATES, fedavg, RATES, work=frozenset({"steps"}), tolerance=1e-12),
    "fednova is fedbuff": Case(
        "fednova",
        RATES,
        fedbuff,
        RATES | FADING,
        "polynomial:0.5",
        work=frozenset({"steps"}),
        tolerance=1e-12,
    ),
}
