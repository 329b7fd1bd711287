"""MasFL (ICML 2025, PMLR 267:70410, Algorithm 1): control variates and momentum, asynchronous.

beta is the weight of the new gradient. Clients upload their mean raw gradient alone; where their
local steps led them is thrown away. The server moves along the momentum it has just made.
"""

from math import e
from typing import Any

import numpy as np

from oracles.adamasfl import Rates
from oracles.cases import MOMENTUM, Case
from oracles.replay import Run, Vector
from oracles.variates import State, start


def masfl_theory(
    cohort: int, local_steps: int, rounds: int, smoothness: float, worst_staleness: int
) -> Rates:
    """Theorem 1, with the largest local rate that it allows."""
    work = cohort * local_steps
    room = rounds - (work * rounds) ** 0.5 - 4 * work * worst_staleness**2
    if room <= 0:
        raise ValueError("Theorem 1 needs T > sqrt(SKT) + 4 S K tau_max^2")
    beta = (work / rounds) ** 0.5
    return Rates(
        local_lr=room**0.5 / (4 * 5**0.5 * e * local_steps * smoothness * rounds**0.5),
        server_lr=beta / (4 * smoothness),
        beta=beta,
    )


def masfl(run: Run, **known: Any) -> list[Vector]:
    """The models alone."""
    return [state.x for state in masfl_states(run, **known)]


def masfl_states(run: Run, *, local_lr: float, server_lr: float, beta: float) -> list[State]:
    """Versions 0 to T with everything in them."""
    problem, population, x0, steps = run
    states = [start(problem, population, np.array(x0, dtype=np.float64))]
    for step in steps:
        now = states[-1]
        own = list(now.variates)
        shift = np.zeros_like(now.x)
        gradients, directions = [], []
        for client, version, visit in step:
            handed = states[version]
            b = beta * handed.c + (1 - beta) * handed.g
            y = handed.x
            gradient_sum, direction_sum = 0 * y, 0 * y
            count = problem.steps(client, visit)
            for k in range(count):
                gradient = problem.gradient(client, visit, k, y)
                u = beta * (gradient - own[client]) + b
                y = y - local_lr * u
                gradient_sum += gradient
                direction_sum += u
            upload = gradient_sum / count
            shift += upload - own[client]
            own[client] = upload
            gradients.append(upload)
            directions.append(direction_sum / count)
        g = beta * (shift / len(step) + now.c) + (1 - beta) * now.g
        c = now.c + shift / population
        states.append(State(now.x - server_lr * g, c, g, own, gradients, directions))
    return states


CASES = {"masfl": Case("masfl", MOMENTUM, masfl, MOMENTUM)}
