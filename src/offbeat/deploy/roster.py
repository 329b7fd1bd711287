"""Which site is which client, once and for all; a file in the run's folder knows it after a restart."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.deploy import durable
from offbeat.deploy.rejections import Reason, Rejected
from offbeat.errors import InputError


class Member(NamedTuple):
    """A site that has a number."""

    name: str
    site: str  # its own number, made once in its folder
    node: int | None  # the only node it may come by, where nodes have keys


class Roster:
    """Numbers are given in the order of coming, to `clients` sites at most; the file is client to member."""

    def __init__(self, path: Path, clients: int, bound: bool) -> None:
        self._path = path
        self._clients = clients
        self._bound = bound
        self.members: dict[int, Member] = _read(path, clients) if path.exists() else {}
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
        self._write(client, Member(name, site, node if self._bound else None))
        return client

    def _check_node(self, node: int, name: str) -> None:
        for member in self.members.values():
            if member.node == node:
                raise _refused(
                    f"the node of {name} is that of {member.name}, by its key: join with the folder it had."
                )

    def _write(self, client: int, member: Member) -> None:
        members = self.members | {client: member}
        text = json.dumps({str(number): each._asdict() for number, each in members.items()}, indent=1)
        durable.replace(self._path, [text.encode(), b"\n"])
        self.members = members
        self._numbers[member.site] = client


def _read(path: Path, clients: int) -> dict[int, Member]:
    try:
        known = json.loads(path.read_bytes())
        members = {int(client): _member(each) for client, each in known.items()}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise InputError(f"{path} cannot be read ({error}): put it back as it was.") from None
    if sorted(members) != list(range(len(members))) or len(members) > clients:
        raise InputError(f"{path} is not of a run of {clients} clients: put it back as it was.")
    return members


def _member(each: dict[str, Any]) -> Member:
    if not isinstance(each["name"], str) or not isinstance(each["site"], str):
        raise ValueError("a site has no name")
    return Member(each["name"], each["site"], each["node"])


def _refused(sentence: str) -> Rejected:
    return Rejected(Reason.SETTINGS, sentence)
