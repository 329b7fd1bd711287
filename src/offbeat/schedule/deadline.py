"""A time limit on tasks: fixed, or a quantile of the durations seen so far; in simulations and deployments.

A task that takes longer is given up at its limit, which is decided as it starts, and its client is free
again. The quantile is over the last 1000 tasks. Those that were given up took longer than any time that was
seen, so they rank last: if more than the intended share were given up, the limit doubles.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, Protocol

from offbeat.errors import InputError, setting_name
from offbeat.schedule.parsing import format_number, format_spec, parse_spec

_WINDOW = 1000  # tasks whose durations are remembered
_LEAST = 20  # durations to be seen before the quantile counts


class DeadlineTracker(Protocol):
    """The limit of one run, which may follow what it sees."""

    def limit(self) -> float:
        """The seconds that a task that starts now may take."""
        ...

    def add(self, seconds: float, *, given_up: bool) -> None:
        """A task ended after so many seconds, done or given up."""
        ...

    def save(self) -> list[list[float]]: ...

    def load(self, data: list[list[float]]) -> None: ...


class Deadline(Protocol):
    """A rule for the time limit; `str` gives the text that `parse_deadline` reads."""

    def open(self, first: float = inf) -> DeadlineTracker:
        """The limit of one run; `first` holds while too little was seen."""
        ...


@dataclass(frozen=True)
class FixedDeadline:
    """The same limit for every task.

    Attributes:
        seconds: The time that a task may take.
    """

    seconds: float = inf

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise InputError(f"{setting_name('deadline')} must be above 0 seconds, not {self.seconds:g}.")

    def __str__(self) -> str:
        return format_number(self.seconds)

    def open(self, first: float = inf) -> DeadlineTracker:
        return _FixedTracker(self.seconds)


@dataclass(frozen=True)
class QuantileDeadline:
    """A quantile of the durations seen so far, times a factor.

    Attributes:
        quantile: The share of the tasks that shall end in time, above 0 and below 1.
        factor: By which the quantile is multiplied.
    """

    quantile: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.quantile < 1:
            raise InputError(
                f"the quantile of {setting_name('deadline')} must be above 0 and below 1, "
                f"not {self.quantile:g}."
            )
        if not 0 < self.factor < inf:
            raise InputError(
                f"the factor of {setting_name('deadline')} must be above 0 and finite, not {self.factor:g}."
            )

    def __str__(self) -> str:
        return format_spec("quantile", self.quantile, *([self.factor] if self.factor != 1 else []))

    def open(self, first: float = inf) -> DeadlineTracker:
        return _QuantileTracker(self, first)


@dataclass(frozen=True)
class _FixedTracker:
    seconds: float

    def limit(self) -> float:
        return self.seconds

    def add(self, seconds: float, *, given_up: bool) -> None:
        pass

    def save(self) -> list[list[float]]:
        return []

    def load(self, data: list[list[float]]) -> None:
        pass


class _QuantileTracker:
    def __init__(self, rule: QuantileDeadline, first: float) -> None:
        self._rule, self._first = rule, first
        self._recent: deque[tuple[float, bool]] = deque()
        self._done: list[float] = []  # durations of those that were not given up, in order

    def limit(self) -> float:
        seen = len(self._recent)
        if seen < _LEAST:
            return self._first
        rank = ceil(self._rule.quantile * seen)
        if rank <= len(self._done):
            return self._rule.factor * self._done[rank - 1]
        return 2 * max(seconds for seconds, given_up in self._recent if given_up)

    def add(self, seconds: float, *, given_up: bool) -> None:
        self._recent.append((seconds, given_up))
        if not given_up:
            insort(self._done, seconds)
        if len(self._recent) > _WINDOW:
            oldest, was_given_up = self._recent.popleft()
            if not was_given_up:
                del self._done[bisect_left(self._done, oldest)]

    def save(self) -> list[list[float]]:
        return [[seconds, float(given_up)] for seconds, given_up in self._recent]

    def load(self, data: list[list[float]]) -> None:
        self._recent = deque((seconds, bool(given_up)) for seconds, given_up in data)
        self._done = sorted(seconds for seconds, given_up in self._recent if not given_up)


@dataclass(frozen=True)
class TaskLimits:
    """When a simulated task ends before its work is done.

    Attributes:
        deadline: The time limit of a task.
        partial_work: Whether a client then returns the steps that it has done.
        recall_stale: Whether it is asked for them before its update would be too stale.
    """

    deadline: Deadline = FixedDeadline()
    partial_work: bool = False
    recall_stale: bool = False


DEADLINES: Mapping[str, type[QuantileDeadline]] = {"quantile": QuantileDeadline}


def parse_deadline(value: str | float | None) -> Deadline:
    """The time limit that a number of seconds or `quantile:Q[:FACTOR]` names; None: no limit."""
    if value is None:
        return FixedDeadline()
    try:
        seconds = float(value)
    except ValueError:
        pass
    else:
        return FixedDeadline(seconds)
    if not str(value).startswith("quantile"):
        raise InputError(
            f"{setting_name('deadline')} must be a number of seconds or quantile:Q[:FACTOR], not '{value}'."
        )
    return parse_spec("deadline", str(value), DEADLINES)


def deadline_state(tracker: DeadlineTracker) -> dict[str, Any]:
    """What a checkpoint holds of a limit, if anything."""
    seen = tracker.save()
    return {"deadline": seen} if seen else {}
