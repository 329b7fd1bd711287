"""Timed releases: the server steps by a clock, with the updates that have arrived for the release.

Each client's releases are drawn in secret by the dispatch. A task that arrives after its release is dropped,
never moved to a later one, and a release to which nothing arrived is empty. Nothing that the server does for
one client therefore depends on another client, and the sums can be divided by a nominal cohort: this is what
the privacy accounting of timed releases rests on (docs/privacy.md).
"""

from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import numpy as np

from offbeat.core import Cohort, Task
from offbeat.errors import InputError, setting_name
from offbeat.schedule.availability import Availability, ListedAvailability
from offbeat.schedule.clock import Arrival, Timeline
from offbeat.schedule.dispatch import Dispatch, PooledDispatch, TimedDispatch
from offbeat.schedule.participation import Participation
from offbeat.schedule.rng import Rng
from offbeat.schedule.scheduler import Buffer, Scheduler, TaskBook, run_everyone
from offbeat.schedule.staleness import StalenessWeights


class TimedScheduler(TaskBook):
    """Starts the tasks of each release and collects what arrives before it.

    The task of a client for release r starts when one of the `lead` versions before r is published, drawn
    for each client and release. A client that is unavailable at that time does not contribute to the release.
    An update is late if it arrives after the time of its release, whenever the server processes it.
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
        super().__init__(timeline, draws, population, buffer, availability, observe)
        self._dispatch = dispatch
        self._listed = availability if isinstance(availability, ListedAvailability) else None
        self._origin = timeline.now  # when version 0 was published
        self._begun = -1  # the last version whose tasks were started
        self._releases: dict[tuple[int, int], int] = {}  # (client, visit) of each task -> its release
        self._drawn: dict[int, list[tuple[int, int]]] = {}  # release -> (client, version to start from)

    @property
    def buffered(self) -> tuple[Task, ...]:
        return tuple(each.task for each in self._waiting if self._release(each.task) == self._begun + 1)

    def ended(self) -> None:
        """Never: releases by a clock need no full buffer."""
        return

    def fill(self, version: int) -> Buffer:
        """Start the tasks that begin with `version`, and wait for the next release."""
        timeline, release = self._timeline, version + 1
        if self._begun < version:
            if self._begun < 0:
                self._wait_for_sites()
            self._begun = version
            is_there = self._find_present()
            for client, target in self._starters(version):
                if is_there(client):
                    task = self._start_task(client, version, until=self._due(target))
                    self._releases[task.client, task.visit] = target
            self._observe()
        due = self._due(release)
        while True:
            arrival = timeline.next(due)
            if arrival is not None:
                self._sort(arrival, release)
                self._observe()
            elif timeline.now >= due:
                break
        ready = [each for each in self._waiting if self._release(each.task) == release]
        self._waiting = [each for each in self._waiting if self._release(each.task) > release]
        for each in ready:
            del self._releases[each.task.client, each.task.visit]
        return self._take(version, ready, due)

    def everyone(self) -> Buffer:
        """One task of version 0 for every client; the clock of the releases starts after it."""
        arrivals = run_everyone(
            self._timeline,
            self._back,
            self.population,
            lambda client: self._start_task(client, 0, sure=True),
        )
        self._origin = self._timeline.now
        return self._take(0, arrivals, self._origin)

    def save(self) -> dict[str, Any]:
        return super().save() | {
            "origin": self._origin,
            "begun": self._begun,
            "releases": [[*key, release] for key, release in self._releases.items()],
        }

    def load(self, data: dict[str, Any]) -> None:
        super().load(data)
        self._drawn = {}  # they follow from a secret that was just loaded
        self._origin, self._begun = data["origin"], data["begun"]
        self._releases = {(client, visit): release for client, visit, release in data["releases"]}

    def _wait_for_sites(self) -> None:
        """In a deployment the clock starts once a nominal cohort of clients is connected."""
        if self._listed is None:
            return
        while len(self._listed.there) < self.buffer:
            self._timeline.wait(self._timeline.now + self._listed.pause)
        self._origin = self._timeline.now

    def _find_present(self) -> Callable[[int], bool]:
        """A test of whether a client can be given a task now."""
        if self._listed is not None:
            return frozenset(self._listed.there).__contains__
        now = self._timeline.now
        return lambda client: self._back(client, now) <= now

    def _due(self, release: int) -> float:
        return self._origin + release * self._dispatch.period

    def _starters(self, version: int) -> Iterator[tuple[int, int]]:
        """The clients that start from this version, with their releases."""
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
        leads = self._draws.many_below(self._dispatch.lead, "lead", release, self.population) + 1
        starts = np.maximum(release - leads[members], self._dispatch.first_version(release))
        return list(zip(members.tolist(), starts.tolist(), strict=True))

    def _release(self, task: Task) -> int:
        """The release that a task is for."""
        return self._releases[task.client, task.visit]

    def _sort(self, arrival: Arrival, release: int) -> None:
        """Keep an arrival for its release, unless it is lost or late; `release` is the next one."""
        task = arrival.task
        own = self._release(task)
        if not arrival.lost and own >= release and arrival.time <= self._due(own):
            self._waiting.append(arrival)
            return
        del self._releases[task.client, task.visit]
        if arrival.lost:
            self._lose(task)
        else:
            self._drop(task)


def nominal_cohort(
    dispatch: TimedDispatch, version: int, population: int, buffer: int, weights: StalenessWeights
) -> Cohort:
    """The public cohort of a release: the expected number of updates, of all possible values of staleness.

    The server's step uses it in place of the actual cohort, which would reveal who was drawn.
    """
    oldest = version - dispatch.first_version(version + 1)
    staleness = tuple(min(oldest, index % dispatch.lead) for index in range(buffer))
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
