"""Tree aggregation (Dwork et al. 2010; DP-FTRL, Kairouz et al. 2021): noise on sums over dyadic intervals.

A node is an interval of 2^level steps that begins at a multiple of 2^(level + 1): those are all that
the binary expansions of prefixes use. The noise of a prefix is the sum of its nodes', at most one a level; a
step's noise is what it adds to that. Nothing depends on how long the run will be, and no noise is kept.

Sensitivity. The square of it is the largest sum over nodes of (contributions inside)^2. Contributions at
least `apart` steps from one another are at most one in each aligned block of 2^p <= `apart` steps, and
there each is worst at the block's first step, which is in all nodes that end inside the block. What is left
is how to share contributions between the halves of each interval, which `_worst` tries out from small
intervals to large. It is exact where `apart` is a power of two, for first steps of blocks are that far
apart, and an upper bound else.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat.core import Saved
from offbeat.errors import InputError
from offbeat.privacy.correlated import NoiseStream, contributions
from offbeat.privacy.gaussian import standard_normal

_MANY = 20_000


@dataclass(frozen=True)
class Tree:
    """C has a row for each node: ones at its steps."""

    @property
    def name(self) -> str:
        return "tree"

    def sensitivity(self, steps: int, most: int | None, apart: int) -> float:
        count = contributions(steps, most, apart)
        if count > _MANY:
            raise InputError(
                f"the sensitivity of tree noise to {count} contributions takes too long: "
                f"allow at most {_MANY}, or use banded noise."
            )
        if apart == 0:
            return count * self.sensitivity(steps, 1, 1)  # all to the first step, which most nodes hold
        return math.sqrt(_worst(steps, count, apart.bit_length() - 1)[-1])

    def open(self, key: bytes) -> NoiseStream:
        return _Nodes(key)


class _Nodes:
    """Each node's noise is a function of the key, so that it can be drawn again when it is taken back."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._marks: dict[int, bytes] = {}  # of the steps that made the nodes which are still in use

    def draw(self, step: int, field: int, like: Tensor, mark: bytes = b"") -> Tensor:
        if mark:
            used = [_made(step, level) for level in range(step.bit_length()) if step >> level & 1]
            self._marks = {each: self._marks[each] for each in used} | {step: mark}
        level = 0
        taken = torch.zeros_like(like)
        while step >> level & 1:  # nodes that the next prefix no longer uses, for a larger one holds them
            taken += self._node(step, level, field, like)
            level += 1
        return self._node(step + 1, level, field, like) - taken

    def save(self) -> Saved:
        return Saved({"marks": {str(step): mark.hex() for step, mark in self._marks.items()}}, {})

    def load(self, saved: Saved) -> None:
        self._marks = {int(step): bytes.fromhex(mark) for step, mark in saved.facts["marks"].items()}

    def _node(self, prefix: int, level: int, field: int, like: Tensor) -> Tensor:
        """The noise of the node of this level in the expansion of a prefix."""
        mark = self._marks.get(_made(prefix, level), b"")
        return standard_normal(self._key, (prefix >> (level + 1), level, field), like, mark)


def _made(prefix: int, level: int) -> int:
    """The step that completes the node of this level in the expansion of a prefix."""
    return (prefix >> level << level) - 1


def _worst(steps: int, count: int, block: int) -> npt.NDArray[np.float64]:
    """The largest sum of squares for 0, 1, ... contributions, up to `count`, to the first `steps` steps."""
    if steps == 0:
        return np.zeros(1)
    level = steps.bit_length() - 1
    whole = _whole(level, count, block)
    node = whole + np.arange(len(whole)) ** 2.0
    if level < block:  # steps that hold at most one contribution, and it is best at the first
        return node
    return _share(node, _worst(steps - 2**level, count, block), count)


def _whole(level: int, count: int, block: int) -> npt.NDArray[np.float64]:
    """The same for an interval of 2^level steps, without the node of the interval itself."""
    inside = np.array([0.0, min(level, block)])[: count + 1]
    for _ in range(block, level):
        inside = _share(inside + np.arange(len(inside)) ** 2.0, inside, count)
    return inside


def _share(
    left: npt.NDArray[np.float64], right: npt.NDArray[np.float64], count: int
) -> npt.NDArray[np.float64]:
    """The best of all ways to share contributions between two parts, up to `count` in all."""
    best = np.zeros(min(count, len(left) + len(right) - 2) + 1)
    for each, value in enumerate(left[: len(best)]):
        reach = best[each : each + len(right)]
        np.maximum(reach, value + right[: len(reach)], out=reach)
    return best
