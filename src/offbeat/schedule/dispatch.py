"""Dispatch: how many tasks to start, and when; the pool chooses the clients.

Under a timed dispatch the server steps by a clock, and the clients that contribute to a release are drawn in
secret (`RandomAllocation`, `TimedPoisson`). Their method `sampling` gives the probabilities of the draws, and
the privacy accounting uses only that, so the draws and the accounting cannot disagree.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from offbeat.core import SamplingEvent
from offbeat.errors import InputError, check_whole, setting_name, unknown_name
from offbeat.schedule.parsing import check_kind, check_number
from offbeat.schedule.pool import AnyClientPool, ClientPool, IdleClientPool, RepeatedCohortPool
from offbeat.schedule.rng import FadasScriptRng, KeyedRng, Rng

TIMED_DISPATCH_NAMES = ("allocation", "timed-poisson")
DISPATCH_NAMES = (
    "synchronous",
    "asynchronous",
    "round-refill",
    "poisson",
    "phases",
    "queues",
    "open-slots",
    *TIMED_DISPATCH_NAMES,
)
_FORMER_NAMES = {"rounds": "round-refill"}


class DispatchEvent(Enum):
    """The events at which a dispatcher may start tasks."""

    PUBLISHED = "a new version is published"
    ARRIVED = "a task arrived and the buffer is not full"
    FILLED = "a task arrived and the buffer is full, but the next version is not published yet"


class Dispatch(Protocol):
    """A rule for when tasks start."""

    def source(self, seed: int) -> Rng:
        """The source of random numbers for this rule."""
        ...

    def check(self, buffer: int, population: int) -> None:
        """Reject a buffer or a population with which the rule cannot work."""
        ...


@runtime_checkable
class PooledDispatch(Dispatch, Protocol):
    """A rule for the number of tasks; the server steps when its buffer is full."""

    @property
    def redraws(self) -> bool:
        """Whether another client is drawn in place of one that is away."""
        ...

    def count(self, idle: int, busy: int, waiting: int, moment: DispatchEvent, draws: Rng) -> int:
        """The number of tasks to start now; it may exceed the number of clients."""
        ...

    def pool(self, population: int) -> ClientPool:
        """The pool from which clients are chosen."""
        ...


@runtime_checkable
class TimedDispatch(Dispatch, Protocol):
    """A rule for which clients contribute to which release, where the server steps by a clock.

    Release r, counted from 1, makes version r, `period` seconds after release r - 1. Its tasks start from one
    of the `lead` versions before it, but not from one before `first_version`.
    """

    @property
    def period(self) -> float: ...

    @property
    def lead(self) -> int: ...

    def members(self, release: int, population: int, draws: Rng) -> npt.NDArray[np.int64]:
        """The clients that contribute to a release if their updates arrive in time."""
        ...

    def first_version(self, release: int) -> int:
        """The oldest version that a task for this release may start from."""
        ...

    def sampling(self, releases: int) -> SamplingEvent:
        """How a client's contributions to the first `releases` releases are distributed."""
        ...


@dataclass(frozen=True)
class Synchronous:
    """A cohort starts from each version, and a server step waits for `buffer` of them.

    With a buffer of the cohort's size no update is stale. With a smaller buffer the cohort is
    over-selected: late updates are stale, or are dropped if the maximum staleness is 0.

    Attributes:
        cohort: The number of clients that start from each version.
    """

    cohort: int
    source: ClassVar = KeyedRng
    pool: ClassVar = IdleClientPool
    redraws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("the cohort", self.cohort)

    def count(self, idle: int, busy: int, waiting: int, moment: DispatchEvent, draws: Rng) -> int:
        return self.cohort - waiting - busy if moment is DispatchEvent.PUBLISHED else 0

    def check(self, buffer: int, population: int) -> None:
        _check_concurrency("cohort", self.cohort, buffer, population)


