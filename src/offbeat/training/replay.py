"""Replay a run from its trace: the same tasks from the same versions give the same model.

A trace lists the tasks of each server step, so a simulated run and a deployed run can be replayed alike. A
private run whose noise has a secret key is not replayed: another draw of the noise would reveal more about
its clients, and a replay without noise would reveal everything.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from offbeat.aggregate.compression import Compression
from offbeat.aggregate.mean import Aggregator, Mean
from offbeat.aggregate.private import Private
from offbeat.core import AnyAlgorithm, Task, traits_of
from offbeat.engines.engine import Engine, Session
from offbeat.errors import InputError, renamed_parameters
from offbeat.schedule.clock import ReplayedTimeline
from offbeat.schedule.dispatch import Dispatch, TimedDispatch
from offbeat.schedule.scheduler import Buffer, TaskCounts
from offbeat.schedule.staleness import Equal, StalenessWeights
from offbeat.training.loop import RunState, Snapshot, StartProgress, check_fit, server_steps

_TIMED_LENGTH, _UNTIMED_LENGTH = 5, 3  # numbers of a task that was used, and of one that was dropped or lost
_MAX_NUMBER = 2**32  # larger numbers mean that the trace is damaged


@renamed_parameters(limit="max_staleness")
def replay(
    algorithm: AnyAlgorithm,
    engine: Engine,
    trace: Iterable[Mapping[str, Any]],
    *,
    dispatch: Dispatch,
    buffer: int,
    rounds: int | None = None,
    weights: StalenessWeights = Equal(),
    max_staleness: float = math.inf,
    aggregate: Aggregator = Mean(),
    compress: Compression | None = None,
    seed: int = 0,
    until: int | None = None,
    observe_start: Callable[[StartProgress], None] = lambda starting: None,
) -> Iterator[Snapshot]:
    """Compute the snapshots of a run again on a simulated engine, with the times of the trace.

    The other arguments are those of `train`. The dispatcher starts no tasks here, but the privacy accounting
    depends on it. `rounds` is the number of server steps of the run, if the trace has fewer. The trace is
    validated up to version `until` before anything is computed.
    """
    if isinstance(aggregate, Private) and aggregate.noise and aggregate.noise_seed is None:
        raise secret_noise_error()
    if traits_of(algorithm).reads_rank:
        raise InputError(
            "a trace does not contain the order in which tasks started, which trailing needs: run it again."
        )
    timed = isinstance(dispatch, TimedDispatch)
    start, taken = read_trace(trace, engine.clients, None if timed else buffer, max_staleness, until)
    warm = algorithm.warmup() is not None
    if warm != (start is not None):
        had, has = ("a start", "none") if start else ("no start", "one")
        name = type(algorithm).__name__
        raise InputError(
            f"this trace has {had} of all clients and {name} has {has}: name the method that made it."
        )
    if until is not None and len(taken) < until:
        raise InputError(f"this trace ends at version {len(taken)}: replay up to there at most.")
    rounds = max(1, len(taken)) if rounds is None else rounds
    if len(taken) > rounds:
        raise InputError(f"this trace has {len(taken)} server steps: give at least as many rounds.")
    check_fit(algorithm, dispatch, weights, rounds, max_staleness)
    run = RunState(
        algorithm, engine, dispatch, weights, buffer, rounds, max_staleness, aggregate, seed, compress
    )
    run.scheduler = TraceSource(start, taken, run.session)
    try:
        for snapshot in server_steps(run, None, observe_start):
            yield snapshot._replace(time=snapshot.filled.time if snapshot.filled else 0.0)
            if snapshot.version == len(taken):
                return
    finally:
        run.session.close()


def secret_noise_error() -> InputError:
    """The error for a run whose noise cannot be drawn a second time."""
    return InputError(
        "the noise of this run is secret and drawn only once, so a replay cannot compute its model: "
        "replay a run without noise, or a simulation whose noise has a seed."
    )


class TraceSource:
    """The full buffers of a trace, in place of a scheduler.

    Each task is started together with its version, so that the session keeps the message until it is needed,
    and arrives at once: the virtual clock is not used.
    """

    def __init__(self, start: Buffer | None, taken: Sequence[Buffer], session: Session) -> None:
        self._start = start
        self._taken = taken
        self._session = session
        self._begun: dict[int, list[Task]] = {}
        for filled in taken:
            for task in (*filled.tasks, *filled.dropped, *filled.lost):
                self._begun.setdefault(task.version, []).append(task)
        self._started = self._consumed = self._dropped = self._lost = 0

    @property
    def counts(self) -> TaskCounts:
        back = self._consumed + self._dropped + self._lost
        return TaskCounts(self._started, self._consumed, 0, self._dropped, self._lost, self._started - back)

    def ended(self) -> None:
        return None

    def everyone(self) -> Buffer:
        assert self._start
        return self._take(self._start, self._start.tasks)

    def fill(self, version: int) -> Buffer:
        return self._take(self._taken[version], self._begun.pop(version, ()))

    def save(self) -> dict[str, Any]:
        raise InputError("a replay has no checkpoints: replay the trace again, up to the version needed.")

    def load(self, data: dict[str, Any]) -> None:
        raise InputError("a replay begins at version 0: leave out the checkpoint.")

    def _take(self, filled: Buffer, begun: Sequence[Task]) -> Buffer:
        for task in begun:
            self._session.start(task, sure=True)
            self._session.next()
        for task, steps in zip(filled.tasks, filled.steps, strict=False):
            if steps is not None and isinstance(self._session, ReplayedTimeline):
                self._session.end_early(task, steps)
        self._started += len(begun)
        self._consumed += len(filled.tasks)
        self._dropped += len(filled.dropped)
        self._lost += len(filled.lost)
        return filled


def read_trace_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read the lines of a trace; an incomplete last line, as a killed process leaves it, is skipped."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                return
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                raise _damaged(number, "is not JSON") from None
            yield line


def read_trace(
    trace: Iterable[Mapping[str, Any]],
    clients: int,
    buffer: int | None,
    max_staleness: float,
    until: int | None,
) -> tuple[Buffer | None, list[Buffer]]:
    """Return the start, if there was one, and every server step; an inconsistent trace is rejected.

    Without a buffer the steps are releases by a clock, which may have any number of tasks, and a client's
    later visit may be for an earlier release.
    """
    start: Buffer | None = None
    taken: list[Buffer] = []
    seen: set[tuple[int, int]] = set()  # client and visit
    last: dict[int, int] = {}  # each client's last visit that was used
    for number, line in enumerate(trace, 1):
        version, filled = _parse(number, line)
        expected = 0 if number == 1 and version == 0 else len(taken) + 1
        if version != expected:
            raise _damaged(number, f"is of version {version} where {expected} comes next")
        for client, began, visit in (*filled.tasks, *filled.dropped, *filled.lost):
            if not 0 <= client < clients:
                raise _damaged(number, f"has a client {client}, outside 0..{clients - 1}")
            if began > filled.version:
                raise _damaged(number, f"has a task of version {began}, which was not there yet")
            if (client, visit) in seen:
                raise _damaged(number, f"has visit {visit} of client {client} a second time")
            seen.add((client, visit))
        for client, began, visit in filled.tasks:
            if filled.version - began > max_staleness:
                raise _damaged(number, f"uses an update that is {filled.version - began} versions old")
            if buffer is not None and last.get(client, 0) > visit:
                raise _damaged(number, f"has visit {visit} of client {client} after a later one")
            last[client] = visit
        due = buffer if version else clients
        if due is not None and len(filled.tasks) != due:
            raise _damaged(number, f"has {len(filled.tasks)} tasks in place of {due}")
        if version:
            taken.append(filled)
        else:
            start = filled
        if len(taken) == until:
            break
    return start, taken[:until]


def _parse(number: int, line: Any) -> tuple[int, Buffer]:
    """Parse a line into the version that it made and the buffer behind it."""
    if not isinstance(line, Mapping):
        raise _damaged(number, "is not an object")
    version, time = line.get("version"), line.get("time")
    if type(version) is not int or version < 0 or not _is_number(time):
        raise _damaged(number, "has no version, or no time")
    tasks, dropped, lost = (_rows(number, line, name) for name in ("tasks", "dropped", "lost"))
    if any(len(row) != _TIMED_LENGTH for row in tasks) or any(
        len(row) != _UNTIMED_LENGTH for row in (*dropped, *lost)
    ):
        raise _damaged(number, "has a task with too few or too many numbers")
    filled = Buffer(
        max(0, version - 1),
        time,
        tuple(Task(*row[:_UNTIMED_LENGTH]) for row in tasks),
        tuple(row[3] for row in tasks),
        tuple(row[4] for row in tasks),
        tuple(Task(*row) for row in dropped),
        tuple(Task(*row) for row in lost),
        _steps(number, line.get("steps", ()), len(tasks)),
    )
    return version, filled


def _steps(number: int, given: Any, tasks: int) -> tuple[int | None, ...]:
    """The steps of tasks that ended early."""
    counted = isinstance(given, list | tuple) and all(
        each is None or (type(each) is int and 1 <= each < _MAX_NUMBER) for each in given
    )
    if not counted or len(given) not in (0, tasks):
        raise _damaged(number, "has steps that are not those of its tasks")
    return tuple(given)


def _rows(number: int, line: Mapping[str, Any], name: str) -> list[list[Any]]:
    rows = line.get(name)
    if not isinstance(rows, list | tuple):
        raise _damaged(number, f"has no list of {name}")
    for row in rows:
        if not (
            isinstance(row, list | tuple)
            and all(_is_number(each) for each in row)
            and all(type(each) is int and 0 <= each < _MAX_NUMBER for each in row[:_UNTIMED_LENGTH])
        ):
            raise _damaged(number, f"has something among its {name} that is not a task")
    return [list(row) for row in rows]


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and -math.inf < value < math.inf


def _damaged(number: int, what: str) -> InputError:
    return InputError(
        f"line {number} of the trace {what}: replay an undamaged copy, or only the versions before it."
    )
