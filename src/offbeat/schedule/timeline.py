"""What the flow asks of time, be it a clock or a network."""

from typing import NamedTuple, Protocol

from offbeat.core import Task


class Arrival(NamedTuple):
    """A task that came back, or of which it became clear that it will not."""

    task: Task
    started: float
    time: float
    lost: bool


class Timeline(Protocol):
    """Where tasks go and come back from."""

    @property
    def now(self) -> float: ...

    @property
    def busy(self) -> int:
        """How many tasks are in flight."""
        ...

    def start(self, task: Task, *, sure: bool = False) -> None:
        """Send a task off; one that is sure must not get lost."""
        ...

    def next(self) -> Arrival | None:
        """Go on to the next arrival; None: there is none yet, but somebody has come who was not there."""
        ...

    def wait(self, until: float) -> None:
        """Let time pass."""
        ...
