"""Tasks out, uploads in: what is sent to which client, what is accepted, and what is given up."""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from offbeat.aggregate.mean import SecureEncoding
from offbeat.core import AnyAlgorithm, Task, Vector, traits_of
from offbeat.deploy.config import NetworkConfig
from offbeat.deploy.monitor.observer import Observer
from offbeat.deploy.protocol import messages
from offbeat.deploy.protocol.messages import TaskMessage, TensorSpecs, byte_size, pack, specs_of
from offbeat.deploy.protocol.strict_json import Reason, Rejected
from offbeat.deploy.protocol.transport import Cooldown, Reply, RetryingTransport
from offbeat.deploy.server.journal import AcceptedUpload, Journal
from offbeat.deploy.server.registry import ConnectedNodes
from offbeat.deploy.server.validation import (
    NormGuard,
    SecureUploadValidator,
    UploadValidator,
    plain_validator,
    secure_validator,
    validate_upload,
)
from offbeat.nn.problem import Statistics
from offbeat.schedule.clock import Arrival, parse_deadline
from offbeat.trees import Tree

_FIRST_LIMIT = 600.0  # seconds for a task, before enough were seen for a quantile
_MAX_SETTLED = 256  # messages that are remembered after a reply
_MIN_UPLOAD_LIMIT = 64 * 1024  # bytes
_UPLOAD_LIMIT_FACTOR = 4  # times the expected size of an upload
_ANSWER_SHARE = 0.9  # of a time limit, for a site; the rest is for network and server
_OVERHEAD_FACTOR = 2.0  # times the seconds beside its work that a client's last upload took
_NO_COOLDOWN = (Reason.GONE, Reason.AWAY)  # leaving is not a failure


@dataclass(frozen=True)
class SessionConfig:
    """What a session needs to know of the run, of its sites and of the network; times are in seconds."""

    plan: dict[str, Any]  # all that a site needs beyond its own code: part of every task's header
    clients: int
    network: NetworkConfig = NetworkConfig()
    bind_names: bool = False  # a site keeps its key for good, which needs nodes with keys
    greeting_timeout: float = 120.0
    poll: float = 0.5  # between two polls of the transport, if nothing ends the pause before
    refresh: float = 2.0  # between two requests for the list of nodes
    grace: float = 10.0  # how long a node may be missing from the list, or a task wait to be sent
    cooldown: float = 2.0  # after a client's first failure; doubled with each failure in a row


def upload_byte_limit(validator: UploadValidator, config: SessionConfig) -> int:
    """The most bytes that an upload may have."""
    if config.network.max_upload_bytes is not None:
        return config.network.max_upload_bytes
    return max(_MIN_UPLOAD_LIMIT, _UPLOAD_LIMIT_FACTOR * byte_size(validator.form))


@dataclass
class InFlightTask:
    """A started task without a reply; it has a message id and a node once it was sent."""

    task: Task
    started: float
    required: bool  # part of the full-participation start: must not be lost
    until: float = math.inf  # when its upload is of no more use
    message_id: str | None = None
    node: int | None = None
    sent: float = 0.0
    digest: bytes = b""  # of the message that was sent
    limit: float = _FIRST_LIMIT  # seconds that it may take
    recalled: bool = False  # the site is to send what it has done
    recall_id: str | None = None  # the message that says so


class Broadcast(NamedTuple):
    """The server's message of one version, encoded."""

    payload: bytes
    form: TensorSpecs
    secure: dict[str, Any] | None
    digests: dict[bool, bytes]  # of the message in the full-participation start, and otherwise


