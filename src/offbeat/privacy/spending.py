"""From what was released to what it tells, and from a budget to how much may be released."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.privacy.accountant import Accountant, Releases, allowed
from offbeat.privacy.correlated import Independent, Noise
from offbeat.privacy.ledger import Tally


class Budget(NamedTuple):
    """How far a run may go; infinite where something else ends it first."""

    steps: float  # server steps
    contributions: float  # of any one client to server steps


@dataclass(frozen=True)
class Spending:
    """What a run's noise is worth, and under which assumption."""

    noise: float  # multiplier
    delta: float
    rate: float | None  # of the Poisson sampling that is simulated to amplify; None: nothing does
    most: int | None  # contributions of a client, the start included
    apart: int
    correlation: Noise
    accountant: Accountant

    def releases(self, tally: Tally) -> tuple[Releases, ...]:
        """As an accountant adds them up."""
        start = (Releases(self.noise, 1),) if tally.start else ()
        if not tally.steps:
            return start
        if self.rate is not None:
            return (*start, Releases(self.noise, tally.steps, self.rate))
        if isinstance(self.correlation, Independent):
            return (*start, Releases(self.noise, tally.largest))
        sensitivity = self.correlation.sensitivity(tally.steps, tally.largest, self.apart)
        return (*start, Releases(self.noise / sensitivity, 1))

    def epsilon(self, tally: Tally) -> float:
        """What has been told about any one client."""
        releases = self.releases(tally)
        return self.accountant.epsilon(releases, self.delta) if releases else 0.0

    def budget(self, epsilon: float, start: bool, rounds: int) -> Budget:
        """What fits below an epsilon, in a run of that many server steps."""
        before = (Releases(self.noise, 1),) if start else ()
        most = rounds if self.most is None else min(rounds, self.most - start)
        if self.rate is not None or isinstance(self.correlation, Independent):
            cap = rounds if self.rate is not None else most
            fit = allowed(epsilon, self.delta, self.noise, self.rate, self.accountant, cap, before)
            reach = math.inf if fit == cap else fit
            return Budget(reach, math.inf) if self.rate is not None else Budget(math.inf, reach)

        def fits(steps: int) -> bool:
            return self.epsilon(Tally(start, steps, min(most, steps))) <= epsilon

        steps = _most(fits, rounds)
        return Budget(math.inf if steps == rounds else steps, math.inf)


def _most(fits: Callable[[int], bool], cap: int) -> int:
    """The largest number up to the cap that fits, where all smaller ones do."""
    low, high = 0, cap + 1
    middle = cap
    while high - low > 1:
        low, high = (middle, high) if fits(middle) else (low, middle)
        middle = (low + high) // 2
    return low
