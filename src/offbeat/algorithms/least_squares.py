"""Weights that bring the rows of a basis near a target, kept bounded where rows are nearly dependent.

Plain least squares fits best and may take weights of 10^3 to 10^10 to do so, which then multiply
noisy vectors. Both solvers here bound that; `Truncated(0)` is plain least squares.
"""

from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from offbeat.algorithms.ranges import within


class Solver(Protocol):
    """From rows (n, k) and a target (k,), in float64 on the CPU, to weights (n,)."""

    def __call__(self, rows: Tensor, target: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Ridge:
    """The least of |a rows - target|^2 + penalty |a|^2."""

    penalty: float = 1e-4

    def __post_init__(self) -> None:
        within("penalty of Ridge", self.penalty, "(0, inf)")

    @classmethod
    def under_noise(cls, deviation: float, cohort: int, least: float = 1e-4) -> Self:
        """A penalty of at least the noise's variance, for rows that are noisy counts over a cohort.

        In the letters of arXiv 2402.09247, with noise lowered by a factor r for a simulation: (xi r / C)^2,
        where the deviation is xi r.
        """
        within("deviation of the noise", deviation, "[0, inf)")
        return cls(max(least, (deviation / cohort) ** 2))

    def __call__(self, rows: Tensor, target: Tensor) -> Tensor:
        gram = rows @ rows.T
        gram.diagonal().add_(self.penalty)
        return torch.cholesky_solve((rows @ target)[:, None], torch.linalg.cholesky(gram))[:, 0]


@dataclass(frozen=True)
class Truncated:
    """The least |a rows - target|^2, without directions of singular values below rcond of the largest."""

    rcond: float = 1e-2

    def __post_init__(self) -> None:
        within("rcond of Truncated", self.rcond, "[0, 1)")

    def __call__(self, rows: Tensor, target: Tensor) -> Tensor:
        left, values, right = torch.linalg.svd(rows, full_matrices=False)
        rounding = max(rows.shape) * torch.finfo(rows.dtype).eps
        kept = values >= max(self.rcond, rounding) * values.max()
        inverse = torch.where(kept & (values > 0), 1 / values, 0.0)
        weights: Tensor = left @ (inverse * (right @ target))
        return weights
