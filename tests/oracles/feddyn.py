"""FedDyn (Acar et al. 2021), Algorithm 1 with SGD as the local solver.

theta_k minimises L_k(theta) - <grad_k, theta> + alpha/2 |theta - theta^{t-1}|^2, grad_k is then lowered by
alpha (theta_k - theta^{t-1}), h by alpha (1/m) sum over the active devices of (theta_k - theta^{t-1}), and
theta^t is the mean of the theta_k less h / alpha. Under delay theta^{t-1} is the version that the device was
sent, and the mean of the models is the newest one plus the mean of the changes.
"""

import numpy as np

from oracles.cases import RATES, Case
from oracles.fedavg import fedavg
from oracles.fedbuff import fedbuff
from oracles.replay import Run, Vector, begin
from oracles.weights import polynomial


def feddyn(run: Run, *, local_lr: float, server_lr: float = 1.0, alpha: float) -> list[Vector]:
    """theta <- theta + server_lr (mean change - h / alpha)."""
    problem, population, x0, steps = run
    models = begin(x0)
    gradients = [np.zeros_like(models[0]) for _ in range(population)]
    h = np.zeros_like(models[0])
    for step in steps:
        changes = []
        for client, version, visit in step:
            theta = models[version].copy()
            for k in range(problem.steps(client, visit)):
                slope = problem.gradient(client, visit, k, theta)
                theta = theta - local_lr * (slope - gradients[client] + alpha * (theta - models[version]))
            changes.append(theta - models[version])
            gradients[client] = gradients[client] - alpha * changes[-1]
        h = h - alpha * np.sum(changes, axis=0) / population
        models.append(models[-1] + server_lr * (np.mean(changes, axis=0) - h / alpha))
    return models


NONE = {"alpha": 0.0}
CASES = {
    "feddyn": Case("feddyn", RATES | {"alpha": 0.1}, feddyn, RATES | {"alpha": 0.1}),
    "feddyn as in the paper": Case(
        "feddyn", {"local_lr": 0.2, "alpha": 0.5}, feddyn, {"local_lr": 0.2, "alpha": 0.5}, prompt=True
    ),
    # without the regulariser it is FedAvg, and FedBuff where stale updates fade
    "feddyn is fedavg": Case("feddyn", RATES | NONE, fedavg, RATES, tolerance=1e-12),
    "feddyn is fedbuff": Case(
        "feddyn",
        RATES | NONE,
        fedbuff,
        RATES | {"weight": polynomial(0.5)},
        "polynomial:0.5",
        tolerance=1e-12,
    ),
}
