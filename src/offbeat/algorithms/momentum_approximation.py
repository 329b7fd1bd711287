"""Momentum approximation (Yu et al., arXiv 2402.09247, Algorithm 1): momentum that undoes staleness.

A buffer's mean r_t mixes updates that began at versions s <= t in shares W[t, s]. Momentum over
such means weighs the versions by M W, not by M[t, s] = (1 - beta) beta^(t-s) as it would without
delay. `Approximation` (eq. 11) weighs the past means by the a_t for which a_t W is nearest to
row t of M, and `LightApproximation` (eq. 15) is the nearest combination of r_t and the last m.
`relative_errors` computes the remaining errors of both under a schedule (table 4).

Differences from the paper:

- A client's version is sent as a one-hot vector of the version modulo `span`, not of the version among
  all T. An accepted update began less than `span` versions ago, so no information is lost: the
  rows of W are the same, by post-processing, and what is sent and stored does not grow with T.
- a_t reaches back over the last `window` means, not all (beta^80 is 2e-4 for beta = 0.9).
- The least squares are regularised. Plain least squares (`Truncated(0)`) fits best, but if delays are
  widely spread it may need weights of 10^3 to 10^10, which then multiply noisy vectors.
- Weights of stale updates are in W as they are in r_t: one-hot vectors are averaged as updates are.
- A row is projected onto what is known about it: shares lie between 0 and their sum, their sum is
  the cohort's mean weight, and no update began before version 0. Without noise this has no effect.

A scale (Adam's, FADAS's) sees the mean itself, as in Algorithm 1. The hyperparameters in the catalogue are
those of section B.1.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

from offbeat.algorithms.fedopt import Adagrad, Adam, AmsGrad, FedOpt, Identity, Scale, Upload
from offbeat.algorithms.registry import Cost, Method, check_interval, constructor
from offbeat.core import Cohort, Tensor, Vector, zeros_like

_NEGLIGIBLE = 1e-12  # relative to the first weight of momentum


class Solver(Protocol):
    """From rows (n, k) and a target (k,), in float64 on the CPU, to weights (n,)."""

    def __call__(self, rows: Tensor, target: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Ridge:
    """The minimiser a of |a rows - target|^2 + penalty |a|^2."""

    penalty: float = 1e-4

    def __post_init__(self) -> None:
        check_interval("penalty of Ridge", self.penalty, "(0, inf)")

    @classmethod
    def under_noise(cls, deviation: float, cohort: int, least: float = 1e-4) -> Self:
        """A penalty of at least the noise's variance, for rows that are noisy counts divided by the cohort.

        In the letters of arXiv 2402.09247, with noise lowered by a factor r for a simulation: (xi r / C)^2,
        where the deviation is xi r.
        """
        check_interval("deviation of the noise", deviation, "[0, inf)")
        return cls(max(least, (deviation / cohort) ** 2))

    def __call__(self, rows: Tensor, target: Tensor) -> Tensor:
        import torch

        gram = rows @ rows.T
        gram.diagonal().add_(self.penalty)
        return torch.cholesky_solve((rows @ target)[:, None], torch.linalg.cholesky(gram))[:, 0]


@dataclass(frozen=True)
class Truncated:
    """The minimiser a of |a rows - target|^2, without singular values below rcond times the largest."""

    rcond: float = 1e-2

    def __post_init__(self) -> None:
        check_interval("rcond of Truncated", self.rcond, "[0, 1)")

    def __call__(self, rows: Tensor, target: Tensor) -> Tensor:
        import torch

        left, values, right = torch.linalg.svd(rows, full_matrices=False)
        rounding = max(rows.shape) * torch.finfo(rows.dtype).eps
        kept = values >= max(self.rcond, rounding) * values.max()
        inverse = torch.where(kept & (values > 0), 1 / values, 0.0)
        weights: Tensor = left @ (inverse * (right @ target))
        return weights


class History(NamedTuple):
    """The last means, newest last; at first the others are empty."""

    means: tuple[Vector, ...]
    rows: Tensor  # (window, span) the shares of each mean by staleness


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
        check_interval("momentum beta", self.beta, "(-1, 1)")
        check_interval("span of momentum approximation", self.span, "[1, inf)")
        check_interval("window of momentum approximation", self.window, "[1, inf)")

    def init(self, x: Vector) -> History:
        return History((x.new_empty(0),) * self.window, _float64_zeros(self.window, self.span))

    def stamp(self, x: Vector, version: int) -> Tensor:
        return version_stamp(x, version, self.span)

    def __call__(self, past: History, mean: Upload, cohort: Cohort) -> tuple[Vector, History]:
        import torch

        means = (*past.means[1:], mean.delta)
        rows = torch.cat([past.rows[1:].cpu(), staleness_shares(mean.stamp, cohort)[None]])
        known = sum(r.numel() > 0 for r in means)
        a = fit_weights(rows[self.window - known :], self.beta, cohort.version, self.solver)
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
        check_interval("momentum beta", self.beta, "(-1, 1)")
        check_interval("span of momentum approximation", self.span, "[1, inf)")

    def init(self, x: Vector) -> Recursion:
        return Recursion(zeros_like(x), _float64_zeros(momentum_reach(self.beta, self.span)))

    def stamp(self, x: Vector, version: int) -> Tensor:
        return version_stamp(x, version, self.span)

    def __call__(self, past: Recursion, mean: Upload, cohort: Cohort) -> tuple[Vector, Recursion]:
        row = staleness_shares(mean.stamp, cohort)
        (u, v), origins = fit_blend(row, past.origins.cpu(), self.beta, cohort.version)
        m = u * mean.delta + v * past.m
        return m, Recursion(m, origins)


def version_stamp(x: Vector, version: int, span: int) -> Tensor:
    """(span,) a one-hot vector of the version modulo `span`."""
    mark = x.new_zeros(span)
    mark[version % span] = 1
    return mark


def staleness_shares(counted: Tensor, cohort: Cohort) -> Tensor:
    """(span,) the share of each staleness in a mean, from the mean of the stamps, noisy or not."""
    import torch

    ring = counted.to("cpu", torch.float64)
    staleness = torch.arange(len(ring))
    row = ring[(cohort.version - staleness) % len(ring)]
    row = torch.where(staleness <= cohort.version, row, 0.0).clamp(0, cohort.mean_weight)
    total = row.sum()
    return row * (cohort.mean_weight / total) if total > 0 else row


def momentum_weights(beta: float, version: int, ages: int) -> Tensor:
    """(ages,) row `version` of M, newest first."""
    import torch

    age = torch.arange(ages, dtype=torch.float64)
    return torch.where(age <= version, (1 - beta) * beta**age, 0.0)


def shares_by_age(rows: Tensor) -> Tensor:
    """Shares by staleness (n, span), newest last, to shares by the age of the version (n, n + span - 1)."""
    import torch

    n, span = rows.shape
    age = torch.arange(n - 1, -1, -1)[:, None] + torch.arange(span)
    return rows.new_zeros(n, n + span - 1).scatter_(1, age, rows)


def fit_weights(rows: Tensor, beta: float, version: int, solver: Solver) -> Tensor:
    """(n,) the weights of the last n means that come nearest to momentum's weights of versions."""
    basis = shares_by_age(rows)
    return solver(basis, momentum_weights(beta, version, basis.shape[1]))


