"""Local optimisers, weight decay and gradient clipping under FedBuff, as torch documents each of them.

Momentum and Nesterov: torch.optim.SGD with dampening 0. Adam: Kingma and Ba 2015, Algorithm 1. AdamW:
Loshchilov and Hutter 2019, Algorithm 2 with a schedule multiplier of 1 and the decay times the rate, as in
torch. Clipping: g min(1, C / |g|) on the gradient of the whole local objective, which includes the weight
decay W/2 |x|^2 and a proximal term. All of them begin anew in each task.
"""

from collections.abc import Callable

import numpy as np

from oracles.cases import RATES, Case
from oracles.replay import Run, Vector, begin
from oracles.weights import Weight, constant, polynomial

Optimizer = Callable[[Vector, list[Vector], float], Vector]  # x, all gradients of the task so far, and lr


def sgd(x: Vector, gradients: list[Vector], lr: float) -> Vector:
    """x - lr g."""
    return x - lr * gradients[-1]


def momentum(beta: float, nesterov: bool = False) -> Optimizer:
    """The buffer is the sum of beta^age g over the gradients so far."""

    def step(x: Vector, gradients: list[Vector], lr: float) -> Vector:
        buffer = sum(beta**age * g for age, g in enumerate(reversed(gradients)))
        return x - lr * (gradients[-1] + beta * buffer if nesterov else buffer)

    return step


def adam(beta1: float, beta2: float, eps: float, decay: float = 0.0) -> Optimizer:
    """m_t is the sum of (1 - beta1) beta1^age g, v_t that of (1 - beta2) beta2^age g^2."""

    def step(x: Vector, gradients: list[Vector], lr: float) -> Vector:
        t = len(gradients)
        aged = list(enumerate(reversed(gradients)))
        m = (1 - beta1) * sum(beta1**age * g for age, g in aged) / (1 - beta1**t)
        v = (1 - beta2) * sum(beta2**age * g * g for age, g in aged) / (1 - beta2**t)
        return x - lr * decay * x - lr * m / (np.sqrt(v) + eps)

    return step


def local_rules(
    run: Run,
    *,
    local_lr: float,
    server_lr: float,
    optimizer: Optimizer = sgd,
    weight_decay: float = 0.0,
    max_norm: float = np.inf,
    mu: float = 0.0,
    weight: Weight = constant,
) -> list[Vector]:
    """x <- x - server_lr (1/M) sum of s(staleness) (x_v - x_i)."""
    problem, _, x0, steps = run
    models = begin(x0)
    for t, step in enumerate(steps):
        descents = []
        for client, version, visit in step:
            start, gradients = models[version], []
            x = start.copy()
            for k in range(problem.steps(client, visit)):
                g = problem.gradient(client, visit, k, x) + weight_decay * x + mu * (x - start)
                norm = np.sqrt(np.sum(g**2))
                gradients.append(g * max_norm / norm if norm > max_norm else g)
                x = optimizer(x, gradients, local_lr)
            descents.append(weight(t - version) * (start - x))
        models.append(models[-1] - server_lr * np.sum(descents, axis=0) / len(step))
    return models


SMALL = {"local_lr": 0.02, "server_lr": 0.5}
FADING = {"weight": polynomial(0.5)}
EQUAL, UNEQUAL = frozenset({"steps"}), frozenset({"epochs"})  # numbers of local steps
CASES = {
    "local momentum": Case(
        "fedbuff",
        RATES,
        local_rules,
        RATES | FADING | {"optimizer": momentum(0.7)},
        "polynomial:0.5",
        work=UNEQUAL,
        settings={"local_optimizer": "momentum:0.7"},
    ),
    "local nesterov": Case(
        "fedavg",
        RATES,
        local_rules,
        RATES | {"optimizer": momentum(0.9, nesterov=True)},
        work=EQUAL,
        settings={"local_optimizer": "nesterov"},
    ),
    "local adam": Case(
        "fedbuff",
        SMALL,
        local_rules,
        SMALL | {"optimizer": adam(0.8, 0.95, 1e-3)},
        work=UNEQUAL,
        settings={"local_optimizer": "adam:0.8:0.95:1e-3"},
    ),
    "local adamw": Case(
        "fedprox",
        SMALL | {"mu": 0.3},
        local_rules,
        SMALL | {"mu": 0.3, "optimizer": adam(0.9, 0.999, 1e-8, decay=0.1)},
        work=EQUAL,
        settings={"local_optimizer": "adamw:0.1"},
    ),
    "clipped gradients": Case(
        "fedprox",
        RATES | {"mu": 0.5},
        local_rules,
        RATES | {"mu": 0.5, "max_norm": 0.4},
        work=UNEQUAL,
        settings={"clip_grad_norm": 0.4},
    ),
    "clipped adam with decay": Case(
        "fedbuff",
        SMALL,
        local_rules,
        SMALL | {"optimizer": adam(0.9, 0.999, 1e-8), "max_norm": 0.4, "weight_decay": 0.2},
        work=EQUAL,
        settings={"local_optimizer": "adam", "clip_grad_norm": 0.4, "weight_decay": 0.2},
    ),
    "weight decay": Case(
        "fedbuff",
        RATES,
        local_rules,
        RATES | {"weight_decay": 0.3},
        work=EQUAL,
        settings={"weight_decay": 0.3},
    ),
}
