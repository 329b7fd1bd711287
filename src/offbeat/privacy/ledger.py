"""The releases of a run, their privacy cost for any one client, and the assumptions behind it.

`Ledger` counts each client's contributions, `PrivacyAccounting` computes an epsilon from the counts or a
number of steps from a budget, and `privacy_statement` states the assumptions in words.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from offbeat.core import SamplingEvent, SavedState
from offbeat.errors import InputError
from offbeat.privacy.accountant import Accountant, Releases, epsilon_if_seen, max_releases
from offbeat.privacy.correlated import IndependentNoise, NoiseCorrelation


class ReleaseTotals(NamedTuple):
    """The totals of a ledger."""

    start: bool  # whether every client contributed once before the first server step
    steps: int  # releases made in server steps
    largest: int  # contributions to them of the client with the most


class Ledger:
    """Releases made, and each client's contributions to those of server steps."""

    def __init__(self, population: int, max_participations: int | None, min_separation: int) -> None:
        self._max, self._separation = max_participations, min_separation
        self._start, self._steps, self._largest = False, 0, 0
        self._counts = np.zeros(population, np.int32)
        self._last = np.zeros(population, np.int32)  # each client's last release, if it has contributed

    @property
    def tally(self) -> ReleaseTotals:
        """What has been released so far."""
        return ReleaseTotals(self._start, self._steps, self._largest)

    def contribute(self, clients: Sequence[int]) -> None:
        """Count these clients for the next release; raises if the noise does not cover a contribution."""
        for client in clients:
            count, now = int(self._counts[client]), self._steps + 1
            if count and now - self._last[client] < self._separation:
                raise InputError(
                    f"client {client} contributed twice within {self._separation} server steps, which the "
                    "noise does not cover: use a schedule that keeps to the bounds on participation."
                )
            if self._max is not None and count + self._start >= self._max:
                raise InputError(
                    f"client {client} contributed more than {self._max} times, which the noise does not "
                    "cover: use a schedule that keeps to the bounds on participation."
                )
            self._counts[client], self._last[client] = count + 1, now
            self._largest = max(self._largest, count + 1)

    def release(self) -> None:
        """Count the release of a server step."""
        self._steps += 1

    def begin(self) -> None:
        """Count the release of the full-participation start."""
        self._start = True

    def save(self) -> SavedState:
        """The state; only clients that contributed are saved."""
        import torch

        clients = self._counts.nonzero()[0]
        tensors = {
            "clients": torch.from_numpy(clients),
            "contributions": torch.from_numpy(self._counts[clients]),
            "last": torch.from_numpy(self._last[clients]),
        }
        return SavedState({"start": self._start, "steps": self._steps}, tensors)

    def load(self, saved: SavedState) -> None:
        """Restore what `save` returned."""
        self._start, self._steps = saved.facts["start"], saved.facts["steps"]
        clients = saved.tensors["clients"].numpy()
        self._counts[:], self._last[:] = 0, 0
        self._counts[clients] = saved.tensors["contributions"].numpy()
        self._last[clients] = saved.tensors["last"].numpy()
        self._largest = int(self._counts.max(initial=0))


class PrivacyBudget(NamedTuple):
    """How far a run may go; infinite if the budget is not the limit."""

    steps: float  # server steps
    contributions: float  # of any one client to server steps


@dataclass(frozen=True)
class PrivacyAccounting:
    """Computes the epsilon of a run's noise."""

    noise: float  # multiplier
    delta: float
    rate: float | None  # of simulated Poisson sampling; None: nothing is simulated
    max_participations: int | None  # contributions of a client, the start included
    min_separation: int
    correlation: NoiseCorrelation
    accountant: Accountant
    sampling: Callable[[int], SamplingEvent] | None = None  # of timed releases, from their dispatch

    def releases(self, tally: ReleaseTotals) -> tuple[Releases, ...]:
        """The releases as an accountant composes them."""
        start = (Releases(self.noise, 1),) if tally.start else ()
        if not tally.steps:
            return start
        if self.sampling is not None:
            return (*start, Releases(self.noise, *self.sampling(tally.steps)))
        if self.rate is not None:
            return (*start, Releases(self.noise, tally.steps, self.rate))
        if isinstance(self.correlation, IndependentNoise):
            return (*start, Releases(self.noise, tally.largest))
        sensitivity = self.correlation.sensitivity(tally.steps, tally.largest, self.min_separation)
        return (*start, Releases(self.noise / sensitivity, 1))

    def epsilon(self, tally: ReleaseTotals) -> float:
        """The epsilon of everything released so far, for any one client."""
        releases = self.releases(tally)
        return self.accountant.epsilon(releases, self.delta) if releases else 0.0

    def unamplified(self, tally: ReleaseTotals) -> float | None:
        """The epsilon against those who see which client contributed to which release; None: the same.

        It must not depend on the ledger, since the numbers of contributions are secret.
        """
        return None if self.sampling is None else epsilon_if_seen(self.releases(tally), self.delta)

    def budget(self, epsilon: float, start: bool, rounds: int) -> PrivacyBudget:
        """The steps and contributions that fit below an epsilon in a run of `rounds` server steps."""
        before = (Releases(self.noise, 1),) if start else ()
        if self.sampling is not None:

            def fits_timed(steps: int) -> bool:
                return self.epsilon(ReleaseTotals(start, steps, 0)) <= epsilon

            steps = _largest_fitting(fits_timed, rounds)
            return PrivacyBudget(math.inf if steps == rounds else steps, math.inf)
        largest = rounds if self.max_participations is None else min(rounds, self.max_participations - start)
        if self.rate is not None or isinstance(self.correlation, IndependentNoise):
            cap = rounds if self.rate is not None else largest
            fit = max_releases(epsilon, self.delta, self.noise, self.rate, self.accountant, cap, before)
            reach = math.inf if fit == cap else fit
            return PrivacyBudget(reach, math.inf) if self.rate is not None else PrivacyBudget(math.inf, reach)

        def fits(steps: int) -> bool:
            return self.epsilon(ReleaseTotals(start, steps, min(largest, steps))) <= epsilon

        steps = _largest_fitting(fits, rounds)
        return PrivacyBudget(math.inf if steps == rounds else steps, math.inf)


