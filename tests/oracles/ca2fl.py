"""CA2FL (Wang et al. 2024; read second-hand): late changes, calibrated by every client's last one.

Changes are end - start, and the server adds. The mean of the cache is over the whole population, seen
or not, and stands still until the step is made; an arrival is compared with the cache as it was before
it is stored there.
"""

from typing import NamedTuple

import numpy as np

from oracles.cases import RATES, Case
from oracles.replay import Run, Vector, local_sgd


class State(NamedTuple):
    """What the server holds at a version, and the direction that led to it."""

    x: Vector
    h: Vector
    cache: list[Vector]  # h^i of every client
    v: Vector


def ca2fl(run: Run, *, local_lr: float, server_lr: float = 1.0) -> list[Vector]:
    """The models alone."""
    return [s.x for s in ca2fl_states(run, local_lr, server_lr)]


def ca2fl_states(run: Run, local_lr: float, server_lr: float = 1.0) -> list[State]:
    """Versions 0 to T with everything in them."""
    problem, population, x0, steps = run
    x = np.array(x0, dtype=np.float64)
    zero = np.zeros_like(x)
    states = [State(x, zero, [zero] * population, zero)]
    for step in steps:
        x, h, cache, _ = states[-1]
        cache = list(cache)
        delta = np.zeros_like(x)
        for client, version, visit in step:
            handed = states[version].x
            change = local_sgd(problem, client, visit, handed, local_lr) - handed
            delta += change - cache[client]
            cache[client] = change
        v = h + delta / len(step)
        states.append(State(x + server_lr * v, h + delta / population, cache, v))
    return states


CASES = {"ca2fl": Case("ca2fl", RATES, ca2fl, RATES)}
