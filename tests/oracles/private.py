"""Private means and what momentum approximation sends under noise (arXiv 2402.09247, eqs 16 to 19).

An upload is named fields; each is clipped to its own bound, and the noise goes on the sum, once. The
paper's payload is a field of descents with bound S_delta beside gamma times a one-hot version; its joint
sensitivity is S = sqrt(S_delta^2 + gamma^2), and every entry gets noise of deviation sigma S.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]


def clip(x: Array, bound: float) -> Array:
    """The same direction, no longer than the bound."""
    norm = float(np.sqrt(np.sum(x**2)))
    return x if norm <= bound else x * (bound / norm)


def joint_sensitivity(bounds: Sequence[float]) -> float:
    """How far one upload moves the sum when all its fields are at their bounds."""
    return float(np.sqrt(sum(bound**2 for bound in bounds)))


def stamp_scale(sigma: float, xi: float, bound: float) -> float:
    """gamma: what a one-hot version is multiplied by, so that its counts get noise xi (eq. 17)."""
    return float(sigma / np.sqrt(xi**2 - sigma**2) * bound)


def payload_deviations(sigma: float, bound: float, scale: float) -> tuple[float, float]:
    """The noise on the sum of descents, and on the counts of versions once gamma is divided out."""
    sensitivity = joint_sensitivity([bound, scale])
    return sigma * sensitivity, sigma * sensitivity / scale


def private_mean(
    uploads: Sequence[Mapping[str, Array]],
    weights: Sequence[float],
    bounds: Mapping[str, float],
    stds: Mapping[str, float],
    noise: Mapping[str, Array],
) -> dict[str, Array]:
    """(sum of w clip(field) + std * noise) / how many uploads; the noise has deviation 1."""
    means = {}
    for field in uploads[0]:
        total = stds[field] * noise[field]
        for upload, weight in zip(uploads, weights, strict=True):
            total = total + weight * clip(upload[field], bounds[field])
        means[field] = total / len(uploads)
    return means


def clean_row(row: Array, t: int, span: int, total: float) -> Array:
    """A noisy row of W, with what is public about it put right: it costs no privacy.

    No upload starts after step t, before version 0 or more than span - 1 versions ago; entries add up to
    the mean weight (1, where all count alike), and none is negative, so none is larger than that.
    """
    clean = np.zeros_like(row)
    for s in range(max(0, t - span + 1), t + 1):
        clean[s] = min(total, max(0.0, float(row[s])))
    return clean * (total / clean.sum())
