"""Momentum approximation (arXiv 2402.09247, Algorithm 1): past mean descents, weighted anew in each step.

Row t of W holds what came in at step t, by the version it started from, each upload with the factor it
has in the mean. The weights a of the past descents are to make a W the momentum's row,
beta^(t-s) (1-beta). beta is the weight of the old momentum. W is kept whole and nothing is forgotten;
a window only bars old rows from use.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from oracles.cases import ADAPTIVE, LATE, RATES, Case
from oracles.replay import Problem, Run, Step, Vector, begin, local_sgd
from oracles.server_rules import Rule, adagrad, adam, amsgrad, identity
from oracles.weights import Weight, constant, polynomial

Matrix: TypeAlias = npt.NDArray[np.float64]


def arrivals(steps: Sequence[Step], span: int, weight: Weight = constant) -> Matrix:
    """W: entry (t, s) is the weight of what step t consumed from version s, over the size of its buffer."""
    W = np.zeros((len(steps), len(steps)))
    for t, step in enumerate(steps):
        for _, version, _ in step:
            if not 0 <= t - version < span:
                raise ValueError(f"an upload of staleness {t - version} does not fit a span of {span}")
            W[t, version] += weight(t - version) / len(step)
    return W


def target(t: int, beta: float) -> Vector:
    """Row t of M, up to column t."""
    return np.array([beta ** (t - s) * (1 - beta) for s in range(t + 1)])


def ridge(B: Matrix, y: Vector, penalty: float) -> Vector:
    """The a that minimises |B a - y|^2 + penalty |a|^2, as one taller least squares problem."""
    size = B.shape[1]
    tall = np.concatenate([B, penalty**0.5 * np.eye(size)])
    solution: Vector = np.linalg.lstsq(tall, np.concatenate([y, np.zeros(size)]), rcond=None)[0]
    return solution


def truncated(B: Matrix, y: Vector, rcond: float) -> Vector:
    """The least a that minimises |B a - y|^2, without directions whose singular values are small."""
    left, sizes, right = np.linalg.svd(B, full_matrices=False)
    solution = np.zeros(B.shape[1])
    for k, size in enumerate(sizes):
        if size > rcond * sizes[0]:
            solution += right[k] * float(left[:, k] @ y) / size
    return solution


def full(
    W: Matrix, beta: float, *, penalty: float = 1e-4, rcond: float | None = None, window: int = 80
) -> Matrix:
    """A of MA: row t weighs r_0 to r_t; truncated singular values where rcond is given, else ridge."""
    A = np.zeros_like(W)
    for t in range(len(W)):
        oldest = max(0, t - window + 1)
        B = W[oldest : t + 1, : t + 1].T
        if rcond is None:
            A[t, oldest : t + 1] = ridge(B, target(t, beta), penalty)
        else:
            A[t, oldest : t + 1] = truncated(B, target(t, beta), rcond)
    return A


def light(W: Matrix, beta: float) -> Matrix:
    """A of MA-light: row t is u e_t + v (row t-1), the least (u, v) of those that fit best."""
    A = np.zeros_like(W)
    for t in range(len(W)):
        before = A[t - 1] if t else np.zeros(len(W))
        newest = np.eye(len(W))[t]
        B = np.stack([newest @ W, before @ W], axis=1)[: t + 1]
        u, v = truncated(B, target(t, beta), 1e-7)
        A[t] = u * newest + v * before
    return A


def relative_error(A: Matrix, W: Matrix, beta: float) -> float:
    """Table 4: |A W - M|^2 / |M|^2 in the Frobenius norm."""
    M = np.zeros_like(W)
    for t in range(len(W)):
        M[t, : t + 1] = target(t, beta)
    return float(((A @ W - M) ** 2).sum() / (M**2).sum())


def momentum_approximation(
    run: Run,
    *,
    local_lr: float,
    server_lr: float,
    beta: float = 0.9,
    penalty: float = 1e-4,
    rcond: float | None = None,
    window: int = 80,
    span: int = 21,
    rule: Rule = identity,
    weight: Weight = constant,
) -> list[Vector]:
    """x <- x - server_lr H^-1 sum_s a_s r_s."""
    problem, _, x0, steps = run
    W = arrivals(steps, span, weight)
    A = full(W, beta, penalty=penalty, rcond=rcond, window=window)
    return follow(problem, x0, steps, A, local_lr, server_lr, rule, weight)


def light_momentum_approximation(
    run: Run,
    *,
    local_lr: float,
    server_lr: float,
    beta: float = 0.9,
    span: int = 21,
    rule: Rule = identity,
    weight: Weight = constant,
) -> list[Vector]:
    """The same with the weights of MA-light."""
    problem, _, x0, steps = run
    A = light(arrivals(steps, span, weight), beta)
    return follow(problem, x0, steps, A, local_lr, server_lr, rule, weight)


def follow(
    problem: Problem,
    x0: npt.ArrayLike,
    steps: Sequence[Step],
    A: Matrix,
    local_lr: float,
    server_lr: float,
    rule: Rule,
    weight: Weight,
) -> list[Vector]:
    """The models that weights A lead to; they do not depend on what is learned."""
    models = begin(x0)
    history: list[Vector] = []
    for t, step in enumerate(steps):
        r = np.zeros_like(models[0])
        for client, version, visit in step:
            start = models[version]
            r += weight(t - version) * (start - local_sgd(problem, client, visit, start, local_lr))
        history.append(r / len(step))
        m = np.zeros_like(r)
        for s in range(t + 1):
            m += A[t, s] * history[s]
        models.append(models[t] - server_lr * m / rule(history))
    return models


FULL = {"beta": 0.8, "penalty": 1e-3, "span": 5}
LIGHT = {"beta": 0.8, "span": 5}
RULES = {  # by the method underneath: its parameters, the rule, its rates
    "fedavgm": ({}, identity, RATES),
    "fedadam": ({"beta2": 0.95, "eps": 0.02}, adam(0.95, 0.02), ADAPTIVE),
    "fedadagrad": ({"eps": 0.02}, adagrad(0.02), ADAPTIVE),
    "fadas": ({"beta2": 0.95, "eps": 1e-4}, amsgrad(0.95, 1e-4), ADAPTIVE),
}
CASES = {
    f"ma-{name}": Case(
        f"ma-{name}",
        rates | FULL | given,
        momentum_approximation,
        rates | FULL | {"rule": rule},
        max_staleness=4,
        only=frozenset() if name == "fedavgm" else LATE,
    )
    for name, (given, rule, rates) in RULES.items()
}
CASES |= {
    f"ma-light-{name}": Case(
        f"ma-light-{name}",
        rates | LIGHT | given,
        light_momentum_approximation,
        rates | LIGHT | {"rule": rule},
        max_staleness=4,
        only=LATE,
    )
    for name, (given, rule, rates) in RULES.items()
}
CASES |= {
    "ma-fedavgm by default": Case(
        "ma-fedavgm", RATES, momentum_approximation, RATES, max_staleness=20, only=LATE
    ),
    "ma-fedavgm truncated": Case(
        "ma-fedavgm",
        RATES | {"rcond": 0.1},
        momentum_approximation,
        RATES | {"rcond": 0.1},
        max_staleness=9,
        only=LATE,
    ),
    "ma-fedavgm windowed": Case(
        "ma-fedavgm",
        RATES | {"window": 3},
        momentum_approximation,
        RATES | {"window": 3},
        max_staleness=9,
        only=LATE,
    ),
    "ma-fedadam fading": Case(
        "ma-fedadam",
        ADAPTIVE | {"beta2": 0.95, "eps": 0.02} | FULL,
        momentum_approximation,
        ADAPTIVE | FULL | {"rule": adam(0.95, 0.02), "weight": polynomial(0.5)},
        "polynomial:0.5",
        max_staleness=4,
        only=LATE,
    ),
    "ma-light-fedavgm fading": Case(
        "ma-light-fedavgm",
        RATES | LIGHT,
        light_momentum_approximation,
        RATES | LIGHT | {"weight": polynomial(0.5)},
        "polynomial:0.5",
        max_staleness=4,
        only=LATE,
    ),
}
