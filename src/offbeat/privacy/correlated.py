"""Noise that is correlated over server steps: the matrix mechanism.

Take a matrix C >= 0 over server steps, the clipped sums x with a row for each step, and independent noise z.
With a lower-triangular C, releasing x + C^-1 z reveals no more than C x + z would, also where contributions
depend on earlier releases (Denisov et al. 2022), and its prefix sums can be far less noisy than those of
x + z. A client with contributions of norm 1 to the steps in P moves C x by at most the root of the sum of
(C^T C)_ij over i and j in P: no entry is negative, so equal vectors are the worst. The sensitivity is the
largest of these over all P that are allowed.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from offbeat.core import SavedState, Tensor
from offbeat.errors import InputError, unknown_name
from offbeat.privacy.mechanism import standard_normal


class NoiseStream(Protocol):
    """The noise of one run, drawn step by step from a key; it can be saved between two steps."""

    def draw(self, step: int, field: int, like: Tensor, mark: bytes = b"") -> Tensor:
        """Noise of multiplier 1 for one tensor of one release; steps count from 0 without a gap.

        `mark` identifies the step's sum: for another sum, the fresh part of the noise is another, too.
        """
        ...

    def save(self) -> SavedState: ...

    def load(self, saved: SavedState) -> None: ...


class NoiseCorrelation(Protocol):
    """A choice of C."""

    @property
    def name(self) -> str: ...

    def sensitivity(self, steps: int, max_participations: int | None, min_separation: int) -> float:
        """The sensitivity of a run of `steps`, with bounds on a client's participations."""
        ...

    def open(self, key: bytes) -> NoiseStream:
        """Begin a run."""
        ...


@dataclass(frozen=True)
class IndependentNoise:
    """C = I: fresh noise for each step."""

    @property
    def name(self) -> str:
        return "independent"

    def sensitivity(self, steps: int, max_participations: int | None, min_separation: int) -> float:
        count = max_contributions(steps, max_participations, min_separation)
        return math.sqrt(count) if min_separation else float(count)

    def open(self, key: bytes) -> NoiseStream:
        return _IndependentStream(key)


