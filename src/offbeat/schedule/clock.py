"""Time limits of tasks, the interface of time that schedulers use (`Timeline`), and virtual time (`Clock`).

A task that takes longer than its limit is given up, and its client is free again. The limit is set when the
task starts, in simulations and deployments: fixed, or a quantile of the durations of the last 1000 tasks.
Tasks that were given up count as longer than all others: if more than the intended share were given up, the
limit doubles. Virtual time is a heap of tasks ordered by their arrival.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nsmallest
from math import ceil, inf
from typing import Any, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

from offbeat.core import Task
from offbeat.errors import InputError, check_attributes, setting_name
from offbeat.schedule.availability import Dropout
from offbeat.schedule.parsing import check_kind, format_number, format_spec, parse_spec
from offbeat.schedule.rng import Rng

_WINDOW = 1000  # tasks whose durations are remembered
_LEAST = 20  # durations that the quantile needs


class DeadlineTracker(Protocol):
    """The time limit during one run, which may depend on the durations so far."""

    def limit(self) -> float:
        """The seconds that a task that starts now may take."""
        ...

    def add(self, seconds: float, *, given_up: bool) -> None:
        """Record that a task ended after `seconds`, done or given up."""
        ...

    def save(self) -> list[list[float]]: ...

    def load(self, data: list[list[float]]) -> None: ...


class Deadline(Protocol):
    """A rule for the time limit; `str` gives the text that `parse_deadline` reads."""

    def open(self, first: float = inf) -> DeadlineTracker:
        """The limit of one run; `first` applies while too few durations are known."""
        ...


@dataclass(frozen=True)
class FixedDeadline:
    """The same limit for every task.

    Attributes:
        seconds: The time that a task may take.
    """

    seconds: float = inf

    def __post_init__(self) -> None:
        check_kind("the deadline", self.seconds)
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
        quantile: The share of the tasks that should end in time, above 0 and below 1.
        factor: The factor by which the quantile is multiplied.
    """

    quantile: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_kind("the quantile of a deadline", self.quantile)
        check_kind("the factor of a deadline", self.factor)
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
        recall_stale: Whether a client returns them as well before its update would be too stale.
    """

    deadline: Deadline = FixedDeadline()
    partial_work: bool = False
    recall_stale: bool = False

    def __post_init__(self) -> None:
        check_attributes("the deadline", self.deadline, ["open"], "one such as offbeat.FixedDeadline(30)")


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
    """The part of a checkpoint for a time limit; empty if there is nothing to save."""
    seen = tracker.save()
    return {"deadline": seen} if seen else {}


DEFAULT_STEPS = 10  # local steps of a task, in schedules without training


class Arrival(NamedTuple):
    """A task whose update arrived, or that was found to be lost."""

    task: Task
    started: float
    time: float
    lost: bool
    steps: int | None = None  # local steps of a task that ended early; None: all


class Timeline(Protocol):
    """Starts tasks and waits for their arrivals: a virtual clock, or a network."""

    @property
    def now(self) -> float: ...

    @property
    def busy(self) -> int:
        """The number of tasks in flight."""
        ...

    def start(self, task: Task, *, sure: bool = False, until: float = inf) -> None:
        """Start a task; with `sure` it must not be lost. After `until` its result is not needed."""
        ...

    def next(self, until: float = inf) -> Arrival | None:
        """Advance to the next arrival, but not beyond `until`.

        None: that time has come, or a client has become available before any arrival.
        """
        ...

    def wait(self, until: float) -> None:
        """Let time pass until a time."""
        ...


@runtime_checkable
class RecallingTimeline(Protocol):
    """A timeline that can end tasks early, so that clients return the steps done so far."""

    @property
    def recalls(self) -> bool: ...

    def recall(self, version: int) -> Sequence[Task]:
        """End tasks that started from this version or an earlier one, if they have done at least a step."""
        ...


@runtime_checkable
class ReplayedTimeline(Protocol):
    """A timeline that is given the number of steps that tasks of a trace did."""

    def end_early(self, task: Task, steps: int) -> None:
        """Set the number of steps of a task that ended early."""
        ...


# due, serial, client, version, visit, lost, started
HeapEntry: TypeAlias = tuple[float, int, int, int, int, bool, float]


class Clock:
    """Virtual time and the tasks in flight; ties are broken by the order of starting.

    A client that is sent a second task while it is busy starts it when the first is done.
    """

    def __init__(
        self,
        seconds: Callable[[int, int, float], float],
        draws: Rng,
        dropout: Dropout | None = None,
        limits: TaskLimits | float = inf,
        steps: Callable[[int], int] = lambda client: DEFAULT_STEPS,
    ) -> None:
        """Tasks end at their time limit, unless they are started with `sure`.

        `steps` gives the number of steps of a client's task, which are spread evenly over its duration.
        """
        if not isinstance(limits, TaskLimits):
            limits = TaskLimits(FixedDeadline(limits))
        self.now = 0.0
        self._seconds = seconds
        self._draws = draws
        self._dropout = dropout or Dropout()
        self._risky = self._dropout.probability > 0
        self._deadline = limits.deadline.open()
        self._partial = limits.partial_work
        self.recalls = limits.recall_stale
        self._steps = steps
        self._cut: dict[tuple[int, int], int] = {}  # steps of tasks that end early, by client and visit
        # Flat: the garbage collector does not traverse tuples of numbers.
        self._heap: list[HeapEntry] = []
        self._ends: dict[int, float] = {}  # when each busy client will have done all its tasks
        self.busy = 0  # tasks in flight
        self._serial = 0

    @property
    def working(self) -> int:
        """The number of clients that have a task."""
        return len(self._ends)

    def start(self, task: Task, *, sure: bool = False, until: float = inf) -> None:
        """Start a task; with `sure` it is never lost. `until` has no effect."""
        client, version, visit = task
        duration = self._seconds(client, visit, self._draws.duration(client, visit))
        lost = self._risky and not sure and self._dropout.loses(self._draws.seed, client, visit)
        if lost:
            duration *= self._dropout.patience
        limit = inf if sure else self._deadline.limit()
        if duration > limit:
            done = int(self._steps(client) * limit / duration) if self._partial and not lost else 0
            self._cut[client, visit] = done
            lost, duration = not done, limit
        begin = max(self.now, self._ends.get(client, 0.0))
        due = self._ends[client] = begin + duration
        heappush(self._heap, (due, self._serial, client, version, visit, lost, begin))
        self._serial += 1
        self.busy += 1

    def next(self, until: float = inf) -> Arrival | None:
        """Advance to the next arrival, or to `until` if that comes first."""
        if until < inf and not (self._heap and self._heap[0][0] <= until):
            self.wait(until)
            return None
        due, _, client, version, visit, lost, started = heappop(self._heap)
        self.busy -= 1
        if self._ends.get(client, due) <= due:
            self._ends.pop(client, None)
        if due > self.now:
            self.now = due
        steps = self._cut.get((client, visit))
        if steps is not None or not lost:
            self._deadline.add(due - started, given_up=steps is not None)
        if steps == 0:
            del self._cut[client, visit]
        return Arrival(Task(client, version, visit), started, due, lost, steps or None)

    def recall(self, version: int) -> Sequence[Task]:
        recalled: list[Task] = []
        for index, (due, serial, client, began, visit, lost, started) in enumerate(self._heap):
            if lost or began > version or due <= self.now:
                continue
            all_steps = self._cut.get((client, visit), self._steps(client))
            done = int(all_steps * (self.now - started) / (due - started))
            if done >= 1:
                self._cut[client, visit] = done
                self._heap[index] = (self.now, serial, client, began, visit, lost, started)
                if self._ends.get(client) == due:
                    self._ends[client] = self.now
                recalled.append(Task(client, began, visit))
        heapify(self._heap)
        return recalled

    def end_early(self, task: Task, steps: int) -> None:
        self._cut[task.client, task.visit] = steps

    def steps_of(self, task: Task) -> int | None:
        """The number of steps of a task that ends early; None: all."""
        return self._cut.get((task.client, task.visit)) if self._cut else None

    def forget(self, tasks: Iterable[Task]) -> None:
        """Forget tasks that are over."""
        for task in tasks if self._cut else ():
            self._cut.pop((task.client, task.visit), None)

    def upcoming(self, count: int) -> list[Task]:
        """Those of the next `count` arrivals that will not be lost."""
        first = nsmallest(count, self._heap)
        return [Task(client, version, visit) for _, _, client, version, visit, lost, _ in first if not lost]

    def flying(self) -> list[Task]:
        """All tasks in flight, in no order."""
        return [Task(client, version, visit) for _, _, client, version, visit, _, _ in self._heap]

    def wait(self, until: float) -> None:
        """Let time pass; tasks that are due meanwhile arrive afterwards, with their own times."""
        self.now = max(self.now, until)

    def save(self) -> dict[str, Any]:
        """The whole state, as JSON."""
        facts = {"now": self.now, "serial": self._serial, "flights": [list(flight) for flight in self._heap]}
        if self._cut:
            facts["cut"] = [[*key, steps] for key, steps in self._cut.items()]
        return facts | deadline_state(self._deadline)

    def load(self, data: dict[str, Any]) -> None:
        """Restore what `save` returned."""
        self.now = float(data["now"])
        self._serial = int(data["serial"])
        self._heap = [cast(HeapEntry, tuple(flight)) for flight in data["flights"]]
        self.busy = len(self._heap)
        self._cut = {(client, visit): steps for client, visit, steps in data.get("cut", ())}
        self._deadline.load(data.get("deadline", []))
        self._ends = {}
        for due, _, client, *_ in self._heap:
            self._ends[client] = max(due, self._ends.get(client, due))
