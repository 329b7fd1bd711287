"""Operations on trees: nested tuples, named tuples, lists and dictionaries of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import optree

if TYPE_CHECKING:
    from torch import Tensor

Tree: TypeAlias = Any
Structure: TypeAlias = Any  # a tree without its leaves


def map(function: Callable[..., Any], *trees: Tree) -> Any:
    """A tree of the same structure with the function applied to each leaf."""
    return optree.tree_map(function, *trees)


def map_until(kinds: tuple[type, ...], function: Callable[..., Any], tree: Tree) -> Any:
    """As `map`, but nodes of these types are passed to the function as a whole."""
    return optree.tree_map(function, tree, is_leaf=lambda node: isinstance(node, kinds))


def leaves(tree: Tree) -> list[Tensor]:
    """All leaves, in order."""
    return optree.tree_leaves(tree)


def structure(tree: Tree) -> Structure:
    """The structure of a tree, from which `unflatten` builds trees."""
    return optree.tree_structure(tree)


def unflatten(shape: Structure, leaves: Sequence[Tensor]) -> Any:
    """The tree of a structure with these leaves."""
    return optree.tree_unflatten(shape, leaves)


def stack(trees: Sequence[Tree]) -> Any:
    """One tree from trees of equal structure, with their leaves stacked along axis 0."""
    import torch

    return map(lambda *parts: torch.stack(parts), *trees)


def numel(tree: Tree) -> int:
    """The number of elements of all leaves."""
    return sum(leaf.numel() for leaf in leaves(tree))
