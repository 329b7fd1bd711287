"""Which nodes are connected, and which client each of their sites is.

A site keeps its client number for the whole run: `ClientRegistry` holds the numbers in a file. `NameBinding`
makes sure that a site whose public key the server has is not impersonated, and `ConnectedNodes` follows
nodes as they appear, are greeted, become clients and leave.
"""

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from offbeat import files
from offbeat.deploy.keys import fingerprint, read_public_key
from offbeat.deploy.monitor.observer import Observer
from offbeat.deploy.protocol import messages
from offbeat.deploy.protocol.messages import HelloReply, TensorSpecs, describe_difference
from offbeat.deploy.protocol.strict_json import Reason, Rejected
from offbeat.deploy.protocol.transport import Cooldown, Reply, Transport
from offbeat.errors import InputError

_SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # what keys are made for; no path out of a folder
_GREETING_COOLDOWN = 5.0  # seconds until a refused node is greeted again, doubled each time


class RegisteredSite(NamedTuple):
    """A site that has a client number."""

    name: str
    site: str  # its own id, drawn once in its folder
    key: str | None  # the only public key it may use, in hexadecimal, where nodes have registered keys


class ClientRegistry:
    """Client numbers in order of arrival, for at most `clients` sites; the file maps client to site."""

    def __init__(self, path: Path, clients: int, bound: bool) -> None:
        self._path, self._clients, self._bound = path, clients, bound
        self.members: dict[int, RegisteredSite] = _read_registry(path, clients) if path.exists() else {}

    def admit(self, key: str | None, name: str, site: str) -> int:
        """The client number of a site with this public key; `Rejected` if it cannot have one."""
        client = next((number for number, each in self.members.items() if each.site == site), None)
        if client is None:
            return self._add(key, name, site)
        member = self.members[client]
        if member.name != name:
            raise _refused(f"the site {name} first joined as {member.name}: let it join under that name.")
        if self._bound and member.key != key:
            if member.key is not None:
                raise _refused(f"the site {name} joined with another key before: let it join with that one.")
            self._check_key(key, name)
            self._write(client, member._replace(key=key))
        return client

    def _add(self, key: str | None, name: str, site: str) -> int:
        if any(member.name == name for member in self.members.values()):
            raise _refused(
                f"this run has another site {name}: join with the folder it had, or under another name."
            )
        if self._bound:
            self._check_key(key, name)
        if len(self.members) >= self._clients:
            raise _refused(f"the run already has its {self._clients} sites, so {name} cannot join.")
        client = len(self.members)
        self._write(client, RegisteredSite(name, site, key if self._bound else None))
        return client

    def _check_key(self, key: str | None, name: str) -> None:
        if key is None:
            raise _refused(f"the node that calls itself {name} has no key: join with one.")
        for member in self.members.values():
            if member.key == key:
                raise _refused(f"the key of {name} belongs to {member.name}: join with the folder it had.")

    def _write(self, client: int, member: RegisteredSite) -> None:
        members = self.members | {client: member}
        facts = {str(number): each._asdict() for number, each in members.items()}
        text = json.dumps(files.with_checksum(facts), indent=1)
        files.write_atomic(self._path, [text.encode(), b"\n"])
        self.members = members


