"""Sums in fixed point mod 2^32, in Python's own integers, which do not overflow."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MODULUS = 2**32


def encode(x: float, bits: int) -> int:
    """The nearest multiple of 2^-bits, ties to even, as a residue."""
    return round(x * 2**bits) % MODULUS


def decode(residue: int, bits: int) -> float:
    """The number nearest to zero that has this residue."""
    signed = residue - MODULUS if residue >= MODULUS // 2 else residue
    return signed / 2**bits


def fixed_point_sum(
    arrays: Sequence[npt.NDArray[np.float64]], weights: Sequence[int], bits: int
) -> npt.NDArray[np.float64]:
    """The weighted sum; right as long as it lies within 2^31 / 2^bits of zero."""
    sums = []
    for column in zip(*(array.tolist() for array in arrays), strict=True):
        residue = 0
        for x, weight in zip(column, weights, strict=True):
            residue = (residue + weight * encode(x, bits)) % MODULUS
        sums.append(decode(residue, bits))
    return np.array(sums)
