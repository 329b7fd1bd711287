"""What has happened in a deployment: its event log and its status, in bounded memory.

Nothing here is needed to continue a run: if events.jsonl cannot be written, the run continues without it.
"""

import json
import logging
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from offbeat.deploy.protocol.strict_json import Reason
from offbeat.files import open_jsonl

T = TypeVar("T")


class ThinnedSeries(Generic[T]):
    """A series of at most `max_points` points: evenly spaced ones, and the last."""

    def __init__(self, max_points: int = 400) -> None:
        self._max_points = max_points
        self._kept: list[T] = []
        self._last: T | None = None
        self._stride = 1
        self._seen = 0

    def add(self, point: T) -> None:
        if self._seen % self._stride == 0:
            if len(self._kept) == self._max_points - 1:
                self._kept = self._kept[::2]
                self._stride *= 2
            if self._seen % self._stride == 0:
                self._kept.append(point)
        self._last = point
        self._seen += 1

    def points(self) -> list[T]:
        """The points, oldest first."""
        tail_kept = self._seen == 0 or (self._seen - 1) % self._stride == 0
        return list(self._kept) if tail_kept or self._last is None else [*self._kept, self._last]


class DoublingHistogram:
    """A histogram of integers whose bin width doubles when a value lies beyond the last bin."""

    def __init__(self, count: int = 24) -> None:
        self.width = 1
        self.counts = [0] * count
        self.number = self.total = self.most = 0

    def add(self, value: int) -> None:
        while value >= self.width * len(self.counts):
            halves = [sum(self.counts[n : n + 2]) for n in range(0, len(self.counts), 2)]
            self.counts = halves + [0] * (len(self.counts) - len(halves))
            self.width *= 2
        self.counts[value // self.width] += 1
        self.number += 1
        self.total += value
        self.most = max(self.most, value)

    @property
    def mean(self) -> float | None:
        return self.total / self.number if self.number else None


class MinuteCounts:
    """Counts of several kinds in each of the last minutes, including the current one."""

    def __init__(self, kinds: int, minutes: int = 60) -> None:
        self._kinds = kinds
        self._rows: deque[list[int]] = deque(maxlen=minutes)
        self._minute: int | None = None

    def add(self, kind: int, now: float) -> None:
        self._advance(now)
        self._rows[-1][kind] += 1

    def counts(self, now: float) -> Sequence[list[int]]:
        """The counts of each kind, oldest first."""
        self._advance(now)
        return [[row[kind] for row in self._rows] for kind in range(self._kinds)]

    def _advance(self, now: float) -> None:
        """Add empty minutes up to now; a clock that was set back counts towards the last minute."""
        minute = int(now // 60)
        if self._minute is None:
            self._minute = minute - 1
        passed = max(0, minute - self._minute)
        self._rows.extend([0] * self._kinds for _ in range(min(passed, self._rows.maxlen or passed)))
        self._minute += passed


_LOG = logging.getLogger(__name__)

_MAX_CHARS = 200  # characters of untrusted text
_REPEAT_WINDOW = 60.0  # seconds in which repetitions are only counted
_MAX_REPEATED = 256  # keys whose repetitions are counted


def printable(text: str, longest: int = _MAX_CHARS) -> str:
    """Untrusted text, shortened and with control characters escaped."""
    short = text if len(text) <= longest else text[: longest - 1] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)


def timestamp(now: float) -> str:
    """A time as ISO 8601, in UTC."""
    return datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class _Repeated(NamedTuple):
    since: float
    times: int  # not yet written
    event: str
    fields: dict[str, Any]  # of the last one


class EventLog:
    """The events of one run, for programs in events.jsonl and for people through logging."""

    def __init__(self, folder: Path | None, run: str, now: Callable[[], float] = time.time) -> None:
        self._run = printable(run)
        self._now = now
        self._file = None if folder is None else _open_log(folder / "events.jsonl")
        self._repeated: OrderedDict[Hashable, _Repeated] = OrderedDict()  # oldest first

    def tell(self, event: str, sentence: str | None = None, /, **fields: Any) -> None:
        """Write one event; with a sentence it is logged, too."""
        self._settle()
        self._write(event, sentence, fields)

    def tell_once(self, key: Hashable, event: str, sentence: str, /, **fields: Any) -> None:
        """Write an event at most once a minute for each key; repetitions are counted and written after it."""
        self._settle()
        known = self._repeated.get(key)
        if known is not None:
            self._repeated[key] = known._replace(times=known.times + 1, fields=fields)
            return
        while len(self._repeated) >= _MAX_REPEATED:
            self._tell_times(self._repeated.popitem(last=False)[1])
        self._repeated[key] = _Repeated(self._now(), 0, event, fields)
        self._write(event, sentence, fields)

    def close(self) -> None:
        """Write the counts of repetitions, and close the file."""
        while self._repeated:
            self._tell_times(self._repeated.popitem(last=False)[1])
        if self._file is not None:
            self._file.close()
            self._file = None

    def _settle(self) -> None:
        now = self._now()
        while self._repeated and not now - next(iter(self._repeated.values())).since < _REPEAT_WINDOW:
            self._tell_times(self._repeated.popitem(last=False)[1])

    def _tell_times(self, known: _Repeated) -> None:
        if known.times:
            sentence = f"{known.event} again, {known.times} times since {timestamp(known.since)}"
            self._write(known.event, sentence, known.fields | {"times": known.times})

    def _write(self, event: str, sentence: str | None, fields: dict[str, Any]) -> None:
        safe = {name: _json_safe(value) for name, value in fields.items()}
        if sentence is not None:
            _LOG.info("%s", printable(sentence, 2 * _MAX_CHARS))
        if self._file is None:
            return
        line = {"time": timestamp(self._now()), "event": event, "run": self._run, **safe}
        try:
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        except OSError as error:
            _LOG.warning("events.jsonl cannot be written (%s): the run continues without it.", error.strerror)
            self._file.close()
            self._file = None


def _json_safe(value: Any) -> Any:
    """A field as JSON: floats are finite and rounded, and text is short."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [_json_safe(each) for each in value]
    return value


def _open_log(path: Path) -> FileIO | None:
    try:
        return open_jsonl(path)
    except OSError as error:
        _LOG.warning("%s cannot be written (%s): the run continues without it.", path, error.strerror)
        return None


SCORE_NAMES = ("accuracy", "loss")
_MAX_LISTED = 200  # clients on the page
_MAX_NAME = 60  # characters of a site's name


@dataclass(frozen=True)
class RunInfo:
    """What is known of a run before it begins."""

    run: str
    algorithm: str
    clients: int
    buffer: int
    rounds: int
    concurrency: int
    epsilon: float | None = None  # the privacy budget, if any
    delta: float | None = None


class _Point(NamedTuple):
    version: int
    time: float
    scores: tuple[float | None, ...]  # in the order of SCORE_NAMES


@dataclass
class _Client:
    name: str
    node: int
    present: bool
    seen: float
    working: bool = False
    aside: float = -math.inf  # until then
    done: int = 0
    rejected: int = 0


@dataclass
class RunStatus:
    """The status of a run; its users must hold a lock that they share."""

    outline: RunInfo
    since: float
    begun: bool = False  # whether version 0 exists
    version: int = 0
    time: float = 0.0
    saved: int | None = None
    checkpoints: int = 0
    network_errors: int = 0
    epsilon: float | None = None
    epsilon_version: int | None = None  # that it was computed for
    ended: bool = False
    sentence: str | None = None  # why it ended
    trouble: str | None = None  # what the run waits for
    accepted: int = 0
    sent: int = 0
    lost: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    waiting: int = 0
    in_flight: int = 0
    scores: dict[str, float] = field(default_factory=dict)
    nodes: dict[int, int] = field(default_factory=dict)  # connected nodes, and their clients
    clients: dict[int, _Client] = field(default_factory=dict)
    rejections: Counter[str] = field(default_factory=Counter)
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=20))
    staleness: DoublingHistogram = field(default_factory=DoublingHistogram)
    minutes: MinuteCounts = field(default_factory=lambda: MinuteCounts(2))
    points: ThinnedSeries[_Point] = field(default_factory=ThinnedSeries)

    def join(self, node: int, name: str, client: int, now: float) -> None:
        self.nodes[node] = client
        known = self.clients.get(client)
        if known is None:
            self.clients[client] = _Client(printable(name, _MAX_NAME), node, True, now)
        else:
            known.name, known.node, known.present, known.seen = printable(name, _MAX_NAME), node, True, now

    def leave(self, node: int) -> None:
        client = self.nodes.pop(node, None)
        known = None if client is None else self.clients.get(client)
        if known and known.node == node:  # it may be back as another node
            known.present = False

    def reject(self, node: int, client: int | None, reason: Reason, sentence: str, now: float) -> None:
        self.rejections[reason.value] += 1
        self.minutes.add(1, now)
        known = None if client is None else self.clients.get(client)
        if known:
            known.rejected += 1
        entry = {"node": str(node), "client": client, "reason": reason.value, "sentence": printable(sentence)}
        last = self.recent[-1] if self.recent else None
        if last and all(last[key] == entry[key] for key in ("node", "client", "reason")):
            self.recent[-1] = entry | {"time": timestamp(now), "times": last["times"] + 1}
        else:
            self.recent.append(entry | {"time": timestamp(now), "times": 1})

    def step(self, version: int, time: float, record: Mapping[str, Any] | None) -> None:
        self.begun, self.version, self.time = True, version, time
        if record is None:
            return
        known = {name: float(record[name]) for name in SCORE_NAMES if record.get(name) is not None}
        self.scores = {name: value for name, value in known.items() if math.isfinite(value)}
        if self.scores:
            self.points.add(_Point(version, time, tuple(map(self.scores.get, SCORE_NAMES))))
        if record.get("epsilon") is not None:
            self.spend(float(record["epsilon"]))

    def spend(self, epsilon: float) -> None:
        """The privacy cost up to this version."""
        self.epsilon, self.epsilon_version = epsilon, self.version

    def count_aside(self, now: float) -> int:
        return sum(each.aside > now for each in self.clients.values())

    def status(self, now: float) -> dict[str, Any]:
        """Everything that the live page shows, as JSON."""
        accepted, rejected = self.minutes.counts(now)
        points = self.points.points()
        return {
            "run": {key: _finite_or_none(value) for key, value in asdict(self.outline).items()},
            "now": timestamp(now),
            "since": timestamp(self.since),
            "ended": self.ended,
            "sentence": self.sentence,
            "trouble": self.trouble,
            "version": self.version,
            "time": _finite_or_none(self.time),
            "saved": self.saved,
            "scores": self.scores,
            "history": {
                "version": [point.version for point in points],
                "time": [_finite_or_none(point.time) for point in points],
                **{name: [point.scores[n] for point in points] for n, name in enumerate(SCORE_NAMES)},
            },
            "staleness": {
                "width": self.staleness.width,
                "counts": self.staleness.counts,
                "mean": self.staleness.mean,
                "most": self.staleness.most,
            },
            "arrivals": {"accepted": accepted, "rejected": rejected},
            "rejections": dict(self.rejections.most_common()),
            "recent": list(self.recent)[::-1],
            "tasks": {"sent": self.sent, "accepted": self.accepted, "lost": self.lost},
            "bytes": {"in": self.bytes_in, "out": self.bytes_out},
            "in_flight": self.in_flight,
            "buffer": {"waiting": self.waiting, "size": self.outline.buffer},
            "present": len(self.nodes),
            "known": len(self.clients),
            "aside": self.count_aside(now),
            "clients": list(self._listed(now)),
            "privacy": {
                "spent": _finite_or_none(self.epsilon),
                "version": self.epsilon_version or 0,
                "budget": _finite_or_none(self.outline.epsilon),
                "delta": _finite_or_none(self.outline.delta),
            },
        }

    def _listed(self, now: float) -> Iterable[dict[str, Any]]:
        """Clients by number; if there are too many, those seen last."""
        shown = sorted(self.clients, key=lambda client: -self.clients[client].seen)[:_MAX_LISTED]
        for client in sorted(shown):
            known = self.clients[client]
            left = max(0.0, known.aside - now)
            standing = "aside" if left else "working" if known.working else "idle"
            yield {
                "client": client,
                "name": known.name,
                "node": str(known.node),  # JavaScript's numbers have less than 64 bits
                "standing": standing if known.present else "away",
                "aside": round(left),
                "seen": round(max(0.0, now - known.seen), 1),
                "done": known.done,
                "rejected": known.rejected,
            }


def _finite_or_none(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
