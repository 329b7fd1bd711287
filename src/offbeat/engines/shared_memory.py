"""A tree of tensors as one run of bytes, and back as views of those bytes.

Memory that processes share: it has no name, and is gone with the last process that uses it.

A line between two processes that pass words, and segments of shared memory.
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

_ALIGNMENT = 64  # every tensor begins at a multiple, as torch's own do


@dataclass(frozen=True)
class TensorSlot:
    """Where a tensor lies among the bytes."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class PackingPlan(NamedTuple):
    """Where the tensors of a tree are to lie, and how many bytes they take."""

    slots: Tree
    size: int


def plan_packing(tree: Tree) -> PackingPlan:
    """One tensor after another."""
    end = 0

    def slot(leaf: Tensor) -> TensorSlot:
        nonlocal end
        start = end
        end += -(-leaf.nbytes // _ALIGNMENT) * _ALIGNMENT
        return TensorSlot(start, leaf.dtype, tuple(leaf.shape))

    slots = trees.map(slot, tree)
    return PackingPlan(slots, end)


def write_packed(tree: Tree, slots: Tree, room: Tensor) -> None:
    """Copy a tree to where it was planned to lie."""
    trees.map(lambda leaf, place: place.copy_(leaf), tree, read_packed(slots, room))


def read_packed(slots: Tree, room: Tensor) -> Tree:
    """The tree that lies there; nothing is copied."""

    def view(slot: TensorSlot) -> Tensor:
        length = slot.dtype.itemsize
        for side in slot.shape:
            length *= side
        return room[slot.start : slot.start + length].view(slot.dtype).view(slot.shape)

    return trees.map(view, slots)


def pack_tree(tree: Tree) -> tuple[Tree, Tensor]:
    """The slots of a tree and its bytes."""
    slots, size = plan_packing(tree)
    room = torch.empty(size, dtype=torch.uint8)
    write_packed(tree, slots, room)
    return slots, room


_PAGE = mmap.PAGESIZE


class Segment(NamedTuple):
    """A run of bytes, mapped here; `handle` is how another process is given it."""

    number: int
    size: int
    handle: int
    room: Tensor


class SegmentPool:
    """Where one process puts trees for others to read; room that was taken off is used again."""

    def __init__(self) -> None:
        self._free: list[Segment] = []
        self._made: list[Segment] = []

    def put(self, tree: Tree) -> tuple[Segment, Tree]:
        """Copy a tree to the shelf: the segment it is in, and where."""
        slots, size = plan_packing(tree)
        segment = self._take(size)
        write_packed(tree, slots, segment.room)
        return segment, slots

    def take_off(self, segment: Segment) -> None:
        """Nobody reads it any more."""
        self._free.append(segment)

    def close(self) -> None:
        for segment in self._made:
            os.close(segment.handle)
        self._made, self._free = [], []

    def _take(self, size: int) -> Segment:
        fit = [segment for segment in self._free if size <= segment.size <= 2 * size + _PAGE]
        if not fit:
            return self._make(-(-max(size, 1) // _PAGE) * _PAGE)
        segment = min(fit, key=lambda each: each.size)
        self._free = [each for each in self._free if each is not segment]
        return segment

    def _make(self, size: int) -> Segment:
        handle = _anonymous_file()
        os.ftruncate(handle, size)
        segment = Segment(len(self._made), size, handle, map_segment(handle, size))
        self._made.append(segment)
        return segment


def map_segment(handle: int, size: int) -> Tensor:
    """The bytes behind a handle; the handle may be closed afterwards."""
    return torch.frombuffer(mmap.mmap(handle, size), dtype=torch.uint8)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("offbeat")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@dataclass(frozen=True)
class PlacedTree:
    """Where the other process finds a tree."""

    number: int
    slots: Tree


@dataclass(frozen=True)
class _SegmentNotice:
    """Announces a segment; its handle follows."""

    number: int
    size: int


class Channel:
    """One end of the line; what is said is small, what is large lies in segments."""

    def __init__(self, line: Connection) -> None:
        self.line = line
        self._shown: set[int] = set()
        self._theirs: dict[int, Tensor] = {}

    def show(self, segment: Segment) -> None:
        """Let the other end read a segment."""
        if segment.number not in self._shown:
            self._shown.add(segment.number)
            self.say(_SegmentNotice(segment.number, segment.size))
            reduction.send_handle(self.line, segment.handle, None)

    def say(self, thing: Any) -> None:
        self.line.send_bytes(cloudpickle.dumps(thing))

    def hear(self) -> Any:
        """What the other end says next; EOFError or OSError where it is gone."""
        while isinstance(thing := cloudpickle.loads(self.line.recv_bytes()), _SegmentNotice):
            handle = reduction.recv_handle(self.line)
            self._theirs[thing.number] = map_segment(handle, thing.size)
            os.close(handle)
        return thing

    def read(self, placed: PlacedTree) -> Tree:
        """The tree that the other end has put there, as views."""
        return read_packed(placed.slots, self._theirs[placed.number])
