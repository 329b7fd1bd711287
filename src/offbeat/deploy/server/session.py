"""The deployed engine: client work at real sites, in a session that loses nothing that it accepted.

No task is sent before the journal knows of it: `start` only records a task, and `keep`, which writes the
scheduler's state, sends it. So a server that was killed at any moment knows of every task that a site may
have been given. Tasks in flight are lost in a kill, except for those whose upload had been accepted.
"""

import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from offbeat.aggregate.mean import SecureEncoding
from offbeat.core import AnyAlgorithm, SavedState, Task, Vector
from offbeat.deploy.monitor.observer import Observer
from offbeat.deploy.protocol.messages import specs_of, unpack
from offbeat.deploy.protocol.transport import RetryingTransport, Transport
from offbeat.deploy.server.exchange import (
    BroadcastCache,
    Exchange,
    InFlightTask,
    SessionConfig,
    upload_byte_limit,
)
from offbeat.deploy.server.journal import Journal, buffered_tasks, without_buffered
from offbeat.deploy.server.registry import ClientRegistry, ConnectedNodes, NameBinding
from offbeat.deploy.server.validation import plain_validator
from offbeat.engines.engine import ClientUpdates
from offbeat.errors import DiskFullError, InputError
from offbeat.files import disk_full
from offbeat.nn.layers import SCALING
from offbeat.nn.problem import Problem, Statistics
from offbeat.schedule.availability import NextAvailable
from offbeat.schedule.clock import Arrival, deadline_state
from offbeat.schedule.rng import Rng
from offbeat.trees import Tree

_MIN_SLEEP = 1e-3  # seconds: less might be too little to change the time, which is a float


class SiteAvailability:
    """The clients that can be given a task now: those that a session reports as idle."""

    by_client = True  # a site is there, or busy with an earlier task, or not: others have no part in it

    def __init__(self) -> None:
        self._idle: Callable[[], set[int]] = set
        self.pause = 1.0

    def follow(self, idle: Callable[[], set[int]], pause: float) -> None:
        """Ask this session from now on; other clients are looked at again after `pause` seconds."""
        self._idle, self.pause = idle, pause

    @property
    def there(self) -> set[int]:
        return self._idle()

    def bind(self, seed: int) -> NextAvailable:
        return lambda client, now: now if client in self._idle() else now + self.pause


class StopRequested(Exception):  # noqa: N818 - a request, not a fault of the program
    """The run is to end here; its folder has everything that was accepted."""


