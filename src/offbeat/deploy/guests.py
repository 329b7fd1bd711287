"""Who is there: nodes come, are greeted, turn out to be clients, and leave."""

from dataclasses import dataclass

from offbeat.deploy import notes
from offbeat.deploy.claims import Claims
from offbeat.deploy.notes import HelloNote
from offbeat.deploy.post import Reply
from offbeat.deploy.rejections import Reason, Rejected
from offbeat.deploy.roster import Roster
from offbeat.deploy.standing import Standing
from offbeat.deploy.terms import Terms
from offbeat.deploy.told import Told
from offbeat.deploy.wire import Form, differs

_AGAIN = 5.0  # seconds until a node that was turned away is greeted again, doubled each time
_SAID = 200  # characters of what the network says, in a sentence


@dataclass
class _Guest:
    seen: float  # when it was last listed
    client: int | None = None
    hello: str | None = None  # the number of the hello that is on its way to it
    until: float = 0.0  # when an answer is due
    refused: str | None = None  # why it was turned away last


class Guests:
    """Nodes by their numbers; one that is not listed for longer than `grace` has left."""

    def __init__(
        self, roster: Roster, form: Form, terms: Terms, told: Told, claims: Claims | None = None
    ) -> None:
        self._roster = roster
        self._form = form
        self._terms = terms
        self._told = told
        self._claims = claims
        self._guests: dict[int, _Guest] = {}
        self._listed: frozenset[int] = frozenset()
        self._nodes: dict[int, int] = {}  # of clients
        self._hellos: dict[str, int] = {}  # number of the message to node
        self._standing = Standing(_AGAIN)

    @property
    def hellos(self) -> list[str]:
        """The numbers of all that are on their way."""
        return list(self._hellos)

    @property
    def clients(self) -> list[int]:
        """Those who have not left."""
        return list(self._nodes)

    def node(self, client: int) -> int | None:
        """By which node it can be reached now."""
        node = self._nodes.get(client)
        return node if node in self._listed else None

    def client(self, node: int) -> int | None:
        """Who it is, as far as known."""
        return self._guests[node].client if node in self._guests else None

    def has(self, node: int) -> bool:
        """Whether it has not left."""
        return node in self._guests

    def see(self, listed: frozenset[int], now: float) -> None:
        """Who is in the network's list now."""
        self._listed = listed
        for node in listed:
            self._guests.setdefault(node, _Guest(now)).seen = now
        for node, guest in list(self._guests.items()):
            if now - guest.seen > self._terms.grace:
                self._leave(node, guest)

    def strangers(self, now: float) -> list[int]:
        """Those to be greeted."""
        return [
            node
            for node, guest in self._guests.items()
            if guest.client is None
            and guest.hello is None
            and node in self._listed
            and self._standing.free(node, now)
        ]

    def refusal(self, node: int) -> str | None:
        """Why it was turned away last, for it to hear."""
        return self._guests[node].refused

    def greet(self, node: int, number: str, now: float) -> None:
        """A hello with this number was sent to it."""
        guest = self._guests[node]
        guest.hello, guest.until = number, now + self._terms.greeting
        self._hellos[number] = node

    def answer(self, reply: Reply, now: float) -> None:
        """What came back of a hello."""
        node = self._hellos[reply.number]
        guest = self._guests[node]
        try:
            if reply.error is not None:
                raise Rejected(Reason.FAILED, f"it could not say who it is: {said(reply.error)}")
            if reply.node != node:
                raise Rejected(Reason.TASK, "it answered a hello that went to another node.")
            hello = notes.read_hello(reply.note)
            client = self._admit(node, hello)
        except Rejected as rejected:
            self._turn_away(node, rejected, now)
        else:
            self._settle(guest)
            self._standing.clear(node)
            guest.client = client
            self._nodes[client] = node
            self._told.joined(node, hello.name, client)

    def expire(self, now: float) -> None:
        """Nodes that did not say who they are in time."""
        for node in list(self._hellos.values()):
            if now > self._guests[node].until:
                self._turn_away(node, Rejected(Reason.LATE, "it did not say who it is in time."), now)

    def _admit(self, node: int, hello: HelloNote) -> int:
        if hello.error is not None:
            raise Rejected(Reason.FAILED, hello.error)
        if hello.form != self._form:
            difference = differs(hello.form, self._form)
            raise Rejected(Reason.SETTINGS, f"{hello.name} has another model than the server: {difference}.")
        if not hello.examples:
            raise Rejected(Reason.SETTINGS, f"{hello.name} has no examples: give it some.")
        if self._claims is not None:
            self._claims.check(node, hello.name)
        for other, guest in self._guests.items():
            if guest.client is None or other == node:
                continue
            member = self._roster.members[guest.client]
            if hello.site == member.site or hello.name == member.name:
                raise Rejected(Reason.SETTINGS, f"{hello.name} is there already, by another node.")
        return self._roster.admit(node, hello.name, hello.site)

    def _turn_away(self, node: int, rejected: Rejected, now: float) -> None:
        self._settle(self._guests[node])
        self._guests[node].refused = rejected.sentence
        self._standing.fail(node, now)
        self._told.rejected(node, None, rejected.reason, rejected.sentence)

    def _settle(self, guest: _Guest) -> None:
        if guest.hello is not None:
            del self._hellos[guest.hello]
            guest.hello = None

    def _leave(self, node: int, guest: _Guest) -> None:
        self._settle(guest)
        self._standing.clear(node)
        del self._guests[node]
        if guest.client is not None:
            del self._nodes[guest.client]
        self._told.left(node, guest.client)


def said(error: str) -> str:
    """What the network says went wrong, on one line of plain characters."""
    return ascii(" ".join(error.split()))[1:-1][:_SAID]
