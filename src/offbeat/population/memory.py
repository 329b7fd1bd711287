"""What clients keep between visits, as tensors or wherever else it lives."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from offbeat import trees
from offbeat.trees import Tree


class Memories(Protocol):
    """Each client's memory; those that never wrote have the initial one."""

    @property
    def mapped(self) -> bool:
        """Whether it lives in a file, to which checkpoints only refer."""
        ...

    def read(self, client: int) -> Tree:
        """One client's."""
        ...

    def write(self, clients: Sequence[int], stacked: Tree) -> None:
        """Commit what was computed for accepted tasks."""
        ...

    def save(self) -> tuple[list[int], list[Tensor]]:
        """The clients that wrote, and what it takes to find their memory again, a row for each."""
        ...

    def confirm(self) -> None:
        """What `save` last gave is in its place: nothing older will be loaded again."""
        ...

    def load(self, clients: Sequence[int], columns: Sequence[Tensor]) -> None:
        """Go on from what `save` gave."""
        ...


class Held:
    """Tensors in RAM or on a device, whole in every checkpoint."""

    mapped = False

    def __init__(
        self, initial: Tree, home: torch.device | str = "cpu", device: torch.device | str = "cpu"
    ) -> None:
        self._shape = trees.shape(initial)
        self._initial = trees.leaves(initial)
        self._home = home
        self._device = device  # where it is computed with
        self._rows: dict[int, list[Tensor]] = {}

    def read(self, client: int) -> Tree:
        leaves = self._rows.get(client, self._initial)
        return trees.rebuild(self._shape, [leaf.to(self._device) for leaf in leaves])

    def write(self, clients: Sequence[int], stacked: Tree) -> None:
        self._put(clients, trees.leaves(stacked))

    def save(self) -> tuple[list[int], list[Tensor]]:
        clients = sorted(self._rows)
        rows = [self._rows[client] for client in clients]
        return clients, [torch.stack(column) for column in zip(*rows, strict=True)]

    def confirm(self) -> None:
        pass

    def load(self, clients: Sequence[int], columns: Sequence[Tensor]) -> None:
        self._rows = {}
        self._put(clients, columns)

    def _put(self, clients: Sequence[int], columns: Sequence[Tensor]) -> None:
        if columns:
            for place, client in enumerate(clients):
                self._rows[client] = [column[place].to(self._home, copy=True) for column in columns]
