"""What a flow gives and counts."""

from typing import Any, NamedTuple, Protocol

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


class Filling(Protocol):
    """Where full buffers come from: a flow, or what was written down of one."""

    @property
    def counts(self) -> Counts:
        """Where all tasks are."""
        ...

    def ended(self) -> str | None:
        """Why the buffer cannot be filled again, in a sentence."""
        ...

    def fill(self, version: int) -> Filled:
        """The next full buffer, in which nothing began later than at `version`."""
        ...

    def everyone(self) -> Filled:
        """One task of version 0 for every client."""
        ...

    def save(self) -> dict[str, Any]: ...

    def load(self, data: dict[str, Any]) -> None: ...
