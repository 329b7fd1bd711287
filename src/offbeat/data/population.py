"""The clients: the examples of each, and the minibatches of each task."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat import draws, trees
from offbeat.errors import InputError, check_attributes, check_whole, describe
from offbeat.trees import Tree

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Steps:
    """`count` minibatches of `size` examples; the examples are shuffled again after each pass.

    Attributes:
        count: The number of minibatches of a task.
        size: The number of examples of a minibatch.
    """

    count: int
    size: int

    def __post_init__(self) -> None:
        _check_work("local steps", self.count, self.size)

    def steps(self, examples: int) -> int:
        """The number of minibatches of a client with this number of examples."""
        return self.count

    def draw(self, examples: int, rng: np.random.Generator) -> list[Positions]:
        """The minibatches of a client; with few examples, one may occur twice in a minibatch."""
        needed = self.count * self.size
        passes = -(-needed // examples)
        if passes == 1:
            stream = rng.choice(examples, needed, replace=False)
        else:
            stream = _shuffled(examples, passes, rng).reshape(-1)[:needed]
        return list(stream.reshape(self.count, self.size))


@dataclass(frozen=True)
class Epochs:
    """`count` shuffled passes over all examples; the last minibatch of a pass may be smaller.

    A minibatch of fewer than `least` examples is left out unless the client has no more: BatchNorm cannot
    normalise a single example.

    Attributes:
        count: The number of passes of a task.
        size: The number of examples of a minibatch.
        least: The smallest last minibatch of a pass.
    """

    count: int
    size: int
    least: int = 1

    def __post_init__(self) -> None:
        _check_work("epochs", self.count, self.size)
        if not 1 <= self.least <= self.size:
            raise InputError(f"the least minibatch is {self.least}: give a number from 1 to the batch size.")

    def steps(self, examples: int) -> int:
        """The number of minibatches of a client with this number of examples."""
        return self.count * len(self._starts(examples))

    def draw(self, examples: int, rng: np.random.Generator) -> list[Positions]:
        """The minibatches of a client with this number of examples."""
        order = _shuffled(examples, self.count, rng)
        starts = self._starts(examples)
        return [row[start : start + self.size] for row in order for start in starts]

    def _starts(self, examples: int) -> range:
        return range(0, max(1, examples - self.least + 1), self.size)


def _shuffled(examples: int, passes: int, rng: np.random.Generator) -> Positions:
    """(passes, examples) independent orders."""
    order = np.empty((passes, examples), np.int64)
    order[:] = np.arange(examples)
    return rng.permuted(order, axis=1, out=order)


def _check_work(counted: str, count: int, size: int) -> None:
    check_whole(f"the number of {counted}", count)
    check_whole("the batch size", size)


Indices = NDArray[np.int64]

_PASS_BATCH = 256  # examples of one piece of a full pass


class Parts(Protocol):
    """The indices of each client's examples: a list, or an object that computes them on request."""

    def __len__(self) -> int: ...

    def __getitem__(self, client: int, /) -> Indices: ...


