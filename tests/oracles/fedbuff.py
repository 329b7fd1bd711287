"""FedBuff (Nguyen et al. 2022): a mean of late descents, each weighted by its staleness."""

import numpy as np

from oracles.cases import RATES, Case
from oracles.replay import Run, Vector, begin, local_sgd
from oracles.weights import Weight, constant, polynomial


def fedbuff(run: Run, *, local_lr: float, server_lr: float = 1.0, weight: Weight = constant) -> list[Vector]:
    """x <- x - server_lr * (1/M) sum s(staleness) (x_v - x_i)."""
    problem, _, x0, steps = run
    models = begin(x0)
    for t, step in enumerate(steps):
        descents = []
        for client, version, visit in step:
            start = models[version]
            end = local_sgd(problem, client, visit, start, local_lr)
            descents.append(weight(t - version) * (start - end))
        models.append(models[t] - server_lr * np.sum(descents, axis=0) / len(step))
    return models


CASES = {
    "fedbuff": Case("fedbuff", RATES, fedbuff, RATES | {"weight": constant}),
    "fedbuff fading": Case("fedbuff", RATES, fedbuff, RATES | {"weight": polynomial(0.5)}, "polynomial:0.5"),
}