@dataclass(frozen=True)
class Asynchronous:
    """`concurrency` tasks are in flight, and each task that arrives is replaced at once.

    With `eager` this includes the task that fills the buffer, so its replacement still starts from the
    old version (FADAS); otherwise that one is replaced after the server step (MasFL).

    Attributes:
        concurrency: The number of tasks in flight.
        eager: Whether the task that fills the buffer is replaced before the server step.
    """

    concurrency: int
    eager: bool = True
    source: ClassVar = KeyedRng
    pool: ClassVar = IdleClientPool
    redraws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("the concurrency", self.concurrency)

    def count(self, idle: int, busy: int, waiting: int, moment: DispatchEvent, draws: Rng) -> int:
        return self.concurrency - busy if self.eager or moment is not DispatchEvent.FILLED else 0

    def check(self, buffer: int, population: int) -> None:
        _check_concurrency("concurrency", self.concurrency, buffer, population)


@dataclass(frozen=True)
class RoundRefill:
    """`concurrency` tasks are in flight after each server step, as in FADAS's scripts.

    Attributes:
        concurrency: The number of tasks in flight after each server step.
    """

    concurrency: int
    source: ClassVar = FadasScriptRng
    pool: ClassVar = IdleClientPool
    redraws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("the concurrency", self.concurrency)

    def count(self, idle: int, busy: int, waiting: int, moment: DispatchEvent, draws: Rng) -> int:
        return self.concurrency - busy if moment is DispatchEvent.PUBLISHED else 0

    def check(self, buffer: int, population: int) -> None:
        _check_concurrency("concurrency", self.concurrency, buffer, population)


@dataclass(frozen=True)
class Poisson:
    """At each version every idle client starts a task with probability `rate`, independently.

    The momentum-approximation paper draws from all clients; here busy clients are not drawn.

    Attributes:
        rate: The probability with which an idle client starts, above 0 and at most 1.
    """

    rate: float
    source: ClassVar = KeyedRng
    pool: ClassVar = IdleClientPool
    redraws: ClassVar[bool] = False  # otherwise clients would start with a higher probability

    def __post_init__(self) -> None:
        check_number("the rate of poisson dispatch", self.rate)

    def count(self, idle: int, busy: int, waiting: int, moment: DispatchEvent, draws: Rng) -> int:
        return draws.binomial(idle, self.rate) if moment is DispatchEvent.PUBLISHED else 0

    def check(self, buffer: int, population: int) -> None:
        _check_buffer(buffer, population)
        if not 0 < self.rate <= 1:
            raise InputError(f"the rate of poisson dispatch is {self.rate}: give one above 0 and at most 1.")


@dataclass(frozen=True)
class Phases:
    """Each cohort is given a task twice in a row, for methods with two phases per round (MIME).

    Attributes:
        cohort: The number of clients of a cohort, which is also the size of the buffer.
    """

    cohort: int
    source: ClassVar = KeyedRng
    pool: ClassVar = RepeatedCohortPool
    redraws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("the cohort", self.cohort)

    def count(self, idle: int, busy: int, waiting: int, moment: DispatchEvent, draws: Rng) -> int:
        return self.cohort - waiting - busy if moment is DispatchEvent.PUBLISHED else 0

    def check(self, buffer: int, population: int) -> None:
        _check_concurrency("cohort", self.cohort, buffer, population)
        if buffer != self.cohort:
            raise InputError(f"phases wait for the whole cohort of {self.cohort}: give the same buffer.")


@dataclass(frozen=True)
class Queues:
    """Each version is sent to `buffer` clients, drawn from all clients, busy or not (DeFedAvg-nIID).

    A client works through its tasks in order. There are `outstanding` tasks at first, and their number stays
    the same, since as many arrive as are sent.

    Attributes:
        outstanding: The number of tasks that were sent and have not arrived.
    """

    outstanding: int
    source: ClassVar = KeyedRng
    pool: ClassVar = AnyClientPool
    redraws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("the number of outstanding tasks", self.outstanding)

    def count(self, idle: int, busy: int, waiting: int, moment: DispatchEvent, draws: Rng) -> int:
        return self.outstanding - busy - waiting if moment is DispatchEvent.PUBLISHED else 0

    def check(self, buffer: int, population: int) -> None:
        _check_concurrency("concurrency", self.outstanding, buffer, population)


