"""Time: what a scheduler asks of it (`Timeline`), and virtual time, a heap of tasks by when they are due."""

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush, nsmallest
from math import inf
from typing import Any, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

from offbeat.core import Task
from offbeat.schedule.availability import Dropout
from offbeat.schedule.deadline import FixedDeadline, TaskLimits, deadline_state
from offbeat.schedule.rng import Rng

DEFAULT_STEPS = 10  # of a task, where no model is there to say


class Arrival(NamedTuple):
    """A task that came back, or that turned out to be lost."""

    task: Task
    started: float
    time: float
    lost: bool
    steps: int | None = None  # that it did, if it ended early; None: all


class Timeline(Protocol):
    """Where tasks are sent and come back from: a clock, or a network."""

    @property
    def now(self) -> float: ...

    @property
    def busy(self) -> int:
        """How many tasks are in flight."""
        ...

    def start(self, task: Task, *, sure: bool = False, until: float = inf) -> None:
        """Start a task; a sure one must not get lost. After `until` its result is of no use."""
        ...

    def next(self, until: float = inf) -> Arrival | None:
        """Advance to the next arrival, but not beyond `until`.

        None: it is that time, or there is none yet, but a client has become available.
        """
        ...

    def wait(self, until: float) -> None:
        """Let time pass."""
        ...


@runtime_checkable
class RecallingTimeline(Protocol):
    """A timeline that can ask clients for what they have done so far."""

    @property
    def recalls(self) -> bool: ...

    def recall(self, version: int) -> Sequence[Task]:
        """End the tasks that started from this version or an earlier one, as far as they have done a step."""
        ...

    def end_early(self, task: Task, steps: int) -> None:
        """A task did so many steps, as a trace says."""
        ...


# due, serial, client, version, visit, lost, started
HeapEntry: TypeAlias = tuple[float, int, int, int, int, bool, float]


class Clock:
    """Tasks in flight; equal times are told apart by the order of starting.

    A client that is sent a second task before it is done with the first begins when it is.
    """

    def __init__(
        self,
        seconds: Callable[[int, int, float], float],
        draws: Rng,
        dropout: Dropout | None = None,
        limits: TaskLimits | float = inf,
        steps: Callable[[int], int] = lambda client: DEFAULT_STEPS,
    ) -> None:
        """A task beyond its limit ends there, unless it is a sure one; `steps` are those of a client's task.

        The steps of a task are spread evenly over its time.
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
        self._ends: dict[int, float] = {}  # when each client at work will be done with all it was sent
        self.busy = 0  # how many tasks are in flight
        self._serial = 0

    @property
    def working(self) -> int:
        """How many clients have a task."""
        return len(self._ends)

    def start(self, task: Task, *, sure: bool = False, until: float = inf) -> None:
        """Start a task; a sure one is never lost. Clients do not stop at `until`."""
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
        """End the tasks that started from this version or an earlier one, as far as they have done a step."""
        recalled: list[Task] = []
        for place, (due, serial, client, began, visit, lost, started) in enumerate(self._heap):
            if lost or began > version or due <= self.now:
                continue
            all_steps = self._cut.get((client, visit), self._steps(client))
            done = int(all_steps * (self.now - started) / (due - started))
            if done >= 1:
                self._cut[client, visit] = done
                self._heap[place] = (self.now, serial, client, began, visit, lost, started)
                if self._ends.get(client) == due:
                    self._ends[client] = self.now
                recalled.append(Task(client, began, visit))
        heapify(self._heap)
        return recalled

    def end_early(self, task: Task, steps: int) -> None:
        """A task did so many steps, as a trace says."""
        self._cut[task.client, task.visit] = steps

    def steps_of(self, task: Task) -> int | None:
        """The steps that a task does that ends early; None: all."""
        return self._cut.get((task.client, task.visit)) if self._cut else None

    def forget(self, tasks: Iterable[Task]) -> None:
        """Drop what is known of tasks that are over."""
        for task in tasks if self._cut else ():
            self._cut.pop((task.client, task.visit), None)

    def upcoming(self, count: int) -> list[Task]:
        """The tasks that will arrive first, less those that will be lost on the way."""
        first = nsmallest(count, self._heap)
        return [Task(client, version, visit) for _, _, client, version, visit, lost, _ in first if not lost]

    def flying(self) -> list[Task]:
        """All tasks in flight, in no order."""
        return [Task(client, version, visit) for _, _, client, version, visit, _, _ in self._heap]

    def wait(self, until: float) -> None:
        """Let time pass; what falls due meanwhile arrives afterwards, with its own time."""
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
