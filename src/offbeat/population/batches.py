"""The minibatches of one task: positions among the client's own examples, in order."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import InputError

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Steps:
    """Exactly `count` minibatches of exactly `size` examples: shuffled, and shuffled again when used up."""

    count: int
    size: int

    def __post_init__(self) -> None:
        _check("local steps", self.count, self.size)

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
        _check("epochs", self.count, self.size)
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


def _check(counted: str, count: int, size: int) -> None:
    if count < 1:
        raise InputError(f"the number of {counted} is {count}: give at least 1.")
    if size < 1:
        raise InputError(f"the batch size is {size}: give at least 1.")