class Examples(NamedTuple):
    """Inputs and targets: trees of tensors whose first axis is the examples.

    Attributes:
        inputs: A tensor, or a tuple or dictionary of tensors, which become the arguments of the module.
        targets: A tensor, or a tuple or dictionary of tensors.
    """

    inputs: Tree
    targets: Tree

    @property
    def total(self) -> int:
        """The number of examples."""
        return len(trees.leaves(self)[0])

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The examples on another device; `dtype` applies to floating-point tensors only."""

        def move(leaf: Tensor) -> Tensor:
            return leaf.to(device=device, dtype=dtype if leaf.is_floating_point() else None)

        moved: Self = trees.map(move, self)
        return moved

    def gather(self, indices: Indices) -> "Examples":
        """The examples at these indices, in their order."""
        rows = torch.from_numpy(indices)
        gathered: Examples = trees.map(lambda leaf: leaf[rows.to(leaf.device)], self)
        return gathered


@runtime_checkable
class ExampleSource(Protocol):
    """Examples that are read by index when they are needed, such as those of a file larger than memory."""

    @property
    def total(self) -> int:
        """The indices are below this number."""
        ...

    def gather(self, indices: Indices) -> Examples:
        """The examples at these indices, in their order."""
        ...


@dataclass(frozen=True)
class Population:
    """All clients; `parts[client]` are the indices of its examples in `data`.

    Parts in a list or a tuple are checked at once. Others may be lazy (`LazyRandom`) and
    are never scanned: the part of a client is checked when it trains.

    Attributes:
        data: The examples of all clients, in memory or as a source that is read when it is needed.
        parts: The indices of the examples of each client.
        work: The minibatches of a task: `Steps` or `Epochs`.
        names: The names of the clients, for messages and reports.
    """

    data: Examples | ExampleSource
    parts: Parts
    work: Steps | Epochs
    names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_attributes("the work of a task", self.work, ["draw"], "offbeat.Steps or offbeat.Epochs")
        parts: object = self.parts
        if isinstance(parts, str) or not hasattr(parts, "__getitem__"):
            raise InputError(
                f"the parts of a population are {describe(parts)}: give the indices of each client's "
                "examples, such as offbeat.Dirichlet(0.5).split(labels, clients=100)."
            )
        if self.in_memory or not isinstance(self.data, ExampleSource):
            object.__setattr__(self, "data", check_examples(self.data))
        if len(self.parts) == 0:
            raise InputError("the population has no clients: give at least one part.")
        if isinstance(self.parts, list | tuple):
            _check_parts(self.parts, self.data.total, self.names)

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def in_memory(self) -> bool:
        """Whether the examples are tensors, and not read when they are needed."""
        return isinstance(self.data, Examples)

    def size(self, client: int) -> int:
        """The number of examples of a client."""
        return len(self.parts[client])

    def indices(self, client: int, visit: int, seed: int) -> list[Indices]:
        """The indices of the examples of each minibatch of a client's task number `visit`."""
        part = self._part(client)
        batches = self.work.draw(len(part), draws.generator(seed, "batches", client, visit))
        return [part[batch] for batch in batches]

    def steps(self, client: int) -> int:
        """The number of minibatches of a client's task."""
        return self.work.steps(self.size(client) if isinstance(self.work, Epochs) else 1)

    def everything(self, client: int) -> list[Indices]:
        """The indices of all examples of a client, in pieces of bounded size."""
        part = self._part(client)
        return [part[start : start + _PASS_BATCH] for start in range(0, len(part), _PASS_BATCH)]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The same clients with their examples on another device; a source is read to the CPU."""
        return replace(self, data=self.data.to(device, dtype)) if isinstance(self.data, Examples) else self

    def _part(self, client: int) -> Indices:
        part = np.asarray(self.parts[client])
        if not isinstance(self.parts, list | tuple):
            _check_part(client, part, self.data.total, self.names)
        return part


def check_examples(data: Any) -> Examples:
    """`Examples`, or a pair of tensors or trees of tensors; raises `InputError` for anything else."""
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise InputError("the data are not a pair of inputs and targets: give Examples(inputs, targets).")
    examples = data if isinstance(data, Examples) else Examples(*data)
    leaves: list[Any] = [*trees.leaves(examples)]
    if not leaves or not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
        raise InputError("the examples are not tensors with a first axis: make inputs and targets tensors.")
    lengths = sorted({len(leaf) for leaf in leaves})
    if len(lengths) > 1:
        raise InputError(
            f"inputs and targets disagree on the number of examples ({' and '.join(map(str, lengths))}): "
            "give tensors with equal first axes."
        )
    return examples


def _check_parts(parts: Sequence[Indices], total: int, names: Sequence[str] | None) -> None:
    for client, part in enumerate(parts):
        if not hasattr(part, "__len__"):
            raise InputError(
                f"the part of client {client} is {describe(part)}: give the indices of its examples."
            )
        if not len(part):
            raise no_examples(client, names)
    every = np.concatenate(parts)
    if not np.issubdtype(every.dtype, np.integer) or every.min() < 0 or every.max() >= total:
        for client, part in enumerate(parts):
            _check_part(client, np.asarray(part), total, names)


def _check_part(client: int, part: Indices, total: int, names: Sequence[str] | None) -> None:
    if not len(part):
        raise no_examples(client, names)
    if not np.issubdtype(part.dtype, np.integer):
        raise InputError(f"the parts have {part.dtype} values: give integers, the indices of examples.")
    if part.min() < 0 or part.max() >= total:
        raise InputError(
            f"client {_client_name(client, names)} has an example index outside 0..{total - 1}: "
            "split the same examples that the population is given."
        )


def no_examples(client: int, names: Sequence[str] | None = None) -> InputError:
    """The error for a client without examples."""
    if names is not None:
        return InputError(
            f"client {_client_name(client, names)} has no examples: leave it out, or give it some."
        )
    return InputError(
        f"client {client} has no examples: use fewer clients, a more even partition, "
        "or one with a least size such as dirichlet:0.5:1."
    )


def _client_name(client: int, names: Sequence[str] | None) -> str:
    return str(client) if names is None else f"'{names[client]}'"
