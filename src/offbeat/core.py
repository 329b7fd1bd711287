"""The nouns that every part shares, and the two loops that algorithms are written with.

A model is one flat vector. An algorithm is five pure functions over vectors: what the server
holds at first (`init`), what a client keeps (`memory`), what goes down (`broadcast`), what a
client does (`local`) and what the server does with the mean of the uploads (`step`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from offbeat import trees
from offbeat.trees import Tree

Vector: TypeAlias = Tensor  # (d,)


class Batch(NamedTuple):
    """One minibatch."""

    data: Tree  # leaves (examples, ...)
    mask: Tensor | None = None  # (examples,) false on padding; None: all are real

    @property
    def active(self) -> Tensor | None:
        """() false if the whole batch is padding; None: it is real."""
        return None if self.mask is None else self.mask.any()


class Batches(NamedTuple):
    """The minibatches of one task, in order."""

    items: tuple[Batch, ...]

    @property
    def steps(self) -> Tensor | int:
        """How many are real."""
        counts = [1 if batch.active is None else batch.active.to(torch.int64) for batch in self.items]
        return sum(counts)


Gradient: TypeAlias = Callable[[Vector, Batch], Vector]


class Task(NamedTuple):
    """One client's work from one version of the model; `visit` counts its tasks from 0."""

    client: int
    version: int
    visit: int


class Visit(NamedTuple):
    """What a client knows of time, as scalars that map."""

    version: Tensor  # ()
    staleness: Tensor  # ()


class Cohort(NamedTuple):
    """What the server knows of a full buffer."""

    version: int  # server steps taken so far
    population: int
    staleness: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def share(self) -> float:
        """The part of the population that reports."""
        return len(self.staleness) / self.population

    @property
    def mean_weight(self) -> float:
        """What the weights of the mean add up to."""
        return sum(self.weights) / len(self.weights)


State = TypeVar("State")
Message = TypeVar("Message")
Memory = TypeVar("Memory")
Upload = TypeVar("Upload")


class Algorithm(Protocol[State, Message, Memory, Upload]):
    """A federated optimiser; every method is pure, and `local` is written for one client.

    State, message, memory and upload are trees of tensors; the state has a field `x`, the model.
    An update is a descent, start minus end: the server subtracts.
    """

    def init(self, x: Vector) -> State: ...

    def memory(self, x: Vector) -> Memory: ...

    def broadcast(self, state: State, version: int) -> Message: ...

    def local(
        self, message: Message, memory: Memory, batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, Memory]: ...

    def step(self, state: State, mean: Upload, cohort: Cohort) -> State: ...

    def warmup(self) -> Self | None:
        """What to run for one full-participation step before training, or nothing."""
        ...


AnyAlgorithm: TypeAlias = Algorithm[Any, Any, Any, Any]
Carry = TypeVar("Carry")


def scan(step: Callable[[Carry, Batch], Carry], carry: Carry, batches: Batches) -> Carry:
    """Fold `step` over the batches; one that is all padding changes nothing."""
    for batch in batches.items:
        moved = step(carry, batch)
        active = batch.active
        carry = moved if active is None else where(active, moved, carry)
    return carry


def where(condition: Tensor, yes: Carry, no: Carry) -> Carry:
    """`torch.where` over trees."""
    chosen: Carry = trees.over(lambda a, b: torch.where(condition, a, b), yes, no)
    return chosen


def sgd(x: Vector, batches: Batches, grad: Gradient, lr: float) -> Vector:
    """Plain local descent."""
    return scan(lambda y, batch: torch.sub(y, grad(y, batch), alpha=lr), x, batches)
