"""What a worker elsewhere is asked to do, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from offbeat.core import AnyAlgorithm, Task
from offbeat.trees import Tree


class Order(NamedTuple):
    """Some tasks of one buffer."""

    number: int
    algorithm: AnyAlgorithm
    seed: int
    tasks: Sequence[Task]
    visits: Sequence[Sequence[int]]  # each `Visit`, its numbers in order
    messages: Sequence[Any]  # each once, as the crew has placed it
    which: Sequence[int]  # of the messages, for each task
    memories: Sequence[Tree]


@dataclass(frozen=True)
class Done:
    """The results of an order, and what was logged on the way."""

    number: int
    results: Tree  # `Results`, or where they lie
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failed:
    """An error that would have stopped the run here, too."""

    number: int
    error: Exception


@dataclass(frozen=True)
class Lost:
    """A worker is gone, and why, as far as that can be told."""

    worker: int
    reason: str
