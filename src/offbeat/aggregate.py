"""Uploads in, one mean out: the only thing a server half ever sees of its clients."""

from typing import TypeAlias

import torch
from torch import Tensor

from offbeat import trees
from offbeat.core import Cohort
from offbeat.trees import Tree

Stacked: TypeAlias = Tree  # leaves (tasks, ...)


def weighted_mean(uploads: Stacked, cohort: Cohort) -> Tree:
    """The sum of weighted uploads over how many there are, so that its sensitivity is known."""

    def mean(stack: Tensor) -> Tensor:
        numbers = stack if stack.is_floating_point() else stack.to(torch.get_default_dtype())
        weights = torch.tensor(cohort.weights, dtype=numbers.dtype, device=stack.device)
        return (weights @ numbers.reshape(len(stack), -1)).view(stack.shape[1:]) / len(stack)

    return trees.over(mean, uploads)
