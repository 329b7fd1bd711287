"""Stretches of equal length along an axis, and what adds up in each."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class Bins:
    """From 0 to `end`, in `count` stretches; what lies outside belongs to the first or the last."""

    end: float
    count: int

    @property
    def width(self) -> float:
        return self.end / self.count

    @property
    def edges(self) -> Numbers:
        """Where stretches end."""
        return self.width * np.arange(1, self.count + 1, dtype=np.float64)

    @property
    def centres(self) -> Numbers:
        return self.edges - self.width / 2

    def places(self, at: Numbers) -> Places:
        """Which stretch each number lies in."""
        return np.clip(at / self.width, 0, self.count - 1).astype(np.int64)

    def tally(self, at: Numbers) -> Places:
        """How many of these numbers lie in each stretch."""
        return np.bincount(self.places(at), minlength=self.count)

    def presence(self, since: Numbers, until: Numbers) -> Numbers:
        """How long, in all, the intervals lie in each stretch."""
        return self._after(since) - self._after(until)

    def _after(self, at: Numbers) -> Numbers:
        """The length of each stretch that comes after each of these numbers, added up."""
        at = np.clip(at, 0.0, self.end)
        places = self.places(at)
        part = np.bincount(places, weights=(places + 1) * self.width - at, minlength=self.count)
        begun = np.bincount(places, minlength=self.count).cumsum()
        whole: Numbers = part + self.width * np.concatenate([[0], begun[:-1]])
        return whole
