"""Which clients can be given a task now."""

from collections.abc import Callable

from offbeat.schedule.availability import Back


class Attendance:
    """As a session sees it; before there is one, nobody is there."""

    def __init__(self) -> None:
        self._idle: Callable[[], set[int]] = set
        self.pause = 1.0

    def follow(self, idle: Callable[[], set[int]], pause: float) -> None:
        """Ask this from now on; who is not there may be so many seconds later."""
        self._idle, self.pause = idle, pause

    @property
    def there(self) -> set[int]:
        return self._idle()

    def bind(self, seed: int) -> Back:
        return lambda client, now: now if client in self._idle() else now + self.pause
