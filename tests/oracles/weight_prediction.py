"""Weight prediction (arXiv 2402.09247, Algorithm 2): clients start where the model is going to be.

With version v go the model and the drift server_lr H^-1 x_h, where x_h averages the mean descents so far
and H is what the last step divided by; before the first step there is no drift. The staleness that a
client reckons with is the one its upload is going to have, or with `previous` the one that its last
upload had, which is 0 at first. The server's momentum is the ordinary one.

Not in the paper: `stepwise` takes for drift the same average of the steps that the server took, which
asks nothing of how it takes them.
"""

import numpy as np

from oracles.cases import ADAPTIVE, LATE, RATES, Case
from oracles.replay import Run, Vector, begin, local_sgd
from oracles.server_rules import Rule, adam, identity
from oracles.weights import Weight, constant, polynomial


def weight_prediction(
    run: Run,
    *,
    local_lr: float,
    server_lr: float,
    beta: float = 0.9,
    decay: float = 0.9,
    previous: bool = False,
    stepwise: bool = False,
    rule: Rule = identity,
    weight: Weight = constant,
) -> list[Vector]:
    """Start from x - staleness * drift; upload that start minus the end."""
    problem, population, x0, steps = run
    models = begin(x0)
    drifts = [np.zeros_like(models[0])]
    history: list[Vector] = []
    m = np.zeros_like(models[0])
    x_h = np.zeros_like(models[0])
    last = [0] * population
    for t, step in enumerate(steps):
        r = np.zeros_like(m)
        for client, version, visit in step:
            reckoned = last[client] if previous else t - version
            last[client] = t - version
            start = models[version] - reckoned * drifts[version]
            r += weight(t - version) * (start - local_sgd(problem, client, visit, start, local_lr))
        history.append(r / len(step))
        H = rule(history)
        m = beta * m + (1 - beta) * history[t]
        models.append(models[t] - server_lr * m / H)
        if stepwise:
            drifts.append(decay * drifts[t] + (1 - decay) * (models[t] - models[t + 1]))
        else:
            x_h = decay * x_h + (1 - decay) * history[t]
            drifts.append(server_lr * x_h / H)
    return models


PREDICTED = ADAPTIVE | {"beta": 0.7}
CASES = {
    "weight-prediction": Case("weight-prediction", RATES, weight_prediction, RATES, max_staleness=20),
    "weight-prediction remembered": Case(
        "weight-prediction",
        RATES | {"remembered": True, "alpha": 0.6},
        weight_prediction,
        RATES | {"previous": True, "decay": 0.6},
        max_staleness=20,
        only=LATE,
    ),
    "weight-prediction fedadam": Case(
        "weight-prediction",
        PREDICTED | {"rule": "fedadam", "beta2": 0.95, "eps": 0.02},
        weight_prediction,
        PREDICTED | {"rule": adam(0.95, 0.02)},
        only=LATE,
    ),
    "weight-prediction fading": Case(
        "weight-prediction",
        PREDICTED | {"rule": "fedadam"},
        weight_prediction,
        PREDICTED | {"rule": adam(0.99, 0.01), "weight": polynomial(0.5)},
        "polynomial:0.5",
        max_staleness=3,
        only=LATE,
    ),
}
