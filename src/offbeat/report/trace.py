"""Stretches of equal length along an axis, and what adds up in each.

A trace in one pass: how stale updates were, who was at work when, what was wasted, and who took part.

What is kept is as long as the run has clients, versions or kinds of staleness, never as it has tasks.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class UniformBins:
    """From 0 to `end`, in `count` stretches; what lies outside belongs to the first or the last."""

    end: float
    count: int

    @property
    def width(self) -> float:
        return self.end / self.count

    @property
    def edges(self) -> Floats:
        """Where stretches end."""
        return self.width * np.arange(1, self.count + 1, dtype=np.float64)

    @property
    def centres(self) -> Floats:
        return self.edges - self.width / 2

    def places(self, at: Floats) -> Integers:
        """Which stretch each number lies in."""
        return np.clip(at / self.width, 0, self.count - 1).astype(np.int64)

    def tally(self, at: Floats) -> Integers:
        """How many of these numbers lie in each stretch."""
        return np.bincount(self.places(at), minlength=self.count)

    def presence(self, since: Floats, until: Floats) -> Floats:
        """How long, in all, the intervals lie in each stretch."""
        return self._after(since) - self._after(until)

    def _after(self, at: Floats) -> Floats:
        """The length of each stretch that comes after each of these numbers, added up."""
        at = np.clip(at, 0.0, self.end)
        places = self.places(at)
        part = np.bincount(places, weights=(places + 1) * self.width - at, minlength=self.count)
        begun = np.bincount(places, minlength=self.count).cumsum()
        whole: Floats = part + self.width * np.concatenate([[0], begun[:-1]])
        return whole


_BLOCK = 20_000  # tasks that are looked at together
_MAX_BINS, _MIN_BINS = 120, 10  # stretches of a figure
_MAX_TIME = 1e150  # no time goes as far
_UPDATES_PER_BIN = 40  # updates that a stretch has, about, so that chance does not hide what goes on


class DamagedFileError(ValueError):
    """A line that no run writes; the message says which, and what is wrong with it."""


class PendingTask(NamedTuple):
    """A task that was under way when the trace ended."""

    started: float
    due: float


@dataclass(frozen=True)
class TraceSummary:
    """A run's trace, added up."""

    versions: int
    time: UniformBins
    steps: UniformBins
    staleness: Mapping[int, int]  # updates by how many versions old they were
    age_mean: Floats  # for each stretch of server steps
    age_max: Floats
    busy: Floats  # clients at work, on average, for each stretch of time
    used: Integers  # arrivals of updates that were used, for each stretch of time
    dropped: Integers
    lost: Integers
    taken: Integers  # updates used, for each client; the start is not counted


class TraceEnd(NamedTuple):
    """How far a trace goes."""

    version: int
    time: float


def trace_end(line: Mapping[str, Any]) -> TraceEnd:
    """Which version a line made, and when."""
    version, time = line.get("version"), line.get("time")
    if not (
        isinstance(version, int) and isinstance(time, int | float) and version >= 0 and 0 <= time < _MAX_TIME
    ):
        raise DamagedFileError("a line has no version, or no time")
    return TraceEnd(version, float(time))


