"""Momentum approximation under noise (arXiv 2402.09247, eqs 16 to 19), given the very noise of each step.

The noise on the counts of versions comes as a ring: entry s mod span belongs to version s. That is as
much of the paper's one-hot of length T as an upload may still refer to; what is cut off would be set to
zero anyway.
"""

from collections.abc import Sequence

import numpy as np

from oracles.momentum_approximation import arrivals, full, light
from oracles.private import clean_row, clip, payload_deviations, stamp_scale
from oracles.replay import Run, Vector, begin, local_sgd
from oracles.server_rules import Rule, identity
from oracles.weights import Weight, constant


def private_momentum(
    run: Run,
    *,
    local_lr: float,
    server_lr: float,
    bound: float,
    sigma: float,
    xi: float,
    noise: Sequence[tuple[Vector, Vector]],
    beta: float = 0.9,
    penalty: float = 1e-4,
    lightly: bool = False,
    span: int = 21,
    rule: Rule = identity,
    weight: Weight = constant,
) -> list[Vector]:
    """noise[t]: standard draws of step t, of the model's size and of the ring's."""
    problem, _, x0, steps = run
    on_sum, on_counts = payload_deviations(sigma, bound, stamp_scale(sigma, xi, bound))
    W = arrivals(steps, span, weight)
    for t, step in enumerate(steps):
        total = W[t].sum()
        for s in range(max(0, t - span + 1), t + 1):
            W[t, s] += on_counts * noise[t][1][s % span] / len(step)
        W[t] = clean_row(W[t], t, span, total)
    A = light(W, beta) if lightly else full(W, beta, penalty=penalty)
    models = begin(x0)
    history: list[Vector] = []
    for t, step in enumerate(steps):
        r = on_sum * noise[t][0]
        for client, version, visit in step:
            start = models[version]
            descent = start - local_sgd(problem, client, visit, start, local_lr)
            r = r + weight(t - version) * clip(descent, bound)
        history.append(r / len(step))
        m = np.sum([A[t, s] * history[s] for s in range(t + 1)], axis=0)
        models.append(models[t] - server_lr * m / rule(history))
    return models
