"""How the noise of one server step depends on that of others: the matrix mechanism.

Take a matrix C >= 0 over server steps, the clipped sums x with a row for each step, and independent noise z.
With a lower-triangular C, to release x + C^-1 z tells no more than C x + z would, also where contributions
depend on earlier releases (Denisov et al. 2022), and its prefix sums can be far less noisy than those of
x + z. A client with contributions of norm 1 to the steps in P moves C x by at most the root of the sum of
(C^T C)_ij over i and j in P: no entry is negative, so equal vectors are the worst. The sensitivity is the
largest of these over all P that are allowed.
"""

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from offbeat.core import Saved
from offbeat.errors import InputError
from offbeat.privacy.gaussian import standard_normal


class NoiseStream(Protocol):
    """The noise of one run, drawn step by step from a key; it can be saved between two steps."""

    def draw(self, step: int, field: int, like: Tensor, mark: bytes = b"") -> Tensor:
        """Noise of multiplier 1 for one tensor of one release; steps count from 0 without a gap.

        `mark` is that of the step's sum: where it is another, so is what is drawn afresh.
        """
        ...

    def save(self) -> Saved: ...

    def load(self, saved: Saved) -> None: ...


class Noise(Protocol):
    """A choice of C."""

    @property
    def name(self) -> str: ...

    def sensitivity(self, steps: int, most: int | None, apart: int) -> float:
        """Of a run of `steps`, with at most `most` contributions of a client, each `apart` from the next."""
        ...

    def open(self, key: bytes) -> NoiseStream:
        """Begin a run."""
        ...


@dataclass(frozen=True)
class Independent:
    """C = I: fresh noise for each step."""

    @property
    def name(self) -> str:
        return "independent"

    def sensitivity(self, steps: int, most: int | None, apart: int) -> float:
        count = contributions(steps, most, apart)
        return math.sqrt(count) if apart else float(count)

    def open(self, key: bytes) -> NoiseStream:
        return _Fresh(key)


class _Fresh:
    """Nothing to keep."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def draw(self, step: int, field: int, like: Tensor, mark: bytes = b"") -> Tensor:
        return standard_normal(self._key, (step, field), like, mark)

    def save(self) -> Saved:
        return Saved({}, {})

    def load(self, saved: Saved) -> None:
        pass


def contributions(steps: int, most: int | None, apart: int) -> int:
    """How often a client can contribute in so many steps; 0 apart: any number of times to one step."""
    if steps < 0 or apart < 0 or (most is not None and most < 1):
        raise InputError(
            f"there is no sensitivity of {steps} steps with {most} contributions {apart} apart: "
            "steps and distance are at least 0, contributions at least 1."
        )
    if apart == 0 and most is None:
        raise InputError(
            "contributions that nothing bounds have no sensitivity: say how many at most, or how far apart."
        )
    if steps == 0:
        return 0
    room = math.inf if apart == 0 else -(-steps // apart)
    return int(room if most is None else min(most, room))
