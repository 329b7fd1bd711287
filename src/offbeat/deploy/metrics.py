"""A deployment in numbers, as Prometheus reads them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_STALENESS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144)
_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 60, 180, 600, 1800, 7200)


class Gauges(NamedTuple):
    """How things stand now; what is None is not shown."""

    version: int
    versions_asked: int
    tasks_in_flight: int
    tasks_in_flight_asked: int
    nodes_present: int
    clients_known: int
    clients_aside: int
    buffer_waiting: int
    buffer_size: int
    epsilon_spent: float | None
    epsilon_version: int | None
    epsilon_budget: float | None
    scores: Mapping[str, float]  # accuracy, loss


_SAYS = {
    "version": "Server steps taken",
    "versions_asked": "Server steps that the run is to take",
    "tasks_in_flight": "Tasks at clients now",
    "tasks_in_flight_asked": "Tasks that the run tries to keep at clients",
    "nodes_present": "Nodes that are there and were greeted",
    "clients_known": "Clients that have joined at any time",
    "clients_aside": "Clients put aside for failing",
    "buffer_waiting": "Uploads that wait for the next server step",
    "buffer_size": "Uploads that make a server step",
    "epsilon_spent": "Privacy spent up to the version of offbeat_epsilon_version, where it was counted last",
    "epsilon_version": "Server steps up to which privacy spent was counted",
    "epsilon_budget": "Privacy that may be spent",
}


class Metrics:
    """Counters and histograms of one run; gauges are read when somebody asks."""

    def __init__(self, gauges: Callable[[], Gauges], reasons: Iterable[str]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Readings(gauges))

        def count(name: str, says: str, labels: tuple[str, ...] = ()) -> Any:
            return Counter(f"offbeat_{name}", says, labels, registry=self._registry)

        def spread(name: str, says: str, buckets: tuple[float, ...]) -> Any:
            return Histogram(f"offbeat_{name}", says, buckets=buckets, registry=self._registry)

        self.accepted = count("uploads_accepted", "Uploads that passed every check")
        self.rejected = count("rejections", "Uploads, greetings and tasks that came to nothing", ("reason",))
        self.sent = count("tasks_sent", "Tasks sent to clients")
        self.lost = count("tasks_lost", "Tasks that brought no upload")
        self.received_bytes = count("received_bytes", "Bytes of accepted uploads")
        self.sent_bytes = count("sent_bytes", "Bytes of tasks")
        self.checkpoints = count("checkpoints", "Checkpoints in their place")
        self.unreachable = count("network_errors", "Times that the network could not be reached")
        self.staleness = spread("staleness_versions", "Versions between a task and its use", _STALENESS)
        self.seconds = spread("task_seconds", "Seconds from sending a task to its upload", _SECONDS)
        self.work = spread("work_seconds", "Seconds of local work, as the site tells", _SECONDS)
        for reason in reasons:
            self.rejected.labels(reason)  # there with 0 before the first, so that a rate can be taken

    def text(self) -> bytes:
        """All of it, in Prometheus's text format."""
        text: bytes = generate_latest(self._registry)
        return text


class _Readings:
    """A collector, as the registry asks for one."""

    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        self._gauges = gauges

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        now = self._gauges()
        for name, says in _SAYS.items():
            value = getattr(now, name)
            if value is not None:
                yield GaugeMetricFamily(f"offbeat_{name}", says, value=value)
        scores = GaugeMetricFamily("offbeat_metric", "The model on the server's test data", labels=["name"])
        for name, value in now.scores.items():
            if math.isfinite(value):
                scores.add_metric([name], value)
        yield scores
