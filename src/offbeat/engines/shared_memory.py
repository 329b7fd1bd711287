"""Trees of tensors in memory that processes share, and the channel over which they pass them.

A tree is packed into one run of bytes and read back as views of these bytes. Segments of shared memory
have no name, and are freed with the last process that uses them.
"""

import math
import mmap
import os
import tempfile
import weakref
from dataclasses import dataclass, replace
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

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.dtype.itemsize * math.prod(self.shape)


def plan_packing(tree: Tree) -> tuple[Tree, int]:
    """A slot for each tensor of a tree, or for a slot of its size, and the number of bytes of all."""
    end = 0

    def slot(leaf: Tensor | TensorSlot) -> TensorSlot:
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
        return memory[slot.start : slot.start + slot.nbytes].view(slot.dtype).view(slot.shape)

    return trees.map(view, slots)


def pack_tree(tree: Tree) -> tuple[Tree, Tensor]:
    """The slots of a tree and its bytes."""
    slots, size = plan_packing(tree)
    memory = torch.empty(size, dtype=torch.uint8)
    write_packed(tree, slots, memory)
    return slots, memory


def row_slots(stacked: Tree) -> Tree:
    """What one row of a tree takes whose leaves are stacked."""
    return trees.map(lambda leaf: TensorSlot(0, leaf.dtype, tuple(leaf.shape[1:])), stacked)


def plan_stack(row: Tree, count: int) -> tuple[Tree, int]:
    """The slots of a stack of so many rows, and the number of bytes of all."""
    return plan_packing(trees.map(lambda slot: replace(slot, shape=(count, *slot.shape)), row))


def select_rows(slots: Tree, first: int, count: int) -> Tree:
    """The slots of some rows of a stack."""

    def select(slot: TensorSlot) -> TensorSlot:
        row = replace(slot, shape=slot.shape[1:]).nbytes
        return TensorSlot(slot.start + first * row, slot.dtype, (count, *slot.shape[1:]))

    return trees.map(select, slots)


class Segment(NamedTuple):
    """A run of shared bytes, mapped here; another process is sent its file descriptor."""

    number: int
    size: int
    descriptor: int
    mapped: mmap.mmap

    @property
    def memory(self) -> Tensor:
        """The bytes."""
        return torch.frombuffer(self.mapped, dtype=torch.uint8)


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

    def lease(self, size: int) -> tuple[Segment, Tensor]:
        """A segment for other processes to write, released once no tensor here uses its memory any more."""
        segment = self._take(size)
        view = memoryview(segment.mapped)  # which the tensor and its views keep alive
        weakref.finalize(view, self.release, segment).atexit = False
        return segment, torch.frombuffer(view, dtype=torch.uint8)

    def release(self, segment: Segment) -> None:
        """No process uses it any more."""
        self._free.append(segment)

    def close(self) -> None:
        for segment in self._made:
            os.close(segment.descriptor)
        self._made, self._free = [], []

    def _take(self, size: int) -> Segment:
        fit = [
            (segment.size, place)
            for place, segment in enumerate(self._free)
            if size <= segment.size <= 2 * size + _PAGE
        ]
        if not fit:
            return self._make(-(-max(size, 1) // _PAGE) * _PAGE)
        return self._free.pop(min(fit)[1])  # what is released meanwhile is added at the end

    def _make(self, size: int) -> Segment:
        descriptor = _anonymous_file()
        os.ftruncate(descriptor, size)
        segment = Segment(len(self._made), size, descriptor, mmap.mmap(descriptor, size))
        self._made.append(segment)
        return segment


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
class ResultShape:
    """Asks for rows for results of another shape than was expected."""

    row: Tree  # of slots


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
            mapped = mmap.mmap(descriptor, message.size)
            self._received[message.number] = torch.frombuffer(mapped, dtype=torch.uint8)
            os.close(descriptor)
        return message

    def read(self, placed: PlacedTree) -> Tree:
        """A tree that the other end has placed, as views."""
        return read_packed(placed.slots, self._received[placed.segment])
