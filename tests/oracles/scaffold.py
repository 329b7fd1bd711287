"""SCAFFOLD (Karimireddy et al. 2020, Algorithm 1), both options for the control variates.

All variates start at zero, without a start pass. A late client works with the x and c of the version
that it was handed; the server adds what it gets to the newest ones.
"""

from typing import Any, NamedTuple

import numpy as np

from oracles.cases import RATES, Case
from oracles.replay import Run, Vector


class State(NamedTuple):
    """What server and clients hold at a version."""

    x: Vector
    c: Vector
    variates: list[Vector]  # c_i of every client


def scaffold(run: Run, **known: Any) -> list[Vector]:
    """The models alone."""
    return [state.x for state in scaffold_states(run, **known)]


def scaffold_states(run: Run, *, local_lr: float, server_lr: float = 1.0, option: int = 2) -> list[State]:
    """Option 1: c_i+ is the gradient on all of the client's data at the x it was handed.

    Option 2: c_i+ = c_i - c + (x - y) / (K local_lr).
    """
    problem, population, x0, steps = run
    if option not in (1, 2):
        raise ValueError("SCAFFOLD has options 1 and 2")
    x = np.array(x0, dtype=np.float64)
    states = [State(x, np.zeros_like(x), [np.zeros_like(x) for _ in range(population)])]
    for step in steps:
        own = list(states[-1].variates)
        delta_y, delta_c = np.zeros_like(x), np.zeros_like(x)
        for client, version, visit in step:
            x, c, _ = states[version]
            y = x.copy()
            count = problem.steps(client, visit)
            for k in range(count):
                y = y - local_lr * (problem.gradient(client, visit, k, y) - own[client] + c)
            if option == 1:
                fresh = problem.whole_gradient(client, x)
            else:
                fresh = own[client] - c + (x - y) / (count * local_lr)
            delta_y += y - x
            delta_c += fresh - own[client]
            own[client] = fresh
        x, c, _ = states[-1]
        states.append(State(x + server_lr * delta_y / len(step), c + delta_c / population, own))
    return states


CASES = {
    "scaffold I": Case("scaffold", RATES | {"whole": True}, scaffold, RATES | {"option": 1}),
    "scaffold II": Case("scaffold", RATES, scaffold, RATES | {"option": 2}),
}
