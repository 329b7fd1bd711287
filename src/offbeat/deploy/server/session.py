"""Which clients can be given a task now.

One run over a network, which loses nothing that it accepted.

Nothing is sent before the journal knows of it: `start` only notes a task, and `keep`, which writes down what
the flow has come to, sends it off. So a server that was killed at any moment knows of every task that a site
may have been given. What was in flight is lost then, except for what had been accepted.

Client work at real sites, with a network between.
"""

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.aggregate.mean import SecureEncoding
from offbeat.aggregate.uploads import clients_read_staleness
from offbeat.core import AnyAlgorithm, SavedState, Task, Vector
from offbeat.deploy.monitor.observer import NullObserver, Observer
from offbeat.deploy.protocol.transport import KeyedTransport, RetryingTransport, Transport
from offbeat.deploy.protocol.wire import specs_of, unpack
from offbeat.deploy.server.exchange import BroadcastCache, Exchange, InFlightTask, upload_byte_limit
from offbeat.deploy.server.journal import Journal, SetAside, buffered_tasks
from offbeat.deploy.server.registry import ClientRegistry, ConnectedNodes, NameBinding, SessionConfig
from offbeat.deploy.server.validation import NormGuard, plain_validator
from offbeat.engines.engine import ClientUpdates
from offbeat.errors import InputError
from offbeat.nn.problem import Problem, Statistics
from offbeat.schedule.availability import NextAvailable
from offbeat.schedule.clock import Arrival
from offbeat.schedule.rng import Rng
from offbeat.trees import Tree


class SiteAvailability:
    """As a session sees it; before there is one, nobody is there."""

    def __init__(self) -> None:
        self._idle: Callable[[], set[int]] = set
        self.pause = 1.0

    def follow(self, idle: Callable[[], set[int]], pause: float) -> None:
        """Ask this from now on; who is not there may be so many seconds later."""
        self._idle, self.pause = idle, pause

    @property
    def there(self) -> set[int]:
        return self._idle()

    def bind(self, seed: int) -> NextAvailable:
        return lambda client, now: now if client in self._idle() else now + self.pause


class StopRequested(Exception):  # noqa: N818 - somebody asked for it
    """The run is to end here; its folder has everything that was accepted."""