class DeployedSession:
    """The session of a `DeployedEngine`."""

    def __init__(
        self,
        engine: "DeployedEngine",
        exchange: Exchange,
        broadcasts: BroadcastCache,
        journal: Journal,
    ) -> None:
        self._config, self._exchange = engine.config, exchange
        self._broadcasts, self._journal, self._observer = broadcasts, journal, engine.observer
        self._stop, self._clock, self._sleep = engine.stop, engine.clock, engine.sleep
        asked = engine.set_aside
        self._set_aside = asked if asked is not None and asked.exists() else None
        self._zero = self._clock()  # when the run began, by this clock
        self._idle: set[int] = set()  # the idle clients when `next` looked last
        self._ended = -math.inf  # the last time to wait until that has passed
        self._epoch = 0  # the number of saves
        self._has_start = False  # whether a task of the full-participation start was seen
        self._gathered = 0  # clients whose upload of that start was gathered
        self._superfluous: set[Task] = set()  # uploads that the last save does not need
        self._kept: dict[str, Any] | None = None

    @property
    def now(self) -> float:
        return self._clock() - self._zero

    @property
    def busy(self) -> int:
        return len(self._exchange.in_flight) + len(self._exchange.arrivals)

    @property
    def streams(self) -> bool:
        return True  # uploads wait on the disk until they are added to the sum

    @property
    def recalls(self) -> bool:
        return self._config.network.recall_stale

    def recall(self, version: int) -> Sequence[Task]:
        return self._exchange.recall(version, self.now)

    def idle(self) -> set[int]:
        """The clients that can be given a task now."""
        return self._exchange.idle()

    def start(self, task: Task, *, sure: bool = False, until: float = math.inf) -> None:
        if task.client in self._exchange.in_flight:
            raise InputError(
                f"client {task.client} was given a second task at once, which a site cannot run: "
                "use another dispatch."
            )
        if sure and self._set_aside is not None:
            raise InputError(
                "this run is in its full-participation start, which needs the upload of every client: "
                "resume it without --set-aside, or start another run."
            )
        self._has_start |= sure
        if sure and task in self._journal.orders:  # the run was interrupted in its start, which is repeated
            arrival, orders = Arrival(task, self.now, self.now, False), self._journal.orders
            insort(self._exchange.arrivals, arrival, key=lambda each: orders[each.task])
        else:
            self._exchange.in_flight[task.client] = InFlightTask(task, self.now, sure, until)

    def next(self, until: float = math.inf) -> Arrival | None:
        if not self.busy and math.isinf(until):
            raise InputError("no task is in flight, so nothing can arrive: start a task first.")
        while not self._exchange.arrivals:
            over = self.now >= until
            if over and self._ended == until:
                return None
            self._poll(until)
            if over:  # what this poll finds is in time, and what the next one would find is not
                self._ended = until
            idle, before = self.idle(), self._idle
            self._idle = idle
            if not self._exchange.arrivals:
                rest = until - self.now
                if idle - before or rest <= 0:
                    return None
                self._sleep(max(_MIN_SLEEP, min(self._config.poll, rest)))
        return self._exchange.arrivals.popleft()

    def wait(self, until: float) -> None:
        self._poll()
        while (rest := until - self.now) > 0:
            self._sleep(max(_MIN_SLEEP, min(self._config.poll, rest)))
            self._poll()

    def publish(self, version: int, algorithm: AnyAlgorithm, message: Tree, statistics: Statistics) -> None:
        in_flight = self._exchange.in_flight.values()
        needed = {each.task.version for each in in_flight if each.message_id is None}
        self._broadcasts.add(version, algorithm, (message, statistics), needed)

    def set_secure_encoding(self, encoding: Callable[[], SecureEncoding | None], private: bool) -> None:
        self._broadcasts.encoding, self._broadcasts.private = encoding, private

    def gather(self, tasks: Sequence[Task], version: int) -> ClientUpdates:
        validator = self._broadcasts.validator(version)

        def read(task: Task) -> list[Tensor]:
            upload = self._journal.read(task)
            if upload.form != validator.form:
                raise InputError(
                    f"the accepted upload of client {task.client} belongs to another method or model: "
                    "resume the run with those it was started with."
                )
            self._exchange.commit(task)
            return unpack(upload.payload, upload.form)

        joined = validator.join(map(read, tasks), len(tasks))
        if self._in_start:
            self._gathered += len(tasks)
        return joined

    def forget(self, tasks: Sequence[Task]) -> None:
        pass  # their accepted uploads are removed with the next checkpoint

    def save_progress(self, flow: dict[str, Any]) -> None:
        for task in buffered_tasks(flow):
            self._exchange.commit(task)
        accepted = {each.task for each in self._exchange.arrivals if not each.lost}
        self._append(flow, self._exchange.pending, self.now, accepted)
        self._exchange.send(self.now)

    def saved_progress(self) -> dict[str, Any] | None:
        return self._kept

    def save(self) -> SavedState:
        needed = {arrival.task for arrival in self._exchange.arrivals}
        self._superfluous = set() if self._in_start else self._journal.tasks - needed
        self._epoch += 1
        facts = {
            "now": self.now,
            "epoch": self._epoch,
            "flying": self._exchange.pending,
            "committed": sorted(self._exchange.committed.items()),
            "begun": self._gathered,
            "norms": self._exchange.norms.save(),
            "order": self._journal.newest,
            **deadline_state(self._exchange.deadline),
        }
        return SavedState(facts, {})

    def confirm(self) -> None:
        # What the checkpoint before this one needs is kept, in case this one is damaged. Under a timed
        # dispatch that includes uploads in the scheduler's buffer that are for a later release.
        self._journal.drop(self._superfluous - _tasks_of(self._journal.last(self._epoch - 1) or {}))
        self._journal.discard(before=self._epoch - 1)
        self._superfluous = set()

    def load(self, saved: SavedState) -> None:
        facts = saved.facts
        self._epoch, self._gathered = facts["epoch"], facts["begun"]
        self._exchange.committed = dict(facts["committed"])
        self._exchange.deadline.load(facts.get("deadline", []))
        self._exchange.norms.load(facts.get("norms", {}))  # without those from after the checkpoint
        if self._in_start:  # every client's upload of the start was found, or is requested again
            self._zero = min(self._zero, self._clock() - facts["now"])
            return
        line = self._last_line()
        last = facts if line is None else line
        self._kept = None if line is None else line["flow"]
        self._zero = self._clock() - last["now"]
        self._exchange.committed |= dict(last.get("committed", ()))
        for task in buffered_tasks(self._kept or {}):
            self._exchange.commit(task)
        self._check_uploads(last)
        pending = [(Task(*task), started) for *task, started in last["flying"]]
        needed = buffered_tasks(self._kept or {}) | {task for task, _ in pending}
        if max(self._journal.epochs(), default=0) > self._epoch:
            # The newest checkpoint was lost or damaged, and this is the one before it.
            self._report_set_aside(self._journal.tasks - needed)
            self._journal.discard(after=self._epoch)
        needed |= _tasks_of(self._journal.last(self._epoch - 1) or {})
        self._journal.drop(self._journal.tasks - needed)
        arrivals = [self._recover(task, started) for task, started in pending]
        self._exchange.arrivals = deque(sorted(arrivals, key=lambda arrival: arrival.time))

    def _last_line(self) -> dict[str, Any] | None:
        """The last line of the epoch; none if the journal is unusable and the operator accepts that."""
        try:
            return self._journal.last(self._epoch)
        except InputError:
            if self._set_aside is None:
                raise
            self._report_set_aside(self._journal.tasks)
            self._journal.drop(self._journal.tasks)
            self._journal.clear()
            return None

    def _check_uploads(self, last: dict[str, Any]) -> None:
        """Find accepted uploads that are missing or damaged, and set aside what the operator said."""
        buffered = buffered_tasks(self._kept or {})
        known, orders = {Task(*task) for *task, _ in last["flying"]} | buffered, self._journal.orders
        unknown = [
            task for task in orders if task not in known and orders[task] > last.get("order", math.inf)
        ]
        if unknown and self._set_aside is None:
            raise InputError(
                f"the journal has lost its last lines: the upload of client {unknown[0].client} from version "
                f"{unknown[0].version} was accepted after the ones that are left. Restore kept.jsonl from a "
                "backup, or resume with --set-aside to continue without such uploads."
            )
        self._journal.newest = max(self._journal.newest, last.get("order", 0))
        accepted = {Task(*task) for task in last.get("accepted", ())}
        damaged = self._journal.damaged((accepted & known) | buffered)
        if self._set_aside is None:
            if damaged:
                raise InputError(next(iter(damaged.values())))
            return
        # All uploads of the buffer, because they made the model diverge; or the damaged ones, if there are.
        aside = buffered & damaged.keys() if damaged else buffered
        state = without_buffered(self._kept or {}, aside)
        self._report_set_aside(aside | {*unknown, *(damaged.keys() & accepted)})
        if self._kept is not None:
            self._kept = state
            self._append(state, last["flying"], last["now"], accepted - damaged.keys())
        self._journal.drop([*unknown, *damaged])
        self._set_aside.unlink(missing_ok=True)  # a server that is restarted uses what has arrived since

    def _report_set_aside(self, tasks: set[Task]) -> None:
        if tasks:
            self._journal.copy_aside(tasks)
        for task in sorted(tasks):
            self._observer.tell("set_aside", **task._asdict())

    def close(self) -> None:
        self._journal.close()

    @property
    def _in_start(self) -> bool:
        """Whether the full-participation start is not over: an interrupted run repeats all of it."""
        return self._has_start and self._gathered < self._config.clients

    def _append(
        self, state: dict[str, Any], pending: list[list[float]], now: float, accepted: Iterable[Task]
    ) -> None:
        facts = {
            "flow": state,
            "flying": pending,
            "now": now,
            "committed": sorted(self._exchange.committed.items()),
            "accepted": [list(task) for task in sorted(accepted)],
            "order": self._journal.newest,
        }
        self._journal.append(self._epoch, facts)

    def _recover(self, task: Task, started: float) -> Arrival:
        """A task that was in flight at a kill: it has arrived if its upload is on disk, else it is lost."""
        if task in self._journal.orders:
            upload = self._journal.read(task)
            return Arrival(task, started, upload.arrived, False, upload.steps)
        return Arrival(task, started, self.now, True)

    def _poll(self, until: float = math.inf) -> None:
        if self._stop():
            raise StopRequested
        self._exchange.poll(min(self.now, until))


