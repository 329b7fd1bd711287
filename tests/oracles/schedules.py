"""Rates by server step, under FedBuff: a task has the local rate of the version that it was sent.

Cosine: Loshchilov and Hutter 2017, eq. 5, without restarts. Linear, step and warm-up are their definitions.
"""

from collections.abc import Callable
from math import cos, pi

import numpy as np

from oracles.cases import RATES, SYSTEM, Case
from oracles.replay import Run, Vector, begin
from oracles.weights import Weight, constant, polynomial

Factor = Callable[[int], float]
ROUNDS = SYSTEM[2]


def scheduled(
    run: Run,
    *,
    local_lr: float,
    server_lr: float,
    local: Factor = lambda t: 1.0,
    server: Factor = lambda t: 1.0,
    beta: float = 0.0,
    weight: Weight = constant,
) -> list[Vector]:
    """x <- x - server_lr server(t) sum of beta^age times the mean descents, with local rates by version."""
    problem, _, x0, steps = run
    models, means = begin(x0), []
    for t, step in enumerate(steps):
        descents = []
        for client, version, visit in step:
            x = models[version].copy()
            for k in range(problem.steps(client, visit)):
                x -= local_lr * local(version) * problem.gradient(client, visit, k, x)
            descents.append(weight(t - version) * (models[version] - x))
        means.append(np.sum(descents, axis=0) / len(step))
        m = sum(beta**age * mean for age, mean in enumerate(reversed(means)))
        models.append(models[-1] - server_lr * server(t) * m)
    return models


def cosine(end: float, steps: int) -> Factor:
    """end + (1 - end) / 2 (1 + cos(pi t / steps))."""
    return lambda t: end + 0.5 * (1 - end) * (1 + cos(pi * min(t, steps) / steps))


def own(version: int) -> float:
    """A schedule of a user's own."""
    return 1 / (1 + 0.3 * version)


EQUAL = frozenset({"steps"})  # numbers of local steps; others are elsewhere
MOMENTUM = RATES | {"beta": 0.6}
CASES = {
    "cosine": Case(
        "fedbuff",
        RATES,
        scheduled,
        RATES | {"local": cosine(0.1, ROUNDS)},
        work=EQUAL,
        settings={"local_lr_schedule": "cosine:0.1", "rounds": ROUNDS},
    ),
    "cosine over fewer steps": Case(
        "fedavgm",
        MOMENTUM,
        scheduled,
        MOMENTUM | {"local": cosine(0.0, 5), "server": cosine(0.2, 3)},
        work=EQUAL,
        settings={"local_lr_schedule": "cosine:0:5", "server_lr_schedule": "cosine:0.2:3"},
    ),
    "linear and step": Case(
        "fedbuff",
        RATES,
        scheduled,
        RATES
        | {
            "local": lambda t: 1 - 0.75 * t / ROUNDS,
            "server": lambda t: 0.5 ** (t // 3),
            "weight": polynomial(0.5),
        },
        "polynomial:0.5",
        work=EQUAL,
        settings={"local_lr_schedule": "linear:0.25", "server_lr_schedule": "step:3:0.5", "rounds": ROUNDS},
    ),
    "warm-up, then cosine": Case(
        "fedavg",
        RATES,
        scheduled,
        RATES
        | {
            "local": lambda t: (t + 1) / 3 if t < 3 else cosine(0.1, ROUNDS - 3)(t - 3),
            "server": lambda t: min(1.0, (t + 1) / 4),
        },
        work=EQUAL,
        settings={
            "local_lr_schedule": "warmup:3,cosine:0.1",
            "server_lr_schedule": "warmup:4",
            "rounds": ROUNDS,
        },
    ),
    "a schedule of one's own": Case(
        "fedbuff",
        RATES,
        scheduled,
        RATES | {"local": own, "server": own},
        work=EQUAL,
        settings={
            "local_lr_schedule": "oracles.schedules:own",
            "server_lr_schedule": "oracles.schedules:own",
        },
    ),
}
