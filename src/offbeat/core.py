"""The nouns that every part shares, and the two loops that algorithms are written with.

A model is one flat vector. An algorithm is six pure functions over vectors: what the server
holds at first (`init`), what a client keeps (`memory`), what goes down (`broadcast`), what a
client does (`local`), what the server does with the mean of the uploads (`step`), and what is done
once before training (`warmup`).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

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
    whole: tuple[Batch, ...] = ()  # all the client's examples once, for an algorithm that is a `WholePass`

    @property
    def steps(self) -> Tensor | int:
        """How many are real."""
        counts = [1 if batch.active is None else batch.active.to(torch.int64) for batch in self.items]
        return sum(counts)


class Gradient(Protocol):
    """The slope of a minibatch's loss at x."""

    def __call__(self, x: Vector, batch: Batch, /) -> Vector: ...

    def with_loss(self, x: Vector, batch: Batch, /) -> tuple[Vector, Tensor]:
        """The same and the loss itself."""
        ...

    def descend(self, x: Vector, batch: Batch, lr: float, /) -> Vector:
        """X less lr times the slope."""
        ...


class Task(NamedTuple):
    """One client's work from one version of the model; `visit` counts its tasks from 0."""

    client: int
    version: int
    visit: int


class Visit(NamedTuple):
    """What a client knows of time, as scalars that map."""

    version: Tensor  # ()
    staleness: Tensor  # ()
    rank: Tensor | tuple[()] = ()  # () tasks of this version that started before; for `ReadsRank` alone


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


class SavedState(NamedTuple):
    """A part of a checkpoint: JSON-able facts and named tensors."""

    facts: dict[str, Any]
    tensors: dict[str, Tensor]


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


@runtime_checkable
class WholePass(Protocol):
    """An algorithm whose local half may also look at all the client's examples at once."""

    @property
    def whole(self) -> bool: ...


@runtime_checkable
class Repeats(Protocol):
    """An algorithm that takes two gradients of one minibatch, and so needs a loss that repeats itself."""

    @property
    def repeats(self) -> bool: ...


@runtime_checkable
class TwoTrips(Protocol):
    """An algorithm that asks each cohort twice in a row, in an even and in an odd version."""

    @property
    def two_trips(self) -> bool: ...


@runtime_checkable
class ReadsStaleness(Protocol):
    """An algorithm whose local half looks at `Visit.staleness`, which is not known until the task is due."""

    @property
    def reads_staleness(self) -> bool: ...


@runtime_checkable
class ReadsRank(Protocol):
    """An algorithm whose local half looks at `Visit.rank`, which only a simulation of all tasks knows."""

    @property
    def reads_rank(self) -> bool: ...


@runtime_checkable
class Spans(Protocol):
    """An algorithm that takes updates which began fewer than `span` versions ago; None: it takes all."""

    @property
    def span(self) -> int | None: ...


@runtime_checkable
class Bounded(Protocol):
    """An algorithm some fields of whose upload have a norm that cannot exceed a known bound."""

    @property
    def bounds(self) -> Mapping[str, float]:
        """Field to bound."""
        ...

    @property
    def shares(self) -> Mapping[str, float]:
        """Field to its part of the sensitivity under noise, where it is not to be an equal one."""
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
    chosen: Carry = trees.map(lambda a, b: torch.where(condition, a, b), yes, no)
    return chosen


def sgd(x: Vector, batches: Batches, grad: Gradient, lr: float) -> Vector:
    """Plain local descent."""
    return scan(lambda y, batch: grad.descend(y, batch, lr), x, batches)


def wants_whole(algorithm: AnyAlgorithm) -> bool:
    """Whether `Batches.whole` is to be filled for it."""
    return isinstance(algorithm, WholePass) and algorithm.whole


def wants_rank(algorithm: AnyAlgorithm) -> bool:
    """Whether `Visit.rank` is to be filled for it."""
    return isinstance(algorithm, ReadsRank) and algorithm.reads_rank


def whole_gradient(x: Vector, batches: Batches, grad: Gradient) -> Vector:
    """The slope at x of the client's loss over all its examples."""
    total, count = torch.zeros_like(x), torch.zeros((), dtype=x.dtype, device=x.device)
    for batch in batches.whole:
        size = len(trees.leaves(batch.data)[0]) if batch.mask is None else batch.mask.sum()
        total = total + size * grad(x, batch)
        count = count + size
    return total / count
