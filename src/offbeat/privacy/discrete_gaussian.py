"""The discrete Gaussian: integers k with probability proportional to exp(-k^2 / (2 sigma^2)), exactly.

Integer noise on integer sums has no low-order bits that could reveal more than the theory says. For integer
vectors that differ by at most D in norm, sums with this noise have Rényi divergences of order a of at most
a D^2 / (2 sigma^2), those of the Gaussian mechanism (Canonne, Kamath and Steinke, NeurIPS 2020), so that an
accountant by Rényi divergences holds for both.

The sampler is theirs, with one rejection in place of three. A candidate is u + t v with u uniform below t, a
power of two, and P(v >= n) = exp(-n). It is accepted with probability exp(-x), where x = (u + t v)^2 /
(2 sigma^2) - v + sigma^2 / (2 t^2) is never negative; the sign is a coin, and minus zero is rejected. A
uniform number is compared with exp(-x) in floating point, and in as many digits as it takes where the error
of that could decide, about once in 2^46 comparisons. The result is a sample of the distribution itself
and not of an approximation. Bits are AES-256 in counter mode: the noise is a function of a key and a label.
"""

import hashlib
import math
from decimal import Context, Decimal
from fractions import Fraction
from functools import cache

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from offbeat.errors import InputError
from offbeat.privacy.mechanism import KEY_BYTES

Integers = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]
_CHUNK = 1 << 14  # candidates at a time
_MAX_DEVIATION = 2.0**40
_RELATIVE_ERROR = 2.0**-48  # of an exponential in floating point, in units of 2 plus its exponent's parts


def discrete_gaussian(key: bytes, label: bytes, deviation: float, count: int) -> Integers:
    """Independent draws, as a function of key and label; `deviation` is sigma."""
    if not 0 < deviation <= _MAX_DEVIATION:
        raise InputError(
            f"discrete Gaussian noise of deviation {deviation} cannot be drawn: give one above 0."
        )
    words, digits = (_Bits(key, label, purpose) for purpose in (b"words", b"digits"))
    width = max(0, math.frexp(deviation)[1])  # t = 2^width is the deviation or up to twice as much
    result, filled = np.empty(count, np.int64), 0
    while filled < count:
        drawn = words.draw(3 * _CHUNK).reshape(3, _CHUNK)
        below = (drawn[0] & np.uint64((1 << width) - 1)).astype(np.int64)
        negative = (drawn[0] >> np.uint64(63)).astype(bool)
        steps = _tail_steps(drawn[1], digits)
        size = below + (steps << width)
        kept = _accepted(size, steps, drawn[2] >> np.uint64(11), deviation, width, digits)
        kept &= ~(negative & (size == 0))
        chosen = np.where(negative, -size, size)[kept][: count - filled]
        result[filled : filled + len(chosen)] = chosen
        filled += len(chosen)
    return result


class _Bits:
    """Pseudo-random words of 64 bits."""

    def __init__(self, key: bytes, label: bytes, purpose: bytes) -> None:
        data = len(label).to_bytes(8, "little") + label + purpose
        own = hashlib.blake2b(data, key=key, digest_size=KEY_BYTES, person=b"discrete noise").digest()
        self._cipher = Cipher(AES(own), CTR(bytes(16))).encryptor()

    def draw(self, count: int) -> _Words:
        return np.frombuffer(self._cipher.update(bytes(8 * count)), dtype="<u8").astype(np.uint64)


@cache
def _tail_thresholds() -> _Words:
    """floor(2^64 exp(-n)) for n from 1 until it is 0."""
    found: list[int] = []
    while not found or found[-1]:
        low, high = _exp_bounds(Fraction(len(found) + 1), 64)
        assert low == high  # exp(-n) is irrational, and no multiple of 2^-64 is that near
        found.append(low)
    return np.array(found, dtype=np.uint64)


def _tail_steps(words: _Words, digits: _Bits) -> Integers:
    """Draws of v: the number of n for which a uniform number is below exp(-n)."""
    thresholds = _tail_thresholds()
    rising = thresholds[::-1]
    steps = (len(rising) - np.searchsorted(rising, words, side="right")).astype(np.int64)
    for place in np.flatnonzero(thresholds[np.minimum(steps, len(thresholds) - 1)] == words):
        n, uniform = int(steps[place]), _Uniform(int(words[place]), 64, digits)
        while uniform.is_below_exp(Fraction(n + 1)):
            n += 1
        steps[place] = n
    return steps


def _accepted(
    size: Integers, steps: Integers, words: _Words, deviation: float, width: int, digits: _Bits
) -> npt.NDArray[np.bool_]:
    """Whether a uniform number, of which the words are the first 53 bits, is below the exponential."""
    square = (size / deviation) ** 2 / 2
    exponent = square - steps + (deviation * 2.0**-width) ** 2 / 2
    expected = np.exp(-exponent)
    error = expected * _RELATIVE_ERROR * (2 + square + steps)
    uniform = words.astype(np.float64)
    accepted: npt.NDArray[np.bool_] = (uniform + 1) * 2.0**-53 <= expected - error
    undecided = ~accepted & (uniform * 2.0**-53 < expected + error)
    variance = Fraction(deviation) ** 2
    for place in np.flatnonzero(undecided):
        exact = Fraction(int(size[place]) ** 2) / (2 * variance) - int(steps[place])
        exact += variance / (2 * 4**width)
        accepted[place] = _Uniform(int(words[place]), 53, digits).is_below_exp(exact)
    return accepted


class _Uniform:
    """A uniform number in [0, 1) of which the first bits are known; further ones are drawn as needed."""

    def __init__(self, prefix: int, bits: int, digits: _Bits) -> None:
        self._prefix, self._bits, self._digits = prefix, bits, digits

    def is_below_exp(self, exponent: Fraction) -> bool:
        """Whether it is below exp(-exponent)."""
        while True:
            low, high = _exp_bounds(exponent, self._bits)
            if self._prefix < low:
                return True
            if self._prefix > high:
                return False
            self._prefix = self._prefix << 64 | int(self._digits.draw(1)[0])
            self._bits += 64


def _exp_bounds(exponent: Fraction, bits: int) -> tuple[int, int]:
    """Integers between which floor(2^bits exp(-exponent)) lies; mostly the same one."""
    size = max(1, len(str(int(exponent))))
    context = Context(prec=bits * 302 // 1000 + size + 30, Emin=-(10**9), Emax=10**9)
    value = context.divide(Decimal(-exponent.numerator), Decimal(exponent.denominator))
    scaled = context.multiply(context.exp(value), Decimal(2**bits))
    margin = context.scaleb(scaled, -(context.prec - size - 5))
    low, high = (int(edge) for edge in (context.subtract(scaled, margin), context.add(scaled, margin)))
    return low, high
