"""Nested tuples, named tuples, lists and dicts of tensors, taken leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import optree

if TYPE_CHECKING:
    from torch import Tensor

Tree: TypeAlias = Any
Structure: TypeAlias = Any  # a tree without its leaves


def map(function: Callable[..., Any], *trees: Tree) -> Any:
    """The function of each leaf, in a tree of the same shape."""
    return optree.tree_map(function, *trees)


def map_until(kinds: tuple[type, ...], function: Callable[..., Any], tree: Tree) -> Any:
    """As `map`, with whole nodes of these kinds in place of their leaves."""
    return optree.tree_map(function, tree, is_leaf=lambda node: isinstance(node, kinds))


def leaves(tree: Tree) -> list[Tensor]:
    """All leaves, in order."""
    return optree.tree_leaves(tree)


def structure(tree: Tree) -> Structure:
    """What `rebuild` needs."""
    return optree.tree_structure(tree)


def unflatten(shape: Structure, leaves: Sequence[Tensor]) -> Any:
    """The tree of that shape with these leaves."""
    return optree.tree_unflatten(shape, leaves)


def stack(trees: Sequence[Tree]) -> Any:
    """Trees of one shape as one, each leaf stacked on axis 0."""
    import torch

    return map(lambda *parts: torch.stack(parts), *trees)


def numel(tree: Tree) -> int:
    """How many numbers are in it."""
    return sum(leaf.numel() for leaf in leaves(tree))
