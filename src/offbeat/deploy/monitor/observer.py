"""The events of a session for observers, and the `Monitor` that logs, counts and keeps the status of a run.

The session and the training loop call a monitor; the thread that serves the live page reads it. It never
raises and waits for nothing but its own lock, so a run is the same with and without it.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from offbeat.core import Task
from offbeat.deploy.monitor.state import EventLog, RunInfo, RunStatus, printable
from offbeat.deploy.protocol.strict_json import Reason
from offbeat.training.runner import Progress


class Observer:
    """Receives the events of a session; no result of the run depends on it. The methods here do nothing."""

    def joined(self, node: int, name: str, client: int) -> None:
        """A site was admitted as this client."""

    def left(self, node: int, client: int | None) -> None:
        """A node is gone."""

    def sent(self, client: int, task: Task, size: int) -> None:
        """A task with a payload of so many bytes was sent."""

    def recalled(self, client: int, task: Task) -> None:
        """A client was asked to send what it has done of a task."""

    def accepted(
        self, client: int, task: Task, seconds: float, size: int, work: float, steps: int | None = None
    ) -> None:
        """An upload passed every check and is on disk, `seconds` after its task was sent.

        `steps` are those of a task that ended early.
        """

    def rejected(self, node: int, client: int | None, reason: Reason, sentence: str) -> None:
        """A reply, a greeting or a task came to nothing."""

    def lost(self, client: int, task: Task) -> None:
        """No upload will come of this task."""

    def set_aside(self, client: int, task: Task) -> None:
        """An accepted upload is not used."""

    def cooling_down(self, client: int, seconds: float) -> None:
        """A client that failed gets no task for so long."""

    def unreachable(self, sentence: str) -> None:
        """The transport fails at the moment."""

    def reachable(self) -> None:
        """The transport works again."""

    def helper_away(self, sentence: str) -> None:
        """The helper of secure aggregation does not answer at the moment."""

    def helper_back(self) -> None:
        """The helper answers again."""

    def notice(self, sentence: str) -> None:
        """Something that the operator should know, such as what was lost."""


METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_STALENESS_BUCKETS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144)
_SECONDS_BUCKETS = (0.1, 0.3, 1, 3, 10, 30, 60, 180, 600, 1800, 7200)


class Metrics:
    """The status of one run for Prometheus, read on request, and histograms."""

    def __init__(self, board: RunStatus, lock: Lock, now: Callable[[], float]) -> None:
        self._board, self._lock, self._now = board, lock, now
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
        with self._lock:
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


class Monitor(Observer):
    """The events, metrics and status of one run; without a folder there is no events.jsonl."""

    def __init__(
        self, outline: RunInfo, folder: Path | None = None, now: Callable[[], float] = time.time
    ) -> None:
        self._now = now
        self._lock = Lock()
        self._board = RunStatus(outline, now())
        self._events = EventLog(folder, outline.run, now)
        self._metrics = Metrics(self._board, self._lock, now)
        self._working: set[int] = set()  # clients, with one task each
        self._trips: int | None = None  # at the last server step

    def recall(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take in the records of a run that is resumed."""
        with self._lock:
            for record in records:
                self._board.step(record["version"], record["time"], record)

    def joined(self, node: int, name: str, client: int) -> None:
        with self._lock:
            self._board.join(node, name, client, self._now())
            self._events.tell(
                "joined", f"{printable(name)} joined as client {client}", node=node, name=name, client=client
            )

    def left(self, node: int, client: int | None) -> None:
        with self._lock:
            self._board.leave(node)
            who = f"node {node}" if client is None else f"client {client}"
            self._events.tell("left", f"{who} left", node=node, client=client)

    def sent(self, client: int, task: Task, size: int) -> None:
        with self._lock:
            self._set_working(client, True)
            self._board.sent += 1
            self._board.bytes_out += size
            self._events.tell("sent", client=client, version=task.version, visit=task.visit, bytes=size)

    def recalled(self, client: int, task: Task) -> None:
        with self._lock:
            self._events.tell("recalled", client=client, version=task.version, visit=task.visit)

    def accepted(
        self, client: int, task: Task, seconds: float, size: int, work: float, steps: int | None = None
    ) -> None:
        with self._lock:
            now, board = self._now(), self._board
            self._set_working(client, False)
            board.accepted += 1
            board.waiting += board.begun  # uploads before version 0 belong to the full-participation start
            board.bytes_in += size
            board.minutes.add(0, now)
            known = board.clients.get(client)
            if known:
                known.done += 1
                known.seen = now
            self._metrics.seconds.observe(seconds)
            self._metrics.work.observe(work)
            self._events.tell(
                "accepted",
                client=client,
                version=task.version,
                visit=task.visit,
                seconds=seconds,
                work=work,
                bytes=size,
                **({} if steps is None else {"steps": steps}),
            )

    def rejected(self, node: int, client: int | None, reason: Reason, sentence: str) -> None:
        with self._lock:
            self._board.reject(node, client, reason, sentence, self._now())
            who = f"node {node}" if client is None else f"client {client}"
            self._events.tell_once(
                (node, reason),
                "rejected",
                f"{who}: {reason.value}: {printable(sentence)}",
                node=node,
                client=client,
                reason=reason.value,
                sentence=sentence,
            )

    def lost(self, client: int, task: Task) -> None:
        with self._lock:
            self._set_working(client, False)
            self._board.lost += 1
            self._events.tell("lost", client=client, version=task.version, visit=task.visit)

    def set_aside(self, client: int, task: Task) -> None:
        with self._lock:
            self._board.lost += 1
            sentence = f"the upload of client {client} from version {task.version} is set aside"
            self._events.tell("set_aside", sentence, client=client, version=task.version, visit=task.visit)

    def cooling_down(self, client: int, seconds: float) -> None:
        with self._lock:
            known = self._board.clients.get(client)
            if known:
                known.aside = self._now() + seconds
            sentence = f"client {client} gets no task for {seconds:.0f} s"
            self._events.tell("aside", sentence, client=client, seconds=seconds)

    def unreachable(self, sentence: str) -> None:
        with self._lock:
            self._board.trouble = printable(f"the network is unreachable: {sentence}")
            self._board.network_errors += 1
            self._events.tell_once("unreachable", "unreachable", sentence, sentence=sentence)

    def reachable(self) -> None:
        with self._lock:
            if self._board.trouble is not None:
                self._board.trouble = None
                self._events.tell("reachable", "the network is reachable again")

    def helper_away(self, sentence: str) -> None:
        with self._lock:
            self._board.trouble = printable(sentence)
            self._events.tell_once("helper_away", "helper_away", sentence, sentence=sentence)

    def helper_back(self) -> None:
        with self._lock:
            self._board.trouble = None
            self._events.tell("helper_back", "the helper answers again")

    def notice(self, sentence: str) -> None:
        with self._lock:
            self._events.tell("notice", sentence, sentence=sentence)

    def stepped(self, progress: Progress, staleness: Sequence[int]) -> None:
        """The server took a step with updates of this staleness."""
        with self._lock:
            board = self._board
            board.step(progress.version, progress.time, progress.record)
            used = board.waiting if self._trips is None else progress.client_updates - self._trips
            board.waiting = max(0, board.waiting - used)
            self._trips = progress.client_updates
            for age in staleness:
                board.staleness.add(age)
                self._metrics.staleness.observe(age)
            self._events.tell(
                "stepped", version=progress.version, staleness=progress.staleness, **board.scores
            )

    def saved(self, version: int) -> None:
        """The checkpoint of this version is on disk."""
        with self._lock:
            self._board.saved = version
            self._board.checkpoints += 1
            self._events.tell("saved", version=version)

    def spent(self, epsilon: float | None) -> None:
        """The privacy cost so far; None keeps the last known value."""
        with self._lock:
            if epsilon is not None:
                self._board.spend(epsilon)
                self._events.tell("spent", epsilon=epsilon)

    def ended(self, sentence: str | None) -> None:
        """The run ended; the sentence says why, unless it took all its steps."""
        with self._lock:
            self._board.ended = True
            self._board.sentence = None if sentence is None else printable(sentence)
            self._events.tell(
                "ended", f"the run ended{': ' + sentence if sentence else ''}", sentence=sentence
            )

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
        return self._metrics.text()

    def _set_working(self, client: int, working: bool) -> None:
        (self._working.add if working else self._working.discard)(client)
        self._board.in_flight = len(self._working)
        known = self._board.clients.get(client)
        if known:
            known.working = working
