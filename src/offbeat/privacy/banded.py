"""Banded factors: a lower-triangular C of a few bands, the same for each step.

The bands are the first coefficients of 1 / sqrt(1 - x), whose square is the matrix of prefix sums. All of
them are the best factors for the largest error of a prefix (Fichtenberger, Henzinger and Upadhyay 2023;
Dvijotham et al. 2024), and the first few are near the best for clients that come back (Kalinin and Lampert
2024, arXiv 2405.13763). They need no search, so nothing depends on how one ended. Factors that were searched
for, such as those of `jax_privacy.matrix_factorization`, make `Toeplitz`.

Sensitivity. The bands are positive and fall, and for such the worst contributions are to the first step and
to those at each `apart` steps from it (theorem 2 there). With no more bands than `apart` their columns do
not meet, and it is sqrt(contributions) times the norm of the bands.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from torch import Tensor

from offbeat.core import Saved
from offbeat.errors import InputError
from offbeat.privacy.correlated import NoiseStream, contributions
from offbeat.privacy.gaussian import standard_normal

_MANY = 10**7


@dataclass(frozen=True)
class Banded:
    """C has `bands` bands, in closed form; the last `bands` - 1 draws are kept."""

    bands: int

    def __post_init__(self) -> None:
        if self.bands < 1:
            raise InputError(f"banded noise of {self.bands} bands cannot be: give at least 1.")

    @property
    def name(self) -> str:
        return f"banded:{self.bands}"

    @property
    def coefficients(self) -> npt.NDArray[np.float64]:
        """The first column of C, as far as it is not zero."""
        return _first(self.bands)

    def sensitivity(self, steps: int, most: int | None, apart: int) -> float:
        return _sensitivity(_first(min(self.bands, max(steps, 1), _MANY + 1)), steps, most, apart)

    def open(self, key: bytes) -> NoiseStream:
        return _Recursion(key, self.coefficients[1:].tolist())


@dataclass(frozen=True)
class Toeplitz:
    """C with bands of one's own; only how they compare with the first one matters."""

    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        falling = all(a >= b for a, b in pairwise(self.factors))
        if not self.factors or not (math.inf > self.factors[0] > 0) or not falling or self.factors[-1] < 0:
            raise InputError(
                "the factors of correlated noise must begin above 0, never rise and never be negative: "
                "give others."
            )

    @property
    def name(self) -> str:
        return f"toeplitz of {len(self.factors)} bands"

    @property
    def coefficients(self) -> npt.NDArray[np.float64]:
        """The first column of C, as far as it is given."""
        return np.array(self.factors) / self.factors[0]

    def sensitivity(self, steps: int, most: int | None, apart: int) -> float:
        return _sensitivity(self.coefficients, steps, most, apart)

    def open(self, key: bytes) -> NoiseStream:
        return _Recursion(key, self.coefficients[1:].tolist())


def _first(bands: int) -> npt.NDArray[np.float64]:
    """The first coefficients of 1 / sqrt(1 - x)."""
    place = np.arange(1, bands)
    return np.cumprod(np.concatenate([[1.0], (2 * place - 1) / (2 * place)]))


def _sensitivity(bands: npt.NDArray[np.float64], steps: int, most: int | None, apart: int) -> float:
    count = contributions(steps, most, apart)
    bands = bands[:steps]
    reach = min(steps, max(count - 1, 0) * apart + len(bands))  # steps that a client can move
    if reach > _MANY:
        raise InputError(
            f"the sensitivity of banded noise over {reach} server steps takes too long: "
            f"allow fewer contributions, or steps up to {_MANY}."
        )
    if apart == 0:
        return count * float(np.linalg.norm(bands))
    moved = np.zeros(reach)
    for start in range(0, count * apart, apart):
        part = moved[start : start + len(bands)]
        part += bands[: len(part)]
    return float(np.linalg.norm(moved))


class _Recursion:
    """C^-1 z: each draw is a fresh one less the bands of the draws before."""

    def __init__(self, key: bytes, bands: list[float]) -> None:
        self._key = key
        self._bands = bands
        self._steps: dict[int, int] = {}  # field -> the next step
        self._drawn: dict[int, list[Tensor]] = {}  # field -> the last draws, the newest first

    def draw(self, step: int, field: int, like: Tensor, mark: bytes = b"") -> Tensor:
        expected = self._steps.get(field, 0)
        if step != expected:
            raise ValueError(f"correlated noise is drawn in order: step {expected} is next, not {step}")
        drawn = self._drawn.setdefault(field, [])
        noise = standard_normal(self._key, (step, field), like, mark)
        for band, before in zip(self._bands, drawn, strict=False):
            noise.sub_(before.to(like), alpha=band)
        drawn.insert(0, noise.clone())
        del drawn[len(self._bands) :]
        self._steps[field] = step + 1
        return noise

    def save(self) -> Saved:
        tensors = {
            f"{field}.{age}": noise for field, drawn in self._drawn.items() for age, noise in enumerate(drawn)
        }
        return Saved({"steps": {str(field): step for field, step in self._steps.items()}}, tensors)

    def load(self, saved: Saved) -> None:
        self._steps = {int(field): step for field, step in saved.facts["steps"].items()}
        self._drawn = {
            field: [saved.tensors[f"{field}.{age}"] for age in range(min(step, len(self._bands)))]
            for field, step in self._steps.items()
        }
