"""FedExP (Jhunjhunwala et al. 2023), Algorithm 1: eta_g = max(1, sum |D_i|^2 / (2 M (|D|^2 + eps))).

D_i = w - w_i is a client's change, D their mean, and w <- w - eta_g D. What is evaluated is the mean of the
last two w. A stale change has a weight in both sums.
"""

import itertools

from oracles.cases import Case
from oracles.fedavg import fedavg
from oracles.replay import Run, Vector, begin, local_sgd
from oracles.weights import Weight, constant, polynomial


def fedexp(run: Run, *, local_lr: float, eps: float, weight: Weight = constant) -> list[Vector]:
    """The mean of the last two points of w <- w - eta_g D."""
    problem, _, x0, steps = run
    path = begin(x0)
    models = [path[0]]
    for t, step in enumerate(steps):
        changes, weights = [], []
        for client, version, visit in step:
            changes.append(path[version] - local_sgd(problem, client, visit, path[version], local_lr))
            weights.append(weight(t - version))
        mean = sum(w * change for w, change in zip(weights, changes, strict=True)) / len(step)
        squares = sum(w * float(change @ change) for w, change in zip(weights, changes, strict=True))
        rate = max(1.0, squares / (2 * len(step) * (float(mean @ mean) + eps)))
        path.append(path[-1] - rate * mean)
        models.append((path[-2] + path[-1]) / 2)
    return models


def two_point_fedavg(run: Run, *, local_lr: float) -> list[Vector]:
    """FedAvg whose model is the mean of its last two."""
    models = fedavg(run, local_lr=local_lr, server_lr=1.0)
    return [models[0], *((one + two) / 2 for one, two in itertools.pairwise(models))]


GIVEN = {"local_lr": 0.2, "eps": 1e-4}
CASES = {
    "fedexp": Case("fedexp", GIVEN, fedexp, GIVEN),
    "fedexp fading": Case("fedexp", GIVEN, fedexp, GIVEN | {"weight": polynomial(0.5)}, "polynomial:0.5"),
    # where eps is beyond all updates the rate is 1
    "fedexp is fedavg": Case("fedexp", GIVEN | {"eps": 1e9}, two_point_fedavg, {"local_lr": 0.2}),
}