class _IndependentStream:
    """Fresh noise; it has no state."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def draw(self, step: int, field: int, like: Tensor, mark: bytes = b"") -> Tensor:
        return standard_normal(self._key, (step, field), like, mark)

    def save(self) -> SavedState:
        return SavedState({}, {})

    def load(self, saved: SavedState) -> None:
        pass


def max_contributions(steps: int, max_participations: int | None, min_separation: int) -> int:
    """How often a client can contribute in `steps` steps; with a separation of 0, repeatedly to one step."""
    if steps < 0 or min_separation < 0 or (max_participations is not None and max_participations < 1):
        raise InputError(
            f"there is no sensitivity of {steps} steps with {max_participations} participations "
            f"{min_separation} steps apart: "
            "steps and separation are at least 0, participations at least 1."
        )
    if min_separation == 0 and max_participations is None:
        raise InputError(
            "unbounded participation has no sensitivity: give a largest number, or a least separation."
        )
    if steps == 0:
        return 0
    room = math.inf if min_separation == 0 else -(-steps // min_separation)
    return int(room if max_participations is None else min(max_participations, room))


_MAX_BANDED_STEPS = 10**7


@dataclass(frozen=True)
class BandedNoise:
    """C has `bands` bands, in closed form; the last `bands` - 1 draws are kept.

    The bands are the first coefficients of 1 / sqrt(1 - x), whose square is the matrix of prefix sums. All
    of them are the best factors for the largest error of a prefix (Fichtenberger, Henzinger and Upadhyay
    2023; Dvijotham et al. 2024), and the first few are near the best for repeated participation (Kalinin
    and Lampert 2024, arXiv 2405.13763). They need no optimisation.

    The bands are positive and fall, and for such the worst contributions are to the first step and to those
    at each `min_separation` steps from it (theorem 2 there). With no more bands than that their columns do
    not overlap, and the sensitivity is sqrt(contributions) times the norm of the bands.
    """

    bands: int

    def __post_init__(self) -> None:
        if self.bands < 1:
            raise InputError(f"banded noise cannot have {self.bands} bands: give at least 1.")

    @property
    def name(self) -> str:
        return f"banded:{self.bands}"

    @property
    def coefficients(self) -> npt.NDArray[np.float64]:
        """The first column of C, as far as it is not zero."""
        return _sqrt_coefficients(self.bands)

    def sensitivity(self, steps: int, max_participations: int | None, min_separation: int) -> float:
        return _banded_sensitivity(
            _sqrt_coefficients(min(self.bands, max(steps, 1), _MAX_BANDED_STEPS + 1)),
            steps,
            max_participations,
            min_separation,
        )

    def open(self, key: bytes) -> NoiseStream:
        return _BandedStream(key, self.coefficients[1:].tolist())


# Decays and output scales of the buffers, found by `jax_privacy.matrix_factorization.buffered_toeplitz` 2.0:
# optimize(n=..., min_sep=n / 5, max_participations=5, error="mean", min_buffers=4, max_buffers=4), in double
# precision. One of the four buffers had a scale below 1e-6 and is left out.
_BLT_FACTORS: dict[int, tuple[tuple[float, ...], tuple[float, ...]]] = {
    1000: (
        (0.989141782031292, 0.7777044501208814, 0.23193410696593902),
        (0.17645962992528377, 0.23717599601952133, 0.09075540296194405),
    ),
    10000: (
        (0.9988961486691513, 0.9687929430048974, 0.6957236513254973),
        (0.057440888275528686, 0.135420753132674, 0.29295192706316925),
    ),
}


@dataclass(frozen=True)
class BltNoise:
    """C is a buffered linear Toeplitz matrix (McMahan, Xu and Zhang, arXiv 2408.08868).

    Its first column is 1 and then the sum over buffers of scale * decay^(i - 1), which falls like that of
    the best Toeplitz matrices, and its inverse needs only one model-sized buffer for each decay. The
    parameters are those for runs of about `steps` server steps with 5 contributions of a client; a run of any
    length may use them, and its sensitivity is computed for what the run is.
    """

    steps: int = 1000

    def __post_init__(self) -> None:
        if self.steps not in _BLT_FACTORS:
            known = " and ".join(f"{steps}" for steps in _BLT_FACTORS)
            raise InputError(
                f"the factors of blt noise are known for {known} server steps, not {self.steps}: give the "
                "nearest one."
            )

    @property
    def name(self) -> str:
        return f"blt:{self.steps}"

    @property
    def buffers(self) -> int:
        """Model-sized vectors that are kept between two steps."""
        return len(_BLT_FACTORS[self.steps][0])

    def column(self, steps: int) -> npt.NDArray[np.float64]:
        """The first column of C for a run of `steps` steps."""
        decays, scales = map(np.array, _BLT_FACTORS[self.steps])
        powers = decays ** np.arange(max(steps - 1, 0))[:, None]
        return np.concatenate([[1.0], powers @ scales])[:steps]

    def sensitivity(self, steps: int, max_participations: int | None, min_separation: int) -> float:
        if steps > _MAX_BANDED_STEPS:
            raise InputError(f"blt noise is for at most {_MAX_BANDED_STEPS} server steps: take fewer.")
        return _banded_sensitivity(self.column(steps), steps, max_participations, min_separation)

    def open(self, key: bytes) -> NoiseStream:
        return _BltStream(key, *_BLT_FACTORS[self.steps])


class _BltStream:
    """C^-1 z: a draw is fresh noise minus the scaled buffers, to which it is added after they decay."""

    def __init__(self, key: bytes, decays: tuple[float, ...], scales: tuple[float, ...]) -> None:
        self._key = key
        self._decays, self._scales = decays, scales
        self._steps: dict[int, int] = {}  # field -> the next step
        self._buffers: dict[int, list[Tensor]] = {}  # field -> one for each decay

    def draw(self, step: int, field: int, like: Tensor, mark: bytes = b"") -> Tensor:
        expected = self._steps.get(field, 0)
        if step != expected:
            raise ValueError(f"correlated noise is drawn in order: step {expected} is next, not {step}")
        noise = standard_normal(self._key, (step, field), like, mark)
        buffers = self._buffers.setdefault(field, [like.new_zeros(like.shape) for _ in self._decays])
        for scale, buffer in zip(self._scales, buffers, strict=True):
            noise.sub_(buffer.to(like), alpha=scale)
        self._buffers[field] = [
            buffer.to(like).mul_(decay).add_(noise)
            for decay, buffer in zip(self._decays, buffers, strict=True)
        ]
        self._steps[field] = step + 1
        return noise

    def save(self) -> SavedState:
        tensors = {
            f"{field}.{number}": buffer
            for field, buffers in self._buffers.items()
            for number, buffer in enumerate(buffers)
        }
        return SavedState({"steps": {str(field): step for field, step in self._steps.items()}}, tensors)

    def load(self, saved: SavedState) -> None:
        self._steps = {int(field): step for field, step in saved.facts["steps"].items()}
        self._buffers = {
            field: [saved.tensors[f"{field}.{number}"].clone() for number in range(len(self._decays))]
            for field in self._steps
        }


def _sqrt_coefficients(bands: int) -> npt.NDArray[np.float64]:
    """The first coefficients of 1 / sqrt(1 - x)."""
    k = np.arange(1, bands)
    return np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))


def _banded_sensitivity(
    bands: npt.NDArray[np.float64], steps: int, max_participations: int | None, min_separation: int
) -> float:
    count = max_contributions(steps, max_participations, min_separation)
    bands = bands[:steps]
    reach = min(steps, max(count - 1, 0) * min_separation + len(bands))  # steps that a client can affect
    if reach > _MAX_BANDED_STEPS:
        raise InputError(
            f"the sensitivity of banded noise over {reach} server steps takes too long: "
            f"allow fewer contributions, or steps up to {_MAX_BANDED_STEPS}."
        )
    if min_separation == 0:
        return count * float(np.linalg.norm(bands))
    moved = np.zeros(reach)
    for start in range(0, count * min_separation, min_separation):
        part = moved[start : start + len(bands)]
        part += bands[: len(part)]
    return float(np.linalg.norm(moved))


class _BandedStream:
    """C^-1 z: each draw is fresh noise minus the earlier draws times the bands."""

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

    def save(self) -> SavedState:
        tensors = {
            f"{field}.{age}": noise for field, drawn in self._drawn.items() for age, noise in enumerate(drawn)
        }
        return SavedState({"steps": {str(field): step for field, step in self._steps.items()}}, tensors)

    def load(self, saved: SavedState) -> None:
        self._steps = {int(field): step for field, step in saved.facts["steps"].items()}
        self._drawn = {
            field: [saved.tensors[f"{field}.{age}"] for age in range(min(step, len(self._bands)))]
            for field, step in self._steps.items()
        }


_MAX_TREE_CONTRIBUTIONS = 20_000


@dataclass(frozen=True)
class TreeNoise:
    """Tree aggregation (Dwork et al. 2010; DP-FTRL, Kairouz et al. 2021): C has a row of ones for each node.

    A node is an interval of 2^level steps that begins at a multiple of 2^(level + 1): those are all that
    the binary expansions of prefixes use. The noise of a prefix is the sum of its nodes', at most one a
    level; a step's noise is what it adds to that. Nothing depends on how long the run will be, and no noise
    is kept.

    The square of the sensitivity is the largest sum over nodes of (contributions inside)^2. Contributions
    that are separated are at most one in each aligned block of 2^p <= `min_separation` steps, and there
    each is worst at the block's first step, which is in all nodes that end inside the block. What is left
    is how to share contributions between the halves of each interval, which `_worst_prefix` tries from
    small intervals to large. It is exact where the separation is a power of two, and an upper bound
    otherwise.
    """

    @property
    def name(self) -> str:
        return "tree"

    def sensitivity(self, steps: int, max_participations: int | None, min_separation: int) -> float:
        count = max_contributions(steps, max_participations, min_separation)
        if count > _MAX_TREE_CONTRIBUTIONS:
            raise InputError(
                f"the sensitivity of tree noise to {count} contributions takes too long: "
                f"allow at most {_MAX_TREE_CONTRIBUTIONS}, or use banded noise."
            )
        if min_separation == 0:
            return count * self.sensitivity(steps, 1, 1)  # all to the first step, which most nodes hold
        return math.sqrt(_worst_prefix(steps, count, min_separation.bit_length() - 1)[-1])

    def open(self, key: bytes) -> NoiseStream:
        return _TreeStream(key)


class _TreeStream:
    """The noise of each node is a function of the key, so it can be drawn again in order to be subtracted."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._marks: dict[int, bytes] = {}  # of the steps that made the nodes which are still in use

    def draw(self, step: int, field: int, like: Tensor, mark: bytes = b"") -> Tensor:
        if mark:
            used = [_completing_step(step, level) for level in range(step.bit_length()) if step >> level & 1]
            self._marks = {each: self._marks[each] for each in used} | {step: mark}
        level = 0
        taken = like.new_zeros(like.shape)
        while step >> level & 1:  # nodes that the next prefix replaces by a larger one
            taken += self._node(step, level, field, like)
            level += 1
        return self._node(step + 1, level, field, like) - taken

    def save(self) -> SavedState:
        return SavedState({"marks": {str(step): mark.hex() for step, mark in self._marks.items()}}, {})

    def load(self, saved: SavedState) -> None:
        self._marks = {int(step): bytes.fromhex(mark) for step, mark in saved.facts["marks"].items()}

    def _node(self, prefix: int, level: int, field: int, like: Tensor) -> Tensor:
        """The noise of the node of this level in the expansion of a prefix."""
        mark = self._marks.get(_completing_step(prefix, level), b"")
        return standard_normal(self._key, (prefix >> (level + 1), level, field), like, mark)


