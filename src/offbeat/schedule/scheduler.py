"""The scheduler: starts tasks and fills buffers, without training anything."""

from array import array
from collections.abc import Callable, Sequence
from itertools import count
from math import inf, isinf
from typing import Any, NamedTuple, Protocol

import numpy as np

from offbeat.core import Task
from offbeat.errors import InputError
from offbeat.schedule.availability import Always, Availability, ListedAvailability, NextAvailable
from offbeat.schedule.clock import Arrival, RecallingTimeline, Timeline
from offbeat.schedule.dispatch import DispatchEvent, PooledDispatch
from offbeat.schedule.participation import Participation, ParticipationTracker
from offbeat.schedule.rng import Rng


class Buffer(NamedTuple):
    """The tasks of one server step, and those that were dropped or lost since the last one.

    Under a timed dispatch there may be no task.
    """

    version: int
    time: float
    tasks: tuple[Task, ...]
    started: tuple[float, ...]  # when each task started
    arrived: tuple[float, ...]  # when each update arrived
    dropped: tuple[Task, ...]
    lost: tuple[Task, ...]
    steps: tuple[int | None, ...] = ()  # of tasks that ended early; None: all; (): none ended early

    @property
    def staleness(self) -> tuple[int, ...]:
        """The staleness of each update."""
        return tuple(self.version - task.version for task in self.tasks)


class TaskCounts(NamedTuple):
    """The number of tasks so far by state; started = consumed + waiting + dropped + lost + in flight."""

    started: int
    consumed: int
    waiting: int
    dropped: int
    lost: int
    in_flight: int

    @property
    def client_updates(self) -> int:
        """Updates that arrived, used or not."""
        return self.consumed + self.waiting + self.dropped


class BufferSource(Protocol):
    """Where full buffers come from: a scheduler, or a recorded trace."""

    @property
    def counts(self) -> TaskCounts:
        """The number of tasks by state."""
        ...

    def ended(self) -> str | None:
        """Why the buffer cannot be filled again, in a sentence; None if it can."""
        ...

    def fill(self, version: int) -> Buffer:
        """The next full buffer, after the tasks of `version` were started."""
        ...

    def everyone(self) -> Buffer:
        """One task of version 0 for every client."""
        ...

    def save(self) -> dict[str, Any]: ...

    def load(self, data: dict[str, Any]) -> None: ...


def run_everyone(
    timeline: Timeline, back: NextAvailable, population: int, start: Callable[[int], object]
) -> list[Arrival]:
    """One task of each client, started with `start` as soon as the client is available; none is lost."""
    if timeline.busy:
        raise InputError("a step of all clients cannot begin while tasks are in flight: take it first.")
    now = timeline.now
    for when, client in sorted((back(client, now), client) for client in range(population)):
        if isinf(when):
            raise InputError(f"client {client} is never available, so not all clients can take part.")
        timeline.wait(when)
        start(client)
    arrivals: list[Arrival] = []
    while len(arrivals) < population:
        arrival = timeline.next()
        if arrival is None:
            continue
        if arrival.lost:
            timeline.start(arrival.task, sure=True)
        else:
            arrivals.append(arrival)
    return arrivals


MAX_MISSES = 64  # unavailable clients in a row after which all are assumed to be unavailable
MAX_USELESS_TASKS = 100_000  # tasks in a row that are lost or too stale, in a simulation
MAX_EMPTY_DISPATCHES = 100_000  # times in a row that a dispatcher may start no task while none is in flight


