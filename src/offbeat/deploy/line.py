"""A network that may be away: calls are held back for a while after one failed."""

from collections.abc import Callable
from typing import TypeVar

from offbeat.deploy.post import PostClosedError, PostError
from offbeat.deploy.told import Told
from offbeat.errors import InputError

_FIRST, _MOST = 0.5, 30.0  # seconds to hold back

_Answer = TypeVar("_Answer")


class Line:
    """Ends the run once nothing has been reached for `patience` seconds."""

    def __init__(self, clock: Callable[[], float], patience: float, told: Told) -> None:
        self._clock = clock
        self._patience = patience
        self._told = told
        self._since: float | None = None  # the first failure after the last success
        self._hold = _FIRST
        self._until = 0.0

    @property
    def up(self) -> bool:
        """Whether the last call went through."""
        return self._since is None

    def ask(self, call: Callable[[], _Answer]) -> _Answer | None:
        """What the call gives; None if it failed, or is held back."""
        if not self.up and self._clock() < self._until:
            return None
        try:
            answer = call()
        except PostClosedError:
            raise
        except PostError as error:
            self._fail(str(error))
            return None
        if not self.up:
            self._told.reachable()
        self._since, self._hold = None, _FIRST
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
        self._hold = min(_MOST, 2 * self._hold)
