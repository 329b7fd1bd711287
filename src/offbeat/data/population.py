"""The clients: which examples each has, and the minibatches that it trains on at each visit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat import draws, trees
from offbeat.errors import InputError
from offbeat.trees import Tree

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Steps:
    """Exactly `count` minibatches of exactly `size` examples: shuffled, and shuffled again when used up."""

    count: int
    size: int

    def __post_init__(self) -> None:
        _check_work("local steps", self.count, self.size)

    def draw(self, examples: int, rng: np.random.Generator) -> list[Positions]:
        """Minibatches of a client with that many examples; one with few may see some twice in a batch."""
        needed = self.count * self.size
        passes = -(-needed // examples)
        if passes == 1:
            stream = rng.choice(examples, needed, replace=False)
        else:
            stream = _shuffled(examples, passes, rng).reshape(-1)[:needed]
        return list(stream.reshape(self.count, self.size))


@dataclass(frozen=True)
class Epochs:
    """`count` passes over all examples, shuffled each time; the last minibatch of a pass may be smaller.

    One of fewer than `least` examples is left out, unless it is all the client has: BatchNorm
    cannot normalise a single example.
    """

    count: int
    size: int
    least: int = 1

    def __post_init__(self) -> None:
        _check_work("epochs", self.count, self.size)
        if not 1 <= self.least <= self.size:
            raise InputError(f"the least minibatch is {self.least}: give a number from 1 to the batch size.")

    def draw(self, examples: int, rng: np.random.Generator) -> list[Positions]:
        """Minibatches of a client with that many examples."""
        order = _shuffled(examples, self.count, rng)
        starts = range(0, max(1, examples - self.least + 1), self.size)
        return [row[start : start + self.size] for row in order for start in starts]


def _shuffled(examples: int, passes: int, rng: np.random.Generator) -> Positions:
    """(passes, examples) independent orders."""
    order = np.empty((passes, examples), np.int64)
    order[:] = np.arange(examples)
    return rng.permuted(order, axis=1, out=order)


def _check_work(counted: str, count: int, size: int) -> None:
    if count < 1:
        raise InputError(f"the number of {counted} is {count}: give at least 1.")
    if size < 1:
        raise InputError(f"the batch size is {size}: give at least 1.")


Indices = NDArray[np.int64]

_PASS_BATCH = 256  # examples of one piece of a pass over everything


class Parts(Protocol):
    """The examples of each client, by its number: a list, or something that computes them when asked."""

    def __len__(self) -> int: ...

    def __getitem__(self, client: int, /) -> Indices: ...


class Examples(NamedTuple):
    """Inputs and what a model should make of them: trees of tensors whose first axis is the examples."""

    inputs: Tree
    targets: Tree

    @property
    def total(self) -> int:
        """How many there are."""
        return len(trees.leaves(self)[0])

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """On another device; a dtype is for what is floating, whole numbers keep theirs."""

        def move(leaf: Tensor) -> Tensor:
            return leaf.to(device=device, dtype=dtype if leaf.is_floating_point() else None)

        moved: Self = trees.map(move, self)
        return moved


@dataclass(frozen=True)
class Population:
    """All clients; `parts[client]` are the indices of its examples in `data`.

    Parts in a list or a tuple are checked at once. Others may be lazy (`Blocks`, `Drawn`) and are
    never scanned: a client's are checked when it trains.
    """

    data: Examples
    parts: Parts
    work: Steps | Epochs

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", _examples(self.data))
        _check_examples(self.data)
        if len(self.parts) == 0:
            raise InputError("the population has no clients: give at least one part.")
        if isinstance(self.parts, list | tuple):
            _check_parts(self.parts, self.data.total)

    def __len__(self) -> int:
        return len(self.parts)

    def size(self, client: int) -> int:
        """How many examples a client has."""
        return len(self.parts[client])

    def indices(self, client: int, visit: int, seed: int) -> list[Indices]:
        """The examples of each minibatch of a client's n-th task."""
        part = self._part(client)
        batches = self.work.draw(len(part), draws.generator(seed, "batches", client, visit))
        return [part[batch] for batch in batches]

    def everything(self, client: int) -> list[Indices]:
        """All of a client's examples once, in pieces of bounded size."""
        part = self._part(client)
        return [part[start : start + _PASS_BATCH] for start in range(0, len(part), _PASS_BATCH)]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same clients with their examples elsewhere."""
        return replace(self, data=self.data.to(device, dtype))

    def _part(self, client: int) -> Indices:
        part = np.asarray(self.parts[client])
        if not isinstance(self.parts, list | tuple):
            _check_part(client, part, self.data.total)
        return part


def _examples(data: Any) -> Examples:
    """A plain pair will do too."""
    if isinstance(data, tuple | list) and len(data) == 2:
        return data if isinstance(data, Examples) else Examples(*data)
    raise InputError("the data of a population is not a pair: give Examples(inputs, targets).")


def _check_examples(data: Examples) -> None:
    leaves: list[Any] = [*trees.leaves(data)]
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
        raise InputError("the examples are not tensors with a first axis: make inputs and targets tensors.")
    lengths = sorted({len(leaf) for leaf in leaves})
    if len(lengths) > 1:
        raise InputError(
            f"inputs and targets disagree on the number of examples ({' and '.join(map(str, lengths))}): "
            "give tensors with equal first axes."
        )


def _check_parts(parts: Sequence[Indices], total: int) -> None:
    for client, part in enumerate(parts):
        if not len(part):
            raise _no_examples(client)
    every = np.concatenate(parts)
    if not np.issubdtype(every.dtype, np.integer) or every.min() < 0 or every.max() >= total:
        for client, part in enumerate(parts):
            _check_part(client, np.asarray(part), total)


def _check_part(client: int, part: Indices, total: int) -> None:
    if not len(part):
        raise _no_examples(client)
    if not np.issubdtype(part.dtype, np.integer):
        raise InputError(f"the parts hold {part.dtype} values: give whole numbers, the indices of examples.")
    if part.min() < 0 or part.max() >= total:
        raise InputError(
            f"client {client} has an example index outside 0..{total - 1}: "
            "split the very examples that the population is given."
        )


def _no_examples(client: int) -> InputError:
    return InputError(
        f"client {client} has no examples: use fewer clients, a more even partition, "
        "or one with a least size such as dirichlet:0.5:1."
    )
