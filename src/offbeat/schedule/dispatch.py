"""Dispatch: how many tasks to start, and when; the pool decides who gets them.

Under a timed dispatch the server steps by a clock, and who contributes to which release is drawn in secret
(`RandomAllocation`, `TimedPoisson`). These say with what probability they draw a client (`sampling`), and
the privacy accounting uses nothing else, so the draws and the accounting cannot disagree.
"""

import math
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from offbeat.core import SamplingEvent
from offbeat.errors import InputError, check_whole, setting_name, unknown_name
from offbeat.schedule.parsing import check_number
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
    """When a dispatcher is asked."""

    PUBLISHED = "a version is there to start from"
    ARRIVED = "a task came back and the buffer is short"
    FILLED = "a task came back and the buffer is full, but the next version is not there yet"


class Dispatch(Protocol):
    """A rule for when tasks start."""

    def source(self, seed: int) -> Rng:
        """The source of random numbers for this rule."""
        ...

    def check(self, buffer: int, population: int) -> None:
        """Refuse a buffer or population that cannot work."""
        ...


@runtime_checkable
class PooledDispatch(Dispatch, Protocol):
    """A rule for the number of tasks; the server steps when its buffer is full."""

    @property
    def redraws(self) -> bool:
        """Whether another client is drawn in place of one that is away."""
        ...

    def count(self, idle: int, busy: int, waiting: int, moment: DispatchEvent, draws: Rng) -> int:
        """How many tasks to start now; may exceed the number of clients."""
        ...

    def pool(self, population: int) -> ClientPool:
        """The pool that it chooses from."""
        ...


@runtime_checkable
class TimedDispatch(Dispatch, Protocol):
    """A rule for who contributes to which release, where the server steps by a clock.

    Release r, counted from 1, makes version r, `period` seconds after release r - 1. The tasks for it start
    from one of the `lead` versions before it, and from none before `first_version`.
    """

    @property
    def period(self) -> float: ...

    @property
    def lead(self) -> int: ...

    def members(self, release: int, population: int, draws: Rng) -> npt.NDArray[np.int64]:
        """Who contributes to a release if its update arrives in time."""
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

    With a buffer of the cohort's size nobody is ever stale. With a smaller one the cohort is
    over-selected: who is late arrives stale, or is dropped under a limit of 0.

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
        _check_buffer(buffer, population)
        _check_concurrency("cohort", self.cohort, buffer, population)


@dataclass(frozen=True)
class Asynchronous:
    """`concurrency` tasks are in flight, and each that comes back is replaced at once.

    Eager: also the one that fills the buffer, so its replacement still starts from the old
    version (FADAS); otherwise that one is replaced after the server step (MasFL).

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
        _check_buffer(buffer, population)
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
        _check_buffer(buffer, population)
        _check_concurrency("concurrency", self.concurrency, buffer, population)


@dataclass(frozen=True)
class Poisson:
    """From each version every idle client starts with probability `rate`, on its own.

    The momentum-approximation paper draws from all clients; here one that is still working is not drawn.

    Attributes:
        rate: The probability with which an idle client starts, above 0 and at most 1.
    """

    rate: float
    source: ClassVar = KeyedRng
    pool: ClassVar = IdleClientPool
    redraws: ClassVar[bool] = False  # or clients would start with more than this probability

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
    """Each cohort is asked twice in a row: for methods with two phases a round (MIME).

    Attributes:
        cohort: The number of clients that are asked twice; the buffer has as many.
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
        _check_buffer(buffer, population)
        _check_concurrency("cohort", self.cohort, buffer, population)
        if buffer != self.cohort:
            raise InputError(f"phases wait for the whole cohort of {self.cohort}: give a buffer of as many.")


@dataclass(frozen=True)
class Queues:
    """Each version goes to as many clients as the buffer takes, drawn from all, busy or not (DeFedAvg-nIID).

    A client works through what it was sent in order. `outstanding` tasks are there at first, and
    as many stay, since as many come back as are sent.

    Attributes:
        outstanding: The number of tasks that are sent and not back yet.
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
        _check_buffer(buffer, population)
        _check_concurrency("concurrency", self.outstanding, buffer, population)


@dataclass(frozen=True)
class OpenSlots:
    """`concurrency` tasks are in flight at most, and new ones start once `slots` of these places are free.

    The rule of NVFlare's buffered averaging, with its active jobs K, buffer B and open slots O: O = 1 is
    `Asynchronous` with hand-out after the server step, and K = B = O is `Synchronous`. The task that fills
    the buffer is replaced after the server step.

    Attributes:
        concurrency: The largest number of tasks in flight.
        slots: How many of these places must be free before new tasks start.
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
        _check_buffer(buffer, population)
        _check_concurrency("concurrency", self.concurrency, buffer, population)
        if not 1 <= self.slots <= self.concurrency:
            raise InputError(
                f"{self.slots} open slots are not between 1 and the concurrency of {self.concurrency}: "
                "change one."
            )


