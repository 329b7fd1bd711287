"""FAFED (Wu et al. 2023) in rounds: local STORM momentum under a shared adaptive scale. Unconfirmed.

The paper was not at hand; this is a reading of a summary of it:

- start: m is the mean over all clients of their mean gradient of visit 0 at x0; v the mean of the
  squares of those clients' mean gradients;
- a round hands out x, m, v and A = sqrt(v) + eps, which stands still during the round;
- a local step first moves, x' = x - lr(n) m / A, then draws the minibatch, takes its gradient at x'
  and at x, and sets m <- gradient(x') + (1 - alpha(n)) (m - gradient(x)) and
  v <- rho_v v + (1 - rho_v) gradient(x')^2;
- after its K local steps the round replaces x, m and v by their means, so that the iterate before
  the next round's first move is the mean too, not a client's own.

n counts local steps through all rounds, from 1; a round with ragged clients counts its longest. The
paper has everybody in every round; here the means are over whoever is in the step.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from oracles.cases import Case
from oracles.replay import Run, Vector, begin, mean_gradient, require_prompt

Schedule: TypeAlias = float | Callable[[int], float]


def fafed(run: Run, *, lr: Schedule, alpha: Schedule, rho_v: float = 0.9, eps: float = 1e-3) -> list[Vector]:
    """One model per round."""
    problem, population, x0, steps = run
    require_prompt(steps)
    models = begin(x0)
    seen = [mean_gradient(problem, client, 0, models[0]) for client in range(population)]
    m = np.mean(seen, axis=0)
    v = np.mean([gradient**2 for gradient in seen], axis=0)
    done = 0
    for step in steps:
        scale = np.sqrt(v) + eps
        ends = []
        for client, _, visit in step:
            x, own_m, own_v = models[-1], m, v
            for k in range(problem.steps(client, visit)):
                n = done + k + 1
                x, last = x - at(lr, n) * own_m / scale, x
                gradient = problem.gradient(client, visit, k, x)
                own_m = gradient + (1 - at(alpha, n)) * (own_m - problem.gradient(client, visit, k, last))
                own_v = rho_v * own_v + (1 - rho_v) * gradient**2
            ends.append((x, own_m, own_v))
        done += max(problem.steps(client, visit) for client, _, visit in step)
        x, m, v = (np.mean(part, axis=0) for part in zip(*ends, strict=True))
        models.append(x)
    return models


def at(schedule: Schedule, n: int) -> float:
    """A schedule's value in the n-th local step."""
    return schedule(n) if callable(schedule) else schedule


CASES = {
    "fafed": Case(
        "fafed",
        {"local_lr": 0.02, "alpha": 0.3},
        fafed,
        {"lr": 0.02, "alpha": 0.3, "rho_v": 0.9, "eps": 1e-3},
        prompt=True,
    ),
}