class BroadcastCache:
    """The broadcasts that some task may still be sent with, and the validator for their uploads."""

    def __init__(self, x: Vector, statistics: Statistics) -> None:
        self.x, self._statistics = x, statistics
        self.private = False  # whether uploads are clipped when they are summed, so no norm is checked
        self.encoding: Callable[[], SecureEncoding | None] = lambda: None  # of the version that is added
        self._encoding: SecureEncoding | None = None  # of the newest version
        self._newest = 0
        self._algorithm: AnyAlgorithm | None = None
        self._phases = 1  # of the algorithm, whose uploads may differ
        self._validators: dict[int, UploadValidator] = {}  # by phase
        self._broadcasts: dict[int, Broadcast] = {}

    def __getitem__(self, version: int) -> Broadcast:
        return self._broadcasts[version]

    def digest(self, task: TaskMessage) -> bytes:
        """What reports under secure aggregation must answer; empty where uploads are plain."""
        if task.secure is None:
            return b""
        payload, _, _, digests = self._broadcasts[task.task.version]
        if task.start not in digests:
            digests[task.start] = messages.message_digest(task, payload)
        return digests[task.start]

    def add(
        self, version: int, algorithm: AnyAlgorithm, tree: tuple[Tree, Statistics], needed: Iterable[int]
    ) -> None:
        """A new version, its message and statistics; of the earlier ones only the needed ones are kept."""
        if algorithm is not self._algorithm:
            self._algorithm, self._validators = algorithm, {}
            self._phases = 2 if traits_of(algorithm).two_phases else 1
        self._encoding, self._newest = self.encoding(), version
        secure = None if self._encoding is None else self._encoding.facts
        kept = {old: self._broadcasts[old] for old in needed if old in self._broadcasts}
        self._broadcasts = kept | {version: Broadcast(pack(tree), specs_of(tree), secure, {})}

    def validator(self, version: int) -> UploadValidator:
        """What uploads of tasks from this version must satisfy."""
        if self._encoding is not None:
            return secure_validator(self._encoding, self._newest)
        assert self._algorithm is not None
        phase = version % self._phases
        if phase not in self._validators:
            self._validators[phase] = plain_validator(
                self._algorithm, self.x, self._statistics, version, private=self.private
            )
        return self._validators[phase]


