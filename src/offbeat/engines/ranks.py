"""Which of the tasks that start from a version each one is, for an algorithm that asks."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from offbeat.core import AnyAlgorithm, Task, wants_rank


class Ranks:
    """Counted from 0 as tasks start; where nobody asks, nothing is kept."""

    def __init__(self, algorithm: AnyAlgorithm) -> None:
        self._wanted = wants_rank(algorithm)
        self._known: dict[Task, int] = {}  # tasks in flight or waiting
        self._version = -1  # the newest; tasks start from no other
        self._started = 0  # from it

    def start(self, task: Task) -> None:
        """One more of its version."""
        if not self._wanted:
            return
        if task.version != self._version:
            self._version, self._started = task.version, 0
        self._known[task] = self._started
        self._started += 1

    def of(self, task: Task) -> Tensor | tuple[()]:
        """How many started before it from its version."""
        return torch.tensor(self._known[task]) if self._wanted else ()

    def forget(self, tasks: Iterable[Task]) -> None:
        """These are done with."""
        for task in tasks:
            self._known.pop(task, None)

    def save(self) -> list[list[int]]:
        """Those in flight, as JSON; between two versions, when nothing has started from the next."""
        return [[*task, rank] for task, rank in self._known.items()]

    def load(self, rows: Sequence[Sequence[int]]) -> None:
        """Go on from what `save` gave."""
        self._known = {Task(client, version, visit): rank for client, version, visit, rank in rows}
        self._version, self._started = -1, 0
