"""Trees of tensors in memory that processes share, and the channel over which they pass them.

A tree is packed into one run of bytes and read back as views of these bytes. Segments of shared memory
have no name, and are freed with the last process that uses them.
"""

import mmap
import os
import tempfile
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor

from offbeat import trees
from offbeat.trees import Tree

_ALIGNMENT = 64  # bytes; every tensor starts at a multiple, as torch's own do
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class TensorSlot:
    """Where a tensor is among the bytes."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def plan_packing(tree: Tree) -> tuple[Tree, int]:
    """A slot for each tensor of a tree, one after another, and the number of bytes of all."""
    end = 0

    def slot(leaf: Tensor) -> TensorSlot:
        nonlocal end
        start = end
        end += -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT
        return TensorSlot(start, leaf.dtype, tuple(leaf.shape))

    slots = trees.map(slot, tree)
    return slots, end


def write_packed(tree: Tree, slots: Tree, memory: Tensor) -> None:
    """Copy a tree to its slots."""
    trees.map(lambda leaf, view: view.copy_(leaf), tree, read_packed(slots, memory))


def read_packed(slots: Tree, memory: Tensor) -> Tree:
    """The tree in these slots, as views."""

    def view(slot: TensorSlot) -> Tensor:
        length = slot.dtype.itemsize
        for side in slot.shape:
            length *= side
        return memory[slot.start : slot.start + length].view(slot.dtype).view(slot.shape)

    return trees.map(view, slots)


def pack_tree(tree: Tree) -> tuple[Tree, Tensor]:
    """The slots of a tree and its bytes."""
    slots, size = plan_packing(tree)
    memory = torch.empty(size, dtype=torch.uint8)
    write_packed(tree, slots, memory)
    return slots, memory


class Segment(NamedTuple):
    """A run of shared bytes, mapped here; another process is sent its file descriptor."""

    number: int
    size: int
    descriptor: int
    memory: Tensor


class SegmentPool:
    """Segments that one process writes for others to read; released ones are used again."""

    def __init__(self) -> None:
        self._free: list[Segment] = []
        self._made: list[Segment] = []

    def put(self, tree: Tree) -> tuple[Segment, Tree]:
        """Copy a tree to a segment: the segment and the slots."""
        slots, size = plan_packing(tree)
        segment = self._take(size)
        write_packed(tree, slots, segment.memory)
        return segment, slots

    def release(self, segment: Segment) -> None:
        """No process reads it any more."""
        self._free.append(segment)

    def close(self) -> None:
        for segment in self._made:
            os.close(segment.descriptor)
        self._made, self._free = [], []

    def _take(self, size: int) -> Segment:
        fit = [segment for segment in self._free if size <= segment.size <= 2 * size + _PAGE]
        if not fit:
            return self._make(-(-max(size, 1) // _PAGE) * _PAGE)
        segment = min(fit, key=lambda each: each.size)
        self._free = [each for each in self._free if each is not segment]
        return segment

    def _make(self, size: int) -> Segment:
        descriptor = _anonymous_file()
        os.ftruncate(descriptor, size)
        segment = Segment(len(self._made), size, descriptor, _map_file(descriptor, size))
        self._made.append(segment)
        return segment


def _map_file(descriptor: int, size: int) -> Tensor:
    """The bytes of a file; the descriptor may be closed afterwards."""
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("offbeat")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@dataclass(frozen=True)
class PlacedTree:
    """Where the other process finds a tree."""

    segment: int
    slots: Tree


@dataclass(frozen=True)
class _SegmentNotice:
    """Announces a segment; its file descriptor follows."""

    number: int
    size: int


class Channel:
    """One end of a connection between two processes; large things are in segments."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._shared: set[int] = set()
        self._received: dict[int, Tensor] = {}

    def share(self, segment: Segment) -> None:
        """Let the other end read a segment."""
        if segment.number not in self._shared:
            self._shared.add(segment.number)
            self.send(_SegmentNotice(segment.number, segment.size))
            reduction.send_handle(self.connection, segment.descriptor, None)

    def send(self, message: Any) -> None:
        self.connection.send_bytes(cloudpickle.dumps(message))

    def receive(self) -> Any:
        """The next message of the other end; EOFError or OSError if that is gone."""
        while isinstance(message := cloudpickle.loads(self.connection.recv_bytes()), _SegmentNotice):
            descriptor = reduction.recv_handle(self.connection)
            self._received[message.number] = _map_file(descriptor, message.size)
            os.close(descriptor)
        return message

    def read(self, placed: PlacedTree) -> Tree:
        """A tree that the other end has placed, as views."""
        return read_packed(placed.slots, self._received[placed.segment])
