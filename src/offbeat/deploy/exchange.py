"""Tasks out, uploads in: what is sent to whom, what came of it, and what has to be given up."""

from collections import deque

from offbeat.core import Task
from offbeat.deploy import notes
from offbeat.deploy.flights import Flight, Flights
from offbeat.deploy.guests import Guests, said
from offbeat.deploy.intake import read_upload_bytes
from offbeat.deploy.journal import Journal, Upload
from offbeat.deploy.lengths import Lengths
from offbeat.deploy.line import Line
from offbeat.deploy.notes import TaskNote
from offbeat.deploy.post import Post, Reply
from offbeat.deploy.published import Published, limit_of
from offbeat.deploy.rejections import Reason, Rejected
from offbeat.deploy.secure_intake import SecureIntake
from offbeat.deploy.standing import Standing
from offbeat.deploy.terms import Terms
from offbeat.deploy.told import Told
from offbeat.schedule.timeline import Arrival

_BLAMELESS = (Reason.GONE, Reason.AWAY)  # leaving is no failure


class Exchange:
    """Never raises for anything that a site or the network does, unless the network is away for too long."""

    def __init__(
        self,
        post: Post,
        terms: Terms,
        line: Line,
        guests: Guests,
        published: Published,
        journal: Journal,
        lengths: Lengths,
        told: Told,
    ) -> None:
        self._post, self._terms, self._line, self._guests = post, terms, line, guests
        self._published, self._journal, self._told = published, journal, told
        self.lengths = lengths
        self._standing = Standing(terms.aside)
        self._looked: float | None = None  # when it was last asked who is there
        self.flights = Flights()
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
            note = notes.write(self._note(flight))
            number = self._push(node, "task", note, payload, self._terms.deadline)
            if number is None:
                return
            self.flights.send(flight, number, node, now)
            self._told.sent(client, flight.task, len(payload))

    def _greet(self, now: float) -> None:
        for node in self._guests.strangers(now):
            note = notes.write_greeting(self._guests.refusal(node))
            number = self._push(node, "hello", note, b"", self._terms.greeting)
            if number is None:
                return
            self._guests.greet(node, number, now)

    def _push(self, node: int, kind: str, note: str, payload: bytes, seconds: float) -> str | None:
        return self._line.ask(lambda: self._post.push(node, kind, note, payload, seconds))

    def _note(self, flight: Flight) -> TaskNote:
        down = self._published[flight.task.version]
        return TaskNote(
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
                raise Rejected(Reason.FAILED, f"there is no upload: {said(reply.error)}")
            self._accept(flight, reply, now)
        except Rejected as rejected:
            self._lose(flight, rejected, now)

    def _accept(self, flight: Flight, reply: Reply, now: float) -> None:
        task, intake = flight.task, self._published.intake(flight.task.version)
        limit = limit_of(intake, self._terms)
        leaves = read_upload_bytes(reply.note, reply.payload, task, self._journal.run, intake, limit)
        told = notes.read_upload(reply.note)
        if told.memory == "new" and self.committed.get(task.client, -1) >= 0:
            raise Rejected(
                Reason.SETTINGS, "the site has lost what it kept of this run: give it its folder back."
            )
        norms = intake.norms(leaves)
        if flight.sure:  # which may send something else under the same names
            norms = norms._replace(kind=f"start {norms.kind}")
        self.lengths.check(norms)
        if isinstance(intake, SecureIntake):
            intake.examine(task, leaves)
        self._journal.accept(Upload(task, now, intake.form, reply.payload))
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

    def _lose(self, flight: Flight, rejected: Rejected, now: float) -> None:
        self.flights.end(flight)
        client = flight.task.client
        node = flight.node if flight.node is not None else self._guests.node(client)
        self._told.rejected(node or 0, client, rejected.reason, rejected.sentence)
        self._told.lost(client, flight.task)
        if rejected.reason not in _BLAMELESS:
            self._told.aside(client, self._standing.fail(client, now))
        self.arrivals.append(Arrival(flight.task, flight.started, now, True))

    def _fit(self, client: int, now: float) -> bool:
        return self._standing.free(client, now)
