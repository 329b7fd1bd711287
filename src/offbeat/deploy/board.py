"""How a deployment stands: what the live page shows, bounded whatever happens."""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from offbeat.deploy.events import plain, stamp
from offbeat.deploy.history import Bins, Minutes, Thinned
from offbeat.deploy.rejections import Reason

SCORES = ("accuracy", "loss")
_LISTED = 200  # clients on the page
_NAME = 60  # characters of a site's name


@dataclass(frozen=True)
class Outline:
    """What is known of a run before it begins."""

    run: str
    algorithm: str
    clients: int
    buffer: int
    rounds: int
    concurrency: int
    epsilon: float | None = None  # the budget, where there is one
    delta: float | None = None


class _Point(NamedTuple):
    version: int
    time: float
    scores: tuple[float | None, ...]  # as in SCORES


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
class Board:
    """Told of everything by one thread at a time; who reads meanwhile must hold the same lock."""

    outline: Outline
    since: float
    begun: bool = False  # a version is there, be it 0
    version: int = 0
    time: float = 0.0
    saved: int | None = None
    epsilon: float | None = None
    counted: int = 0  # the version up to which that is
    ended: bool = False
    sentence: str | None = None  # why it ended
    trouble: str | None = None  # why the network cannot be reached
    accepted: int = 0
    sent: int = 0
    lost: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    waiting: int = 0
    in_flight: int = 0
    scores: dict[str, float] = field(default_factory=dict)
    nodes: dict[int, int] = field(default_factory=dict)  # who is there, and as which client
    clients: dict[int, _Client] = field(default_factory=dict)
    rejections: Counter[str] = field(default_factory=Counter)
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=20))
    staleness: Bins = field(default_factory=Bins)
    minutes: Minutes = field(default_factory=lambda: Minutes(2))
    points: Thinned[_Point] = field(default_factory=Thinned)

    def join(self, node: int, name: str, client: int, now: float) -> None:
        self.nodes[node] = client
        known = self.clients.get(client)
        if known is None:
            self.clients[client] = _Client(plain(name, _NAME), node, True, now)
        else:
            known.name, known.node, known.present, known.seen = plain(name, _NAME), node, True, now

    def leave(self, node: int) -> None:
        client = self.nodes.pop(node, None)
        known = None if client is None else self.clients.get(client)
        if known and known.node == node:  # it may be back already, as another node
            known.present = False

    def reject(self, node: int, client: int | None, reason: Reason, sentence: str, now: float) -> None:
        self.rejections[reason.value] += 1
        self.minutes.add(1, now)
        known = None if client is None else self.clients.get(client)
        if known:
            known.rejected += 1
        told = {"node": str(node), "client": client, "reason": reason.value, "sentence": plain(sentence)}
        last = self.recent[-1] if self.recent else None
        if last and all(last[key] == told[key] for key in ("node", "client", "reason")):
            self.recent[-1] = told | {"time": stamp(now), "times": last["times"] + 1}
        else:
            self.recent.append(told | {"time": stamp(now), "times": 1})

    def step(self, version: int, time: float, record: Mapping[str, Any] | None) -> None:
        self.begun, self.version, self.time = True, version, time
        if record is None:
            return
        known = {name: float(record[name]) for name in SCORES if record.get(name) is not None}
        self.scores = {name: value for name, value in known.items() if math.isfinite(value)}
        if self.scores:
            self.points.add(_Point(version, time, tuple(map(self.scores.get, SCORES))))
        if record.get("epsilon") is not None:
            self.spend(float(record["epsilon"]))

    def spend(self, epsilon: float) -> None:
        """Privacy up to this version."""
        self.epsilon, self.counted = epsilon, self.version

    def count_aside(self, now: float) -> int:
        return sum(each.aside > now for each in self.clients.values())

    def status(self, now: float) -> dict[str, Any]:
        """All that the page shows, as JSON has it."""
        accepted, rejected = self.minutes.counts(now)
        points = self.points.points()
        return {
            "run": {key: _number(value) for key, value in asdict(self.outline).items()},
            "now": stamp(now),
            "since": stamp(self.since),
            "ended": self.ended,
            "sentence": self.sentence,
            "trouble": self.trouble,
            "version": self.version,
            "time": _number(self.time),
            "saved": self.saved,
            "scores": self.scores,
            "history": {
                "version": [point.version for point in points],
                "time": [_number(point.time) for point in points],
                **{name: [point.scores[n] for point in points] for n, name in enumerate(SCORES)},
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
                "spent": _number(self.epsilon),
                "version": self.counted,
                "budget": _number(self.outline.epsilon),
                "delta": _number(self.outline.delta),
            },
        }

    def _listed(self, now: float) -> Iterable[dict[str, Any]]:
        """The first by number; where they are too many, those seen last."""
        shown = sorted(self.clients, key=lambda client: -self.clients[client].seen)[:_LISTED]
        for client in sorted(shown):
            known = self.clients[client]
            left = max(0.0, known.aside - now)
            standing = "aside" if left else "working" if known.working else "idle"
            yield {
                "client": client,
                "name": known.name,
                "node": str(known.node),  # of 64 bits, which JavaScript's numbers have not
                "standing": standing if known.present else "away",
                "aside": round(left),
                "seen": round(max(0.0, now - known.seen), 1),
                "done": known.done,
                "rejected": known.rejected,
            }


def _number(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
