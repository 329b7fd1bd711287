"""Compressed FedBuff: QSGD-like levels (Alistarh et al. 2017) and top-k with memory (Stich et al. 2018).

Rounding at random is by a hash of a number's position and the task's key, in arithmetic mod 2^32.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from oracles.replay import Problem, Step, Vector, begin, local_sgd

BLOCK = 1024
MASK = 2**32 - 1
Key = Callable[[int, int], int]  # of a client and a visit


def hashed(position: int, key: int) -> int:
    """The 32 bits that a position has under a key."""
    short = (key ^ (key >> 31)) & 0x7FFFFFFF
    bits = (position * 0x9E3779B1 + short) & MASK
    for _ in range(2):
        bits = (((bits >> 16) ^ bits) * 0x45D9F3B) & MASK
    return bits


def eight_bits(vector: Vector, key: int) -> Vector:
    """What is left of a vector after rounding to 255 levels a block."""
    result = np.zeros_like(vector)
    for start in range(0, len(vector), BLOCK):
        block = vector[start : start + BLOCK]
        unit = np.abs(block).max() / 127
        for offset, value in enumerate(block):
            chance = (hashed(start + offset, key) >> 8) / 2**24
            result[start + offset] = unit * np.floor(value / unit + chance) if unit else 0.0
    return result


def largest(vector: Vector, count: int) -> Vector:
    """The vector with all but its `count` largest numbers set to zero."""
    kept = sorted(range(len(vector)), key=lambda place: -abs(vector[place]))[:count]
    result = np.zeros_like(vector)
    result[kept] = vector[kept]
    return result


def compressed_fedbuff(
    problem: Problem,
    x0: npt.ArrayLike,
    steps: Sequence[Step],
    *,
    local_lr: float,
    server_lr: float,
    key: Key | None = None,
    count: int | None = None,
) -> list[Vector]:
    """x <- x - server_lr * mean of C(x_v - x_i), with error feedback where a `count` is given."""
    models = begin(x0)
    errors: dict[int, Vector] = {}
    for t, step in enumerate(steps):
        sent = []
        for client, version, visit in step:
            start = models[version]
            descent = start - local_sgd(problem, client, visit, start, local_lr)
            if count is None:
                assert key is not None
                sent.append(eight_bits(descent, key(client, visit)))
                continue
            whole = descent + errors.get(client, 0.0)
            sent.append(largest(whole, count))
            errors[client] = whole - sent[-1]
        models.append(models[t] - server_lr * np.mean(sent, axis=0))
    return models
