"""Partial personalisation (Pillutla et al., ICML 2022, FedSim): shared and personal weights move together.

A client joins the shared weights u with its own weights v_i, takes simultaneous SGD steps on both, keeps v_i
and sends the change of u. The server takes the mean of the changes, as FedBuff does. With the last layers
personal this is also FedPer (Arivazhagan et al., 2019). Another local optimiser takes the steps of both, its
state anew in each task.
"""

import numpy as np

from oracles.local_rules import Optimizer, sgd
from oracles.replay import Run, Vector, begin


def fedsim(
    run: Run,
    *,
    personal: int,
    local_lr: float,
    personal_lr: float,
    server_lr: float,
    optimizer: Optimizer = sgd,
) -> tuple[list[Vector], list[Vector]]:
    """The shared weights of every version, and each client's own in the end; the last `personal` are own."""
    problem, population, x0, steps = run
    start = np.array(x0, dtype=np.float64)
    models = begin(start[:-personal])
    own = [start[-personal:].copy() for _ in range(population)]
    for t, step in enumerate(steps):
        changes = []
        for client, version, visit in step:
            u, v = models[version].copy(), own[client].copy()
            gradients = []
            for k in range(problem.steps(client, visit)):
                gradients.append(problem.gradient(client, visit, k, np.concatenate([u, v])))
                u = optimizer(u, [gradient[:-personal] for gradient in gradients], local_lr)
                v = optimizer(v, [gradient[-personal:] for gradient in gradients], personal_lr)
            own[client] = v
            changes.append(u - models[version])
        models.append(models[t] + server_lr * np.sum(changes, axis=0) / len(step))
    return models, own
