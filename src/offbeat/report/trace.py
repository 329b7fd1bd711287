"""Summarises a trace in one pass: staleness, concurrency, wasted work, participation, and durations.

Memory grows with the number of clients, versions and distinct staleness values, not with the number of
tasks.
"""

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import InputError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class UniformBins:
    """`count` bins of equal width from 0 to `end`; values outside belong to the first or the last bin."""

    end: float
    count: int

    @property
    def width(self) -> float:
        return self.end / self.count

    @property
    def edges(self) -> Floats:
        """The right edges of the bins."""
        return self.width * np.arange(1, self.count + 1, dtype=np.float64)

    @property
    def centres(self) -> Floats:
        return self.edges - self.width / 2

    def indices(self, at: Floats) -> Integers:
        """The bin of each value."""
        return np.clip(at / self.width, 0, self.count - 1).astype(np.int64)

    def counts(self, at: Floats) -> Integers:
        """The number of values in each bin."""
        return np.bincount(self.indices(at), minlength=self.count)

    def overlap(self, since: Floats, until: Floats) -> Floats:
        """The total length of the intervals' intersections with each bin."""
        return self._after(since) - self._after(until)

    def _after(self, at: Floats) -> Floats:
        """For each bin, the length of its part after each value, summed over the values."""
        at = np.clip(at, 0.0, self.end)
        bins = self.indices(at)
        part = np.bincount(bins, weights=(bins + 1) * self.width - at, minlength=self.count)
        begun = np.bincount(bins, minlength=self.count).cumsum()
        whole: Floats = part + self.width * np.concatenate([[0], begun[:-1]])
        return whole


_BLOCK = 20_000  # tasks that are processed together
_MAX_BINS, _MIN_BINS = 120, 10  # bins of a figure
_MAX_TIME = 1e150  # later times mean that the file is damaged
_UPDATES_PER_BIN = 40  # so that the averages of a bin are not dominated by chance


class DamagedFileError(ValueError):
    """A line that no run writes; the message says what is wrong with it."""


class PendingTask(NamedTuple):
    """A task in flight at the end of a trace."""

    started: float
    due: float


@dataclass(frozen=True)
class TraceSummary:
    """Summary statistics of a trace."""

    versions: int
    time: UniformBins
    steps: UniformBins
    staleness: Mapping[int, int]  # number of updates by staleness
    age_mean: Floats  # mean staleness for each bin of server steps
    age_max: Floats
    busy: Floats  # mean number of tasks in flight for each bin of time
    used: Integers  # arrivals of updates that were used, for each bin of time
    dropped: Integers
    lost: Integers
    taken: Integers  # updates used, for each client; the warm-up is not counted


class TraceEnd(NamedTuple):
    """The last version of a trace, and its time."""

    version: int
    time: float


def trace_end(line: Mapping[str, Any]) -> TraceEnd:
    """The version and the time of a line."""
    version, time = line.get("version"), line.get("time")
    if not (
        isinstance(version, int) and isinstance(time, int | float) and version >= 0 and 0 <= time < _MAX_TIME
    ):
        raise DamagedFileError("a line has no valid version or time")
    return TraceEnd(version, float(time))


