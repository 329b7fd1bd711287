"""Ringmaster LMO (Sadiev et al. 2026) with the Euclidean ball: steps of given length along momentum.

m_{k+1} = (1 - alpha_k) m_k + alpha_k g_k from m_0 = 0, x_{k+1} = x_k - eta_k m_{k+1} / |m_{k+1}|. g_k is the
mean gradient of the arrived tasks, each the mean over its minibatches, all at the model that the task was
sent. Constant: eta_k = eta, alpha_k = alpha. Parameter-agnostic: eta_k = eta (k + 1)^(-3/4) and alpha_k =
k^(-1/2), alpha_0 = 1. Tasks with k - version >= R never arrive, which is the run's business.
"""

import numpy as np

from oracles.cases import Case
from oracles.replay import Run, Vector, begin, mean_gradient
from oracles.weights import Weight, constant, polynomial


def ringmaster_lmo(
    run: Run, *, eta: float, alpha: float | None = None, weight: Weight = constant
) -> list[Vector]:
    """Models 0 to T; without alpha, of the parameter-agnostic form."""
    problem, _, x0, steps = run
    models = begin(x0)
    m = np.zeros_like(models[0])
    for k, step in enumerate(steps):
        gradients = [
            weight(k - version) * mean_gradient(problem, client, visit, models[version])
            for client, version, visit in step
        ]
        share = alpha if alpha is not None else 1 / np.sqrt(k) if k else 1.0
        length = eta if alpha is not None else eta / (k + 1) ** 0.75
        m = (1 - share) * m + share * np.mean(gradients, axis=0)
        models.append(models[-1] - length * m / np.linalg.norm(m))
    return models


CONSTANT = {"server_lr": 0.2, "alpha": 0.3, "falling": False}
CASES = {
    "ringmaster-lmo": Case("ringmaster-lmo", {"server_lr": 0.7}, ringmaster_lmo, {"eta": 0.7}),
    "ringmaster-lmo, constant rates": Case(
        "ringmaster-lmo", CONSTANT, ringmaster_lmo, {"eta": 0.2, "alpha": 0.3}
    ),
    "ringmaster-lmo, two versions at most": Case(
        "ringmaster-lmo", {"server_lr": 0.7}, ringmaster_lmo, {"eta": 0.7}, max_staleness=1
    ),
    "ringmaster-lmo fading": Case(
        "ringmaster-lmo",
        CONSTANT,
        ringmaster_lmo,
        {"eta": 0.2, "alpha": 0.3, "weight": polynomial(0.5)},
        "polynomial:0.5",
    ),
}
