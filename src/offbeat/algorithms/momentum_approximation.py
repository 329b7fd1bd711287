"""Momentum approximation (Yu et al., arXiv 2402.09247, Algorithm 1): momentum that undoes staleness.

A buffer's mean r_t mixes updates that began at versions s <= t in shares W[t, s]. Momentum over
such means weighs the versions by M W, not by M[t, s] = (1 - beta) beta^(t-s) as it would without
delay. `Approximation` (eq. 11) weighs the past means by the a_t for which a_t W is nearest to
row t of M, and `LightApproximation` (eq. 15) mixes r_t and the last m in the proportion that is.

Where this departs from the paper:

- A client's version comes as a one-hot vector of its remainder by `span`, not of the version among
  all T. An update that is accepted began less than `span` versions ago, so nothing is lost: the
  rows of W are the same, by post-processing, and what is sent and kept does not grow with T.
- a_t reaches back over the last `window` means, not all (beta^80 is 2e-4 for beta = 0.9).
- The least squares are regularised, or the weights explode where delays are broad.
- Weights of stale updates are in W as they are in r_t: one-hot vectors are averaged as updates are.
- A row is mended by what is known without it: shares lie between 0 and their sum, their sum is
  the cohort's mean weight, and no update began before version 0. Without noise that changes nothing.

A scale (Adam's, FADAS's) sees the mean itself, as in Algorithm 1.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, zeros_like

from offbeat.algorithms.fedopt import Upload
from offbeat.algorithms.least_squares import Ridge, Solver
from offbeat.algorithms.ranges import within
from offbeat.core import Cohort, Vector

_NEGLIGIBLE = 1e-12  # of momentum's weights, against its first


class History(NamedTuple):
    """The last means, newest last; those that are yet to come are empty."""

    means: tuple[Vector, ...]
    rows: Tensor  # (window, span) where each began: shares by staleness


class Recursion(NamedTuple):
    """The last direction."""

    m: Vector
    origins: Tensor  # (reach,) its weight of each version, by age: row t of A W


@dataclass(frozen=True)
class Approximation:
    """m = R a with a W nearest to momentum's own weights."""

    beta: float
    span: int = 21  # one more than the staleness limit
    window: int = 80
    solver: Solver = Ridge()

    def __post_init__(self) -> None:
        within("momentum beta", self.beta, "(-1, 1)")
        within("span of momentum approximation", self.span, "[1, inf)")
        within("window of momentum approximation", self.window, "[1, inf)")

    def init(self, x: Vector) -> History:
        return History((x.new_empty(0),) * self.window, _numbers(self.window, self.span))

    def stamp(self, x: Vector, version: int) -> Tensor:
        return stamp(x, version, self.span)

    def __call__(self, past: History, mean: Upload, cohort: Cohort) -> tuple[Vector, History]:
        means = (*past.means[1:], mean.delta)
        rows = torch.cat([past.rows[1:].cpu(), row_of(mean.stamp, cohort)[None]])
        known = sum(r.numel() > 0 for r in means)
        a = fit(rows[self.window - known :], self.beta, cohort.version, self.solver)
        m = zeros_like(mean.delta)
        for weight, r in zip(a.tolist(), means[self.window - known :], strict=True):
            m.add_(r, alpha=weight)
        return m, History(means, rows)


@dataclass(frozen=True)
class LightApproximation:
    """m <- u r + v m with the u and v nearest to momentum's own weights; keeps no history of means."""

    beta: float
    span: int = 21  # one more than the staleness limit

    def __post_init__(self) -> None:
        within("momentum beta", self.beta, "(-1, 1)")
        within("span of momentum approximation", self.span, "[1, inf)")

    def init(self, x: Vector) -> Recursion:
        return Recursion(zeros_like(x), _numbers(reach(self.beta, self.span)))

    def stamp(self, x: Vector, version: int) -> Tensor:
        return stamp(x, version, self.span)

    def __call__(self, past: Recursion, mean: Upload, cohort: Cohort) -> tuple[Vector, Recursion]:
        row = row_of(mean.stamp, cohort)
        (u, v), origins = blend(row, past.origins.cpu(), self.beta, cohort.version)
        m = u * mean.delta + v * past.m
        return m, Recursion(m, origins)


def stamp(x: Vector, version: int, span: int) -> Tensor:
    """(span,) where an update from this version is to be counted."""
    mark = x.new_zeros(span)
    mark[version % span] = 1
    return mark


def row_of(counted: Tensor, cohort: Cohort) -> Tensor:
    """(span,) the part of each staleness in a mean, from the mean of the stamps, noisy or not."""
    ring = counted.to("cpu", torch.float64)
    staleness = torch.arange(len(ring))
    row = ring[(cohort.version - staleness) % len(ring)]
    row = torch.where(staleness <= cohort.version, row, 0.0).clamp(0, cohort.mean_weight)
    total = row.sum()
    return row * (cohort.mean_weight / total) if total > 0 else row


def momentum(beta: float, version: int, ages: int) -> Tensor:
    """(ages,) row `version` of M, newest first."""
    age = torch.arange(ages, dtype=torch.float64)
    return torch.where(age <= version, (1 - beta) * beta**age, 0.0)


def spread(rows: Tensor) -> Tensor:
    """Shares by staleness (n, span), newest last, to shares by the age of the version (n, n + span - 1)."""
    n, span = rows.shape
    age = torch.arange(n - 1, -1, -1)[:, None] + torch.arange(span)
    return rows.new_zeros(n, n + span - 1).scatter_(1, age, rows)


def fit(rows: Tensor, beta: float, version: int, solver: Solver) -> Tensor:
    """(n,) the weights of the last n means that come nearest to momentum's weights of versions."""
    basis = spread(rows)
    return solver(basis, momentum(beta, version, basis.shape[1]))


def blend(row: Tensor, origins: Tensor, beta: float, version: int) -> tuple[tuple[float, float], Tensor]:
    """The weights of the mean and of the last direction; and of versions, (reach,), which they lead to."""
    now = zeros_like(origins)
    now[: len(row)] = row
    basis = torch.stack([now, torch.cat([origins.new_zeros(1), origins[:-1]])])
    gram = torch.linalg.pinv(basis @ basis.T, hermitian=True)
    weights = gram @ (basis @ momentum(beta, version, len(origins)))
    u, v = weights.tolist()
    return (u, v), weights @ basis


def reach(beta: float, span: int) -> int:
    """Ages beyond which momentum's weights, and so those of a direction fitted to them, no longer count."""
    decay = math.log(_NEGLIGIBLE) / math.log(abs(beta)) if beta else 0.0
    return span + math.ceil(decay)


def _numbers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)
