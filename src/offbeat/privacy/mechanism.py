"""The Gaussian mechanism: how much noise each field of a sum gets, and the noise itself.

A field of bound b and share s gets a standard deviation of noise * b / s. One client then moves the
whole release by at most sqrt(sum of s^2) / noise in units of the noise, which is 1 / noise as the
squares of the shares add up to 1: jointly it is one Gaussian mechanism of multiplier `noise`. For momentum
approximation (arXiv 2402.09247) shares of 1 / 1.1 for updates and sqrt(1 - 1 / 1.21) for stamps are its
joint sensitivity of 1.1 times the updates' bound.

Noise is drawn from a secret key, each draw as a function of (key, numbers). The bits are AES-256 in counter
mode under a key of their own for each draw, so whoever has seen any number of draws cannot predict another.
A torch generator would not do: on the CPU it keeps 32 bits of its seed, which can be guessed, and two of
many draws would be the same. Draws are made on the CPU in double precision and then moved, so that devices
agree. A `mark` ties a draw to the sum it hides: a step that is taken again after a resume has the same
noise for the same sum, and fresh noise for any other, so that noise never cancels between two releases.
Rounding is not hidden: the last bits of a noised float can reveal more than the real numbers of the theory
would.
"""

import hashlib
import math
import secrets
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
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
    """Independent draws of mean 0 and standard deviation 1, in the shape, type and place of `like`."""
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
    with noise beside the sum, and the bound moves geometrically until it is the quantile asked for.
    """

    quantile: float = 0.5
    rate: float = 0.2
    noise: float | None = (
        None  # standard deviation on the count of answers; None: a 20th of the cohort or more
    )

    def __post_init__(self) -> None:
        if not 0 < self.quantile < 1:
            raise InputError(f"the quantile of adaptive clipping is {self.quantile}: give one in (0, 1).")
        if not 0 < self.rate < math.inf:
            raise InputError(f"the rate of adaptive clipping is {self.rate}: give one above 0.")
        if self.noise is not None and not 0 <= self.noise < math.inf:
            raise InputError(f"the noise of adaptive clipping is {self.noise}: give at least 0.")

    def deviation(self, noise: float, cohort: int, answers: int) -> float:
        """The standard deviation on each of the counts of answers.

        Unless given it is the paper's, and so much that the answers take no more than a quarter of
        what the whole release may tell.
        """
        if self.noise is not None or not noise:
            return self.noise or 0.0
        return max(cohort / 20, math.sqrt(answers) * noise)

    def rest(self, noise: float, cohort: int, answers: int) -> float:
        """The multiplier for everything else, so that all together is one release of multiplier `noise`."""
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
    """The share of each field: those given, and the others alike, so that the squares add up to 1."""
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
    """Refuse given bounds without a field, and fields without any bound."""
    for name in given:
        if name not in fields:
            raise unknown_name("upload field", name, fields)
    for name in fields:
        if name not in bounds:
            raise InputError(f"the upload's field {name} has no bound, so no noise would hide it: give one.")


@dataclass(frozen=True)
class GaussianMechanism:
    """Noise of multiplier `noise` for all that one release holds."""

    noise: float
    shares: tuple[tuple[str, float], ...]
    scale: float  # below 1 in simulations of larger cohorts
    cohort: int  # the size that those are taken to have
    adaptive: AdaptiveClipping | None
    moving: tuple[str, ...]  # fields whose bounds adapt, each by an answer in the release

    def check(self) -> None:
        """Refuse noise of which the answers leave nothing."""
        self._multiplier()

    def deviations(
        self, bounds: Mapping[str, float], sizes: Mapping[str, int], rounding: float
    ) -> dict[str, float]:
        """Of each field's noise on the sum; rounding of each number may have lengthened what was clipped."""
        shares, noise = dict(self.shares), self._multiplier() * self.scale
        if not noise:
            return dict.fromkeys(sizes, 0.0)
        return {
            name: noise * (bounds[name] + rounding * math.sqrt(size)) / shares[name]
            for name, size in sizes.items()
        }

    def answer_deviation(self) -> float:
        """Of the noise on each sum of answers."""
        if self.adaptive is None:
            return 0.0
        return self.scale * self.adaptive.deviation(self.noise, self.cohort, len(self.moving))

    def _multiplier(self) -> float:
        """For all but the answers."""
        if self.adaptive is None:
            return self.noise
        return self.adaptive.rest(self.noise, self.cohort, len(self.moving))
