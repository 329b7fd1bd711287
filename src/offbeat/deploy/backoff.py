"""When to try again."""

import time
from collections.abc import Callable


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