class Exchange:
    """Sends tasks and accepts uploads.

    Nothing that a site or the network does raises an exception, unless the network is away for too long.
    """

    def __init__(
        self,
        config: SessionConfig,
        transport: RetryingTransport,
        nodes: ConnectedNodes,
        broadcasts: BroadcastCache,
        journal: Journal,
        observer: Observer,
        clock: Callable[[], float],
    ) -> None:
        self._config, self._transport, self._nodes = config, transport, nodes
        self._broadcasts, self._journal, self._observer = broadcasts, journal, observer
        self.norms = NormGuard(config.network.max_update_norm, float(broadcasts.x.double().norm()))
        self._cooldown = Cooldown(config.cooldown, clock)
        self.deadline = parse_deadline(config.network.deadline).open(_FIRST_LIMIT)
        self._refreshed: float | None = None  # when the list of nodes was requested last
        self.in_flight: dict[int, InFlightTask] = {}  # by client
        self._asked: dict[str, InFlightTask] = {}  # by message, and by the message that recalls it
        self._settled: dict[str, bool] = {}  # the latest messages that were; whether they recalled a task
        self.arrivals: deque[Arrival] = deque()  # not yet taken by the session
        self._overheads: dict[int, float] = {}  # seconds beside the work of each client's last upload
        self.committed: dict[int, int] = {}  # each client's last visit whose upload is certain to be used

    @property
    def pending(self) -> list[list[float]]:
        """Each task that the scheduler waits for, and when it was started."""
        waiting: list[InFlightTask | Arrival] = [*self.in_flight.values(), *self.arrivals]
        return [[*each.task, each.started] for each in waiting]

    def idle(self) -> set[int]:
        """The clients that can be given a task."""
        reachable = self._nodes.reachable - self.in_flight.keys()
        return {client for client in reachable if self._cooldown.is_over(client)}

    def commit(self, task: Task) -> None:
        """Its upload is used, or on disk and certain to be: the client's next task builds on it."""
        self.committed[task.client] = max(task.visit, self.committed.get(task.client, -1))

    def poll(self, now: float) -> None:
        """Take replies, update the nodes, give up overdue tasks, and send what can be sent."""
        was_reachable = self._transport.reachable
        message_ids = [*self._asked, *self._nodes.greetings]
        replies = self._transport.pull(message_ids) if message_ids else None
        for reply in replies or ():
            self._take(reply, now)
        if not was_reachable or self._refreshed is None or now - self._refreshed >= self._config.refresh:
            listed = self._transport.nodes()
            if listed is not None:
                self._refreshed = now
                self._nodes.update(listed, now)
        if self._transport.reachable:  # otherwise overdue replies may be waiting on the other side
            self._nodes.expire(now)
            self._expire(now)
        self._greet(now)
        self.send(now)

    def send(self, now: float) -> None:
        """Send the tasks that were not sent yet to those of their clients that are reachable."""
        for pending in self.in_flight.values():
            client = pending.task.client
            node = self._nodes.node(client)
            if pending.message_id is not None or node is None or not self._cooldown.is_over(client):
                continue
            if pending.until <= now:
                continue
            pending.limit = min(self.deadline.limit(), pending.until - now)
            payload = self._broadcasts[pending.task.version].payload
            message = self._task_message(pending, now)
            header, pending.digest = messages.encode_message(message), self._broadcasts.digest(message)
            message_id = self._transport.push(node, "task", header, payload, pending.limit)
            if message_id is None:
                return
            pending.message_id, pending.node, pending.sent = message_id, node, now
            self._asked[message_id] = pending
            self._observer.tell("sent", **pending.task._asdict(), bytes=len(payload))
        self._send_recalls(now)

    def recall(self, version: int, now: float) -> list[Task]:
        """Ask for what was done of the tasks that started from this version or an earlier one."""
        recalled = [
            each
            for each in self.in_flight.values()
            if each.task.version <= version and each.message_id is not None and not each.required
        ]
        for pending in recalled:
            pending.recalled = True
        self._send_recalls(now)
        return [pending.task for pending in recalled]

    def _send_recalls(self, now: float) -> None:
        for pending in self.in_flight.values():
            if not pending.recalled or pending.recall_id is not None or pending.node is None:
                continue
            message = messages.RecallMessage(self._journal.run, pending.task)
            rest = max(1.0, pending.sent + pending.limit - now)
            header = messages.encode_message(message)
            message_id = self._transport.push(pending.node, "recall", header, b"", rest)
            if message_id is None:
                return
            pending.recall_id = message_id
            self._asked[message_id] = pending
            self._observer.tell("recalled", **pending.task._asdict())

    def _greet(self, now: float) -> None:
        for node, refused in self._nodes.to_greet():
            header = messages.encode_greeting(refused)
            message_id = self._transport.push(node, "hello", header, b"", self._config.greeting_timeout)
            if message_id is None:
                return
            self._nodes.greeted(node, message_id, now)

    def _task_message(self, pending: InFlightTask, now: float) -> TaskMessage:
        broadcast = self._broadcasts[pending.task.version]
        seconds = min(pending.limit, _ANSWER_SHARE * (pending.until - now))
        work = None
        if self._config.network.partial_work and not pending.required and math.isfinite(seconds):
            overhead = _OVERHEAD_FACTOR * self._overheads.get(pending.task.client, 0.0)
            work = max(0.0, min(_ANSWER_SHARE * seconds, seconds - overhead))
        return TaskMessage(
            run=self._journal.run,
            task=pending.task,
            start=pending.required,
            committed=self.committed.get(pending.task.client, -1),
            plan=self._config.plan,
            seconds=seconds,
            form=broadcast.form,
            secure=broadcast.secure,
            work=work,
        )

    def _take(self, reply: Reply, now: float) -> None:
        if reply.message_id in self._nodes.greetings:
            self._nodes.take_reply(reply)
            return
        pending, repeated = self._asked.get(reply.message_id), reply.message_id in self._settled
        if self._settled.get(reply.message_id) or (pending and reply.message_id == pending.recall_id):
            self._asked.pop(reply.message_id, None)
            return  # the reply that counts is that to the task, which may come before
        if pending is None or (reply.error is None and reply.node != pending.node):
            self._observer.tell(
                "rejected",
                node=reply.node,
                client=self._nodes.client(reply.node),
                reason=Reason.REPEATED if repeated else Reason.TASK,
                sentence=f"it answered a task {'again' if repeated else 'that was not given to it'}.",
            )
            return
        try:
            if reply.error is not None:
                raise Rejected(Reason.FAILED, f"there is no upload: {messages.one_line(reply.error)}")
            if not reply.authentic:
                raise Rejected(Reason.SIGNATURE, "the reply was not signed with the key of its node.")
            self._accept(pending, reply, now)
        except Rejected as rejected:
            self._give_up(pending, rejected, now)

    def _accept(self, pending: InFlightTask, reply: Reply, now: float) -> None:
        task, validator = pending.task, self._broadcasts.validator(pending.task.version)
        limit = upload_byte_limit(validator, self._config)
        message, leaves = validate_upload(
            reply.header, reply.payload, task, self._journal.run, validator, limit
        )
        if message.memory == "new" and self.committed.get(task.client, -1) >= 0:
            raise Rejected(
                Reason.SETTINGS, "the site has lost its memory of this run: restore the site's folder."
            )
        self._check_steps(pending, message.steps)
        norms = validator.norms(leaves)
        if pending.required:  # the start may upload something else under the same names
            norms = norms._replace(kind=f"start {norms.kind}")
        self.norms.check(norms)
        if isinstance(validator, SecureUploadValidator):
            validator.examine(task, leaves, pending.digest)
        self._journal.accept(AcceptedUpload(task, now, validator.form, reply.payload, message.steps))
        self.norms.add(norms)
        self._settle(pending)
        seconds = now - pending.sent
        self.deadline.add(seconds, given_up=message.steps is not None)
        self._overheads[task.client] = max(0.0, seconds - message.seconds)
        self._cooldown.reset(task.client)
        self.arrivals.append(Arrival(task, pending.started, now, False, message.steps))
        early: dict[str, Any] = {} if message.steps is None else {"steps": message.steps}
        size = len(reply.payload)
        self._observer.tell(
            "accepted", **task._asdict(), seconds=seconds, work=message.seconds, bytes=size, **early
        )

    def _check_steps(self, pending: InFlightTask, steps: int | None) -> None:
        """Reject a task that ended early without being asked to, or after more steps than it has."""
        if steps is None:
            return
        if pending.required or not (self._config.network.partial_work or pending.recalled):
            raise Rejected(Reason.RANGE, f"the task ended after {steps} steps, which nobody asked for.")
        kind, count, _ = self._config.plan["work"]
        if kind == "steps" and steps >= count:
            raise Rejected(Reason.RANGE, f"the task ended early after {steps} steps, and it has {count}.")

    def _expire(self, now: float) -> None:
        backlog = self._transport.backlog  # what has arrived in time is not late
        for pending in list(self.in_flight.values()):
            if pending.message_id is None:
                if not pending.required and now > min(pending.started + self._config.grace, pending.until):
                    self._give_up(pending, Rejected(Reason.AWAY, "it left before its task was sent."), now)
            elif now - pending.sent > pending.limit and pending.message_id not in backlog:
                self.deadline.add(pending.limit, given_up=True)
                self._give_up(pending, Rejected(Reason.LATE, "it did not answer in time."), now)
            elif pending.node is not None and pending.node not in self._nodes:
                self._give_up(pending, Rejected(Reason.GONE, "its node has left."), now)

    def _settle(self, pending: InFlightTask) -> None:
        """A reply came, or none ever will."""
        del self.in_flight[pending.task.client]
        for message_id in (pending.message_id, pending.recall_id):
            if message_id is not None:
                self._asked.pop(message_id, None)
                self._settled[message_id] = message_id == pending.recall_id
        while len(self._settled) > _MAX_SETTLED:
            del self._settled[next(iter(self._settled))]

    def _give_up(self, pending: InFlightTask, rejected: Rejected, now: float) -> None:
        self._settle(pending)
        client = pending.task.client
        node = pending.node if pending.node is not None else self._nodes.node(client)
        self._observer.tell(
            "rejected", node=node or 0, client=client, reason=rejected.reason, sentence=rejected.sentence
        )
        self._observer.tell("lost", **pending.task._asdict())
        if rejected.reason not in _NO_COOLDOWN:
            self._observer.tell("aside", client=client, seconds=self._cooldown.fail(client))
        self.arrivals.append(Arrival(pending.task, pending.started, now, True))
