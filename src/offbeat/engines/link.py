"""A line between two processes that pass words, and segments of shared memory."""

import os
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
from torch import Tensor

from offbeat.engines import packing
from offbeat.engines.segments import Segment, map_room
from offbeat.trees import Tree


@dataclass(frozen=True)
class Placed:
    """Where the other process finds a tree."""

    number: int
    slots: Tree


@dataclass(frozen=True)
class _Segment:
    """Announces a segment; its handle follows."""

    number: int
    size: int


class Link:
    """One end of the line; what is said is small, what is large lies in segments."""

    def __init__(self, line: Connection) -> None:
        self.line = line
        self._shown: set[int] = set()
        self._theirs: dict[int, Tensor] = {}

    def show(self, segment: Segment) -> None:
        """Let the other end read a segment."""
        if segment.number not in self._shown:
            self._shown.add(segment.number)
            self.say(_Segment(segment.number, segment.size))
            reduction.send_handle(self.line, segment.handle, None)

    def say(self, thing: Any) -> None:
        self.line.send_bytes(cloudpickle.dumps(thing))

    def hear(self) -> Any:
        """What the other end says next; EOFError or OSError where it is gone."""
        while isinstance(thing := cloudpickle.loads(self.line.recv_bytes()), _Segment):
            handle = reduction.recv_handle(self.line)
            self._theirs[thing.number] = map_room(handle, thing.size)
            os.close(handle)
        return thing

    def read(self, placed: Placed) -> Tree:
        """The tree that the other end has put there, as views."""
        return packing.read(placed.slots, self._theirs[placed.number])
