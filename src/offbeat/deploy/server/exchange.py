"""Tasks that were started and of which nothing has come back.

What goes down with a task of each version, and what has to come up.

Tasks out, uploads in: what is sent to whom, what came of it, and what has to be given up.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from offbeat.aggregate.mean import SecureEncoding
from offbeat.core import AnyAlgorithm, Task, TwoTrips, Vector
from offbeat.deploy.monitor.observer import Observer
from offbeat.deploy.protocol import messages
from offbeat.deploy.protocol.messages import TaskMessage
from offbeat.deploy.protocol.strict_json import Reason, Rejected
from offbeat.deploy.protocol.transport import Cooldown, Reply, RetryingTransport, Transport
from offbeat.deploy.protocol.wire import TensorSpecs, byte_size, pack, specs_of
from offbeat.deploy.server.journal import AcceptedUpload, Journal
from offbeat.deploy.server.registry import ConnectedNodes, SessionConfig, one_line
from offbeat.deploy.server.validation import (
    NormGuard,
    SecureUploadValidator,
    UploadValidator,
    plain_validator,
    secure_validator,
    validate_upload,
)
from offbeat.nn.problem import Statistics
from offbeat.schedule.clock import Arrival
from offbeat.trees import Tree

_MAX_ANSWERED = 256  # answered messages that are remembered


@dataclass
class InFlightTask:
    """One of them; it has a number and a node once it was sent."""

    task: Task
    started: float
    sure: bool  # of the full-participation start: must not get lost
    number: str | None = None
    node: int | None = None
    sent: float = 0.0


class InFlightTasks:
    """One for each client at most."""

    def __init__(self) -> None:
        self._flights: dict[int, InFlightTask] = {}
        self._numbers: dict[str, InFlightTask] = {}
        self._recent: deque[str] = deque(maxlen=_MAX_ANSWERED)
        self._answered: set[str] = set()

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[InFlightTask]:
        return iter(list(self._flights.values()))

    def __contains__(self, client: int) -> bool:
        return client in self._flights

    @property
    def numbers(self) -> list[str]:
        """The messages that wait for an answer."""
        return list(self._numbers)

    def add(self, flight: InFlightTask) -> None:
        self._flights[flight.task.client] = flight

    def send(self, flight: InFlightTask, number: str, node: int, now: float) -> None:
        """It is on its way."""
        flight.number, flight.node, flight.sent = number, node, now
        self._numbers[number] = flight

    def find(self, number: str) -> InFlightTask | None:
        """The one that a message was sent for."""
        return self._numbers.get(number)

    def knew(self, number: str) -> bool:
        """Whether a message with this number was sent, and is settled."""
        return number in self._answered

    def end(self, flight: InFlightTask) -> None:
        """Something came back of it, or never will."""
        del self._flights[flight.task.client]
        if flight.number is not None:
            del self._numbers[flight.number]
            if len(self._recent) == _MAX_ANSWERED:
                self._answered.discard(self._recent[0])
            self._recent.append(flight.number)
            self._answered.add(flight.number)


_MIN_UPLOAD_LIMIT = 64 * 1024  # bytes that any upload may have
_UPLOAD_LIMIT_FACTOR = 4  # times what an upload should be


class Broadcast(NamedTuple):
    """The message of one version, as it travels."""

    payload: bytes
    form: TensorSpecs
    secure: dict[str, Any] | None


class BroadcastCache:
    """Versions that somebody may still be sent, the newest among them."""

    def __init__(self, x: Vector, statistics: Statistics) -> None:
        self._model = x, statistics
        self._hiding: SecureEncoding | None = None
        self._newest = 0
        self._algorithm: AnyAlgorithm | None = None
        self._intakes: dict[int, UploadValidator] = {}
        self._downs: dict[int, Broadcast] = {}

    def __getitem__(self, version: int) -> Broadcast:
        return self._downs[version]

    def add(
        self,
        version: int,
        algorithm: AnyAlgorithm,
        message: Tree,
        statistics: Statistics,
        hiding: SecureEncoding | None,
        needed: Iterable[int],
    ) -> None:
        """A new version; of those before it only the needed ones are held."""
        if algorithm is not self._algorithm:
            self._algorithm, self._intakes = algorithm, {}
        self._hiding, self._newest = hiding, version
        secure = None if hiding is None else hiding.facts
        tree = (message, statistics)
        held = {old: self._downs[old] for old in needed if old in self._downs}
        self._downs = held | {version: Broadcast(pack(tree), specs_of(tree), secure)}

    def intake(self, version: int) -> UploadValidator:
        """What uploads of tasks from this version must be."""
        if self._hiding is not None:
            return secure_validator(self._hiding, self._newest)
        assert self._algorithm is not None
        kind = version % 2 if isinstance(self._algorithm, TwoTrips) and self._algorithm.two_trips else 0
        if kind not in self._intakes:
            self._intakes[kind] = plain_validator(self._algorithm, *self._model, version)
        return self._intakes[kind]


def upload_byte_limit(intake: UploadValidator, terms: SessionConfig) -> int:
    """The most bytes that an upload may have."""
    return (
        max(_MIN_UPLOAD_LIMIT, _UPLOAD_LIMIT_FACTOR * byte_size(intake.form))
        if terms.most_bytes is None
        else terms.most_bytes
    )


_NO_COOLDOWN = (Reason.GONE, Reason.AWAY)  # leaving is no failure


class Exchange:
    """Never raises for anything that a site or the network does, unless the network is away for too long."""

    def __init__(
        self,
        post: Transport,
        terms: SessionConfig,
        line: RetryingTransport,
        guests: ConnectedNodes,
        published: BroadcastCache,
        journal: Journal,
        lengths: NormGuard,
        told: Observer,
    ) -> None:
        self._post, self._terms, self._line, self._guests = post, terms, line, guests
        self._published, self._journal, self._told = published, journal, told
        self.lengths = lengths
        self._standing = Cooldown(terms.aside)
        self._looked: float | None = None  # when it was last asked who is there
        self.flights = InFlightTasks()
        self.arrivals: deque[Arrival] = deque()  # that nobody has been told of
        self.committed: dict[int, int] = {}  # each client's last visit whose upload is used, or sure to be

    @property
    def flying(self) -> list[list[float]]:
        """Each task that the flow waits for, and when it was started."""
        flying = [(*flight.task, flight.started) for flight in self.flights]
        return [list(each) for each in [*flying, *((*each.task, each.started) for each in self.arrivals)]]

    def idle(self, now: float) -> set[int]:
        """Who can be given a task."""
        there = (client for client in self._guests.clients if self._guests.node(client) is not None)
        return {client for client in there if client not in self.flights and self._fit(client, now)}

    def commit(self, task: Task) -> None:
        """Its upload is used, or is on disk and sure to be: the client's next task builds on it."""
        self.committed[task.client] = max(task.visit, self.committed.get(task.client, -1))

    def look(self, now: float) -> None:
        """See what has come, who is there and what is overdue, and send what can be sent."""
        was_up = self._line.up
        numbers = self.flights.numbers + self._guests.hellos
        replies = self._line.ask(lambda: self._post.pull(numbers)) if numbers else None
        for reply in replies or ():
            self._take(reply, now)
        if not was_up or self._looked is None or now - self._looked >= self._terms.refresh:
            listed = self._line.ask(self._post.nodes)
            if listed is not None:
                self._looked = now
                self._guests.see(listed, now)
        if self._line.up:  # else what is overdue may be waiting on the other side
            self._guests.expire(now)
            self._expire(now)
        self._greet(now)
        self.send(now)

    def send(self, now: float) -> None:
        """Send off the tasks that have not been, as far as their clients are there."""
        for flight in self.flights:
            client = flight.task.client
            node = self._guests.node(client)
            if flight.number is not None or node is None or not self._fit(client, now):
                continue
            payload = self._published[flight.task.version].payload
            note = messages.encode_message(self._note(flight))
            number = self._push(node, "task", note, payload, self._terms.deadline)
            if number is None:
                return
            self.flights.send(flight, number, node, now)
            self._told.sent(client, flight.task, len(payload))

    def _greet(self, now: float) -> None:
        for node in self._guests.strangers(now):
            note = messages.encode_greeting(self._guests.refusal(node))
            number = self._push(node, "hello", note, b"", self._terms.greeting)
            if number is None:
                return
            self._guests.greet(node, number, now)

    def _push(self, node: int, kind: str, note: str, payload: bytes, seconds: float) -> str | None:
        return self._line.ask(lambda: self._post.push(node, kind, note, payload, seconds))

    def _note(self, flight: InFlightTask) -> TaskMessage:
        down = self._published[flight.task.version]
        return TaskMessage(
            run=self._journal.run,
            task=flight.task,
            start=flight.sure,
            committed=self.committed.get(flight.task.client, -1),
            plan=self._terms.plan,
            seconds=self._terms.deadline,
            form=down.form,
            secure=down.secure,
        )

    def _take(self, reply: Reply, now: float) -> None:
        if reply.number in self._guests.hellos:
            self._guests.answer(reply, now)
            return
        flight = self.flights.find(reply.number)
        if flight is None or (reply.error is None and reply.node != flight.node):
            again = flight is None and self.flights.knew(reply.number)
            self._told.rejected(
                reply.node,
                self._guests.client(reply.node),
                Reason.REPEATED if again else Reason.TASK,
                "it answered a task once more." if again else "it answered a task that was not given to it.",
            )
            return
        try:
            if reply.error is not None:
                raise Rejected(Reason.FAILED, f"there is no upload: {one_line(reply.error)}")
            self._accept(flight, reply, now)
        except Rejected as rejected:
            self._lose(flight, rejected, now)

    def _accept(self, flight: InFlightTask, reply: Reply, now: float) -> None:
        task, intake = flight.task, self._published.intake(flight.task.version)
        limit = upload_byte_limit(intake, self._terms)
        leaves = validate_upload(reply.note, reply.payload, task, self._journal.run, intake, limit)
        told = messages.decode_upload(reply.note)
        if told.memory == "new" and self.committed.get(task.client, -1) >= 0:
            raise Rejected(
                Reason.SETTINGS, "the site has lost what it kept of this run: give it its folder back."
            )
        norms = intake.norms(leaves)
        if flight.sure:  # which may send something else under the same names
            norms = norms._replace(kind=f"start {norms.kind}")
        self.lengths.check(norms)
        if isinstance(intake, SecureUploadValidator):
            intake.examine(task, leaves)
        self._journal.accept(AcceptedUpload(task, now, intake.form, reply.payload))
        self.lengths.add(norms)
        self.flights.end(flight)
        self._standing.clear(task.client)
        self.arrivals.append(Arrival(task, flight.started, now, False))
        self._told.accepted(task.client, task, now - flight.sent, len(reply.payload), told.seconds)

    def _expire(self, now: float) -> None:
        for flight in self.flights:
            if flight.number is None:
                if not flight.sure and now - flight.started > self._terms.grace:
                    self._lose(flight, Rejected(Reason.AWAY, "it left before its task was sent."), now)
            elif now - flight.sent > self._terms.deadline:
                self._lose(flight, Rejected(Reason.LATE, "it did not answer in time."), now)
            elif flight.node is not None and not self._guests.has(flight.node):
                self._lose(flight, Rejected(Reason.GONE, "its node has left."), now)

    def _lose(self, flight: InFlightTask, rejected: Rejected, now: float) -> None:
        self.flights.end(flight)
        client = flight.task.client
        node = flight.node if flight.node is not None else self._guests.node(client)
        self._told.rejected(node or 0, client, rejected.reason, rejected.sentence)
        self._told.lost(client, flight.task)
        if rejected.reason not in _NO_COOLDOWN:
            self._told.aside(client, self._standing.fail(client, now))
        self.arrivals.append(Arrival(flight.task, flight.started, now, True))

    def _fit(self, client: int, now: float) -> bool:
        return self._standing.free(client, now)
