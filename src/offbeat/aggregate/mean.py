"""The plain weighted mean."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat import trees
from offbeat.aggregate.aggregation import Opening
from offbeat.core import Cohort, Saved, Task
from offbeat.schedule.participation import Participation
from offbeat.trees import Tree


@dataclass(frozen=True)
class Mean:
    """The sum of weighted uploads over how many there are, so that its sensitivity is known."""

    @property
    def participation(self) -> Participation:
        return Participation()

    def open(self, opening: Opening) -> "Mean":
        return self

    @property
    def private(self) -> bool:
        return False

    def collect(self, uploads: Tree, tasks: Sequence[Task], cohort: Cohort) -> Tree:
        return weighted_sum(uploads, cohort)

    def release(self, total: Tree, cohort: Cohort) -> Tree:
        return trees.over(lambda leaf: leaf / len(cohort.weights), total)

    def ended(self) -> None:
        return None

    def spent(self) -> None:
        return None

    def save(self) -> Saved:
        return Saved({}, {})

    def load(self, saved: Saved) -> None:
        pass


def weighted_sum(uploads: Tree, cohort: Cohort) -> Tree:
    """Leaves (tasks, ...) to leaves (...)."""

    def total(stack: Tensor) -> Tensor:
        numbers = stack if stack.is_floating_point() else stack.to(torch.get_default_dtype())
        weights = torch.tensor(cohort.weights, dtype=numbers.dtype, device=stack.device)
        return (weights @ numbers.reshape(len(stack), -1)).view(stack.shape[1:])

    return trees.over(total, uploads)