class DeployedSession:
    """The session of a `Deployed` engine."""

    def __init__(
        self,
        terms: SessionConfig,
        exchange: Exchange,
        published: BroadcastCache,
        journal: Journal,
        stop: Callable[[], bool],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        aside: SetAside | None = None,
    ) -> None:
        self._terms, self._exchange = terms, exchange
        self._published, self._journal = published, journal
        self._stop, self._clock, self._sleep = stop, clock, sleep
        self._aside = aside
        self._zero = clock()  # when the run began, by this clock
        self._idle: set[int] = (
            set()
        )  # clients that waited for a task when the flow was last told of something
        self._epoch = 0  # counts saves
        self._beginning = False  # whether a task of the start of everybody was seen
        self._begun = 0  # clients whose upload of that start has been gathered
        self._spare: set[Task] = set()  # uploads that the last save has no need of
        self._kept: dict[str, Any] | None = None
        self._hiding: Callable[[], SecureEncoding | None] = lambda: None

    @property
    def now(self) -> float:
        return self._clock() - self._zero

    @property
    def busy(self) -> int:
        return len(self._exchange.flights) + len(self._exchange.arrivals)

    def idle(self) -> set[int]:
        """Who can be given a task now."""
        return self._exchange.idle(self.now)

    def start(self, task: Task, *, sure: bool = False) -> None:
        if task.client in self._exchange.flights:
            raise InputError(
                f"client {task.client} was to be given a second task at once, which a site cannot take: "
                "use another dispatch."
            )
        if sure and self._aside is not None:
            raise InputError(
                "this run is in its start, for which the upload of everybody is needed: "
                "resume it without --set-aside, or begin another."
            )
        self._beginning |= sure
        if (
            sure and task in self._journal.orders
        ):  # the run was cut off in its start, and goes through it again
            found, orders = Arrival(task, self.now, self.now, False), self._journal.orders
            insort(self._exchange.arrivals, found, key=lambda arrival: orders[arrival.task])
        else:
            self._exchange.flights.add(InFlightTask(task, self.now, sure))

    def next(self) -> Arrival | None:
        if not self.busy:
            raise InputError("nothing is in flight, so nothing can arrive: start a task first.")
        while not self._exchange.arrivals:
            self._look()
            idle, before = self.idle(), self._idle
            self._idle = idle
            if not self._exchange.arrivals:
                if idle - before:
                    return None
                self._sleep(self._terms.poll)
        return self._exchange.arrivals.popleft()

    def wait(self, until: float) -> None:
        self._look()
        while (rest := until - self.now) > 0:
            self._sleep(min(self._terms.poll, rest))
            self._look()

    def publish(self, version: int, algorithm: AnyAlgorithm, message: Tree, statistics: Statistics) -> None:
        needed = {flight.task.version for flight in self._exchange.flights if flight.number is None}
        self._published.add(version, algorithm, message, statistics, self._hiding(), needed)

    def veil(self, hiding: Callable[[], SecureEncoding | None]) -> None:
        self._hiding = hiding

    def gather(self, tasks: Sequence[Task], version: int) -> ClientUpdates:
        intake = self._published.intake(version)
        uploads = []
        for task in tasks:
            upload = self._journal.read(task)
            if upload.form != intake.form:
                raise InputError(
                    f"the accepted upload of client {task.client} is of another method or model: "
                    "resume the run with what it began with."
                )
            uploads.append(unpack(upload.payload, upload.form))
            self._exchange.commit(task)
        if self._starting:
            self._begun += len(tasks)
        return intake.join(uploads)

    def forget(self, tasks: Sequence[Task]) -> None:
        pass  # what was accepted of them goes with the next checkpoint

    def keep(self, flow: dict[str, Any]) -> None:
        for task in buffered_tasks(flow):
            self._exchange.commit(task)
        self._write(flow, self._exchange.flying, self.now)
        self._exchange.send(self.now)

    def kept(self) -> dict[str, Any] | None:
        return self._kept

    def save(self) -> SavedState:
        needed = {arrival.task for arrival in self._exchange.arrivals}
        self._spare = set() if self._starting else self._journal.tasks - needed
        self._epoch += 1
        facts = {
            "now": self.now,
            "epoch": self._epoch,
            "flying": self._exchange.flying,
            "committed": sorted(self._exchange.committed.items()),
            "begun": self._begun,
            "norms": self._exchange.lengths.save(),
        }
        return SavedState(facts, {})

    def confirm(self) -> None:
        self._journal.cut(self._epoch)
        self._journal.drop(self._spare)
        self._spare = set()

    def load(self, saved: SavedState) -> None:
        facts = saved.facts
        self._epoch, self._begun = facts["epoch"], facts["begun"]
        self._exchange.committed = dict(facts["committed"])
        self._exchange.lengths.load(facts.get("norms", {}))  # less those that came after the checkpoint
        if self._starting:  # everybody's uploads of the start were found, or asked for again
            self._zero = min(self._zero, self._clock() - facts["now"])
            return
        line = self._journal.last(self._epoch)
        last = facts if line is None else line
        self._kept = None if line is None else line["flow"]
        self._zero = self._clock() - last["now"]
        self._exchange.committed |= dict(last.get("committed", ()))
        for task in buffered_tasks(self._kept or {}):
            self._exchange.commit(task)
        if self._aside is not None:
            if self._kept is not None:
                self._kept = self._aside.empty(self._kept)
                self._write(self._kept, last["flying"], last["now"])
            self._aside.done()
        flying = [(Task(*task), started) for *task, started in last["flying"]]
        needed = buffered_tasks(self._kept or {}) | {task for task, _ in flying}
        self._journal.drop(self._journal.tasks - needed)
        arrivals = [self._recover(task, started) for task, started in flying]
        self._exchange.arrivals = deque(sorted(arrivals, key=lambda arrival: arrival.time))

    def close(self) -> None:
        self._journal.close()

    @property
    def _starting(self) -> bool:
        """The start of everybody is not over: a run that is cut off goes through all its uploads again."""
        return self._beginning and self._begun < self._terms.clients

    def _write(self, flow: dict[str, Any], flying: list[list[float]], now: float) -> None:
        committed = sorted(self._exchange.committed.items())
        self._journal.keep(self._epoch, {"flow": flow, "flying": flying, "now": now, "committed": committed})

    def _recover(self, task: Task, started: float) -> Arrival:
        """A task that was in flight at a kill: it has arrived if its upload is on disk, else it is lost."""
        if task in self._journal.orders:
            return Arrival(task, started, self._journal.read(task).arrived, False)
        return Arrival(task, started, self.now, True)

    def _look(self) -> None:
        if self._stop():
            raise StopRequested
        self._exchange.look(self.now)


