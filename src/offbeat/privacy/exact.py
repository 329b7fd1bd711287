"""What one Gaussian release tells, exactly: Balle and Wang 2018, theorem 8.

`shift` is the sensitivity over the standard deviation; k releases of multiplier `noise` to which a
client contributes come to one of shift sqrt(k) / noise, and nothing is lost by that.
"""

import math

from scipy.optimize import brentq
from scipy.special import log_ndtr


def log_delta(shift: float, epsilon: float) -> float:
    """The logarithm of the least delta at this epsilon."""
    if shift == 0:
        return -math.inf
    above = float(log_ndtr(shift / 2 - epsilon / shift))
    below = epsilon + float(log_ndtr(-shift / 2 - epsilon / shift))
    # Far out in the tail both are the same number.
    return above + math.log(-math.expm1(below - above)) if below < above else -math.inf


def epsilon_of(shift: float, delta: float) -> float:
    """The least epsilon at this delta, rounded up."""
    if math.isinf(shift):
        return math.inf
    target = math.log(delta)
    if log_delta(shift, 0.0) <= target:
        return 0.0
    # delta is at most the first of its two terms, and a Gaussian's tail at most exp(-x^2 / 2).
    ceiling = shift**2 / 2 + shift * math.sqrt(-2 * target)
    root = brentq(lambda epsilon: max(log_delta(shift, epsilon), -1e6) - target, 0.0, ceiling, xtol=1e-13)
    return float(root) * (1 + 1e-12) + 1e-12
