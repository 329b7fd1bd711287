"""What a flow gives and counts."""

from typing import NamedTuple

from offbeat.core import Task


class Filled(NamedTuple):
    """A full buffer, and what else happened on the way to it."""

    version: int
    time: float
    tasks: tuple[Task, ...]
    started: tuple[float, ...]  # when each task began
    arrived: tuple[float, ...]  # when each task came back
    dropped: tuple[Task, ...]
    lost: tuple[Task, ...]

    @property
    def staleness(self) -> tuple[int, ...]:
        """How many versions old each task is."""
        return tuple(self.version - task.version for task in self.tasks)


class Counts(NamedTuple):
    """Tasks so far; started = consumed + waiting + dropped + lost + in flight."""

    started: int
    consumed: int
    waiting: int
    dropped: int
    lost: int
    in_flight: int

    @property
    def trips(self) -> int:
        """Arrivals, used or not."""
        return self.consumed + self.waiting + self.dropped
