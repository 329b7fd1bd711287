"""One run over a network, which loses nothing that it accepted.

Nothing is sent before the journal knows of it: `start` only notes a task, and `keep`, which writes down what
the flow has come to, sends it off. So a server that was killed at any moment knows of every task that a site
may have been given. What was in flight is lost then, except for what had been accepted.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from offbeat.aggregate.aggregation import Hiding
from offbeat.core import AnyAlgorithm, Saved, Task
from offbeat.deploy.exchange import Exchange
from offbeat.deploy.flights import Flight
from offbeat.deploy.journal import Journal
from offbeat.deploy.published import Published
from offbeat.deploy.set_aside import SetAside, waiting
from offbeat.deploy.terms import Terms
from offbeat.deploy.wire import unpack
from offbeat.engines.engine import Gathered
from offbeat.errors import InputError
from offbeat.problem import Statistics
from offbeat.schedule.timeline import Arrival
from offbeat.trees import Tree


class Stopped(Exception):  # noqa: N818 - somebody asked for it
    """The run is to end here; its folder has everything that was accepted."""


class Deployment:
    """The session of a `Deployed` engine."""

    def __init__(
        self,
        terms: Terms,
        exchange: Exchange,
        published: Published,
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
        self._hiding: Callable[[], Hiding | None] = lambda: None

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
            self._exchange.flights.add(Flight(task, self.now, sure))

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

    def veil(self, hiding: Callable[[], Hiding | None]) -> None:
        self._hiding = hiding

    def gather(self, tasks: Sequence[Task], version: int) -> Gathered:
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
        for task in waiting(flow):
            self._exchange.commit(task)
        self._write(flow, self._exchange.flying, self.now)
        self._exchange.send(self.now)

    def kept(self) -> dict[str, Any] | None:
        return self._kept

    def save(self) -> Saved:
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
        return Saved(facts, {})

    def confirm(self) -> None:
        self._journal.cut(self._epoch)
        self._journal.drop(self._spare)
        self._spare = set()

    def load(self, saved: Saved) -> None:
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
        for task in waiting(self._kept or {}):
            self._exchange.commit(task)
        if self._aside is not None:
            if self._kept is not None:
                self._kept = self._aside.empty(self._kept)
                self._write(self._kept, last["flying"], last["now"])
            self._aside.done()
        flying = [(Task(*task), started) for *task, started in last["flying"]]
        needed = waiting(self._kept or {}) | {task for task, _ in flying}
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
            raise Stopped
        self._exchange.look(self.now)