def summarise_trace(
    lines: Iterable[Mapping[str, Any]],
    end: TraceEnd,
    clients: int,
    buffer: int,
    flights: Sequence[PendingTask] = (),
) -> TraceSummary:
    """Add up the lines of a trace that goes as far as `end`; `flights` were under way there.

    Tasks that were dropped or lost have no times in a trace: theirs are taken to be in the middle of what
    the server steps around them leave open.
    """
    count = max(_MIN_BINS, min(_MAX_BINS, end.version * buffer // _UPDATES_PER_BIN))
    time = UniformBins(end.time or 1.0, count)
    steps = UniformBins(max(1, end.version), min(max(1, end.version), count))
    sums = _TraceSums(time, steps, clients)
    for block in _blocks(lines):
        sums.add(block)
    if flights:
        since, due = (np.array(each) for each in zip(*flights, strict=True))
        sums.busy += time.presence(since, np.maximum(since, due))
    return sums.digest(end.version)


class _Block(NamedTuple):
    """Some lines together."""

    used: Floats  # (tasks, 5): client, version, visit, started, arrived
    used_by: Floats  # (tasks,) the version that each helped to make
    dropped: Floats  # (tasks, 3)
    dropped_by: Floats
    lost: Floats
    lost_by: Floats
    times: Sequence[float]  # of all versions up to here


class _Rows:
    """Tasks of one kind, and which version each belongs to."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._rows: list[Any] = []
        self._by: list[int] = []

    def __len__(self) -> int:
        return len(self._by)

    def add(self, rows: Any, version: int) -> None:
        if not isinstance(rows, list):
            raise DamagedFileError(f"version {version} has no list of tasks")
        self._rows += rows
        self._by += [version] * len(rows)

    def take(self) -> tuple[Floats, Floats]:
        by = np.array(self._by, dtype=np.float64)
        try:
            rows = np.array(self._rows, dtype=np.float64).reshape(len(by), self._width)
        except (ValueError, TypeError, OverflowError):
            raise self._damaged() from None
        if not np.isfinite(rows).all() or (rows < 0).any() or (rows[:, 1] >= np.maximum(by, 1)).any():
            raise self._damaged()
        self._rows, self._by = [], []
        return rows, by

    def _damaged(self) -> DamagedFileError:
        return DamagedFileError(f"versions {self._by[0]} to {self._by[-1]} have something that is no task")


def _blocks(lines: Iterable[Mapping[str, Any]]) -> Iterator[_Block]:
    used, dropped, lost = _Rows(5), _Rows(3), _Rows(3)
    times = array("d", [0.0])
    for line in lines:
        version, time = trace_end(line)
        if version == 0 and len(times) == 1 and not len(used):
            times[0] = time
        elif version != len(times) or time < times[-1]:
            raise DamagedFileError(f"version {version} comes where {len(times)} should")
        else:
            times.append(time)
        for rows, name in ((used, "tasks"), (dropped, "dropped"), (lost, "lost")):
            rows.add(line.get(name), version)
        if len(used) + len(dropped) + len(lost) >= _BLOCK:
            yield _Block(*used.take(), *dropped.take(), *lost.take(), times)
    yield _Block(*used.take(), *dropped.take(), *lost.take(), times)


class _TraceSums:
    """What adds up over blocks."""

    def __init__(self, time: UniformBins, steps: UniformBins, clients: int) -> None:
        self._time, self._steps = time, steps
        self._ages: dict[int, int] = {}
        self._age_sum, self._age_count = np.zeros(steps.count), np.zeros(steps.count)
        self._age_max = np.zeros(steps.count)
        self._used, self._dropped, self._lost = (np.zeros(time.count, dtype=np.int64) for _ in range(3))
        self._taken = np.zeros(clients, dtype=np.int64)
        self.busy = np.zeros(time.count)

    def add(self, block: _Block) -> None:
        client, began, _, started, arrived = block.used.T
        if (block.used[:, 0] >= len(self._taken)).any():
            raise DamagedFileError(f"it has a client {int(client.max())}, and there are {len(self._taken)}")
        self._used += self._time.tally(arrived)
        self.busy += self._time.presence(started, np.maximum(started, arrived))
        self._count_ages(block.used_by, began)
        later = block.used_by > 0
        self._taken += np.bincount(client[later].astype(np.int64), minlength=len(self._taken))
        times = np.array(block.times)
        for rows, by, total in (
            (block.dropped, block.dropped_by, self._dropped),
            (block.lost, block.lost_by, self._lost),
        ):
            made, since = by.astype(np.int64), rows[:, 1].astype(np.int64)
            total += self._time.tally(times[made])
            until = (times[np.maximum(made - 1, 0)] + times[made]) / 2
            self.busy += self._time.presence(
                np.minimum((times[since] + times[np.minimum(since + 1, made)]) / 2, until), until
            )

    def _count_ages(self, by: Floats, began: Floats) -> None:
        later = by > 0
        ages = (by - 1 - began)[later].astype(np.int64)
        for age, count in zip(*np.unique(ages, return_counts=True), strict=True):
            self._ages[int(age)] = self._ages.get(int(age), 0) + int(count)
        places = self._steps.places(by[later] - 1)
        self._age_sum += np.bincount(places, weights=ages, minlength=self._steps.count)
        self._age_count += np.bincount(places, minlength=self._steps.count)
        np.maximum.at(self._age_max, places, ages)

    def digest(self, versions: int) -> TraceSummary:
        return TraceSummary(
            versions,
            self._time,
            self._steps,
            dict(sorted(self._ages.items())),
            self._age_sum / np.maximum(self._age_count, 1),
            self._age_max,
            self.busy / self._time.width,
            self._used,
            self._dropped,
            self._lost,
            self._taken,
        )
