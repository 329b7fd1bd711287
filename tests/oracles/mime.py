"""MIME and MIMELite (Karimireddy et al. 2020) with momentum as the base method, in rounds.

Here beta is the weight of the memory. The momentum is frozen while clients work; both means weigh
clients equally.
"""

import numpy as np

from oracles.cases import RATES, Case
from oracles.replay import Run, Vector, begin, require_prompt


def mime(
    run: Run, *, local_lr: float, server_lr: float = 1.0, beta: float = 0.9, lite: bool = False
) -> list[Vector]:
    """Lite: clients step along their plain minibatch gradients, without the correction by c."""
    problem, _, x0, steps = run
    require_prompt(steps)
    models = begin(x0)
    m = np.zeros_like(models[0])
    for step in steps:
        x = models[-1]
        c = np.mean([problem.whole_gradient(client, x) for client, _, _ in step], axis=0)
        total = np.zeros_like(x)
        for client, _, visit in step:
            y = x
            for k in range(problem.steps(client, visit)):
                gradient = problem.gradient(client, visit, k, y)
                if not lite:
                    gradient = gradient - problem.gradient(client, visit, k, x) + c
                y = y - local_lr * ((1 - beta) * gradient + beta * m)
            total += x - y
        models.append(x - server_lr * total / len(step))
        m = (1 - beta) * c + beta * m
    return models


CASES = {
    "mime": Case("mime", RATES, mime, RATES, two_phases=True),
    "mimelite": Case("mimelite", RATES, mime, RATES | {"lite": True}, prompt=True),
}
