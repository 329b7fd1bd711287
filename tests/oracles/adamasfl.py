"""AdaMasFL (ICML 2025, PMLR 267:70410): control variates, momentum and unit steps, asynchronous.

beta is the weight of the new gradient. Every client's visit 0 is spent on the start: its mean
gradient at x0, without moving. A client that occurs twice in a step works from what its first
occurrence left. Counts of local steps may differ: a client divides by its own.
"""

from typing import Any, NamedTuple

import numpy as np

from oracles.cases import SYSTEM, Case
from oracles.replay import Problem, Run, Vector


class Rates(NamedTuple):
    """Local rate eta, server rate gamma, weight of the new gradient beta."""

    local_lr: float
    server_lr: float
    beta: float


def theorem_2(cohort: int, local_steps: int, rounds: int) -> Rates:
    """Rates from S, K and T alone; beta is kept at 1 where SK > T."""
    return Rates(
        local_lr=1 / (local_steps * rounds**0.5),
        server_lr=(cohort * local_steps) ** 0.25 / rounds**0.75,
        beta=min(1.0, (cohort * local_steps / rounds) ** 0.5),
    )


class Upload(NamedTuple):
    """What a task sends, and its mean direction before normalising, which it does not send."""

    delta: Vector  # (x_v - x_K) / (eta K)
    gradient: Vector  # mean raw gradient, the client's next control variate
    direction: Vector


class State(NamedTuple):
    """What the server holds at a version, and the uploads that led to it."""

    x: Vector
    c: Vector
    g: Vector
    variates: list[Vector]  # c_i of every client
    uploads: list[Upload]


def adamasfl(run: Run, **known: Any) -> list[Vector]:
    """The models alone."""
    return [state.x for state in adamasfl_states(run, **known)]


def adamasfl_states(run: Run, *, local_lr: float, server_lr: float, beta: float) -> list[State]:
    """Versions 0 to T with everything in them."""
    problem, population, x0, steps = run
    states = [start(problem, population, np.array(x0, dtype=np.float64))]
    for step in steps:
        x, c, g, _, _ = states[-1]
        variates = list(states[-1].variates)
        uploads = []
        delta = np.zeros_like(x)
        shift = np.zeros_like(x)
        for client, version, visit in step:
            upload = work(problem, client, visit, states[version], variates[client], local_lr, beta)
            delta += upload.delta
            shift += upload.gradient - variates[client]
            variates[client] = upload.gradient
            uploads.append(upload)
        states.append(
            State(
                x=x - server_lr * delta / len(step),
                c=c + shift / population,
                g=beta * (shift / len(step) + c) + (1 - beta) * g,
                variates=variates,
                uploads=uploads,
            )
        )
    return states


def start(problem: Problem, population: int, x: Vector) -> State:
    """c_i: client i's mean gradient at x0; c and g: the mean of all c_i."""
    variates = []
    for client in range(population):
        count = problem.steps(client, 0)
        variates.append(sum((problem.gradient(client, 0, k, x) for k in range(count)), 0 * x) / count)
    mean = sum(variates, 0 * x) / population
    return State(x, mean, mean, variates, [])


def work(
    problem: Problem, client: int, visit: int, handed: State, variate: Vector, local_lr: float, beta: float
) -> Upload:
    """Unit steps along beta (gradient - c_i) + b, with b as it was in the version handed out."""
    b = beta * handed.c + (1 - beta) * handed.g
    y = handed.x.copy()
    gradients = np.zeros_like(y)
    directions = np.zeros_like(y)
    count = problem.steps(client, visit)
    for k in range(count):
        gradient = problem.gradient(client, visit, k, y)
        u = beta * (gradient - variate) + b
        y = y - local_lr * u / max(float(np.linalg.norm(u)), 1e-12)
        gradients += gradient
        directions += u
    return Upload((handed.x - y) / (local_lr * count), gradients / count, directions / count)


CASES = {
    "adamasfl": Case("adamasfl", {}, adamasfl, theorem_2(*SYSTEM)._asdict()),
    "adamasfl small beta": Case(
        "adamasfl", {"beta": 0.3}, adamasfl, theorem_2(*SYSTEM)._asdict() | {"beta": 0.3}
    ),
}
