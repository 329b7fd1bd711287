"""Robust aggregation against a few malicious clients: trimmed mean, median, geometric median, norm bounds.

Each replaces the mean of a server step and needs a server that sees every upload: secure aggregation hides
them, and the noise of differential privacy is computed for a sum. Updates are first multiplied by their
staleness weights, as in the plain mean, so a stale update is nearer to zero. Each field of an upload is
aggregated separately, as one vector.

Trimmed mean and median are taken coordinate by coordinate (Yin et al. 2018, arXiv 1803.01498), the geometric
median by the smoothed Weiszfeld algorithm (Pillutla et al. 2022, arXiv 1912.13445), starting from the median
of the coordinates; the papers start from the mean, which one attacker can move anywhere.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from offbeat import trees
from offbeat.aggregate.mean import AggregationContext, Aggregator, Mean
from offbeat.aggregate.uploads import upload_fields
from offbeat.algorithms.rates import unwrapped
from offbeat.core import Cohort, SavedState, Task
from offbeat.errors import InputError
from offbeat.privacy import clipping
from offbeat.schedule.dispatch import TimedDispatch
from offbeat.schedule.parsing import check_kind, check_number, parse_spec
from offbeat.schedule.participation import Participation
from offbeat.trees import Tree

_SORTED = 1 << 22  # numbers that are sorted at a time


class RobustRule(Protocol):
    """A robust aggregate of the updates of a buffer, for one field."""

    def __call__(self, part: Tree) -> Tree:
        """Leaves (tasks, ...) to leaves (...)."""
        ...

    def check(self, buffer: int) -> None:
        """Reject a buffer for which the rule has no effect."""
        ...


@dataclass(frozen=True)
class RobustAggregation:
    """The aggregation of one run."""

    rule: RobustRule
    private: bool = False
    hides_sample: bool = False

    def piece(self, numbers: int) -> None:
        """None: a robust aggregate needs all uploads at once."""

    def collect(self, uploads: Tree, tasks: Sequence[Task], cohort: Cohort, onto: Tree | None = None) -> Tree:
        """The aggregate itself, since all uploads of a server step are collected in one call."""
        weighted = uploads if set(cohort.weights) == {1.0} else _weighted(uploads, cohort.weights)
        parts = clipping.fields(weighted)
        return clipping.replace(
            trees.map(lambda leaf: leaf[0], weighted), {name: self.rule(part) for name, part in parts.items()}
        )

    def release(self, total: Tree, cohort: Cohort) -> Tree:
        return total

    def secure_encoding(self) -> None:
        return None

    def ended(self) -> None:
        return None

    def spent(self) -> Callable[[], None]:
        return lambda: None

    def save(self) -> SavedState:
        return SavedState({}, {})

    def load(self, saved: SavedState) -> None:
        pass


def _open(rule: RobustRule, context: AggregationContext) -> RobustAggregation:
    """Begin a run; raises if its method or dispatch needs a mean."""
    name = type(unwrapped(context.algorithm)).__name__
    if trees.leaves(context.algorithm.memory(torch.zeros(1))) or context.algorithm.warmup() is not None:
        # the server adds up changes of the clients' memory, and a robust aggregate is not their mean
        raise InputError(
            f"{name} has no robust aggregation, since its clients keep memory whose changes the server adds "
            "up: use the mean, or a method without client memory."
        )
    if "stamp" in upload_fields(context.algorithm):
        raise InputError(
            f"{name} with these parameters computes the versions of the updates from the mean of their "
            "stamps, which a robust aggregate does not have: use the mean."
        )
    if isinstance(context.dispatch, TimedDispatch):
        raise InputError(
            "releases by a clock have any number of updates, even none, and a robust aggregate needs a full "
            "buffer: use another dispatch, or the mean."
        )
    rule.check(context.buffer)
    return RobustAggregation(rule)


@dataclass(frozen=True)
class TrimmedMean:
    """Without the largest and the smallest `share` of the values of each coordinate.

    It tolerates as many attackers as are left out on one side: `share` of the buffer, rounded down.

    Attributes:
        share: The part of the values that is left out on each side, at least 0 and below 0.5.
    """

    share: float
    participation: ClassVar = Participation()
    open = _open

    def __post_init__(self) -> None:
        check_kind("the share of a trimmed mean", self.share)
        if not 0 <= self.share < 0.5:
            raise InputError(
                f"a trimmed mean cannot leave out a share of {self.share:g} on each side: give one of at "
                "least 0 and below 0.5, such as 0.2, or take the median."
            )

    def check(self, buffer: int) -> None:
        if self.share and not self._trimmed(buffer):
            raise InputError(
                f"a share of {self.share:g} of a buffer of {buffer} is less than one update, so nothing "
                "would be left out: raise the share or the buffer."
            )

    def __call__(self, part: Tree) -> Tree:
        return trees.map(lambda leaf: _trimmed_mean(leaf, self._trimmed(len(leaf))), part)

    def _trimmed(self, count: int) -> int:
        return math.floor(self.share * count + 1e-9)  # 0.29 of 100 is 29


@dataclass(frozen=True)
class Median:
    """The median of each coordinate; for an even number of updates the mean of the middle two."""

    participation: ClassVar = Participation()
    open = _open

    def check(self, buffer: int) -> None:
        _check_majority("median", buffer)

    def __call__(self, part: Tree) -> Tree:
        return trees.map(lambda leaf: _trimmed_mean(leaf, (len(leaf) - 1) // 2), part)


@dataclass(frozen=True)
class GeometricMedian:
    """The point with the least sum of distances to all updates; it does not depend on the axes.

    Smoothed Weiszfeld: each iteration is a mean in which the weight of an update is the inverse of its
    distance, or of `smoothing` if it is nearer.

    Attributes:
        smoothing: A lower bound on the distances in the weights.
        iterations: The number of iterations.
    """

    smoothing: float = 1e-6
    iterations: int = 8
    participation: ClassVar = Participation()
    open = _open

    def __post_init__(self) -> None:
        check_number("the smoothing of a geometric median", self.smoothing, strict=True)
        if self.iterations < 1 or self.iterations != int(self.iterations):
            raise InputError(
                f"a geometric median needs a whole number of iterations above 0, not {self.iterations:g}."
            )

    def check(self, buffer: int) -> None:
        _check_majority("geometric median", buffer)

    def __call__(self, part: Tree) -> Tree:
        centre = Median()(part)
        for _ in range(int(self.iterations)):
            distance = clipping.norms(trees.map(lambda leaf, middle: leaf - middle, part, centre))
            inverse = 1 / distance.clamp_min(self.smoothing)
            centre = _weighted_sum(part, inverse / inverse.sum())
        return centre


@dataclass(frozen=True)
class NormBound:
    """The mean of updates that are shortened to a norm: `bound`, or the median norm of the buffer.

    It limits the influence of an attacker on a server step but does not remove it: many small steps in one
    direction add up. With a fixed bound it is the clipping of differential privacy without the noise.

    Attributes:
        bound: The largest norm; None: the median norm of the buffer.
    """

    bound: float | None = None
    participation: ClassVar = Participation()
    open = _open

    def __post_init__(self) -> None:
        if self.bound is not None:
            check_number("the bound on norms", self.bound, strict=True)

    def check(self, buffer: int) -> None:
        if self.bound is None:
            _check_majority("median norm", buffer)

    def __call__(self, part: Tree) -> Tree:
        norms = clipping.norms(part)
        bound = _trimmed_mean(norms, (len(norms) - 1) // 2) if self.bound is None else self.bound
        factor = torch.where(norms > bound, bound / norms, 1.0)
        return _weighted_sum(part, factor / len(norms))


_RULES: dict[str, type[Any]] = {
    "trimmed-mean": TrimmedMean,
    "median": Median,
    "geometric-median": GeometricMedian,
    "norm-bound": NormBound,
}


def parse_aggregate(text: str) -> Aggregator:
    """`mean`, `trimmed-mean:SHARE`, `median`, `geometric-median` or `norm-bound[:BOUND]`."""
    if text == "mean":
        return Mean()
    forms: dict[str, type[Any]] = {"mean": _PlainMean} | _RULES
    rule: Aggregator = parse_spec("aggregation", text, forms)
    return rule


@dataclass(frozen=True)
class _PlainMean:
    """For the list of names in an error, and for `mean` with a value, which it does not take."""


def _check_majority(name: str, buffer: int) -> None:
    if buffer < 3:
        raise InputError(
            f"a {name} of {buffer} updates protects against no attacker: give a buffer of at least 3, or use "
            "the mean."
        )


def _weighted(uploads: Tree, weights: Sequence[float]) -> Tree:
    """Each upload times its staleness weight."""

    def scale(leaf: Tensor) -> Tensor:
        factors = torch.tensor(weights, dtype=leaf.dtype, device=leaf.device)
        return leaf * factors.view(-1, *[1] * (leaf.dim() - 1))

    return trees.map(scale, uploads)


def _weighted_sum(part: Tree, weights: Tensor) -> Tree:
    """The sum of rows with these weights (tasks,)."""

    def add(leaf: Tensor) -> Tensor:
        return (weights.to(leaf) @ leaf.reshape(len(leaf), -1)).view(leaf.shape[1:])

    return trees.map(add, part)


def _trimmed_mean(stack: Tensor, trimmed: int) -> Tensor:
    """The mean over rows without the `trimmed` largest and smallest values of each coordinate."""
    rows = stack.reshape(len(stack), -1)
    kept = slice(trimmed, len(rows) - trimmed)
    width = max(1, _SORTED // len(rows))
    pieces = [
        rows[:, start : start + width].sort(0).values[kept].mean(0)
        for start in range(0, max(1, rows.shape[1]), width)
    ]
    return torch.cat(pieces).view(stack.shape[1:])