def fit_blend(row: Tensor, origins: Tensor, beta: float, version: int) -> tuple[tuple[float, float], Tensor]:
    """The weights of the mean and of the last direction, and the resulting weights of versions, (reach,)."""
    import torch

    now = zeros_like(origins)
    now[: len(row)] = row
    basis = torch.stack([now, torch.cat([origins.new_zeros(1), origins[:-1]])])
    gram = torch.linalg.pinv(basis @ basis.T, hermitian=True)
    weights = gram @ (basis @ momentum_weights(beta, version, len(origins)))
    u, v = weights.tolist()
    return (u, v), weights @ basis


def momentum_reach(beta: float, span: int) -> int:
    """The age beyond which momentum's weights, and so those of a direction fitted to them, are negligible."""
    decay = math.log(_NEGLIGIBLE) / math.log(abs(beta)) if beta else 0.0
    return span + math.ceil(decay)


def _float64_zeros(*shape: int) -> Tensor:
    import torch

    return torch.zeros(shape, dtype=torch.float64)


class RelativeErrors(NamedTuple):
    """|A W - M|^2 / |M|^2 over all entries, of three ways to choose A."""

    approximation: float
    light: float
    naive: float  # A = M: momentum that does not know of staleness


def relative_errors(
    staleness: Iterable[Sequence[int]], beta: float, span: int, window: int = 80, solver: Solver = Ridge()
) -> RelativeErrors:
    """From the staleness of each server step's updates, all below `span`."""
    import torch

    rows: deque[Tensor] = deque(maxlen=window)
    ages = momentum_reach(beta, span)
    light = naive = torch.zeros(ages, dtype=torch.float64)
    missed, whole = torch.zeros(3, dtype=torch.float64), 0.0
    for version, each in enumerate(staleness):
        row = torch.bincount(torch.tensor(each), minlength=span).double() / len(each)
        rows.append(row)
        history = torch.stack(list(rows))
        basis = shares_by_age(history)
        fitted = fit_weights(history, beta, version, solver) @ basis
        _, light = fit_blend(row, light, beta, version)
        naive = beta * torch.cat([naive.new_zeros(1), naive[:-1]])
        naive[:span] += (1 - beta) * row
        target = momentum_weights(beta, version, max(ages, len(fitted)))
        whole += float(target.square().sum())
        missed += torch.stack([_squared_distance(target, made) for made in (fitted, light, naive)])
    return RelativeErrors(*(missed / whole).tolist())


