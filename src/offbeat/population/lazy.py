"""Parts that are computed when they are asked for, so that a population of any size takes no memory.

Each is what `Population` asks of its parts: a length, and the examples of one client by its number.
Clients may share examples, as they must where there are more clients than data.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat import draws
from offbeat.errors import InputError


@dataclass(frozen=True)
class Blocks:
    """Client c has the `size` examples from c * size on, as if the data were repeated for ever."""

    clients: int
    size: int
    examples: int  # of the data

    def __post_init__(self) -> None:
        _check(self.clients, self.size, self.examples)

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: int) -> NDArray[np.int64]:
        _check_client(client, self.clients)
        return np.arange(client * self.size, (client + 1) * self.size) % self.examples


@dataclass(frozen=True)
class Drawn:
    """Each client has `least` to `most` different examples, how many and which a keyed draw says."""

    clients: int
    least: int
    most: int
    examples: int  # of the data
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self.clients, self.most, self.examples)
        if not 1 <= self.least <= self.most:
            raise InputError(
                f"clients have from {self.least} to {self.most} examples: give 1 <= least <= most."
            )

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: int) -> NDArray[np.int64]:
        _check_client(client, self.clients)
        rng = draws.generator(self.seed, "part", client)
        size = rng.integers(self.least, self.most, endpoint=True)
        return rng.choice(self.examples, size, replace=False, shuffle=False)


def _check(clients: int, size: int, examples: int) -> None:
    if clients < 1:
        raise InputError(f"the number of clients is {clients}: give at least 1.")
    if not 1 <= size <= examples:
        raise InputError(f"a client with {size} of {examples} examples cannot be: give from 1 to {examples}.")


def _check_client(client: int, clients: int) -> None:
    if not 0 <= client < clients:
        raise IndexError(f"client {client} of {clients}")
