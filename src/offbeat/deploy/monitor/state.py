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
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypedDict, TypeVar, Unpack

from offbeat.deploy.protocol.strict_json import Reason
from offbeat.files import open_jsonl
from offbeat.training.runner import Progress

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


EventName: TypeAlias = Literal[
    "joined",  # a site was admitted as this client
    "left",  # a node is gone
    "sent",  # a task, with a payload of so many bytes
    "recalled",  # a client was asked to send what it has done of a task
    "accepted",  # an upload passed every check and is on disk
    "rejected",  # a reply, a greeting or a task came to nothing
    "lost",  # no upload will come of this task
    "set_aside",  # an accepted upload is not used
    "aside",  # a client that failed gets no task for so long
    "unreachable",  # the transport fails at the moment
    "reachable",
    "helper_away",  # the helper of secure aggregation does not answer at the moment
    "helper_back",
    "notice",  # something that the operator should know, such as what was lost
    "stepped",  # the server took a step
    "saved",  # the checkpoint of this version is on disk
    "spent",  # the privacy cost so far
    "ended",  # and why, unless the run took all its steps
]


class EventFields(TypedDict, total=False):
    """What an event says, in the order of a line of events.jsonl; each event has some of these."""

    node: int
    name: str  # of a site
    client: int | None  # None: not known yet
    version: int  # of a task, or of the model
    visit: int
    seconds: float  # from a task to its upload, or without a task
    work: float  # seconds, as the site reports
    bytes: int
    steps: int  # of a task that ended early
    reason: Reason
    sentence: str | None
    staleness: float  # mean over the buffer
    accuracy: float
    loss: float
    epsilon: float


# For people; events that happen all the time have none.
_SENTENCES = {
    "joined": "{name} joined as client {client}",
    "left": "{who} left",
    "rejected": "{who}: {reason}: {sentence}",
    "set_aside": "the upload of client {client} from version {version} is set aside",
    "aside": "client {client} gets no task for {seconds:.0f} s",
    "unreachable": "{sentence}",
    "reachable": "the network is reachable again",
    "helper_away": "{sentence}",
    "helper_back": "the helper answers again",
    "notice": "{sentence}",
    "ended": "the run ended{why}",
}
# Are written at most once a minute for each value of these fields; repetitions are counted.
_THROTTLED: dict[str, tuple[str, ...]] = {
    "rejected": ("node", "reason"),
    "unreachable": (),
    "helper_away": (),
}


class _Repeated(NamedTuple):
    since: float
    times: int  # not yet written
    event: str
    fields: EventFields  # of the last one


class EventLog:
    """The events of one run, for programs in events.jsonl and for people through logging."""

    def __init__(self, folder: Path | None, run: str, now: Callable[[], float] = time.time) -> None:
        self._run = printable(run)
        self._now = now
        self._file = None if folder is None else _open_log(folder / "events.jsonl")
        self._repeated: OrderedDict[Hashable, _Repeated] = OrderedDict()  # oldest first

    def tell(self, event: EventName, /, **fields: Unpack[EventFields]) -> None:
        """Write one event, unless it is one of many alike."""
        now = self._now()
        while self._repeated and not now - next(iter(self._repeated.values())).since < _REPEAT_WINDOW:
            self._tell_times()
        if event in _THROTTLED:
            key = (event, *map(fields.get, _THROTTLED[event]))
            if known := self._repeated.get(key):
                self._repeated[key] = known._replace(times=known.times + 1, fields=fields)
                return
            while len(self._repeated) >= _MAX_REPEATED:
                self._tell_times()
            self._repeated[key] = _Repeated(now, 0, event, fields)
        self._write(event, _describe(event, fields), fields)

    def close(self) -> None:
        """Write the counts of repetitions, and close the file."""
        while self._repeated:
            self._tell_times()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _tell_times(self) -> None:
        """Write how often the oldest of the repeated events came again."""
        _, known = self._repeated.popitem(last=False)
        if known.times:
            sentence = f"{known.event} again, {known.times} times since {timestamp(known.since)}"
            self._write(known.event, sentence, {**known.fields, "times": known.times})

    def _write(self, event: str, sentence: str | None, fields: Mapping[str, Any]) -> None:
        if sentence is not None:
            _LOG.info("%s", printable(sentence, 2 * _MAX_CHARS))
        if self._file is None:
            return
        safe = {name: _json_safe(value) for name, value in fields.items()}
        line = {"time": timestamp(self._now()), "event": event, "run": self._run, **safe}
        try:
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        except OSError as error:
            _LOG.warning("events.jsonl cannot be written (%s): the run continues without it.", error.strerror)
            self._file.close()
            self._file = None


