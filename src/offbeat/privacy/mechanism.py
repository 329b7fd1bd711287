"""The Gaussian mechanism: how much noise each field of a sum gets, and the noise itself.

A field of bound b and share s gets a standard deviation of noise * b / s. One client then moves the
whole release by at most sqrt(sum of s^2) / noise in units of the noise, which is 1 / noise as the
squares of the shares add up to 1: jointly it is one Gaussian mechanism of multiplier `noise`. For momentum
approximation (arXiv 2402.09247) shares of 1 / 1.1 for updates and sqrt(1 - 1 / 1.21) for stamps are its
joint sensitivity of 1.1 times the updates' bound.

Noise is drawn from a secret key, each draw as a function of (key, numbers). The bits are AES-256 in counter
mode under a key of their own for each draw, so no number of known draws allows another one to be predicted.
A torch generator would not do: on the CPU it keeps 32 bits of its seed, which can be guessed, and two of
many draws would be the same. Draws are made on the CPU in double precision and then moved, so that devices
agree. A `mark` binds a draw to the sum it hides: a step that is repeated after a resume has the same noise
for the same sum and fresh noise for any other, so that noise never cancels between two releases.
Floating-point rounding is not hidden: the last bits of a noisy float can reveal more than the real numbers of
the theory would.

Integer sums get the discrete Gaussian, integers k with probability proportional to exp(-k^2 / (2 sigma^2)),
which has no such bits. For integer vectors that differ by at most D in norm, sums with this noise have Rényi
divergences of order a of at most a D^2 / (2 sigma^2), those of the Gaussian mechanism (Canonne, Kamath and
Steinke, NeurIPS 2020), so that an accountant by Rényi divergences holds for both. The sampler is theirs, with
one rejection in place of three. A candidate is u + t v with u uniform below t, a power of two, and
P(v >= n) = exp(-n). It is accepted with probability exp(-x), where x = (u + t v)^2 / (2 sigma^2) - v +
sigma^2 / (2 t^2) is never negative; the sign is a coin, and minus zero is rejected. A uniform number is
compared with exp(-x) in floating point, and in as many digits as it takes where the error of that could
decide, about once in 2^46 comparisons. The result is a sample of the distribution itself and not of an
approximation.
"""

import hashlib
import math
import secrets
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import cache

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR

from offbeat.core import Tensor
from offbeat.errors import InputError, unknown_name

KEY_BYTES = 32


def secret_key() -> bytes:
    """A random key."""
    return secrets.token_bytes(KEY_BYTES)


def seeded_key(seed: int) -> bytes:
    """A key that follows from a seed, for simulations."""
    return hashlib.blake2b(struct.pack("<q", seed), digest_size=KEY_BYTES, person=b"noise seed").digest()


def subkey(key: bytes, purpose: str) -> bytes:
    """A key derived for one purpose."""
    return hashlib.blake2b(key=key, digest_size=KEY_BYTES, person=purpose.encode()).digest()


def fingerprint(key: bytes, leaves: Iterable[Tensor]) -> bytes:
    """A keyed digest of these numbers."""
    import torch

    digest = hashlib.blake2b(key=key, digest_size=KEY_BYTES, person=b"mark")
    for leaf in leaves:
        digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
        digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def standard_normal(key: bytes, numbers: tuple[int, ...], like: Tensor, mark: bytes = b"") -> Tensor:
    """Independent draws of mean 0 and standard deviation 1, with the shape, type and device of `like`."""
    import torch

    count = like.numel()
    pairs = (count + 1) // 2
    packed = struct.pack(f"<{len(numbers)}q", *numbers) + mark
    stream = hashlib.blake2b(packed, key=key, digest_size=KEY_BYTES, person=b"noise").digest()
    cipher = Cipher(AES(stream), CTR(bytes(16))).encryptor()
    words = np.frombuffer(cipher.update(bytes(16 * pairs)), dtype="<u8") >> np.uint64(11)
    # Box and Muller; a radius needs a uniform number above 0
    radius = np.sqrt(-2 * np.log((words[:pairs] + np.uint64(1)) * 2.0**-53))
    angle = words[pairs:] * (2 * math.pi * 2.0**-53)
    draws = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
    return torch.from_numpy(draws).to(like.dtype).to(like.device).view(like.shape)


_ANSWER_SENSITIVITY = 0.5  # an answer is sent as plus or minus a half, so this is its sensitivity


