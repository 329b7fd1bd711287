"""Clipping: each field of an upload is one vector, whose norm is limited to a bound."""

import math

import torch
from torch import Tensor

from offbeat import trees
from offbeat.errors import InputError
from offbeat.trees import Tree

_SAFE = (1e-140, 1e140)  # norms whose squares neither vanish nor overflow


def fields(upload: Tree) -> dict[str, Tree]:
    """The non-empty fields of an upload by name; an upload that is not a named tuple is one field."""
    names = getattr(upload, "_fields", None)
    parts = {"upload": upload} if names is None else dict(zip(names, upload, strict=True))
    held = {name: part for name, part in parts.items() if trees.leaves(part)}
    for name, part in held.items():
        if not all(leaf.is_floating_point() for leaf in trees.leaves(part)):
            raise InputError(
                f"the upload's field {name} has values other than floats, which noise cannot hide."
            )
    return held


def replace(upload: Tree, parts: dict[str, Tree]) -> Tree:
    """The upload with these parts in place of its own."""
    return upload._replace(**parts) if hasattr(upload, "_fields") else parts["upload"]


def norms(part: Tree) -> Tensor:
    """(tasks,) the norms in double precision, from leaves (tasks, ...)."""
    leaves = trees.leaves(part)
    columns = [leaf.reshape(len(leaf), -1) for leaf in leaves if leaf.numel()]
    if not columns:
        return torch.zeros(len(leaves[0]), dtype=torch.float64, device=leaves[0].device)
    result = _root(columns)
    extreme = ~((result >= _SAFE[0]) & (result <= _SAFE[1]))
    if bool(extreme.any()):
        rows = [column[extreme].double() for column in columns]
        largest = torch.stack([row.abs().amax(1) for row in rows]).amax(0)
        unit = largest.clamp_min(torch.finfo(torch.float64).tiny)
        result[extreme] = unit * _root([row / unit[:, None] for row in rows])
    return result


def clip(part: Tree, bound: float) -> tuple[Tree, Tensor]:
    """The clipped part, with norms within the bound even after rounding; and (tasks,) which were before."""
    if math.isinf(bound):
        return part, torch.ones(len(trees.leaves(part)[0]), dtype=torch.bool)
    norm = norms(part)
    below = norm <= bound

    def shorten(leaf: Tensor) -> Tensor:
        # smaller by a few units in the last place, so that rounding cannot exceed the bound
        margin = 1 - 4 * torch.finfo(leaf.dtype).eps
        shape = (-1, *[1] * (leaf.dim() - 1))
        factor = torch.where(below, 1.0, bound / norm * margin)
        clipped = leaf * factor.to(leaf.dtype).view(shape)
        coarse = factor < torch.finfo(leaf.dtype).tiny  # a subnormal factor is imprecise
        if bool(coarse.any()):
            exact = leaf.double() / norm.view(shape) * (bound * margin)
            clipped = torch.where(coarse.view(shape), exact.to(leaf.dtype), clipped)
        return clipped

    return trees.map(shorten, part), below


def _root(columns: list[Tensor]) -> Tensor:
    each = [torch.linalg.vector_norm(column, dim=1, dtype=torch.float64) for column in columns]
    total: Tensor = torch.linalg.vector_norm(torch.stack(each), dim=0)
    return each[0] if len(each) == 1 else total