class TaskBook:
    """The tasks that a scheduler starts, and their states until a server step uses them."""

    def __init__(
        self,
        timeline: Timeline,
        draws: Rng,
        population: int,
        buffer: int,
        availability: Availability | None,
        observe: Callable[[], None],
    ) -> None:
        self.population = population
        self.buffer = buffer
        self._timeline = timeline
        self._draws = draws
        self._back = (availability or Always()).bind(draws.seed)
        self._observe = observe
        self._visits = array("I", bytes(4 * population))
        self._waiting: list[Arrival] = []
        self._late: list[Task] = []  # since the last step
        self._missing: list[Task] = []
        self._started = self._consumed = self._dropped = self._lost = 0

    @property
    def counts(self) -> TaskCounts:
        """The number of tasks by state."""
        waiting, busy = len(self._waiting), self._timeline.busy
        return TaskCounts(self._started, self._consumed, waiting, self._dropped, self._lost, busy)

    @property
    def buffered(self) -> tuple[Task, ...]:
        """The tasks of the next server step that have arrived so far, in order."""
        return tuple(arrival.task for arrival in self._waiting)

    def save(self) -> dict[str, Any]:
        """Everything but the timeline, as JSON."""
        visits = np.frombuffer(self._visits, dtype=self._visits.typecode)
        clients = visits.nonzero()[0]
        facts: dict[str, Any] = {
            "clients": clients.tolist(),
            "visits": visits[clients].tolist(),
            "counts": [self._started, self._consumed, self._dropped, self._lost],
            "draws": self._draws.save(),
        }
        if self._waiting or self._late or self._missing:
            facts["buffer"] = {
                "waiting": [
                    [*arrival.task, arrival.started, arrival.time]
                    + ([] if arrival.steps is None else [arrival.steps])
                    for arrival in self._waiting
                ],
                "dropped": self._late,
                "lost": self._missing,
            }
        return facts

    def load(self, data: dict[str, Any]) -> None:
        """Restore what `save` returned; the timeline is loaded separately."""
        self._visits = array("I", bytes(4 * self.population))
        for client, visits in zip(data["clients"], data["visits"], strict=True):
            self._visits[client] = visits
        self._started, self._consumed, self._dropped, self._lost = data["counts"]
        self._draws.load(data["draws"])
        part = data.get("buffer", {"waiting": [], "dropped": [], "lost": []})
        self._waiting = [
            Arrival(Task(client, version, visit), started, time, False, *steps)
            for client, version, visit, started, time, *steps in part["waiting"]
        ]
        self._late = [Task(*task) for task in part["dropped"]]
        self._missing = [Task(*task) for task in part["lost"]]

    def _start_task(self, client: int, version: int, *, sure: bool = False, until: float = inf) -> Task:
        task = Task(client, version, self._visits[client])
        self._visits[client] += 1
        self._started += 1
        self._timeline.start(task, sure=sure, until=until)
        return task

    def _drop(self, task: Task) -> None:
        self._late.append(task)
        self._dropped += 1

    def _lose(self, task: Task) -> None:
        self._missing.append(task)
        self._lost += 1

    def _take(self, version: int, arrivals: Sequence[Arrival], time: float) -> Buffer:
        """The buffer of a server step."""
        tasks, started, arrived, _, steps = zip(*arrivals, strict=True) if arrivals else ((),) * 5
        dropped, lost = tuple(self._late), tuple(self._missing)
        self._consumed += len(tasks)
        self._late.clear()
        self._missing.clear()
        partial = steps if any(each is not None for each in steps) else ()
        return Buffer(version, time, tasks, started, arrived, dropped, lost, partial)


