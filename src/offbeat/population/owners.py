"""From draws to parts: an owner for every example, and nobody with too few."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from offbeat import draws

IntArray = NDArray[np.int64]
TRIES = 100


def parts(owners: IntArray, clients: int) -> list[IntArray]:
    """The indices that each client owns, in order."""
    order = np.argsort(owners, kind="stable")
    ends = np.cumsum(np.bincount(owners, minlength=clients))
    return np.split(order, ends[:-1])


def cut(shares: NDArray[np.float64], count: int) -> IntArray:
    """The owner of each of `count` examples in a row, cut at cumulative shares."""
    cuts = (np.cumsum(shares[:-1]) * count).astype(np.int64)
    return np.searchsorted(cuts, np.arange(count), side="right")


def scatter(order: IntArray, values: IntArray) -> IntArray:
    """What `values` are when they are given in that order."""
    placed = np.empty_like(values)
    placed[order] = values
    return placed


def settle(draw: Callable[[int], IntArray], clients: int, least: int, seed: int) -> IntArray:
    """The first draw of owners that leaves nobody short, or the nearest one, repaired."""
    lacks = []
    for attempt in range(TRIES):
        owners = draw(attempt)
        sizes = np.bincount(owners, minlength=clients)
        lacks.append(np.maximum(least - sizes, 0).sum())
        if lacks[-1] == 0:
            return owners
    nearest = draw(int(np.argmin(lacks)))
    return _repaired(nearest, clients, least, draws.generator(seed, "partition repair"))


def _repaired(owners: IntArray, clients: int, least: int, rng: np.random.Generator) -> IntArray:
    held = [list(part) for part in parts(owners, clients)]
    sizes = np.array([len(part) for part in held])
    repaired = owners.copy()
    for client in np.flatnonzero(sizes < least):
        while sizes[client] < least:
            giver = int(np.argmax(sizes))
            example = held[giver].pop(int(rng.integers(sizes[giver])))
            repaired[example] = client
            sizes[giver] -= 1
            sizes[client] += 1
    return repaired
