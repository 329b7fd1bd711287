"""The network as a session sees it: who is there, what was sent, what came back."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class Reply(NamedTuple):
    """What one message brought; nothing in it has been checked."""

    number: str  # of the message that it answers
    node: int
    note: str
    payload: bytes
    error: str | None  # why there is no answer, in the network's own words


class PostError(Exception):
    """The network cannot be reached for now."""


class PostClosedError(PostError):
    """It carries nothing of this run any more: another has to be begun underneath."""


class Post(Protocol):
    """Messages to nodes; every call may fail with a `PostError`, and may be tried again."""

    def nodes(self) -> frozenset[int]:
        """Who is there now."""
        ...

    def push(self, node: int, kind: str, note: str, payload: bytes, seconds: float) -> str:
        """Send, with so many seconds to answer; the message's number."""
        ...

    def pull(self, numbers: Sequence[str]) -> list[Reply]:
        """The answers to these that have come; each is given once."""
        ...


@runtime_checkable
class Knows(Protocol):
    """A post whose nodes come with keys."""

    def key(self, node: int) -> bytes:
        """The public key of a node that was there, as PEM; nothing if it has none."""
        ...