def _completing_step(prefix: int, level: int) -> int:
    """The step that completes the node of this level in the expansion of a prefix."""
    return (prefix >> level << level) - 1


def _worst_prefix(steps: int, count: int, block: int) -> npt.NDArray[np.float64]:
    """The largest sum of squares for 0, 1, ... contributions, up to `count`, to the first `steps` steps."""
    if steps == 0:
        return np.zeros(1)
    level = steps.bit_length() - 1
    whole = _worst_interval(level, count, block)
    node = whole + np.arange(len(whole)) ** 2.0
    if level < block:  # steps that hold at most one contribution, and it is best at the first
        return node
    return _best_split(node, _worst_prefix(steps - 2**level, count, block), count)


def _worst_interval(level: int, count: int, block: int) -> npt.NDArray[np.float64]:
    """The same for an interval of 2^level steps, without the node of the interval itself."""
    inside = np.array([0.0, min(level, block)])[: count + 1]
    for _ in range(block, level):
        inside = _best_split(inside + np.arange(len(inside)) ** 2.0, inside, count)
    return inside


def _best_split(
    left: npt.NDArray[np.float64], right: npt.NDArray[np.float64], count: int
) -> npt.NDArray[np.float64]:
    """The maximum over all ways to divide up to `count` contributions between two parts."""
    best = np.zeros(min(count, len(left) + len(right) - 2) + 1)
    for each, value in enumerate(left[: len(best)]):
        reach = best[each : each + len(right)]
        np.maximum(reach, value + right[: len(reach)], out=reach)
    return best


def default_separation(correlation: NoiseCorrelation) -> int:
    """The separation of a client's contributions, in server steps, unless it is given."""
    return correlation.bands if isinstance(correlation, BandedNoise) else 1


def parse_correlation(text: str) -> NoiseCorrelation:
    """`independent`, `tree`, `banded:B` or `blt[:STEPS]`."""
    name, colon, bands = text.partition(":")
    if name == "blt":
        if colon and not (bands.isascii() and bands.isdigit()):
            raise InputError(f"write blt noise as blt:STEPS, such as blt:1000, not '{text}'.")
        return BltNoise(int(bands)) if colon else BltNoise()
    if name == "banded":
        if not bands.isascii() or not bands.isdigit():
            raise InputError(
                f"write banded noise as banded:B with B its bands, such as banded:8, not '{text}'."
            )
        return BandedNoise(int(bands))
    for shape in (IndependentNoise(), TreeNoise()):
        if name == shape.name:
            if colon:
                raise InputError(f"{name} noise takes no number: write it as {name}, not '{text}'.")
            return shape
    raise unknown_name("shape of noise", name, ("independent", "tree", "banded", "blt"))