@dataclass(frozen=True)
class DeployedEngine:
    """One site is one client; what is accepted is written to `folder` before anything else is done with it.

    The loop above has to take a checkpoint after every server step and confirm it (`save_every=1`). When
    `stop` says so the session raises `Stopped` while it waits: all that was accepted is in the folder.
    Where there is a file `set_aside`, a resumed run does not use the uploads that wait in its buffer, once.
    """

    post: Transport
    problem: Problem
    terms: SessionConfig
    folder: Path
    told: Observer = field(default_factory=NullObserver)
    stop: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    set_aside: Path | None = None
    sites: Path | None = None  # has the public keys of sites, by name
    availability: SiteAvailability = field(
        default_factory=SiteAvailability
    )  # follows whatever session was opened last

    @property
    def clients(self) -> int:
        return self.terms.clients

    def initial(self) -> tuple[Vector, Statistics]:
        return self.problem.initial()

    def open(self, algorithm: AnyAlgorithm, seed: int, source: Rng) -> DeployedSession:
        if clients_read_staleness(algorithm):
            raise InputError(
                f"the clients of {type(algorithm).__name__} look at how stale their task will be, "
                "which nobody knows before it is back: use another method, or the simulator."
            )
        x, statistics = self.problem.initial()
        terms, told = self.terms, self.told
        roster = ClientRegistry(self.folder / "roster.json", self.clients, terms.bound)
        claims = None
        if terms.bound and self.sites is not None and isinstance(self.post, KeyedTransport):
            claims = NameBinding(self.sites, self.post)
        guests = ConnectedNodes(roster, specs_of((x, statistics)), terms, told, claims)
        published = BroadcastCache(x, statistics)
        journal = Journal(self.folder / "journal")
        line = RetryingTransport(self.clock, terms.patience, told)
        lengths = NormGuard(terms.most_norm, float(x.double().norm()))
        exchange = Exchange(self.post, terms, line, guests, published, journal, lengths, told)
        asked = self.set_aside is not None and self.set_aside.exists()
        aside = SetAside(self.set_aside, journal, told) if self.set_aside and asked else None
        session = DeployedSession(
            terms, exchange, published, journal, self.stop, self.clock, self.sleep, aside
        )
        self.availability.follow(session.idle, terms.poll)
        return session


def max_upload_bytes(algorithm: AnyAlgorithm, problem: Problem, terms: SessionConfig) -> int:
    """The most that an upload may have; what fetches uploads need not take in more."""
    x, statistics = problem.initial()
    return max(
        upload_byte_limit(plain_validator(algorithm, x, statistics, version), terms) for version in (0, 1)
    )
