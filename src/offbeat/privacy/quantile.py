"""Bounds that follow the clients' norms (Andrew et al., NeurIPS 2021).

Each client also says whether its norm was within the bound. The share of those that say so is released
with noise beside the sum, and the bound moves geometrically until it is the quantile asked for.
"""

import math
from dataclasses import dataclass

from offbeat.errors import InputError

_BIT = 0.5  # an answer is sent as plus or minus a half, so this is its sensitivity


@dataclass(frozen=True)
class Quantile:
    """The bound to which the norms of that share of uploads do not come."""

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
        left = noise**-2 - answers * (_BIT / deviation) ** 2 if deviation else -math.inf
        if left <= 0:
            raise InputError(
                f"noise of {deviation} on the answers of adaptive clipping leaves nothing for the rest: "
                f"give it more than {_BIT * math.sqrt(answers) * noise:g}."
            )
        return float(left**-0.5)

    def move(self, bound: float, total: float, weight: float) -> float:
        """The next bound, from the noisy sum of answers that have this weight together."""
        within = total / weight + _BIT
        return bound * math.exp(-self.rate * (within - self.quantile))