class Scheduler(TaskBook):
    """Fills buffers: the dispatcher says how many tasks to start, and its pool chooses the clients.

    A chosen client that is not available is skipped. If others are drawn in its place and all seem to be
    unavailable, the task is started after a later arrival.
    """

    def __init__(
        self,
        timeline: Timeline,
        dispatch: PooledDispatch,
        draws: Rng,
        population: int,
        buffer: int,
        max_staleness: float = inf,
        availability: Availability | None = None,
        participation: Participation = Participation(),
        observe: Callable[[], None] = lambda: None,
    ) -> None:
        """`observe` is called after tasks started or arrived, when `save` may return a partly full buffer."""
        dispatch.check(buffer, population)
        if not max_staleness >= 0:
            raise InputError(f"the largest staleness is {max_staleness}: give a number of at least 0.")
        super().__init__(timeline, draws, population, buffer, availability, observe)
        self.max_staleness = max_staleness
        self._dispatch = dispatch
        self._listed = availability if isinstance(availability, ListedAvailability) else None
        self._pool = dispatch.pool(population)
        participation.check(self._pool, population, buffer)
        self._recalling: RecallingTimeline | None = None
        if isinstance(timeline, RecallingTimeline) and timeline.recalls and not isinf(max_staleness):
            self._recalling = timeline
        self._participation = participation
        self._turns = ParticipationTracker(participation, population) if participation.bounded else None

    def ended(self) -> str | None:
        """Why the buffer cannot be filled again, in a sentence; None if it can."""
        if self._turns is None:
            return None
        return self._turns.ended(len(self._pool) + self._timeline.busy, self._consumed, self.buffer)

    def fill(self, version: int) -> Buffer:
        """Start tasks from `version` and wait until the buffer is full."""
        timeline, pool, waiting, buffer = self._timeline, self._pool, self._waiting, self.buffer
        turns = self._turns
        arrived, filled = DispatchEvent.ARRIVED, DispatchEvent.FILLED  # enumerations are slow to look up
        if self._recalling is not None:
            self._recalling.recall(version - int(self.max_staleness))  # too stale for the next version
        self._send(version, DispatchEvent.PUBLISHED)
        self._observe()
        useless = 0
        while len(waiting) < buffer:
            if not timeline.busy:
                self._publish_again(version)
                self._observe()
            arrival = timeline.next()
            if arrival is None:
                self._send(version, arrived)
                self._observe()
                continue
            task = arrival.task
            useful = not arrival.lost and version - task.version <= self.max_staleness
            if turns is None or not useful or not turns.hold(task.client, version):
                pool.rest(task.client)
            useless = 0 if useful else useless + 1
            if useless > MAX_USELESS_TASKS and self._listed is None:
                raise InputError(
                    f"{MAX_USELESS_TASKS:,} tasks in a row were lost or too stale, so no buffer is filled: "
                    "raise the deadline or the maximum staleness, or lower the drop-out."
                )
            if useful:
                waiting.append(arrival)
            elif arrival.lost:
                self._lose(task)
            else:
                self._drop(task)
            self._send(version, arrived if len(waiting) < buffer else filled)
            if not useful:
                pool.release(task.client)
            self._observe()
        pool.settle()
        if turns is not None:
            for client in turns.rested(version + 1):
                pool.give(client)
        return self._flush(version)

    def everyone(self) -> Buffer:
        """One task of version 0 for every client, started as soon as it is available; none is lost."""
        self._participation.check_start()
        self._waiting = run_everyone(
            self._timeline, self._back, self.population, lambda client: self._start(client, 0, sure=True)
        )
        for arrival in self._waiting:
            self._pool.give(arrival.task.client)
        if self._turns is not None:
            self._turns.begin()
        return self._flush(0)

    def save(self) -> dict[str, Any]:
        facts = super().save() | {"pool": self._pool.save()}
        if self._turns is not None:
            facts["turns"] = self._turns.save()
        if "buffer" in facts:
            facts["buffer"]["resting"] = self._pool.resting
        return facts

    def load(self, data: dict[str, Any]) -> None:
        super().load(data)
        self._pool.load(data["pool"])
        if self._turns is not None:
            self._turns.load(data["turns"])
        for client in data.get("buffer", {"resting": []})["resting"]:
            self._pool.rest(client)

    def _send(self, version: int, moment: DispatchEvent) -> tuple[float, int] | None:
        """Start the tasks that are due; return which unavailable client will be available first, and when."""
        timeline, pool = self._timeline, self._pool
        want = self._dispatch.count(len(pool), timeline.busy, len(self._waiting), moment, self._draws)
        if self._listed is not None and self._dispatch.redraws:
            for client in pool.among(self._listed.there, max(0, want), self._draws):
                self._start(client, version)
            return None
        first: tuple[float, int] | None = None
        misses = 0
        while want > 0 and misses < MAX_MISSES:
            candidates = pool.choose(want, self._draws)
            now = timeline.now
            for client in candidates:
                back = self._back(client, now)
                if back <= now:
                    self._start(client, version)
                    want -= 1
                    misses = 0
                else:
                    misses += 1
                    first = min(first or (inf, client), (back, client))
            if not candidates or not self._dispatch.redraws:
                break
        return first

    def _publish_again(self, version: int) -> None:
        """With nothing in flight and a buffer that is not full, wait until a client can start."""
        for _ in range(MAX_EMPTY_DISPATCHES) if self._listed is None else count():
            first = self._send(version, DispatchEvent.PUBLISHED)
            if self._timeline.busy:
                return
            if self._listed is not None:
                self._timeline.wait(self._timeline.now + self._listed.pause)
            elif first is not None:
                back, client = first
                if isinf(back):
                    raise InputError("no client is ever available: use another availability.")
                self._timeline.wait(back)
                if self._back(client, self._timeline.now) <= self._timeline.now:
                    self._start(client, version)
                    return
        raise InputError(
            f"no client was started in {MAX_EMPTY_DISPATCHES} attempts: raise the rate or the concurrency."
        )

    def _start(self, client: int, version: int, *, sure: bool = False) -> None:
        self._pool.take(client)
        self._start_task(client, version, sure=sure)

    def _flush(self, version: int) -> Buffer:
        filled = self._take(version, self._waiting, self._timeline.now)
        self._waiting.clear()
        return filled
