"""Timed releases: the server steps by a clock on whatever has arrived for that release.

Each client's releases are drawn in secret by the dispatch. A task that arrives after its release is dropped,
never moved to a later one, and a release to which nothing arrived is empty. Nothing that the server does for
one client therefore depends on another client, and the sums can be divided by a nominal cohort: this is what
the privacy accounting of timed releases rests on (docs/privacy.md).
"""

from array import array
from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import numpy as np

from offbeat.core import Cohort, Task
from offbeat.errors import InputError, setting_name
from offbeat.schedule.availability import Always, Availability
from offbeat.schedule.clock import Arrival, Timeline
from offbeat.schedule.dispatch import Dispatch, PooledDispatch, TimedDispatch
from offbeat.schedule.participation import Participation
from offbeat.schedule.rng import Rng
from offbeat.schedule.scheduler import Buffer, Scheduler, TaskCounts, run_everyone
from offbeat.schedule.staleness import StalenessWeights


class TimedScheduler:
    """Starts the tasks of each release and collects what arrives before it.

    The task of a client for release r starts when one of the `lead` versions before r is published, drawn
    for each client and release. A client that is away at that time does not contribute to the release.
    """

    def __init__(
        self,
        timeline: Timeline,
        dispatch: TimedDispatch,
        draws: Rng,
        population: int,
        buffer: int,
        max_staleness: float = inf,
        availability: Availability | None = None,
        observe: Callable[[], None] = lambda: None,
    ) -> None:
        """`buffer` is the nominal cohort; `observe` is called after anything started or arrived."""
        dispatch.check(buffer, population)
        if dispatch.lead - 1 > max_staleness:
            raise InputError(
                f"a lead of {dispatch.lead} releases makes updates up to {dispatch.lead - 1} versions old, "
                f"and {setting_name('max_staleness')} is {max_staleness:g}: lower the lead or raise that."
            )
        self.population = population
        self.buffer = buffer
        self._timeline = timeline
        self._dispatch = dispatch
        self._draws = draws
        self._back = (availability or Always()).bind(draws.seed)
        self._observe = observe
        self._visits = array("I", bytes(4 * population))
        self._origin = timeline.now  # when version 0 was published
        self._begun = -1  # the last version whose tasks were started
        self._releases: dict[tuple[int, int], int] = {}  # (client, visit) of a task in flight -> its release
        self._waiting: dict[int, list[Arrival]] = {}  # by release
        self._late: list[Task] = []  # since the last release
        self._missing: list[Task] = []
        self._started = self._consumed = self._dropped = self._lost = 0
        self._drawn: dict[int, list[tuple[int, int]]] = {}  # release -> (client, version to start from)

    @property
    def counts(self) -> TaskCounts:
        """How many tasks are in which state."""
        waiting = sum(map(len, self._waiting.values()))
        return TaskCounts(
            self._started, self._consumed, waiting, self._dropped, self._lost, self._timeline.busy
        )

    def ended(self) -> None:
        """A clock does not run out of clients."""
        return

    def fill(self, version: int) -> Buffer:
        """Start the tasks that begin with `version`, and wait for the next release."""
        timeline, release = self._timeline, version + 1
        if self._begun < version:
            self._begun = version
            for client, target in self._starters(version):
                if self._back(client, timeline.now) <= timeline.now:
                    self._start(client, version, target)
            self._observe()
        due = self._origin + release * self._dispatch.period
        while True:
            arrival = timeline.next(due)
            if arrival is not None:
                self._take(arrival, release)
                self._observe()
            elif timeline.now >= due:
                break
        return self._flush(version, self._waiting.pop(release, []), due)

    def everyone(self) -> Buffer:
        """One task of version 0 for every client; the clock of the releases starts after it."""
        arrivals = run_everyone(
            self._timeline, self._back, self.population, lambda client: self._start(client, 0, None)
        )
        self._origin = self._timeline.now
        return self._flush(0, arrivals, self._origin)

    def save(self) -> dict[str, Any]:
        """Everything but the timeline, as JSON."""
        visits = np.frombuffer(self._visits, dtype=self._visits.typecode)
        clients = visits.nonzero()[0]
        return {
            "clients": clients.tolist(),
            "visits": visits[clients].tolist(),
            "counts": [self._started, self._consumed, self._dropped, self._lost],
            "draws": self._draws.save(),
            "origin": self._origin,
            "begun": self._begun,
            "releases": [[*key, release] for key, release in self._releases.items()],
            "waiting": [
                [release, *arrival.task, arrival.started, arrival.time]
                for release, arrivals in self._waiting.items()
                for arrival in arrivals
            ],
            "dropped": self._late,
            "lost": self._missing,
        }

    def load(self, data: dict[str, Any]) -> None:
        """Restore what `save` returned; the timeline is loaded separately."""
        self._visits = array("I", bytes(4 * self.population))
        for client, visits in zip(data["clients"], data["visits"], strict=True):
            self._visits[client] = visits
        self._started, self._consumed, self._dropped, self._lost = data["counts"]
        self._draws.load(data["draws"])
        self._drawn = {}  # they follow from a secret that was just loaded
        self._origin, self._begun = data["origin"], data["begun"]
        self._releases = {(client, visit): release for client, visit, release in data["releases"]}
        self._waiting = {}
        for release, client, version, visit, started, time in data["waiting"]:
            arrival = Arrival(Task(client, version, visit), started, time, False)
            self._waiting.setdefault(release, []).append(arrival)
        self._late = [Task(*task) for task in data["dropped"]]
        self._missing = [Task(*task) for task in data["lost"]]

    def _starters(self, version: int) -> Iterator[tuple[int, int]]:
        """Who starts from this version, and for which release."""
        for release in range(version + 1, version + self._dispatch.lead + 1):
            if release not in self._drawn:
                self._drawn[release] = self._draw(release)
            yield from ((client, release) for client, start in self._drawn[release] if start == version)
        self._drawn.pop(version + 1)

    def _draw(self, release: int) -> list[tuple[int, int]]:
        """The clients of a release, and the version that each of them starts from."""
        members = self._dispatch.members(release, self.population, self._draws)
        if self._dispatch.lead == 1:
            return [(client, release - 1) for client in members.tolist()]
        leads = self._draws.keyed("lead", release).integers(self._dispatch.lead, size=self.population) + 1
        starts = np.maximum(release - leads[members], self._dispatch.first_version(release))
        return list(zip(members.tolist(), starts.tolist(), strict=True))

    def _start(self, client: int, version: int, release: int | None) -> None:
        visit = self._visits[client]
        self._visits[client] = visit + 1
        self._started += 1
        if release is not None:
            self._releases[client, visit] = release
        self._timeline.start(Task(client, version, visit), sure=release is None)

    def _take(self, arrival: Arrival, release: int) -> None:
        """Keep an arrival for its release; that of an earlier one than `release` is late."""
        task = arrival.task
        own = self._releases.pop((task.client, task.visit))
        if arrival.lost:
            self._missing.append(task)
            self._lost += 1
        elif own < release:
            self._late.append(task)
            self._dropped += 1
        else:
            self._waiting.setdefault(own, []).append(arrival)

    def _flush(self, version: int, arrivals: list[Arrival], time: float) -> Buffer:
        tasks, started, arrived, _ = zip(*arrivals, strict=True) if arrivals else ((), (), (), ())
        dropped, lost = tuple(self._late), tuple(self._missing)
        self._consumed += len(tasks)
        self._late.clear()
        self._missing.clear()
        return Buffer(version, time, tasks, started, arrived, dropped, lost)


def nominal_cohort(
    dispatch: TimedDispatch, version: int, population: int, buffer: int, weights: StalenessWeights
) -> Cohort:
    """What is public of a release: as many updates as expected, of every staleness that is drawn.

    The server's step is given this in place of the updates that there were, which would tell who was drawn.
    """
    oldest = version - dispatch.first_version(version + 1)
    staleness = tuple(min(oldest, place % dispatch.lead) for place in range(buffer))
    return Cohort(version, population, staleness, tuple(weights(age) for age in staleness))


def make_scheduler(
    timeline: Timeline,
    dispatch: Dispatch,
    draws: Rng,
    population: int,
    buffer: int,
    max_staleness: float = inf,
    availability: Availability | None = None,
    participation: Participation = Participation(),
    observe: Callable[[], None] = lambda: None,
) -> Scheduler | TimedScheduler:
    """The scheduler of a dispatch."""
    if isinstance(dispatch, TimedDispatch):
        return TimedScheduler(
            timeline, dispatch, draws, population, buffer, max_staleness, availability, observe
        )
    assert isinstance(dispatch, PooledDispatch)
    return Scheduler(
        timeline, dispatch, draws, population, buffer, max_staleness, availability, participation, observe
    )
