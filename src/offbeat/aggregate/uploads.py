"""What an algorithm sends and reads, found out by trying it on a model of one number."""

from typing import Any

import torch
from torch import Tensor

from offbeat import trees
from offbeat.core import AnyAlgorithm, Batch, Batches, Cohort, Vector, Visit
from offbeat.privacy import clipping


def upload_fields(algorithm: AnyAlgorithm) -> list[str]:
    """The fields of its upload."""
    return list(clipping.fields(_try(algorithm)[1]))


def reads_staleness(algorithm: AnyAlgorithm) -> bool:
    """Whether its server half makes something else of the same mean where the staleness was another."""
    state, upload = _try(algorithm)

    def after(staleness: int) -> list[Tensor]:
        cohort = Cohort(version=1000, population=10, staleness=(staleness,) * 2, weights=(1.0, 1.0))
        return trees.leaves(algorithm.step(state, upload, cohort))

    fresh = after(0)
    return any(
        not torch.equal(left, right)
        for staleness in (1, 30, 900)
        for left, right in zip(fresh, after(staleness), strict=True)
    )


def _try(algorithm: AnyAlgorithm) -> tuple[Any, Any]:
    """A state, and the upload of one task from it."""
    x = torch.zeros(1)
    state = algorithm.init(x)
    batch = Batch((torch.zeros(1),))
    upload, _ = algorithm.local(
        algorithm.broadcast(state, 0),
        algorithm.memory(x),
        Batches((batch,), (batch,)),
        Visit(torch.tensor(0), torch.tensor(0)),
        _Slope(),
    )
    return state, upload


class _Slope:
    """A gradient of 1 wherever it is asked for."""

    def __call__(self, x: Vector, batch: Batch, /) -> Vector:
        return torch.ones_like(x)

    def with_loss(self, x: Vector, batch: Batch, /) -> tuple[Vector, Tensor]:
        return torch.ones_like(x), torch.ones(())

    def descend(self, x: Vector, batch: Batch, lr: float, /) -> Vector:
        return x - lr
