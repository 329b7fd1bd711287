"""DuDe-ASGD (Wang et al. 2024; read second-hand): descend along the mean of everybody's last gradient.

In the paper a task is one gradient. With local steps, a client's G is its displacement over eta K. At
the start every G is the client's mean gradient of visit 0 at x0; the first move waits for an arrival.
"""

from typing import NamedTuple

import numpy as np

from oracles.cases import RATES, Case
from oracles.replay import Run, Vector, local_sgd, mean_gradient


class State(NamedTuple):
    """What the server holds at a version."""

    x: Vector
    mean: Vector
    table: list[Vector]  # G of every client


def dude(run: Run, *, local_lr: float, server_lr: float) -> list[Vector]:
    """The models alone."""
    return [s.x for s in dude_states(run, local_lr, server_lr)]


def dude_states(run: Run, local_lr: float, server_lr: float) -> list[State]:
    """Versions 0 to T with everything in them."""
    problem, population, x0, steps = run
    x = np.array(x0, dtype=np.float64)
    table = [mean_gradient(problem, client, 0, x) for client in range(population)]
    states = [State(x, np.mean(table, axis=0), table)]
    for step in steps:
        x, mean, table = states[-1]
        table = list(table)
        for client, version, visit in step:
            handed = states[version].x
            end = local_sgd(problem, client, visit, handed, local_lr)
            fresh = (handed - end) / (local_lr * problem.steps(client, visit))
            mean = mean + (fresh - table[client]) / population
            table[client] = fresh
        states.append(State(x - server_lr * mean, mean, table))
    return states


CASES = {"dude": Case("dude", RATES, dude, RATES)}
