"""What an algorithm sends and reads, found out by trying it, on a model of one number unless one is given."""

from typing import Any

import torch
from torch import Tensor

from offbeat import trees
from offbeat.core import AnyAlgorithm, Batch, Batches, Cohort, ReadsStaleness, Vector, Visit
from offbeat.privacy import clipping
from offbeat.trees import Tree


def upload_from(algorithm: AnyAlgorithm, x: Vector, version: int = 0) -> Tree:
    """What a client that starts from this model would send: its form counts, not its numbers."""
    return _try(algorithm, x, version)[1]


def upload_fields(algorithm: AnyAlgorithm) -> list[str]:
    """The fields of its upload."""
    return list(clipping.fields(upload_from(algorithm, torch.zeros(1))))


def reads_staleness(algorithm: AnyAlgorithm) -> bool:
    """Whether its server half makes something else of the same mean where the staleness was another."""
    state, upload = _try(algorithm, torch.zeros(1))

    def after(staleness: int) -> list[Tensor]:
        cohort = Cohort(version=1000, population=10, staleness=(staleness,) * 2, weights=(1.0, 1.0))
        return trees.leaves(algorithm.step(state, upload, cohort))

    fresh = after(0)
    return any(
        not torch.equal(left, right)
        for staleness in (1, 30, 900)
        for left, right in zip(fresh, after(staleness), strict=True)
    )


def clients_read_staleness(algorithm: AnyAlgorithm) -> bool:
    """Whether its local half looks at `Visit.staleness`: said by itself, or seen in what a task leaves."""
    if isinstance(algorithm, ReadsStaleness) and algorithm.reads_staleness:
        return True
    x = torch.zeros(1)
    state = algorithm.init(x)
    for _ in range(2):  # some have nothing to multiply it with before their first step
        tried = [trees.leaves(_local(algorithm, state, x, staleness)) for staleness in (0, 1, 30)]
        if any(not torch.equal(*pair) for other in tried[1:] for pair in zip(tried[0], other, strict=True)):
            return True
        upload, _ = _local(algorithm, state, x, 0)
        state = algorithm.step(state, upload, Cohort(0, 10, (0, 0), (1.0, 1.0)))
    return False


def _try(algorithm: AnyAlgorithm, x: Vector, version: int = 0) -> tuple[Any, Any]:
    """A state, and the upload of one task from it."""
    state = algorithm.init(x)
    return state, _local(algorithm, state, x, 0, version)[0]


def _local(
    algorithm: AnyAlgorithm, state: Any, x: Vector, staleness: int, version: int = 0
) -> tuple[Any, Any]:
    """What one task leaves: its upload and its client's memory."""
    batch = Batch((x.new_zeros(1),))
    numbers = (version, staleness, 0)
    return algorithm.local(
        algorithm.broadcast(state, version),
        algorithm.memory(torch.zeros_like(x)),
        Batches((batch,), (batch,)),
        Visit(*(torch.tensor(number, device=x.device) for number in numbers)),
        _Slope(),
    )


class _Slope:
    """A gradient of 1 wherever it is asked for."""

    def __call__(self, x: Vector, batch: Batch, /) -> Vector:
        return torch.ones_like(x)

    def with_loss(self, x: Vector, batch: Batch, /) -> tuple[Vector, Tensor]:
        return torch.ones_like(x), x.new_ones(())

    def descend(self, x: Vector, batch: Batch, lr: float, /) -> Vector:
        return x - lr
