"""FedAvg-M (Cheng et al. 2024), which is FedCM, and its variance-reduced form (read second-hand).

Momentum on the clients, not FedAvgM's on the server. beta is the weight of the new gradient, g^0 is
zero. VR takes each minibatch's gradient again at the version before the one handed out; x^{-1} is x^0.
"""

from typing import Any

import numpy as np

from oracles.cases import MOMENTUM, Case
from oracles.replay import Run, Vector, begin


def fedcm(run: Run, *, local_lr: float, server_lr: float, beta: float, vr: bool = False) -> list[Vector]:
    """Local steps along beta gradient + (1 - beta) g.

    VR: along gradient + (1 - beta) (g - gradient at the version before).
    """
    problem, _, x0, steps = run
    models = begin(x0)
    momenta = [np.zeros_like(models[0])]
    for step in steps:
        total = np.zeros_like(models[0])
        for client, version, visit in step:
            before, y = models[max(version - 1, 0)], models[version]
            count = problem.steps(client, visit)
            for k in range(count):
                gradient = problem.gradient(client, visit, k, y)
                if vr:
                    again = problem.gradient(client, visit, k, before)
                    y = y - local_lr * (gradient + (1 - beta) * (momenta[version] - again))
                else:
                    y = y - local_lr * (beta * gradient + (1 - beta) * momenta[version])
            total += (models[version] - y) / (local_lr * count)
        momenta.append(total / len(step))
        models.append(models[-1] - server_lr * momenta[-1])
    return models


def fedcm_vr(run: Run, **known: Any) -> list[Vector]:
    """With variance reduction."""
    return fedcm(run, vr=True, **known)


CASES = {
    "fedcm": Case("fedcm", MOMENTUM, fedcm, MOMENTUM),
    "fedcm-vr": Case("fedcm-vr", MOMENTUM, fedcm_vr, MOMENTUM),
}
