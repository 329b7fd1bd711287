"""How the uploads of a buffer are added up: in plain sight, or so that nobody sees a single one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offbeat import trees
from offbeat.aggregate.aggregation import Hiding, Opening
from offbeat.aggregate.payload import Clip
from offbeat.core import Cohort, Saved, Task
from offbeat.trees import Tree


class Summing(Protocol):
    """One run's sums; what it has summed can be saved between two server steps."""

    @property
    def largest(self) -> float:
        """The largest number that an upload may hold."""
        ...

    def total(self, payload: Tree, tasks: Sequence[Task], cohort: Cohort) -> Tree:
        """The weighted sum over tasks: leaves (tasks, ...) to leaves (...)."""
        ...

    def hiding(self, clip: Clip | None = None) -> Hiding | None:
        """How clients clip and hide what is summed; None: they do not."""
        ...

    def save(self) -> Saved: ...

    def load(self, saved: Saved) -> None: ...


class Summation(Protocol):
    """A way to add up uploads."""

    @property
    def secret(self) -> bool:
        """Whether no server sees a single upload."""
        ...

    @property
    def rounding(self) -> float:
        """How far a coordinate of an upload may be moved before it is summed: a norm can grow by as much."""
        ...

    def open(self, opening: Opening) -> Summing:
        """Begin a run, or refuse one that cannot be summed this way."""
        ...


@dataclass(frozen=True)
class PlainSum:
    """The server sees every upload and adds them."""

    @property
    def secret(self) -> bool:
        return False

    @property
    def rounding(self) -> float:
        return 0.0

    @property
    def largest(self) -> float:
        return math.inf

    def open(self, opening: Opening) -> "PlainSum":
        return self

    def total(self, payload: Tree, tasks: Sequence[Task], cohort: Cohort) -> Tree:
        def add(stack: Tensor) -> Tensor:
            numbers = stack if stack.is_floating_point() else stack.to(torch.get_default_dtype())
            weights = torch.tensor(cohort.weights, dtype=numbers.dtype, device=stack.device)
            return (weights @ numbers.reshape(len(stack), -1)).view(stack.shape[1:])

        return trees.over(add, payload)

    def hiding(self, clip: Clip | None = None) -> None:
        return None

    def save(self) -> Saved:
        return Saved({}, {})

    def load(self, saved: Saved) -> None:
        pass
