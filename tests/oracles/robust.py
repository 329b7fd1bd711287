"""Aggregates that stand malicious clients, and FedBuff under them, number by number.

Trimmed mean and median: Yin et al. 2018, definitions 1 and 2. Geometric median: Pillutla et al. 2022,
algorithm 2, from the median of the coordinates on.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from oracles.replay import Problem, Step, Vector, begin, local_sgd
from oracles.weights import Weight, constant

Rows: TypeAlias = npt.NDArray[np.float64]
Rule: TypeAlias = Callable[[Rows], Vector]


def trimmed_mean(rows: Rows, cut: int) -> Vector:
    """Coordinate by coordinate, the mean of what is left without `cut` values at either end."""
    result = np.empty(rows.shape[1])
    for place in range(rows.shape[1]):
        values = sorted(float(value) for value in rows[:, place])
        kept = values[cut : len(values) - cut]
        result[place] = sum(kept) / len(kept)
    return result


def median(rows: Rows) -> Vector:
    """Coordinate by coordinate."""
    return np.median(rows, axis=0)


def geometric_median(rows: Rows, smoothing: float, iterations: int) -> Vector:
    """Weiszfeld's iteration with distances that are not taken smaller than `smoothing`."""
    centre = median(rows)
    for _ in range(iterations):
        factors = [1 / max(smoothing, float(np.linalg.norm(row - centre))) for row in rows]
        centre = sum((f * row for f, row in zip(factors, rows, strict=True)), 0 * centre) / sum(factors)
    return centre


def norm_bounded(rows: Rows, bound: float | None = None) -> Vector:
    """The mean of rows that are shortened to the bound, or to the median norm."""
    norms = [float(np.linalg.norm(row)) for row in rows]
    longest = float(np.median(norms)) if bound is None else bound
    short = [row * min(1.0, longest / norm) if norm else row for row, norm in zip(rows, norms, strict=True)]
    return np.mean(short, axis=0)


def robust_fedbuff(
    problem: Problem,
    x0: npt.ArrayLike,
    steps: Sequence[Step],
    rule: Rule,
    *,
    local_lr: float,
    server_lr: float,
    weight: Weight = constant,
) -> list[Vector]:
    """x <- x - server_lr * rule(w (x_v - x_i) for all tasks)."""
    models = begin(x0)
    for t, step in enumerate(steps):
        descents = []
        for client, version, visit in step:
            start = models[version]
            descents.append(
                weight(t - version) * (start - local_sgd(problem, client, visit, start, local_lr))
            )
        models.append(models[t] - server_lr * rule(np.array(descents)))
    return models