@dataclass(frozen=True)
class OpenSlots:
    """At most `concurrency` tasks are in flight, and new ones start once `slots` of them have arrived.

    The rule of NVFlare's buffered averaging, with its active jobs K, buffer B and open slots O: O = 1 is
    `Asynchronous` with hand-out after the server step, and K = B = O is `Synchronous`. The task that fills
    the buffer is replaced after the server step.

    Attributes:
        concurrency: The largest number of tasks in flight.
        slots: The number of tasks that must have arrived before new ones start.
    """

    concurrency: int
    slots: int = 1
    source: ClassVar = KeyedRng
    pool: ClassVar = IdleClientPool
    redraws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("the concurrency", self.concurrency)
        check_whole("the number of open slots", self.slots)

    def count(self, idle: int, busy: int, waiting: int, moment: DispatchEvent, draws: Rng) -> int:
        free = self.concurrency - busy
        return free if free >= self.slots and moment is not DispatchEvent.FILLED else 0

    def check(self, buffer: int, population: int) -> None:
        _check_concurrency("concurrency", self.concurrency, buffer, population)
        if self.slots > self.concurrency:
            raise InputError(
                f"{self.slots} open slots exceed the concurrency of {self.concurrency}: change one."
            )


@dataclass(frozen=True)
class RandomAllocation:
    """In each epoch of `slots` releases every client contributes to one, drawn uniformly and independently.

    Attributes:
        period: The seconds between two releases.
        slots: The releases of an epoch, to one of which a client contributes.
        lead: How many versions before a release its tasks may start.
    """

    period: float
    slots: int
    lead: int = 1
    source: ClassVar = KeyedRng

    def __post_init__(self) -> None:
        check_whole("the number of slots", self.slots)
        check_whole("the lead", self.lead)

    def members(self, release: int, population: int, draws: Rng) -> npt.NDArray[np.int64]:
        epoch, slot = divmod(release - 1, self.slots)
        return np.flatnonzero(draws.many_below(self.slots, "allocation", epoch, population) == slot)

    def first_version(self, release: int) -> int:
        """The first version of the epoch, so that no epoch depends on the draws of a later one."""
        return (release - 1) // self.slots * self.slots

    def sampling(self, releases: int) -> SamplingEvent:
        """One draw per epoch; an epoch that has begun counts as a whole one."""
        return SamplingEvent(-(-releases // self.slots), slots=self.slots)

    def check(self, buffer: int, population: int) -> None:
        _check_timed(self, buffer, population)


@dataclass(frozen=True)
class TimedPoisson:
    """To each release every client contributes with probability `rate`, independently.

    Attributes:
        period: The seconds between two releases.
        rate: The probability with which a client contributes to a release.
        lead: How many versions before a release its tasks may start.
    """

    period: float
    rate: float
    lead: int = 1
    source: ClassVar = KeyedRng

    def __post_init__(self) -> None:
        check_number("the rate of timed-poisson dispatch", self.rate)
        check_whole("the lead", self.lead)

    def members(self, release: int, population: int, draws: Rng) -> npt.NDArray[np.int64]:
        return np.flatnonzero(draws.many_uniform("poisson", release, population) < self.rate)

    def first_version(self, release: int) -> int:
        return 0

    def sampling(self, releases: int) -> SamplingEvent:
        return SamplingEvent(releases, rate=self.rate)

    def check(self, buffer: int, population: int) -> None:
        _check_timed(self, buffer, population)
        if not 0 < self.rate <= 1:
            raise InputError(
                f"the rate of timed-poisson dispatch is {self.rate}: give one above 0 and at most 1."
            )


def _check_timed(dispatch: TimedDispatch, buffer: int, population: int) -> None:
    if population < 1:
        raise InputError(f"there are {population} clients: give at least 1.")
    if not 1 <= buffer <= population:
        raise InputError(
            f"the nominal cohort of {buffer} is not between 1 and the {population} clients: change one."
        )
    check_kind("the release period", dispatch.period)
    if not 0 < dispatch.period < math.inf:
        raise InputError(f"the release period is {dispatch.period}: give a finite number of seconds above 0.")


def _check_buffer(buffer: int, population: int) -> None:
    if population < 1:
        raise InputError(f"there are {population} clients: give at least 1.")
    if buffer < 1:
        raise InputError(f"the buffer is {buffer}: give at least 1.")
    if buffer > population:
        raise InputError(f"the buffer of {buffer} exceeds the {population} clients: lower it or add clients.")


def _check_concurrency(name: str, value: int, buffer: int, population: int) -> None:
    _check_buffer(buffer, population)
    if value > population:
        raise InputError(f"the {name} of {value} exceeds the {population} clients: lower it or add clients.")
    if buffer > value:
        raise InputError(f"the buffer of {buffer} exceeds the {name} of {value}: make it at most {value}.")


def current_name(name: str) -> str:
    """The present name of a dispatch; files of earlier versions may have its former name."""
    return _FORMER_NAMES.get(name, name)


def parse_dispatch(
    name: str,
    concurrency: int,
    buffer: int,
    population: int,
    hand_out: str = "before",
    rate: float | None = None,
    release_period: float | None = None,
    lead: int | None = None,
    open_slots: int | None = None,
) -> Dispatch:
    """The dispatch of a name, checked against buffer and population.

    `hand_out` says whether the task that fills the buffer is replaced before or after the server step. Under
    a timed dispatch the buffer is the nominal cohort: the average number of clients drawn for a release.
    """
    if name in _FORMER_NAMES:
        raise InputError(f"the dispatch '{name}' is now called '{_FORMER_NAMES[name]}': use that name.")
    if name not in DISPATCH_NAMES:
        raise unknown_name("dispatch", name, DISPATCH_NAMES)
    if hand_out not in ("before", "after"):
        raise unknown_name("hand-out", hand_out, ("before", "after"))
    if open_slots is not None and name != "open-slots":
        raise InputError(
            f"{setting_name('open_slots')} is for {setting_name('dispatch')} open-slots, not for {name}: "
            "leave it out."
        )
    if name in TIMED_DISPATCH_NAMES:
        if release_period is None:
            raise InputError(
                f"{name} dispatch releases by a clock: give the seconds between two releases as "
                f"{setting_name('release_period')}."
            )
        rule: Dispatch
        if name == "allocation":
            rule = RandomAllocation(release_period, max(1, population // max(1, buffer)), lead or 1)
        else:
            rule = TimedPoisson(release_period, min(1.0, buffer / max(1, population)), lead or 1)
        rule.check(buffer, population)
        return rule
    for key, value in (("release_period", release_period), ("lead", lead)):
        if value is not None:
            raise InputError(
                f"{setting_name(key)} is for releases by a clock, not for {name} dispatch: leave it out, "
                f"or use {setting_name('dispatch')} {' or '.join(TIMED_DISPATCH_NAMES)}."
            )
    _check_buffer(buffer, population)
    if name == "poisson" and rate is None and not 1 <= concurrency <= population:
        raise InputError(
            f"the concurrency of {concurrency} is not between 1 and the {population} clients: change one."
        )
    rules: dict[str, Callable[[], Dispatch]] = {
        "synchronous": lambda: Synchronous(buffer),
        "asynchronous": lambda: Asynchronous(concurrency, eager=hand_out == "before"),
        "round-refill": lambda: RoundRefill(concurrency),
        "poisson": lambda: Poisson(concurrency / population if rate is None else rate),
        "phases": lambda: Phases(buffer),
        "queues": lambda: Queues(concurrency),
        "open-slots": lambda: OpenSlots(concurrency, 1 if open_slots is None else open_slots),
    }
    rule = rules[name]()
    rule.check(buffer, population)
    return rule
