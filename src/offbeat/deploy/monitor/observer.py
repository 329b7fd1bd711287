"""The events of a session for observers, and the `Monitor` that logs, counts and keeps the status of a run.

The session and the training loop call a monitor; the thread that serves the live page reads it. It never
raises and waits for nothing but its own lock, so a run is the same with and without it.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, Unpack

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from offbeat.deploy.monitor.state import EventFields, EventLog, EventName, RunInfo, RunStatus
from offbeat.deploy.protocol.strict_json import Reason
from offbeat.training.runner import Progress


class Observer(Protocol):
    """Is told what happens in a session; no result of the run depends on it."""

    def tell(self, event: EventName, /, **fields: Unpack[EventFields]) -> None: ...


METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_STALENESS_BUCKETS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144)
_SECONDS_BUCKETS = (0.1, 0.3, 1, 3, 10, 30, 60, 180, 600, 1800, 7200)


class Metrics:
    """The status of one run for Prometheus, read on request, and histograms."""

    def __init__(self, board: RunStatus, now: Callable[[], float]) -> None:
        self._board, self._now = board, now
        self._registry = CollectorRegistry()
        self._registry.register(self)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return Histogram(f"offbeat_{name}", text, buckets=buckets, registry=self._registry)

        self.staleness = histogram(
            "staleness_versions", "Versions between a task and its use", _STALENESS_BUCKETS
        )
        self.seconds = histogram("task_seconds", "Seconds from a task to its upload", _SECONDS_BUCKETS)
        self.work = histogram("work_seconds", "Seconds of local work, as the site reports", _SECONDS_BUCKETS)

    def text(self) -> bytes:
        """Everything in Prometheus's text format."""
        text: bytes = generate_latest(self._registry)
        return text

    def describe(self) -> list[Any]:
        return []  # so that Prometheus's client library does not ask when this is registered

    def collect(self) -> list[Any]:
        board, run = self._board, self._board.outline
        gauges = (
            ("version", "Server steps taken", board.version),
            ("versions_asked", "Server steps that the run will take", run.rounds),
            ("tasks_in_flight", "Tasks at clients now", board.in_flight),
            ("tasks_in_flight_asked", "Tasks that the run tries to keep at clients", run.concurrency),
            ("nodes_present", "Nodes that are connected and were admitted", len(board.nodes)),
            ("clients_known", "Clients that have joined at any time", len(board.clients)),
            ("clients_aside", "Clients that get no task for a while", board.count_aside(self._now())),
            ("buffer_waiting", "Uploads that wait for the next server step", board.waiting),
            ("buffer_size", "Uploads that make a server step", run.buffer),
            ("epsilon_spent", "Privacy spent up to offbeat_epsilon_version", board.epsilon),
            ("epsilon_version", "Server steps up to which it was counted", board.epsilon_version),
            ("epsilon_budget", "Privacy that may be spent", run.epsilon),
        )
        counters = (
            ("uploads_accepted", "Uploads that passed every check", board.accepted),
            ("tasks_sent", "Tasks sent to clients", board.sent),
            ("tasks_lost", "Tasks that brought no upload", board.lost),
            ("received_bytes", "Bytes of accepted uploads", board.bytes_in),
            ("sent_bytes", "Bytes of tasks", board.bytes_out),
            ("checkpoints", "Checkpoints in their place", board.checkpoints),
            ("network_errors", "Times that the network could not be reached", board.network_errors),
        )
        text = "The model on the server's test data"
        scores = GaugeMetricFamily("offbeat_metric", text, labels=["name"])
        for name, value in board.scores.items():
            scores.add_metric([name], value)
        text = "Uploads, greetings and tasks that failed"
        rejections = CounterMetricFamily("offbeat_rejections", text, labels=["reason"])
        for reason in Reason:  # each from 0 on, so that a rate can be computed
            rejections.add_metric([reason.value], board.rejections[reason.value], board.since)
        return [
            *(
                GaugeMetricFamily(f"offbeat_{name}", text, each)
                for name, text, each in gauges
                if each is not None
            ),
            *(
                CounterMetricFamily(f"offbeat_{name}", text, each, created=board.since)
                for name, text, each in counters
            ),
            scores,
            rejections,
        ]


class Monitor:
    """The events, metrics and status of one run; without a folder there is no events.jsonl."""

    def __init__(
        self, outline: RunInfo, folder: Path | None = None, now: Callable[[], float] = time.time
    ) -> None:
        self._now = now
        self._lock = Lock()
        self._board = RunStatus(outline, now())
        self._events = EventLog(folder, outline.run, now)
        self._metrics = Metrics(self._board, now)

    def recall(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take in the records of a run that is resumed."""
        with self._lock:
            for record in records:
                self._board.recall(record["version"], record["time"], record)

    def tell(self, event: EventName, /, **fields: Unpack[EventFields]) -> None:
        with self._lock:
            if event == "reachable" and self._board.trouble is None:
                return
            self._board.take(event, fields, self._now())
            self._events.tell(event, **fields)
            if event == "accepted":
                self._metrics.seconds.observe(fields["seconds"])
                self._metrics.work.observe(fields["work"])

    def stepped(self, progress: Progress) -> None:
        """The server took a step."""
        with self._lock:
            self._board.step(progress)
            for age in progress.ages:
                self._metrics.staleness.observe(age)
            scores: Any = self._board.scores
            self._events.tell("stepped", version=progress.version, staleness=progress.staleness, **scores)

    def close(self) -> None:
        """Write repeated events that were only counted, and close the file."""
        with self._lock:
            self._events.close()

    def status(self) -> dict[str, Any]:
        """Everything that the live page shows, as JSON."""
        with self._lock:
            return self._board.status(self._now())

    def metrics(self) -> bytes:
        """In Prometheus's text format."""
        with self._lock:
            return self._metrics.text()
