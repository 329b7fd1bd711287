"""Memory that processes share: it has no name, and is gone with the last process that uses it."""

import mmap
import os
import tempfile
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.engines import packing
from offbeat.trees import Tree

_PAGE = mmap.PAGESIZE


class Segment(NamedTuple):
    """A run of bytes, mapped here; `handle` is how another process is given it."""

    number: int
    size: int
    handle: int
    room: Tensor


class Shelf:
    """Where one process puts trees for others to read; room that was taken off is used again."""

    def __init__(self) -> None:
        self._free: list[Segment] = []
        self._made: list[Segment] = []

    def put(self, tree: Tree) -> tuple[Segment, Tree]:
        """Copy a tree to the shelf: the segment it is in, and where."""
        slots, size = packing.plan(tree)
        segment = self._take(size)
        packing.write(tree, slots, segment.room)
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
        handle = _anonymous()
        os.ftruncate(handle, size)
        segment = Segment(len(self._made), size, handle, map_room(handle, size))
        self._made.append(segment)
        return segment


def map_room(handle: int, size: int) -> Tensor:
    """The bytes behind a handle; the handle may be closed afterwards."""
    return torch.frombuffer(mmap.mmap(handle, size), dtype=torch.uint8)


def _anonymous() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("offbeat")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