def summarise_trace(
    lines: Iterable[Mapping[str, Any]],
    end: TraceEnd,
    clients: int,
    buffer: int,
    flights: Sequence[PendingTask] = (),
) -> TraceSummary:
    """Summarise a trace that ends at `end` with the tasks `flights` in flight.

    A trace has no times of tasks that were dropped or lost. They are estimated as the middle of the
    interval that the surrounding server steps allow.
    """
    count = max(_MIN_BINS, min(_MAX_BINS, end.version * buffer // _UPDATES_PER_BIN))
    time = UniformBins(end.time or 1.0, count)
    steps = UniformBins(max(1, end.version), min(max(1, end.version), count))
    sums = _TraceSums(time, steps, clients)
    for block in _blocks(lines):
        sums.add(block)
    if flights:
        since, due = (np.array(each) for each in zip(*flights, strict=True))
        sums.busy += time.overlap(since, np.maximum(since, due))
    return sums.summary(end.version)


class _Block(NamedTuple):
    """The tasks of several lines."""

    used: Floats  # (tasks, 5): client, version, visit, started, arrived
    used_by: Floats  # (tasks,) the version of the server step that used each
    dropped: Floats  # (tasks, 3)
    dropped_by: Floats
    lost: Floats
    lost_by: Floats
    times: Sequence[float]  # of all versions so far


class _Rows:
    """Tasks of one kind, and the version that each belongs to."""

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
        first, last = self._by[0], self._by[-1]
        return DamagedFileError(f"versions {first} to {last} contain an entry that is not a task")


def _blocks(lines: Iterable[Mapping[str, Any]]) -> Iterator[_Block]:
    used, dropped, lost = _Rows(5), _Rows(3), _Rows(3)
    times = array("d", [0.0])
    for line in lines:
        version, time = trace_end(line)
        if version == 0 and len(times) == 1 and not len(used):
            times[0] = time
        elif version != len(times) or time < times[-1]:
            raise DamagedFileError(f"version {version} is where version {len(times)} should be")
        else:
            times.append(time)
        for rows, name in ((used, "tasks"), (dropped, "dropped"), (lost, "lost")):
            rows.add(line.get(name), version)
        if len(used) + len(dropped) + len(lost) >= _BLOCK:
            yield _Block(*used.take(), *dropped.take(), *lost.take(), times)
    yield _Block(*used.take(), *dropped.take(), *lost.take(), times)


def _estimated_spans(times: Floats, since: Integers, made: Integers) -> tuple[Floats, Floats]:
    """When tasks began and ended: the middle of what the server steps around them allow."""
    until = (times[np.maximum(made - 1, 0)] + times[made]) / 2
    return np.minimum((times[since] + times[np.minimum(since + 1, made)]) / 2, until), until


class _TraceSums:
    """Sums over blocks."""

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
            raise DamagedFileError(
                f"it has a client {int(client.max())}, but there are {len(self._taken)} clients"
            )
        self._used += self._time.counts(arrived)
        self.busy += self._time.overlap(started, np.maximum(started, arrived))
        self._count_ages(block.used_by, began)
        later = block.used_by > 0
        self._taken += np.bincount(client[later].astype(np.int64), minlength=len(self._taken))
        times = np.array(block.times)
        for rows, by, total in (
            (block.dropped, block.dropped_by, self._dropped),
            (block.lost, block.lost_by, self._lost),
        ):
            made, since = by.astype(np.int64), rows[:, 1].astype(np.int64)
            total += self._time.counts(times[made])
            self.busy += self._time.overlap(*_estimated_spans(times, since, made))

    def _count_ages(self, by: Floats, began: Floats) -> None:
        later = by > 0
        ages = (by - 1 - began)[later].astype(np.int64)
        for age, count in zip(*np.unique(ages, return_counts=True), strict=True):
            self._ages[int(age)] = self._ages.get(int(age), 0) + int(count)
        bins = self._steps.indices(by[later] - 1)
        self._age_sum += np.bincount(bins, weights=ages, minlength=self._steps.count)
        self._age_count += np.bincount(bins, minlength=self._steps.count)
        np.maximum.at(self._age_max, bins, ages)

    def summary(self, versions: int) -> TraceSummary:
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


@dataclass(frozen=True)
class TaskDurations:
    """How long the tasks of a trace took, and how fast the run was."""

    seconds: Mapping[int, Sequence[float]]  # by client
    used: int
    dropped: int
    lost: int
    lost_seconds: float  # the mean time until a task was found to be lost
    steps_per_second: float
    updates_per_second: float
    staleness_mean: float


def task_durations(
    lines: Iterable[Mapping[str, Any]], flights: Iterable[tuple[int, float]] = ()
) -> TaskDurations:
    """The durations of all tasks of a trace, and of tasks in flight at its end as (client, seconds).

    Dropped and lost tasks have no times in a trace; they are estimated as in `summarise_trace`.
    """
    found: dict[int, array[float]] = {}
    counts = [0, 0, 0]
    ages = waited = 0.0
    times: Sequence[float] = (0.0,)
    for block in _blocks(lines):
        times = block.times
        client, began, _, started, arrived = block.used.T
        _add_durations(found, client, arrived - started)
        later = block.used_by > 0
        ages += float((block.used_by - 1 - began)[later].sum())
        for kind, rows, by in ((1, block.dropped, block.dropped_by), (2, block.lost, block.lost_by)):
            made, since = by.astype(np.int64), rows[:, 1].astype(np.int64)
            spans = _estimated_spans(np.array(times), since, made)
            seconds = np.maximum(0.0, spans[1] - spans[0])
            counts[kind] += len(rows)
            if kind == 1:
                _add_durations(found, rows[:, 0], seconds)
            else:
                waited += float(seconds.sum())
        counts[0] += int(later.sum())
    for client, length in flights:
        if length > max(found.get(client, (0.0,))):
            found.setdefault(client, array("d")).append(length)
    used, dropped, lost = counts
    span = max(times[-1] - times[0], 1e-300)
    return TaskDurations(
        found,
        used,
        dropped,
        lost,
        waited / max(1, lost),
        (len(times) - 1) / span,
        used / span,
        ages / max(1, used),
    )


def _add_durations(found: dict[int, "array[float]"], clients: Floats, seconds: Floats) -> None:
    for client, length in zip(clients.astype(np.int64).tolist(), seconds.tolist(), strict=True):
        found.setdefault(client, array("d")).append(max(0.0, length))


def pending_durations(folder: Path) -> list[tuple[int, float]]:
    """The clients of the tasks in flight in a run's checkpoint, with the duration of each task.

    A simulation knows the whole duration, a deployment the duration so far. Without a checkpoint there are
    none.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(folder / "checkpoint" / "state.safetensors", "numpy") as file:
            session = json.loads(file.metadata()["facts"])["session"]
        if "clock" in session:
            return [(flight[2], flight[0] - flight[6]) for flight in session["clock"]["flights"]]
        return [(client, session["now"] - started) for client, _, _, started in session["flying"]]
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, IndexError):
        return []


def read_lines(path: Path, size: float = float("inf")) -> Iterator[dict[str, Any]]:
    """The complete lines among the first `size` bytes; a run may be appending more."""
    with path.open("rb") as file:
        for text in file:
            size -= len(text)
            if not text.endswith(b"\n") or size < 0:
                return
            yield parse_line(text)


def parse_line(text: bytes) -> dict[str, Any]:
    """One line of a trace or of records."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        raise DamagedFileError("a line is not JSON") from None
    if not isinstance(line, dict):
        raise DamagedFileError("a line is not an object")
    return line


def no_run_sentence(folder: Path, command: str = "report") -> str:
    """The sentence for a folder that is not the folder of a run."""
    if not folder.is_dir():
        return f"there is no folder {folder}: name the folder of a run."
    inside = sorted(path.parent.name for path in folder.glob("*/settings.json"))
    if inside:
        names = " ".join(str(folder / name) for name in inside[: 5 if command == "report" else 1])
        return f"{folder} is not a run but contains runs: name them, as in 'offbeat {command} {names}'."
    return f"{folder} is not the folder of a run: name a folder that 'offbeat run' wrote."


def damaged_error(path: Path, error: DamagedFileError) -> InputError:
    """The error for a damaged file."""
    return InputError(f"{path} is damaged ({error}): replace it with an intact copy.")