def _describe(event: str, fields: EventFields) -> str | None:
    if event not in _SENTENCES:
        return None
    client, sentence = fields.get("client"), fields.get("sentence")
    who = f"node {fields.get('node')}" if client is None else f"client {client}"
    return _SENTENCES[event].format(who=who, why=f": {sentence}" if sentence else "", **fields)


def _json_safe(value: Any) -> Any:
    """A field as JSON: floats are finite and rounded, and text is short."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
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
    name: str = ""
    node: int = 0
    seen: float = 0.0
    working: bool = False
    aside: float = -math.inf  # until then
    done: int = 0
    rejected: int = 0


@dataclass
class RunStatus:
    """The status of a run as its events make it; its users must hold a lock that they share."""

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
    used: int | None = None  # client updates up to the last server step
    scores: dict[str, float] = field(default_factory=dict)
    nodes: set[int] = field(default_factory=set)  # that are connected and were admitted
    clients: dict[int, _Client] = field(default_factory=dict)
    rejections: Counter[str] = field(default_factory=Counter)
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=20))
    staleness: DoublingHistogram = field(default_factory=DoublingHistogram)
    minutes: MinuteCounts = field(default_factory=lambda: MinuteCounts(2))
    points: ThinnedSeries[_Point] = field(default_factory=ThinnedSeries)

    @property
    def in_flight(self) -> int:
        return sum(each.working for each in self.clients.values())

    def take(self, event: EventName, fields: EventFields, now: float) -> None:
        """Take in an event."""
        client = fields.get("client")
        known = self.clients.get(-1 if client is None else client, _Client())
        match event:
            case "joined" if client is not None:
                self.nodes.add(fields["node"])
                self.clients[client] = known
                known.name, known.node, known.seen = printable(fields["name"], _MAX_NAME), fields["node"], now
            case "left":
                self.nodes.discard(fields["node"])
            case "sent":
                self.sent += 1
                self.bytes_out += fields["bytes"]
                known.working = True
            case "accepted":
                self.accepted += 1
                self.waiting += self.begun  # uploads before version 0 belong to the full-participation start
                self.bytes_in += fields["bytes"]
                self.minutes.add(0, now)
                known.working, known.done, known.seen = False, known.done + 1, now
            case "rejected":
                self._reject(fields, now)
                known.rejected += 1
            case "lost" | "set_aside":
                self.lost += 1
                known.working = False
            case "aside":
                known.aside = now + fields["seconds"]
            case "unreachable":
                self.trouble = printable(f"the network is unreachable: {fields['sentence']}")
                self.network_errors += 1
            case "helper_away":
                self.trouble = printable(f"{fields['sentence']}")
            case "reachable" | "helper_back":
                self.trouble = None
            case "saved":
                self.saved = fields["version"]
                self.checkpoints += 1
            case "spent":
                self.epsilon, self.epsilon_version = fields["epsilon"], self.version
            case "ended":
                self.ended, why = True, fields["sentence"]
                self.sentence = None if why is None else printable(why)

    def step(self, progress: Progress) -> None:
        """The server took a step."""
        self.recall(progress.version, progress.time, progress.record)
        used = self.waiting if self.used is None else progress.client_updates - self.used
        self.waiting, self.used = max(0, self.waiting - used), progress.client_updates
        for age in progress.ages:
            self.staleness.add(age)

    def recall(self, version: int, time: float, record: Mapping[str, Any] | None) -> None:
        """Take in a step by its record, if it has one."""
        self.begun, self.version, self.time = True, version, time
        if record is None:
            return
        known = {name: float(record[name]) for name in SCORE_NAMES if record.get(name) is not None}
        self.scores = {name: value for name, value in known.items() if math.isfinite(value)}
        if self.scores:
            self.points.add(_Point(version, time, tuple(map(self.scores.get, SCORE_NAMES))))
        if record.get("epsilon") is not None:
            self.epsilon, self.epsilon_version = float(record["epsilon"]), version

    def _reject(self, fields: EventFields, now: float) -> None:
        reason = fields["reason"].value
        self.rejections[reason] += 1
        self.minutes.add(1, now)
        entry = {"node": str(fields["node"]), "client": fields["client"], "reason": reason}
        last = self.recent[-1] if self.recent else {}
        times = last["times"] + 1 if entry.items() <= last.items() else 1
        if times > 1:
            self.recent.pop()
        sentence = printable(f"{fields['sentence']}")
        self.recent.append(entry | {"sentence": sentence, "time": timestamp(now), "times": times})

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
                "standing": standing if known.node in self.nodes else "away",
                "aside": round(left),
                "seen": round(max(0.0, now - known.seen), 1),
                "done": known.done,
                "rejected": known.rejected,
            }


def _finite_or_none(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
