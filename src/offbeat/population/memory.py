"""What clients keep between visits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat import trees
from offbeat.trees import Tree


class Memories:
    """Each client's memory; those that never wrote have the initial one."""

    def __init__(self, initial: Tree) -> None:
        self._shape = trees.shape(initial)
        self._initial = trees.leaves(initial)
        self._rows: dict[int, list[Tensor]] = {}

    def read(self, client: int) -> Tree:
        """One client's."""
        return trees.rebuild(self._shape, self._rows.get(client, self._initial))

    def write(self, clients: Sequence[int], stacked: Tree) -> None:
        """Commit what was computed for accepted tasks."""
        columns = trees.leaves(stacked)
        if columns:
            for place, client in enumerate(clients):
                self._rows[client] = [column[place].clone() for column in columns]

    def save(self) -> tuple[list[int], list[Tensor]]:
        """The clients that wrote, and their memory stacked leaf by leaf."""
        clients = sorted(self._rows)
        rows = [self._rows[client] for client in clients]
        return clients, [torch.stack(column) for column in zip(*rows, strict=True)]

    def load(self, clients: Sequence[int], columns: Sequence[Tensor]) -> None:
        """Put back what `save` gave."""
        self._rows = {
            client: [column[place].clone() for column in columns] for place, client in enumerate(clients)
        }