def _largest_fitting(fits: Callable[[int], bool], cap: int) -> int:
    """The largest number up to the cap that fits, if every number below a fitting one fits."""
    low, high = 0, cap + 1
    middle = cap
    while high - low > 1:
        low, high = (middle, high) if fits(middle) else (low, middle)
        middle = (low + high) // 2
    return low


TIMED = "amplified by the secret draw of releases by a clock"
SIMULATION = "SIMULATION: this is not a privacy guarantee"
_NOT_AMPLIFIED = (
    "amplification by sampling does not hold for a buffer of fixed size, where another client takes the "
    "place of one that is absent"
)
# Parts of the terms of earlier versions, which assumed amplification for a buffer of fixed size.
_FORMER_PREFIX = "amplified by Poisson sampling"
_FORMER_ASSUMPTION = (
    ", taking a buffer of fixed size to amplify as much, which is assumed and not proved, and the sample"
)


def amplification_refused(most: str, simulate: str) -> InputError:
    """The error for settings that claim amplification, with the names of the settings to use instead."""
    return InputError(
        f"{_NOT_AMPLIFIED}: bound how often a client contributes with {most}, or give {simulate} "
        "for a figure that is not a guarantee."
    )


def is_simulated(terms: str, releases: Iterable[Releases] = ()) -> bool:
    """Whether an epsilon assumes amplification that does not hold, also in the words of earlier versions."""
    if terms.startswith(TIMED):
        return False
    return terms.startswith((SIMULATION, _FORMER_PREFIX)) or any(each.rate is not None for each in releases)


def correct_statement(terms: str, releases: Iterable[Releases] = ()) -> str:
    """The terms of a saved run; those that assumed amplification are marked as a simulation."""
    if terms.startswith(SIMULATION) or not is_simulated(terms, releases):
        return terms
    computed = terms.replace(_FORMER_ASSUMPTION, ", taking the sample")
    return f"{SIMULATION}, since {_NOT_AMPLIFIED}; computed as {computed}"


def corrected_end(ended: str | None, terms: str) -> str | None:
    """Why a run ended; a budget that assumed amplification is called a simulated one."""
    if ended is None or not is_simulated(terms):
        return ended
    return ended.replace("the privacy budget", "the simulated budget (no privacy guarantee)")


NOISE_SOURCES = ("server", "helper", "both")


def noise_statement(source: str) -> str:
    """Against whom an epsilon holds under secure aggregation, by who adds the noise."""
    return {
        "server": "the server adds the noise: this epsilon holds against those who see its models and not "
        "against the server, which sees sums without noise",
        "helper": "the helper adds the noise before the server sees a sum: this epsilon holds against the "
        "server and against those who see its models, and not against the helper, which knows the noise, "
        "where it sees models",
        "both": "server and helper each add noise of this multiplier: this epsilon holds against each of "
        "them where the other keeps its noise secret, and against those who see models, which have both",
    }[source]


def privacy_statement(
    spending: PrivacyAccounting,
    start: bool,
    buffer: int,
    population: int,
    nominal: int | None,
    seeded: bool,
    party: str | None = None,
) -> str:
    """The assumptions of an epsilon in one sentence; `party` says against whom it holds."""
    if not spending.noise:
        return "no noise was added, so nothing is private."
    if spending.sampling is not None:
        event = spending.sampling(1)
        drawn = (
            f"each client contributes with probability {event.rate:g} to a release"
            if event.rate is not None
            else f"each client contributes to one of every {event.slots} releases"
        )
        parts = [
            f"{TIMED}: {drawn}, drawn independently, and the server releases the sum of what has arrived "
            f"over a nominal cohort of {buffer}, taking lateness not to depend on data, and the sample to be "
            "secret, and so the run's checkpoint, trace and records, which tell of it",
        ]
        if start:
            parts.append("the start with all clients is counted without amplification")
    elif spending.rate is not None:
        parts = [
            f"{SIMULATION}, since {_NOT_AMPLIFIED}",
            f"computed as amplified by Poisson sampling at rate {spending.rate:g}, taking the sample to be "
            "secret, and so the run's checkpoint, trace and records, which tell of it",
        ]
        if start:
            parts.append("the start with all clients is counted without amplification")
    else:
        times = f"{spending.max_participations} time{'s' if spending.max_participations != 1 else ''}"
        parts = [f"no amplification: no client contributes more than {times}, and when it did is public"]
    if not isinstance(spending.correlation, IndependentNoise):
        parts.append(f"noise is correlated over server steps ({spending.correlation.name})")
    parts.append(
        "neighbouring runs differ by one client, there with all it contributes or with nothing in its place"
    )
    if party is not None:
        parts.append(party)
    parts.append(f"accountant {spending.accountant.name}")
    if spending.delta * population >= 1:
        parts.append(f"delta is not below one in the {population} clients, so this promises little")
    if nominal is not None:
        parts.append(
            f"SIMULATION: the noise is scaled by {buffer}/{nominal}, so this epsilon is that of cohorts of "
            f"{nominal} and not of this run"
        )
    if seeded:
        parts.append("SIMULATION: noise and sample follow from a seed, which hides nothing from who knows it")
    return "; ".join(parts) + "."
