"""The divisors H of eq. 1 in arXiv 2402.09247, each from all mean descents r_0 to r_t that came in.

Nothing is carried from step to step: whoever asks for H_t replays the history. What v is before the
first step is not in the paper. FedAdam and FedAdagrad start it at eps^2 unless told otherwise (Reddi et
al. 2021 ask for that much); the AMSGrad of FADAS (Wang et al. 2024) starts at zero.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from oracles.replay import Vector

Rule: TypeAlias = Callable[[Sequence[Vector]], Vector]  # r_0 to r_t -> the diagonal of H_t


def identity(history: Sequence[Vector]) -> Vector:
    """FedAvgM: no scale."""
    return np.ones_like(history[-1])


def adam(beta2: float = 0.99, eps: float = 0.01, v0: float | None = None) -> Rule:
    """FedAdam: v <- beta2 v + (1 - beta2) r^2."""

    def rule(history: Sequence[Vector]) -> Vector:
        v = np.full_like(history[0], eps**2 if v0 is None else v0)
        for r in history:
            v = beta2 * v + (1 - beta2) * r**2
        return np.sqrt(v) + eps

    return rule


def adagrad(eps: float = 0.01, v0: float | None = None) -> Rule:
    """FedAdagrad: v <- v + r^2."""

    def rule(history: Sequence[Vector]) -> Vector:
        start = eps**2 if v0 is None else v0
        return np.sqrt(start + np.sum(np.square(history), axis=0)) + eps

    return rule


def amsgrad(beta2: float = 0.99, eps: float = 1e-8) -> Rule:
    """FADAS: the largest v that there ever was."""

    def rule(history: Sequence[Vector]) -> Vector:
        v = np.zeros_like(history[0])
        values = [v]
        for r in history:
            v = beta2 * v + (1 - beta2) * r**2
            values.append(v)
        return np.sqrt(np.max(values, axis=0)) + eps

    return rule