def _squared_distance(target: Tensor, made: Tensor) -> Tensor:
    """Squared; `made` is 0 beyond its end."""
    return (target[: len(made)] - made).square().sum() + target[len(made) :].square().sum()


def approximated(
    scale: Callable[[float, float], Scale],
    light: bool = False,
    local_lr: float = 0.1,
    server_lr: float = 0.01,
    beta: float = 0.9,
    beta2: float = 0.99,
    eps: float = 0.01,
    penalty: float = 1e-4,
    rcond: float | None = None,
    window: int = 80,
    span: int = 21,
) -> FedOpt:
    """`FedOpt` with a scale of (beta2, eps) and an approximated momentum."""
    if light:
        return FedOpt(local_lr, server_lr, LightApproximation(beta, span), scale(beta2, eps))
    solver = Ridge(penalty) if rcond is None else Truncated(rcond)
    return FedOpt(local_lr, server_lr, Approximation(beta, span, window, solver), scale(beta2, eps))


class _Rule(NamedTuple):
    title: str
    scale: Callable[[float, float], Scale]
    vectors: int  # that the scale keeps
    defaults: dict[str, float]
    unused: tuple[str, ...] = ()  # parameters


_RULES = {
    "fedavgm": _Rule("FedAvgM", lambda beta2, eps: Identity(), 0, {"server_lr": 1.0}, ("beta2", "eps")),
    "fedadam": _Rule("FedAdam", Adam, 1, {}),
    "fedadagrad": _Rule("FedAdagrad", lambda beta2, eps: Adagrad(eps), 1, {"server_lr": 0.03}, ("beta2",)),
    "fadas": _Rule("FADAS", AmsGrad, 2, {"server_lr": 1e-3, "eps": 1e-8}),
}


def _method(name: str, rule: _Rule, light: bool) -> Method:
    unused = ("scale", "light", *rule.unused, *(("penalty", "rcond", "window") if light else ()))
    return Method(
        constructor(approximated, unused, scale=rule.scale, light=light, **rule.defaults),
        f"as ma-{name}, without a history of updates"
        if light
        else f"{rule.title} with momentum corrected for staleness",
        "arXiv 2402.09247",
        "poisson",
        Cost(server=(2 if light else 81) + rule.vectors, extra_down=21, extra_up=21),
        max_staleness=20,
    )


METHODS = {f"ma-{name}": _method(name, rule, light=False) for name, rule in _RULES.items()} | {
    f"ma-light-{name}": _method(name, rule, light=True) for name, rule in _RULES.items()
}
