"""SCAFFOLD-M and SCAFFOLD-M-VR (Cheng et al. 2024, Algorithms 2 and 4; read second-hand).

beta is the weight of the new gradient. The momentum is the mean displacement over eta K, which a late
client measures from the model it was handed. g0 is zero in the paper; 'mean' is c^0, as in MasFL.
VR takes each minibatch's gradient again at the version before the one handed out; x^{-1} is x^0.
"""

from typing import Any

import numpy as np

from oracles.cases import MOMENTUM, Case
from oracles.replay import Run, Vector
from oracles.variates import State, start


def scaffold_m(run: Run, **known: Any) -> list[Vector]:
    """The models alone."""
    return [state.x for state in scaffold_m_states(run, **known)]


def scaffold_m_vr(run: Run, **known: Any) -> list[Vector]:
    """The models alone, with variance reduction."""
    return scaffold_m(run, vr=True, **known)


def scaffold_m_states(
    run: Run, local_lr: float, server_lr: float, beta: float, g0: str = "zero", vr: bool = False
) -> list[State]:
    """Versions 0 to T with everything in them."""
    problem, population, x0, steps = run
    if g0 not in ("zero", "mean"):
        raise ValueError("g0 is 'zero' or 'mean'")
    first = start(problem, population, np.array(x0, dtype=np.float64))
    states = [first if g0 == "mean" else first._replace(g=np.zeros_like(first.g))]
    for step in steps:
        variates = list(states[-1].variates)
        gradients, directions, displacements, changes = [], [], [], []
        for client, version, visit in step:
            x, c, g = states[version][:3]
            previous = states[max(version - 1, 0)].x
            c_i = variates[client]
            K = problem.steps(client, visit)
            y = x
            seen, taken = [], []
            for k in range(K):
                gradient = problem.gradient(client, visit, k, y)
                if vr:
                    again = problem.gradient(client, visit, k, previous)
                    direction = gradient - beta * (c_i - c) + (1 - beta) * (g - again)
                else:
                    direction = beta * (gradient - c_i + c) + (1 - beta) * g
                y = y - local_lr * direction
                seen.append(gradient)
                taken.append(direction)
            variates[client] = sum(seen, 0 * y) / K
            displacements.append((x - y) / (local_lr * K))
            changes.append(variates[client] - c_i)
            gradients.append(variates[client])
            directions.append(sum(taken, 0 * y) / K)
        momentum = np.mean(displacements, axis=0)
        states.append(
            State(
                x=states[-1].x - server_lr * momentum,
                c=states[-1].c + np.sum(changes, axis=0) / population,
                g=momentum,
                variates=variates,
                gradients=gradients,
                directions=directions,
            )
        )
    return states


CASES = {
    "scaffold-m": Case("scaffold-m", MOMENTUM, scaffold_m, MOMENTUM, prompt=True),
    "scaffold-m-vr": Case("scaffold-m-vr", MOMENTUM, scaffold_m_vr, MOMENTUM),
}
