"""What a session is told of the run, of sites and of the network between.

Which site is which client, once and for all; a file in the run's folder knows it after a restart.

Whose name is whose: where the server has a site's public key, nobody else goes by that site's name.

Who is there: nodes come, are greeted, turn out to be clients, and leave.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_public_key,
)

from offbeat import files
from offbeat.deploy.monitor.observer import Observer
from offbeat.deploy.protocol import messages
from offbeat.deploy.protocol.messages import HelloReply
from offbeat.deploy.protocol.strict_json import Reason, Rejected
from offbeat.deploy.protocol.transport import Cooldown, KeyedTransport, Reply
from offbeat.deploy.protocol.wire import TensorSpecs, describe_difference
from offbeat.errors import InputError


@dataclass(frozen=True)
class SessionConfig:
    """Times are in seconds."""

    plan: dict[str, Any]  # what a site needs beyond its own code: it goes into every task's note
    clients: int
    deadline: float = 600.0  # for a task
    greeting: float = 120.0  # for a site to say who it is
    poll: float = 0.5  # between two looks
    refresh: float = 2.0  # between two looks at who is there
    grace: float = 10.0  # a node may be missing from the list, or a task wait to be sent
    patience: float = 600.0  # without the network, before the run ends, saved
    aside: float = 2.0  # a client that failed once; doubled with each failure in a row
    most_bytes: int | None = None  # of an upload; None: four times what it should be
    most_norm: float | None = None  # of an upload's field without a bound; None: by what is usual; 0: any
    bound: bool = False  # a site to its node for good: where nodes have keys


class RegisteredSite(NamedTuple):
    """A site that has a number."""

    name: str
    site: str  # its own number, made once in its folder
    node: int | None  # the only node it may come by, where nodes have keys


class ClientRegistry:
    """Numbers are given in the order of coming, to `clients` sites at most; the file is client to member."""

    def __init__(self, path: Path, clients: int, bound: bool) -> None:
        self._path = path
        self._clients = clients
        self._bound = bound
        self.members: dict[int, RegisteredSite] = _read_registry(path, clients) if path.exists() else {}
        self._numbers = {member.site: client for client, member in self.members.items()}

    def admit(self, node: int, name: str, site: str) -> int:
        """The number of a site; `Rejected` if it cannot have one."""
        client = self._numbers.get(site)
        if client is None:
            return self._add(node, name, site)
        member = self.members[client]
        if member.name != name:
            raise _refused(f"the site {name} was {member.name} when it first came: let it join by that name.")
        if self._bound and member.node != node:
            if member.node is not None:
                raise _refused(f"the site {name} came with another key before: let it join with that one.")
            self._check_node(node, name)
            self._write(client, member._replace(node=node))
        return client

    def _add(self, node: int, name: str, site: str) -> int:
        if any(member.name == name for member in self.members.values()):
            raise _refused(
                f"there is another site {name} in this run: join with the folder it had, or by another name."
            )
        if self._bound:
            self._check_node(node, name)
        if len(self.members) >= self._clients:
            raise _refused(f"the run has its {self._clients} sites already, so there is no place for {name}.")
        client = len(self.members)
        self._write(client, RegisteredSite(name, site, node if self._bound else None))
        return client

    def _check_node(self, node: int, name: str) -> None:
        for member in self.members.values():
            if member.node == node:
                raise _refused(
                    f"the node of {name} is that of {member.name}, by its key: join with the folder it had."
                )

    def _write(self, client: int, member: RegisteredSite) -> None:
        members = self.members | {client: member}
        text = json.dumps({str(number): each._asdict() for number, each in members.items()}, indent=1)
        files.write_atomic(self._path, [text.encode(), b"\n"])
        self.members = members
        self._numbers[member.site] = client


def _read_registry(path: Path, clients: int) -> dict[int, RegisteredSite]:
    try:
        known = json.loads(path.read_bytes())
        members = {int(client): _registered_site(each) for client, each in known.items()}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise InputError(f"{path} cannot be read ({error}): put it back as it was.") from None
    if sorted(members) != list(range(len(members))) or len(members) > clients:
        raise InputError(f"{path} is not of a run of {clients} clients: put it back as it was.")
    return members


def _registered_site(each: dict[str, Any]) -> RegisteredSite:
    if not isinstance(each["name"], str) or not isinstance(each["site"], str):
        raise ValueError("a site has no name")
    return RegisteredSite(each["name"], each["site"], each["node"])


def _refused(sentence: str) -> Rejected:
    return Rejected(Reason.SETTINGS, sentence)


_SITE_NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
)  # what a key can be made for; no way out of a folder


@dataclass(frozen=True)
class NameBinding:
    """`sites` has a folder for each site, with its `key.pub`; `post` knows by which key a node came."""

    sites: Path
    post: KeyedTransport

    def check(self, node: int, name: str) -> None:
        """Reject a node that goes by the name of a site whose key it does not have."""
        path = self.sites / name / "key.pub"
        if not _SITE_NAME.fullmatch(name) or not path.exists():
            return
        try:
            wanted = load_ssh_public_key(path.read_bytes())
        except (OSError, ValueError, UnsupportedAlgorithm):
            raise _name_refused(f"the server cannot read its key.pub of {name}: put it back there.") from None
        try:
            given = load_pem_public_key(self.post.key(node))
        except (ValueError, UnsupportedAlgorithm):
            raise _name_refused(
                f"the node that calls itself {name} came without a key: join with one."
            ) from None
        form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
        if given.public_bytes(*form) != wanted.public_bytes(*form):
            raise _name_refused(
                f"the name {name} belongs to another key: join by the name that your key was made for."
            )


def _name_refused(sentence: str) -> Rejected:
    return Rejected(Reason.SETTINGS, sentence)


_GREETING_COOLDOWN = 5.0  # seconds until a node that was turned away is greeted again, doubled each time
_MAX_ERROR_SHOWN = 200  # characters of what the network says, in a sentence


@dataclass
class _Node:
    seen: float  # when it was last listed
    client: int | None = None
    hello: str | None = None  # the number of the hello that is on its way to it
    until: float = 0.0  # when an answer is due
    refused: str | None = None  # why it was turned away last


class ConnectedNodes:
    """Nodes by their numbers; one that is not listed for longer than `grace` has left."""

    def __init__(
        self,
        roster: ClientRegistry,
        form: TensorSpecs,
        terms: SessionConfig,
        told: Observer,
        claims: NameBinding | None = None,
    ) -> None:
        self._roster = roster
        self._form = form
        self._terms = terms
        self._told = told
        self._claims = claims
        self._guests: dict[int, _Node] = {}
        self._listed: frozenset[int] = frozenset()
        self._nodes: dict[int, int] = {}  # of clients
        self._hellos: dict[str, int] = {}  # number of the message to node
        self._standing = Cooldown(_GREETING_COOLDOWN)

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
            self._guests.setdefault(node, _Node(now)).seen = now
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
                raise Rejected(Reason.FAILED, f"it could not say who it is: {one_line(reply.error)}")
            if reply.node != node:
                raise Rejected(Reason.TASK, "it answered a hello that went to another node.")
            hello = messages.decode_hello(reply.note)
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

    def _admit(self, node: int, hello: HelloReply) -> int:
        if hello.error is not None:
            raise Rejected(Reason.FAILED, hello.error)
        if hello.form != self._form:
            difference = describe_difference(hello.form, self._form)
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

    def _settle(self, guest: _Node) -> None:
        if guest.hello is not None:
            del self._hellos[guest.hello]
            guest.hello = None

    def _leave(self, node: int, guest: _Node) -> None:
        self._settle(guest)
        self._standing.clear(node)
        del self._guests[node]
        if guest.client is not None:
            del self._nodes[guest.client]
        self._told.left(node, guest.client)


def one_line(error: str) -> str:
    """What the network says went wrong, on one line of plain characters."""
    return ascii(" ".join(error.split()))[1:-1][:_MAX_ERROR_SHOWN]
