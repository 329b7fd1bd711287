"""A tree of tensors as one run of bytes, and back as views of those bytes."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat import trees
from offbeat.trees import Tree

_STEP = 64  # every tensor begins at a multiple, as torch's own do


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies among the bytes."""

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Plan(NamedTuple):
    """Where the tensors of a tree are to lie, and how many bytes they take."""

    slots: Tree
    size: int


def plan(tree: Tree) -> Plan:
    """One tensor after another."""
    end = 0

    def slot(leaf: Tensor) -> Slot:
        nonlocal end
        start = end
        end += -(-leaf.nbytes // _STEP) * _STEP
        return Slot(start, leaf.dtype, tuple(leaf.shape))

    slots = trees.over(slot, tree)
    return Plan(slots, end)


def write(tree: Tree, slots: Tree, room: Tensor) -> None:
    """Copy a tree to where it was planned to lie."""
    trees.over(lambda leaf, place: place.copy_(leaf), tree, read(slots, room))


def read(slots: Tree, room: Tensor) -> Tree:
    """The tree that lies there; nothing is copied."""

    def view(slot: Slot) -> Tensor:
        length = slot.dtype.itemsize
        for side in slot.shape:
            length *= side
        return room[slot.start : slot.start + length].view(slot.dtype).view(slot.shape)

    return trees.over(view, slots)


def pack(tree: Tree) -> tuple[Tree, Tensor]:
    """The slots of a tree and its bytes."""
    slots, size = plan(tree)
    room = torch.empty(size, dtype=torch.uint8)
    write(tree, slots, room)
    return slots, room
