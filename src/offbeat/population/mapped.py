"""What clients keep, in a file far larger than RAM.

The file is a row of slots; a table in RAM says which slot holds which client's memory. Rows are
read and written one at a time, by plain reads and writes: pages of a mapping would count as
resident memory, and these do not. A checkpoint holds the table only.

What a checkpoint refers to is never overwritten while it may still be needed: a client's first
write after `save` goes to a fresh slot, and the slot it leaves is used again only when a newer
checkpoint is in its place (`confirm`). Rows are on the disk before `save` gives out the table that
refers to them. So whatever moment a run is killed at, the last checkpoint's rows are whole, and the
file has at most two slots for each client. A slot is whole pages, so that writing one never touches
a neighbour. A checksum for each row shows a row that is not the one that was written.
"""

import os
import tempfile
import weakref
import zlib
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from offbeat import trees
from offbeat.errors import InputError
from offbeat.trees import Tree

_PAGE = 4096


class Filed:
    """Rows in a file of this name; without one, in a file that is gone with the run."""

    mapped = True

    def __init__(
        self, initial: Tree, clients: int, path: Path | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self._shape = trees.shape(initial)
        self._initial = [leaf.to(device) for leaf in trees.leaves(initial)]
        self._path = path
        self._device = device
        self._stride = slot_size(initial)
        self._slots = np.full(clients, -1, np.int32)
        self._sums = np.zeros(clients, np.uint32)
        self._fixed = np.zeros(clients, bool)  # a table that was given out has the client's slot
        self._end = 0  # slots in the file
        self._free: list[int] = []
        self._left: list[int] = []  # slots that only tables before the last need
        self._leaving: list[int] = []  # slots that the last table needs, and clients no longer do
        self._open: FileIO | None = None

    def read(self, client: int) -> Tree:
        if self._slots[client] < 0:
            return trees.rebuild(self._shape, self._initial)
        leaves = [torch.empty_like(leaf, device="cpu") for leaf in self._initial]
        file = self._file()
        file.seek(int(self._slots[client]) * self._stride)
        whole = all(_fill(file, _bytes(leaf)) for leaf in leaves)
        if not whole or _checksum(leaves) != self._sums[client]:
            raise InputError(
                f"the memory of client {client} in {self._name} is not what was written there: "
                "let no other run use the file, and start the run anew."
            )
        return trees.rebuild(self._shape, [leaf.to(self._device) for leaf in leaves])

    def write(self, clients: Sequence[int], stacked: Tree) -> None:
        columns = [column.cpu() for column in trees.leaves(stacked)]
        file = self._file()
        for place, client in enumerate(clients):
            row = [column[place].contiguous() for column in columns]
            slot = self._slot_for(client)
            file.seek(slot * self._stride)
            for leaf in row:
                _drain(file, _bytes(leaf))
            self._sums[client] = _checksum(row)

    def save(self) -> tuple[list[int], list[Tensor]]:
        if self._path is None:
            raise InputError(
                "what clients keep is in a temporary file, which no checkpoint can refer to: "
                "name a folder for it, as in memory=Mapped(folder)."
            )
        if self._open:
            os.fsync(self._open.fileno())
        clients = np.flatnonzero(self._slots >= 0)
        self._fixed[clients] = True
        self._left += self._leaving
        self._leaving = []
        table = self._slots[clients], self._sums[clients].astype(np.int64)
        return clients.tolist(), [torch.from_numpy(column) for column in table]

    def confirm(self) -> None:
        self._free += self._left
        self._left = []

    def load(self, clients: Sequence[int], columns: Sequence[Tensor]) -> None:
        places = list(clients)
        slots, sums = (column.numpy() for column in columns)
        end = int(slots.max(initial=-1)) + 1
        if end:
            self._open = self._reopened(end)
        self._slots[:] = -1
        self._slots[places] = slots
        self._sums[places] = sums
        self._fixed = self._slots >= 0
        self._end = end
        self._free = np.setdiff1d(np.arange(end), slots).tolist()
        self._left, self._leaving = [], []

    def _slot_for(self, client: int) -> int:
        """Where to write: never over a row that a table refers to."""
        slot = int(self._slots[client])
        if slot >= 0 and not self._fixed[client]:
            return slot
        if slot >= 0:
            self._leaving.append(slot)
        if not self._free:
            self._free.append(self._end)
            self._end += 1
        self._slots[client] = slot = self._free.pop()
        self._fixed[client] = False
        return slot

    def _file(self) -> FileIO:
        """The file, made anew unless something was loaded."""
        if self._open is None:
            if self._path is None:
                number, name = tempfile.mkstemp(prefix="offbeat-")
                self._open = FileIO(number, "r+")
                Path(name).unlink()  # open, it lives on; a kill leaves nothing behind
            else:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._open = FileIO(self._path, "w+")
            weakref.finalize(self, self._open.close)
        return self._open

    def _reopened(self, slots: int) -> FileIO:
        if not self._path or not self._path.exists() or self._path.stat().st_size < self._needed(slots):
            raise InputError(
                f"{self._name}, where the checkpoint left what clients keep, is missing or cut short: "
                "put it back, or start the run anew."
            )
        file = FileIO(self._path, "r+")
        weakref.finalize(self, file.close)
        return file

    def _needed(self, slots: int) -> int:
        """Bytes of so many slots; the last one's padding is never written."""
        return (slots - 1) * self._stride + sum(leaf.nbytes for leaf in self._initial)

    @property
    def _name(self) -> str:
        return str(self._path or "the temporary file")


def slot_size(initial: Tree) -> int:
    """Bytes in the file for one client: whole pages."""
    return -(-sum(leaf.nbytes for leaf in trees.leaves(initial)) // _PAGE) * _PAGE


def _bytes(leaf: Tensor) -> memoryview:
    view: memoryview = leaf.detach().reshape(-1).view(torch.uint8).numpy().data
    return view


def _checksum(row: Sequence[Tensor]) -> int:
    value = 0
    for leaf in row:
        value = zlib.crc32(_bytes(leaf), value)
    return value


def _fill(file: FileIO, buffer: memoryview) -> bool:
    """Read until it is full; whether there was enough."""
    while buffer:
        count = file.readinto(buffer)
        if not count:
            return False
        buffer = buffer[count:]
    return True


def _drain(file: FileIO, buffer: memoryview) -> None:
    while buffer:
        buffer = buffer[file.write(buffer) :]
