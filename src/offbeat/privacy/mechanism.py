"""How much noise each field of a sum gets.

A field of bound b and share s gets a standard deviation of noise * b / s. One client then moves the
whole release by at most sqrt(sum of s^2) / noise in units of the noise, which is 1 / noise as the
squares of the shares add up to 1: jointly it is one Gaussian mechanism of multiplier `noise`. For momentum
approximation (arXiv 2402.09247) shares of 1 / 1.1 for updates and sqrt(1 - 1 / 1.21) for stamps are its
joint sensitivity of 1.1 times the updates' bound.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from offbeat.errors import InputError, unknown
from offbeat.privacy.quantile import Quantile

_SLACK = 1e-9


def deal(names: Iterable[str], given: Mapping[str, float]) -> dict[str, float]:
    """The share of each field: those given, and the others alike, so that the squares add up to 1."""
    fields = list(names)
    shares = {name: given[name] for name in fields if name in given}
    for name, share in shares.items():
        if not 0 < share <= 1:
            raise InputError(f"the share of {name} is {share}: give one above 0 and at most 1.")
    others = [name for name in fields if name not in given]
    left = 1 - sum(share**2 for share in shares.values())
    if abs(left) > _SLACK if not others else left <= _SLACK:
        ask = "lower them, for fields without one" if others else "make it 1"
        raise InputError(f"the squares of the shares add up to {1 - left:g}: {ask}.")
    return shares | {name: math.sqrt(left / len(others)) for name in others}


def check_bounds(fields: Sequence[str], bounds: Mapping[str, float], given: Mapping[str, float]) -> None:
    """Refuse given bounds without a field, and fields without any bound."""
    for name in given:
        if name not in fields:
            raise unknown("upload field", name, fields)
    for name in fields:
        if name not in bounds:
            raise InputError(f"the upload's field {name} has no bound, so no noise would hide it: give one.")


@dataclass(frozen=True)
class Gaussian:
    """Noise of multiplier `noise` for all that one release holds."""

    noise: float
    shares: tuple[tuple[str, float], ...]
    scale: float  # below 1 in simulations of larger cohorts
    cohort: int  # the size that those are taken to have
    adaptive: Quantile | None
    moving: tuple[str, ...]  # fields whose bounds adapt, each by an answer in the release

    def check(self) -> None:
        """Refuse noise that cannot be dealt out."""
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