@dataclass(frozen=True)
class AdaptiveClipping:
    """Bounds that follow a quantile of the clients' norms (Andrew et al., NeurIPS 2021).

    Each client also reports whether its norm was within the bound. The share of those that were is released
    with noise beside the sum, and the bound moves geometrically towards the quantile.
    """

    quantile: float = 0.5
    rate: float = 0.2
    noise: float | None = None  # deviation on the count of answers; None: a 20th of the cohort or more

    def __post_init__(self) -> None:
        if not 0 < self.quantile < 1:
            raise InputError(f"the quantile of adaptive clipping is {self.quantile}: give one in (0, 1).")
        if not 0 < self.rate < math.inf:
            raise InputError(f"the rate of adaptive clipping is {self.rate}: give one above 0.")
        if self.noise is not None and not 0 <= self.noise < math.inf:
            raise InputError(f"the noise of adaptive clipping is {self.noise}: give at least 0.")

    def deviation(self, noise: float, cohort: int, answers: int) -> float:
        """The standard deviation on each of the counts of answers.

        Unless given it is the paper's, or larger so that the answers use at most a quarter of the privacy
        loss of the release.
        """
        if self.noise is not None or not noise:
            return self.noise or 0.0
        return max(cohort / 20, math.sqrt(answers) * noise)

    def rest(self, noise: float, cohort: int, answers: int) -> float:
        """The multiplier for everything else, so that the whole is one release of multiplier `noise`."""
        if not noise:
            return noise
        deviation = self.deviation(noise, cohort, answers)
        left = noise**-2 - answers * (_ANSWER_SENSITIVITY / deviation) ** 2 if deviation else -math.inf
        if left <= 0:
            raise InputError(
                f"noise of {deviation} on the answers of adaptive clipping leaves nothing for the rest: "
                f"give it more than {_ANSWER_SENSITIVITY * math.sqrt(answers) * noise:g}."
            )
        return float(left**-0.5)

    def move(self, bound: float, total: float, weight: float) -> float:
        """The next bound, from the noisy sum of answers that have this weight together."""
        within = total / weight + _ANSWER_SENSITIVITY
        return bound * math.exp(-self.rate * (within - self.quantile))


_SHARE_TOLERANCE = 1e-9


def noise_shares(names: Iterable[str], given: Mapping[str, float]) -> dict[str, float]:
    """The share of each field: the given ones, and equal ones for the others; the squares add up to 1."""
    fields = list(names)
    shares = {name: given[name] for name in fields if name in given}
    for name, share in shares.items():
        if not 0 < share <= 1:
            raise InputError(f"the share of {name} is {share}: give one above 0 and at most 1.")
    others = [name for name in fields if name not in given]
    left = 1 - sum(share**2 for share in shares.values())
    if abs(left) > _SHARE_TOLERANCE if not others else left <= _SHARE_TOLERANCE:
        ask = "lower them, for fields without one" if others else "make it 1"
        raise InputError(f"the squares of the shares add up to {1 - left:g}: {ask}.")
    return shares | {name: math.sqrt(left / len(others)) for name in others}


def check_bounds(fields: Sequence[str], bounds: Mapping[str, float], given: Mapping[str, float]) -> None:
    """Reject bounds of unknown fields, and fields without a bound."""
    for name in given:
        if name not in fields:
            raise unknown_name("upload field", name, fields)
    for name in fields:
        if name not in bounds:
            raise InputError(f"the upload's field {name} has no bound, so no noise would hide it: give one.")


@dataclass(frozen=True)
class GaussianMechanism:
    """Noise of multiplier `noise` for one release."""

    noise: float
    shares: tuple[tuple[str, float], ...]
    scale: float  # below 1 in simulations of larger cohorts
    cohort: int  # the assumed size of those cohorts
    adaptive: AdaptiveClipping | None
    moving: tuple[str, ...]  # fields with adaptive bounds, each of which has an answer in the release

    def check(self) -> None:
        """Reject noise that would be used up by the answers."""
        self._multiplier()

    def deviations(
        self, bounds: Mapping[str, float], sizes: Mapping[str, int], rounding: float
    ) -> dict[str, float]:
        """The deviation of each field's noise; `rounding` of each number may have increased clipped norms."""
        shares, noise = dict(self.shares), self._multiplier() * self.scale
        if not noise:
            return dict.fromkeys(sizes, 0.0)
        return {
            name: noise * (bounds[name] + rounding * math.sqrt(size)) / shares[name]
            for name, size in sizes.items()
        }

    def answer_deviation(self) -> float:
        """The deviation of the noise on each sum of answers."""
        if self.adaptive is None:
            return 0.0
        return self.scale * self.adaptive.deviation(self.noise, self.cohort, len(self.moving))

    def _multiplier(self) -> float:
        """The multiplier for everything but the answers."""
        if self.adaptive is None:
            return self.noise
        return self.adaptive.rest(self.noise, self.cohort, len(self.moving))


Integers = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]
_CHUNK = 1 << 14  # candidates at a time
_MAX_DEVIATION = 2.0**40
_RELATIVE_ERROR = 2.0**-48  # of exp in floating point, times 2 plus the terms of its exponent


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
    for index in np.flatnonzero(thresholds[np.minimum(steps, len(thresholds) - 1)] == words):
        n, uniform = int(steps[index]), _Uniform(int(words[index]), 64, digits)
        while uniform.is_below_exp(Fraction(n + 1)):
            n += 1
        steps[index] = n
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
    for index in np.flatnonzero(undecided):
        exact = Fraction(int(size[index]) ** 2) / (2 * variance) - int(steps[index])
        exact += variance / (2 * 4**width)
        accepted[index] = _Uniform(int(words[index]), 53, digits).is_below_exp(exact)
    return accepted


class _Uniform:
    """A uniform number in [0, 1) of which the first bits are known; more bits are drawn as needed."""

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
    """A lower and an upper bound on floor(2^bits exp(-exponent)), which are mostly equal."""
    size = max(1, len(str(int(exponent))))
    context = Context(prec=bits * 302 // 1000 + size + 30, Emin=-(10**9), Emax=10**9)
    value = context.divide(Decimal(-exponent.numerator), Decimal(exponent.denominator))
    scaled = context.multiply(context.exp(value), Decimal(2**bits))
    margin = context.scaleb(scaled, -(context.prec - size - 5))
    low, high = (int(edge) for edge in (context.subtract(scaled, margin), context.add(scaled, margin)))
    return low, high
