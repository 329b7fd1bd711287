"""DeFedAvg (Wang et al. 2024; read second-hand), for i.i.d. clients or not: a plain mean of late descents.

The two forms and FedBuff differ in who works on what, which is the trace's affair. Descents are not
divided by the local rate.
"""

import numpy as np

from oracles.cases import RATES, Case
from oracles.replay import Run, Vector, begin


def defedavg(run: Run, *, local_lr: float, server_lr: float = 1.0) -> list[Vector]:
    """x <- x - server_lr (1/M) sum (x_v - x_i)."""
    problem, _, x0, steps = run
    models = begin(x0)
    for step in steps:
        walked = np.zeros_like(models[0])
        for client, version, visit in step:
            y = models[version]
            for k in range(problem.steps(client, visit)):
                slope = problem.gradient(client, visit, k, y)
                y = y - local_lr * slope
                walked += local_lr * slope
        models.append(models[-1] - server_lr * walked / len(step))
    return models


CASES = {
    "defedavg": Case("defedavg", RATES, defedavg, RATES),
    "defedavg-iid": Case("defedavg-iid", RATES, defedavg, RATES, only=frozenset({"round-refill"})),
}