def _read_registry(path: Path, clients: int) -> dict[int, RegisteredSite]:
    try:
        known = files.without_checksum(json.loads(path.read_bytes()))
        members = {
            int(client): RegisteredSite(each["name"], each["site"], each["key"])
            for client, each in known.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise InputError(
            f"{path}, which says which site is which client, cannot be read ({error}): restore it "
            "from a backup."
        ) from None
    if sorted(members) != list(range(len(members))) or len(members) > clients:
        raise InputError(f"{path} does not belong to a run of {clients} clients: restore it.")
    return members


@dataclass(frozen=True)
class NameBinding:
    """The public keys of nodes, and site names that belong to keys.

    `sites` has a folder with a `key.pub` for each such name.
    """

    sites: Path | None
    transport: Transport

    def key(self, node: int) -> str | None:
        """The public key of a node in hexadecimal; None if it has none."""
        try:
            key = load_pem_public_key(self.transport.key(node))
        except (ValueError, UnsupportedAlgorithm):
            return None
        return fingerprint(key) if isinstance(key, ec.EllipticCurvePublicKey) else None

    def check(self, key: str | None, name: str) -> None:
        """Reject a node that uses the name of a site whose key it does not have."""
        if self.sites is None or not _SITE_NAME.fullmatch(name):
            return
        path = self.sites / name / "key.pub"
        if not path.exists():
            return
        try:
            expected = fingerprint(read_public_key(path))
        except InputError:
            raise _refused(f"the server cannot read its key.pub of {name}: restore it there.") from None
        if key is None:
            raise _refused(f"the node that calls itself {name} has no key: join with one.") from None
        if key != expected:
            raise _refused(
                f"the name {name} belongs to another key: join under the name that your key was made for."
            )


@dataclass
class _Node:
    last_seen: float
    client: int | None = None
    refused: str | None = None  # why it was refused last


class ConnectedNodes:
    """Nodes by id; a node that is not listed for longer than `grace` seconds has left."""

    def __init__(
        self,
        registry: ClientRegistry,
        specs: TensorSpecs,
        observer: Observer,
        grace: float,
        greeting_timeout: float,
        clock: Callable[[], float],
        binding: NameBinding | None = None,
    ) -> None:
        self._registry, self._specs, self._observer, self._binding = registry, specs, observer, binding
        self._grace, self._greeting_timeout = grace, greeting_timeout
        self._nodes: dict[int, _Node] = {}
        self._listed: frozenset[int] = frozenset()
        self._node_of: dict[int, int] = {}  # client to node
        self._greetings: dict[str, tuple[int, float]] = {}  # by message: the node, and when it is late
        self._cooldown = Cooldown(_GREETING_COOLDOWN, clock)

    @property
    def greetings(self) -> Collection[str]:
        """The ids of all greetings that wait for a reply."""
        return self._greetings.keys()

    @property
    def reachable(self) -> set[int]:
        """The clients that can be reached now."""
        return {client for client, node in self._node_of.items() if node in self._listed}

    def node(self, client: int) -> int | None:
        """The node through which a client can be reached now."""
        node = self._node_of.get(client)
        return node if node in self._listed else None

    def client(self, node: int) -> int | None:
        """The client of a node, as far as known."""
        return self._nodes[node].client if node in self._nodes else None

    def __contains__(self, node: int) -> bool:
        """Whether a node has not left."""
        return node in self._nodes

    def update(self, listed: frozenset[int], now: float) -> None:
        """Take in the transport's list of nodes."""
        self._listed = listed
        for node in listed:
            self._nodes.setdefault(node, _Node(now)).last_seen = now
        for node, known in list(self._nodes.items()):
            if now - known.last_seen > self._grace:
                self._remove(node, known)

    def to_greet(self) -> list[tuple[int, str | None]]:
        """The nodes that are to be sent a greeting, each with why it was refused last."""
        greeted = {node for node, _ in self._greetings.values()}
        return [
            (node, known.refused)
            for node, known in self._nodes.items()
            if known.client is None
            and node not in greeted
            and node in self._listed
            and self._cooldown.is_over(node)
        ]

    def greeted(self, node: int, message_id: str, now: float) -> None:
        """A greeting was sent."""
        self._greetings[message_id] = node, now + self._greeting_timeout

    def take_reply(self, reply: Reply) -> None:
        """Admit or refuse the node that replied to a greeting."""
        node, _ = self._greetings.pop(reply.message_id)
        try:
            if reply.error is not None:
                raise Rejected(
                    Reason.FAILED, f"it could not answer the greeting: {messages.one_line(reply.error)}"
                )
            if not reply.authentic:
                raise Rejected(Reason.SIGNATURE, "its greeting was not signed with the key of its node.")
            if reply.node != node:
                raise Rejected(Reason.TASK, "it answered a greeting that was sent to another node.")
            hello = messages.decode_message(reply.header, messages.HelloReply)
            client = self._admit(node, hello)
        except Rejected as rejected:
            self._refuse(node, rejected)
        else:
            self._cooldown.reset(node)
            self._nodes[node].client = client
            self._node_of[client] = node
            self._observer.tell("joined", node=node, name=hello.name, client=client)

    def expire(self, now: float) -> None:
        """Refuse nodes that did not answer their greeting in time."""
        for message_id, (node, due) in list(self._greetings.items()):
            if now > due:
                del self._greetings[message_id]
                self._refuse(node, Rejected(Reason.LATE, "it did not answer the greeting in time."))

    def _admit(self, node: int, hello: HelloReply) -> int:
        if hello.error is not None:
            raise Rejected(Reason.FAILED, hello.error)
        if difference := describe_difference(hello.form, self._specs):
            raise _refused(f"{hello.name} has another model than the server: {difference}.")
        if not hello.examples:
            raise _refused(f"{hello.name} has no examples: give it some.")
        key = None
        if self._binding is not None:
            key = self._binding.key(node)
            self._binding.check(key, hello.name)
        for other, known in self._nodes.items():
            if known.client is None or other == node:
                continue
            member = self._registry.members[known.client]
            if hello.site == member.site or hello.name == member.name:
                raise _refused(f"{hello.name} is already connected through another node.")
        return self._registry.admit(key, hello.name, hello.site)

    def _refuse(self, node: int, rejected: Rejected) -> None:
        self._nodes[node].refused = rejected.sentence
        self._cooldown.fail(node)
        self._observer.tell(
            "rejected", node=node, client=None, reason=rejected.reason, sentence=rejected.sentence
        )

    def _remove(self, node: int, known: _Node) -> None:
        self._greetings = {each: sent for each, sent in self._greetings.items() if sent[0] != node}
        self._cooldown.reset(node)
        del self._nodes[node]
        if known.client is not None:
            del self._node_of[known.client]
        self._observer.tell("left", node=node, client=known.client)


def _refused(sentence: str) -> Rejected:
    return Rejected(Reason.SETTINGS, sentence)
