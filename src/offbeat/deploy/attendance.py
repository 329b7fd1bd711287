"""Which clients can be given a task now."""

from collections.abc import Callable

from offbeat.schedule.availability import Back


class Attendance:
    """As a session sees it; before there is one, nobody is there."""

    def __init__(self) -> None:
        self._free: Callable[[int], bool] = lambda client: False
        self._poll = 1.0

    def follow(self, free: Callable[[int], bool], poll: float) -> None:
        """Ask this from now on; who is not there may be so many seconds later."""
        self._free, self._poll = free, poll

    def bind(self, seed: int) -> Back:
        return lambda client, now: now if self._free(client) else now + self._poll
