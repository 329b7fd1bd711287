"""The transport that carries messages to sites, and how long to wait after a failure."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from offbeat.errors import InputError

_FIRST_PAUSE, _MAX_PAUSE = 0.5, 30.0  # seconds between two calls to a transport that fails
_MAX_COOLDOWN = 600.0  # seconds

_T = TypeVar("_T")


class Reply(NamedTuple):
    """The reply to one message; nothing in it has been checked."""

    message_id: str  # of the message that it replies to
    node: int
    header: str
    payload: bytes
    error: str | None  # why there is no reply, in the transport's own words
    authentic: bool = True  # whether it was signed with the key of the node


class TransportError(Exception):
    """The transport cannot be reached at the moment."""


class TransportClosedError(TransportError):
    """The transport has ended this run: another one has to be submitted."""


class Transport(Protocol):
    """Sends messages to nodes; every call may raise a `TransportError` and may be repeated."""

    def nodes(self) -> frozenset[int]:
        """The nodes that are connected now."""
        ...

    def push(self, node: int, kind: str, header: str, payload: bytes, timeout: float) -> str:
        """Send a message that is to be answered within so many seconds; its id."""
        ...

    def pull(self, message_ids: Sequence[str]) -> list[Reply]:
        """Replies to these messages that have arrived, as many as memory is meant for, and each once."""
        ...

    @property
    def backlog(self) -> frozenset[str]:
        """The messages whose replies have arrived, and are left for the next call of `pull`."""
        ...

    def key(self, node: int) -> bytes:
        """The public key of a connected node as PEM; empty if it has none."""
        ...


class Backoff:
    """Pauses that double with each failure in a row."""

    def __init__(self, first: float, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._first, self._longest, self._clock = first, longest, clock
        self._pause = 0.0
        self._until = clock()

    @property
    def due(self) -> bool:
        """Whether the pause is over."""
        return self._clock() >= self._until

    def fail(self) -> float:
        """Count one more failure; the seconds to wait."""
        self._pause = min(self._longest, 2 * self._pause or self._first)
        self._until = self._clock() + self._pause
        return self._pause

    def reset(self) -> None:
        """Start again from the first pause."""
        self._pause, self._until = 0.0, self._clock()


class Cooldown:
    """A back-off for each client or node that keeps failing, of at most ten minutes."""

    def __init__(self, first: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._first, self._clock = first, clock
        self._backoffs: dict[int, Backoff] = {}

    def fail(self, who: int) -> float:
        """Count one more failure; the seconds to leave it alone."""
        return self._backoffs.setdefault(who, Backoff(self._first, _MAX_COOLDOWN, self._clock)).fail()

    def reset(self, who: int) -> None:
        """It succeeded, or is gone."""
        self._backoffs.pop(who, None)

    def is_over(self, who: int) -> bool:
        """Whether it may be tried again, or never failed."""
        return who not in self._backoffs or self._backoffs[who].due


class RetryingTransport:
    """A transport whose calls return None while it is unreachable; gives up after `patience` seconds."""

    def __init__(
        self,
        transport: Transport,
        patience: float,
        clock: Callable[[], float],
        on_failure: Callable[[str], None],
        on_recovery: Callable[[], None],
    ) -> None:
        self._transport, self._patience, self._clock = transport, patience, clock
        self._on_failure, self._on_recovery = on_failure, on_recovery
        self._since: float | None = None  # the first failure after the last success
        self._backoff = Backoff(_FIRST_PAUSE, _MAX_PAUSE, clock)

    @property
    def reachable(self) -> bool:
        """Whether the last call succeeded."""
        return self._since is None

    @property
    def backlog(self) -> frozenset[str]:
        return self._transport.backlog

    def nodes(self) -> frozenset[int] | None:
        return self._call(self._transport.nodes)

    def push(self, node: int, kind: str, header: str, payload: bytes, timeout: float) -> str | None:
        return self._call(lambda: self._transport.push(node, kind, header, payload, timeout))

    def pull(self, message_ids: Sequence[str]) -> list[Reply] | None:
        return self._call(lambda: self._transport.pull(message_ids))

    def _call(self, call: Callable[[], _T]) -> _T | None:
        if not self.reachable and not self._backoff.due:
            return None
        try:
            result = call()
        except TransportClosedError:
            raise
        except TransportError as error:
            self._fail(str(error))
            return None
        if not self.reachable:
            self._on_recovery()
        self._since = None
        self._backoff.reset()
        return result

    def _fail(self, sentence: str) -> None:
        now = self._clock()
        self._since = now if self._since is None else self._since
        self._on_failure(sentence)
        if now - self._since > self._patience:
            raise InputError(
                f"the network has been unreachable for {now - self._since:.0f} seconds ({sentence}): "
                "see the log of the SuperLink, then resume the run."
            )
        self._backoff.fail()