def _tasks_of(line: dict[str, Any]) -> set[Task]:
    """The tasks that a line of the journal needs the uploads of, as far as they have any."""
    return buffered_tasks(line.get("flow", {})) | {Task(*task) for *task, _ in line.get("flying", ())}


@dataclass(frozen=True)
class DeployedEngine:
    """Runs tasks at sites, each of which is one client; accepted uploads are written to `folder` first.

    The training loop must take a checkpoint after every server step and confirm it (`save_every=1`). When
    `stop` returns True the session raises `StopRequested` while it waits; all that was accepted is in the
    folder. If the file `set_aside` exists, a resumed run does not use the uploads in its buffer, once.
    """

    transport: Transport
    problem: Problem
    config: SessionConfig
    folder: Path
    observer: Observer
    stop: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    set_aside: Path | None = None
    sites: Path | None = None  # a folder with the public keys of sites, by name
    roster: Path | None = None  # which site is which client; None: a file in `folder`
    availability: SiteAvailability = field(default_factory=SiteAvailability)  # of the newest session

    @property
    def clients(self) -> int:
        return self.config.clients

    def initial(self) -> tuple[Vector, Statistics]:
        return self.problem.initial()

    def _report_unreachable(self, sentence: str) -> None:
        """A SuperLink answers with an error of its own when the disk is full."""
        if disk_full(self.folder):
            raise DiskFullError(self.folder)
        self.observer.tell("unreachable", sentence=sentence)

    def open(self, algorithm: AnyAlgorithm, seed: int, rng: Rng) -> DeployedSession:
        config, observer, clock = self.config, self.observer, self.clock
        binding = NameBinding(self.sites, self.transport) if config.bind_names else None
        whole, buffers = self.problem.whole()  # as sites have it
        nodes = ConnectedNodes(
            ClientRegistry(self.roster or self.folder / "roster.json", self.clients, config.bind_names),
            specs_of((whole, _own_statistics(buffers, config.plan))),
            observer,
            config.grace,
            config.greeting_timeout,
            clock,
            binding,
        )
        broadcasts = BroadcastCache(*self.problem.initial())
        journal = Journal(self.folder / "journal")
        transport = RetryingTransport(
            self.transport,
            config.network.patience,
            clock,
            self._report_unreachable,
            lambda: observer.tell("reachable"),
        )
        exchange = Exchange(config, transport, nodes, broadcasts, journal, observer, clock)
        session = DeployedSession(self, exchange, broadcasts, journal)
        self.availability.follow(session.idle, config.poll)
        return session


def _own_statistics(statistics: Statistics, plan: dict[str, Any]) -> Statistics:
    """The statistics of the module that a site has; a task asks the site to scale its inputs."""
    scaled = SCALING if plan.get("standardise") else ()
    return {name: value for name, value in statistics.items() if name not in scaled}


def max_upload_bytes(algorithm: AnyAlgorithm, problem: Problem, config: SessionConfig) -> int:
    """The most bytes that any upload may have; a transport need not fetch more."""
    x, statistics = problem.initial()
    return max(
        upload_byte_limit(plain_validator(algorithm, x, statistics, version), config) for version in (0, 1)
    )