@dataclass(frozen=True)
class RandomAllocation:
    """In each epoch of `slots` releases every client contributes to one, drawn uniformly and on its own.

    Attributes:
        period: The seconds between two releases.
        slots: The releases of an epoch, to one of which a client contributes.
        lead: How many versions before a release its tasks may start.
    """

    period: float  # seconds between releases
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
        """That of its epoch, so that nothing of an epoch depends on what was drawn for a later one."""
        return (release - 1) // self.slots * self.slots

    def sampling(self, releases: int) -> SamplingEvent:
        """An epoch that has begun counts as a whole."""
        return SamplingEvent(-(-releases // self.slots), slots=self.slots)

    def check(self, buffer: int, population: int) -> None:
        _check_timed(self, buffer, population)
        if self.slots < 1:
            raise InputError(f"an epoch of {self.slots} releases cannot be: give at least 1.")


@dataclass(frozen=True)
class TimedPoisson:
    """To each release every client contributes with probability `rate`, on its own.

    Attributes:
        period: The seconds between two releases.
        rate: The probability with which a client contributes to a release.
        lead: How many versions before a release its tasks may start.
    """

    period: float  # seconds between releases
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
    if not 0 < dispatch.period < math.inf:
        raise InputError(f"the release period is {dispatch.period}: give a finite number of seconds above 0.")
    if dispatch.lead < 1:
        raise InputError(
            f"a client cannot start {dispatch.lead} releases ahead of its own: give a lead of at least 1."
        )


def _check_buffer(buffer: int, population: int) -> None:
    if population < 1:
        raise InputError(f"there are {population} clients: give at least 1.")
    if buffer < 1:
        raise InputError(f"the buffer is {buffer}: give at least 1.")
    if buffer > population:
        raise InputError(f"the buffer of {buffer} exceeds the {population} clients: lower it or add clients.")


def _check_concurrency(name: str, value: int, buffer: int, population: int) -> None:
    if value > population:
        raise InputError(f"the {name} of {value} exceeds the {population} clients: lower it or add clients.")
    if buffer > value:
        raise InputError(f"the buffer of {buffer} exceeds the {name} of {value}: make it at most {value}.")


def current_name(name: str) -> str:
    """The name that a dispatch has now; files of earlier versions may hold its former one."""
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
    """The rule of that name, checked; `hand_out` says on which side of a server step a task is replaced.

    Under a timed dispatch the buffer is the nominal cohort, and clients are drawn so that on average as many
    contribute to a release.
    """
    if hand_out not in ("before", "after"):
        raise unknown_name("hand-out", hand_out, ("before", "after"))
    if name not in TIMED_DISPATCH_NAMES:
        for key, value in (("release_period", release_period), ("lead", lead)):
            if value is not None and name in DISPATCH_NAMES:
                raise InputError(
                    f"{setting_name(key)} is for releases by a clock, not for {name} dispatch: leave it out, "
                    f"or use {setting_name('dispatch')} {' or '.join(TIMED_DISPATCH_NAMES)}."
                )
    elif release_period is None:
        raise InputError(
            f"{name} dispatch releases by a clock: give the seconds between two releases as "
            f"{setting_name('release_period')}."
        )
    if open_slots is not None and name != "open-slots" and name in DISPATCH_NAMES:
        raise InputError(
            f"{setting_name('open_slots')} is for {setting_name('dispatch')} open-slots, not for {name}: "
            "leave it out."
        )
    if name in DISPATCH_NAMES and name not in TIMED_DISPATCH_NAMES:
        _check_buffer(buffer, population)
    rule: Dispatch
    if name == "synchronous":
        rule = Synchronous(buffer)
    elif name == "asynchronous":
        rule = Asynchronous(concurrency, eager=hand_out == "before")
    elif name == "round-refill":
        rule = RoundRefill(concurrency)
    elif name == "poisson":
        if rate is None and not 1 <= concurrency <= population:
            raise InputError(
                f"the concurrency of {concurrency} is not between 1 and the {population} clients: change one."
            )
        rule = Poisson(concurrency / population if rate is None else rate)
    elif name == "phases":
        rule = Phases(buffer)
    elif name == "queues":
        rule = Queues(concurrency)
    elif name == "open-slots":
        rule = OpenSlots(concurrency, 1 if open_slots is None else open_slots)
    elif name == "allocation":
        assert release_period is not None
        rule = RandomAllocation(release_period, max(1, population // max(1, buffer)), lead or 1)
    elif name == "timed-poisson":
        assert release_period is not None
        rule = TimedPoisson(release_period, min(1.0, buffer / max(1, population)), lead or 1)
    elif name in _FORMER_NAMES:
        raise InputError(f"the dispatch '{name}' is now called '{_FORMER_NAMES[name]}': use that name.")
    else:
        raise unknown_name("dispatch", name, DISPATCH_NAMES)
    rule.check(buffer, population)
    return rule
