"""Means over the examples of a minibatch, and over clients."""

import torch
from torch import Tensor

from offbeat import trees
from offbeat.core import Batch
from offbeat.errors import InputError


def over_examples(losses: Tensor, batch: Batch) -> Tensor:
    """The mean loss of what is real in a minibatch."""
    if losses.ndim == 0:
        return losses
    if len(losses) != len(trees.leaves(batch.data)[0]):
        raise InputError(
            "the loss must give one number per batch or one per example: take the mean of the rest."
        )
    each = losses.flatten(1).mean(1) if losses.ndim > 1 else losses
    if batch.mask is None:
        return each.mean()
    return torch.where(batch.mask, each, 0.0).sum() / batch.mask.sum().clamp_min(1)


def over_clients(statistics: dict[str, Tensor]) -> dict[str, Tensor]:
    """The plain mean of statistics stacked over clients; counts are rounded."""
    return {name: _average(value) for name, value in statistics.items()}


def _average(value: Tensor) -> Tensor:
    if value.is_floating_point():
        return value.mean(0)
    return value.double().mean(0).round().to(value.dtype)
