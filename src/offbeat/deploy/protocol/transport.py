"""When to try again.

Who keeps failing, and for how long they are left alone.

The network as a session sees it: who is there, what was sent, what came back.

A network that may be away: calls are held back for a while after one failed.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from offbeat.deploy.monitor.observer import Observer
from offbeat.errors import InputError


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
        """One more; the seconds to wait."""
        self._pause = min(self._longest, 2 * self._pause or self._first)
        self._until = self._clock() + self._pause
        return self._pause

    def succeed(self) -> None:
        """The next failure is a first one."""
        self._pause, self._until = 0.0, self._clock()


_MAX_COOLDOWN = 600.0  # seconds


class Cooldown:
    """Failures in a row put somebody aside for `base` seconds, doubled each time, at most for ten minutes."""

    def __init__(self, base: float) -> None:
        self._base = base
        self._failures: dict[int, tuple[int, float]] = {}  # how many in a row, and aside until when

    def fail(self, who: int, now: float) -> float:
        """Once more; for how many seconds that puts them aside."""
        count = self._failures.get(who, (0, 0.0))[0] + 1
        seconds: float = min(_MAX_COOLDOWN, self._base * 2.0 ** min(count - 1, 60))
        self._failures[who] = (count, now + seconds)
        return seconds

    def clear(self, who: int) -> None:
        """It went well, or they are gone."""
        self._failures.pop(who, None)

    def free(self, who: int, now: float) -> bool:
        """Whether they are not aside."""
        return who not in self._failures or now >= self._failures[who][1]


class Reply(NamedTuple):
    """What one message brought; nothing in it has been checked."""

    number: str  # of the message that it answers
    node: int
    note: str
    payload: bytes
    error: str | None  # why there is no answer, in the network's own words


class TransportError(Exception):
    """The network cannot be reached for now."""


class TransportClosedError(TransportError):
    """It carries nothing of this run any more: another has to be begun underneath."""


class Transport(Protocol):
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
class KeyedTransport(Protocol):
    """A post whose nodes come with keys."""

    def key(self, node: int) -> bytes:
        """The public key of a node that was there, as PEM; nothing if it has none."""
        ...


_FIRST_PAUSE, _MAX_PAUSE = 0.5, 30.0  # seconds to hold back

_T = TypeVar("_T")


class RetryingTransport:
    """Ends the run once nothing has been reached for `patience` seconds."""

    def __init__(self, clock: Callable[[], float], patience: float, told: Observer) -> None:
        self._clock = clock
        self._patience = patience
        self._told = told
        self._since: float | None = None  # the first failure after the last success
        self._hold = _FIRST_PAUSE
        self._until = 0.0

    @property
    def up(self) -> bool:
        """Whether the last call went through."""
        return self._since is None

    def ask(self, call: Callable[[], _T]) -> _T | None:
        """What the call gives; None if it failed, or is held back."""
        if not self.up and self._clock() < self._until:
            return None
        try:
            answer = call()
        except TransportClosedError:
            raise
        except TransportError as error:
            self._fail(str(error))
            return None
        if not self.up:
            self._told.reachable()
        self._since, self._hold = None, _FIRST_PAUSE
        return answer

    def _fail(self, sentence: str) -> None:
        now = self._clock()
        self._since = now if self._since is None else self._since
        self._told.unreachable(sentence)
        if now - self._since > self._patience:
            raise InputError(
                f"the network has been away for {now - self._since:.0f} seconds ({sentence}): "
                "see that the SuperLink runs, then resume the run."
            )
        self._until = now + self._hold
        self._hold = min(_MAX_PAUSE, 2 * self._hold)
