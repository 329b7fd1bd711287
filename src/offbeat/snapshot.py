"""What a run shows of itself after each server step."""

from collections.abc import Callable
from typing import Any, NamedTuple

from offbeat.aggregate.aggregation import Spent
from offbeat.checkpoint import Checkpoint
from offbeat.core import Cohort, Vector
from offbeat.problem import Statistics
from offbeat.schedule.filled import Counts, Filled


class Sent(NamedTuple):
    """Numbers sent so far: down with every task that started, up with every one that came back."""

    down: int = 0
    up: int = 0


class Starting(NamedTuple):
    """A run in its full-participation start."""

    done: int
    clients: int
    checkpoint: Callable[[], Checkpoint]
    confirm: Callable[[], None]


class Snapshot(NamedTuple):
    """The server after `version` steps."""

    version: int
    time: float
    state: Any
    statistics: Statistics
    cohort: Cohort | None  # whose updates made this version; None before the first step
    filled: Filled | None  # the tasks behind it, with their times; for version 0 those of the start
    counts: Counts  # where all tasks so far are
    sent: Sent
    spent: Callable[[], Spent | None]  # the privacy spent so far, where it is counted
    ended: str | None  # why no further version will come before the last one asked for
    checkpoint: Callable[[], Checkpoint]  # all that is needed to go on from here
    confirm: Callable[[], None]  # the last checkpoint is in its place, so what only older ones need may go

    @property
    def x(self) -> Vector:
        """The model."""
        x: Vector = self.state.x
        return x
