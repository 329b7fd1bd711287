"""A tree of tensors as bytes, and back: the leaves one after another, in C order, little endian."""

import math
import sys
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from offbeat import trees
from offbeat.deploy.protocol.strict_json import Reason, Rejected
from offbeat.errors import InputError
from offbeat.trees import Tree

TensorSpecs: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]  # ("float32", (3, 4)) of each leaf, in order

DTYPES = {
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def specs_of(tree: Tree) -> TensorSpecs:
    """What its leaves are."""
    return tuple((_name(leaf.dtype), tuple(leaf.shape)) for leaf in trees.leaves(tree))


def byte_size(form: TensorSpecs) -> int:
    """How many bytes it takes."""
    return sum(DTYPES[name].itemsize * math.prod(shape) for name, shape in form)


def pack(tree: Tree) -> bytes:
    """The bytes of its leaves, and nothing else."""
    specs_of(tree)  # refuses what cannot travel
    return b"".join(_bytes(leaf.detach().cpu().contiguous()).data for leaf in trees.leaves(tree))


def unpack(data: bytes | memoryview, form: TensorSpecs) -> list[Tensor]:
    """The leaves, in memory of their own."""
    wanted, given = byte_size(form), len(memoryview(data).cast("B"))
    if given != wanted:
        raise Rejected(Reason.SIZE, f"the payload has {given} bytes, and its form takes {wanted}.")
    result, start = [], 0
    for name, shape in form:
        leaf = torch.empty(shape, dtype=DTYPES[name])
        source = np.frombuffer(data, np.uint8, leaf.nbytes, start) if leaf.nbytes else np.empty(0, np.uint8)
        if name == "bool" and leaf.nbytes and source.max() > 1:  # torch takes the byte for granted
            raise Rejected(Reason.MALFORMED, "a byte of the payload that should be true or false is neither.")
        _raw(leaf)[:] = _swap_bytes(source, leaf.itemsize)
        result.append(leaf)
        start += leaf.nbytes
    return result


def describe_difference(given: TensorSpecs, wanted: TensorSpecs) -> str:
    """Where two forms differ first, in words; nothing if they are the same."""
    if given == wanted:
        return ""
    if len(given) != len(wanted):
        return f"{len(given)} tensors, not {len(wanted)}"
    number = next(n for n, (one, other) in enumerate(zip(given, wanted, strict=True)) if one != other)
    return f"tensor {number} is {_describe(*given[number])}, not {_describe(*wanted[number])}"


def is_finite(leaf: Tensor) -> bool:
    """Whether there is no NaN and no infinity in it."""
    # no sum over either is finite, and one pass is cheap; a sum that overflows is looked at again
    return bool(torch.isfinite(leaf.sum())) or bool(torch.isfinite(leaf).all())


def _name(dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise InputError(f"tensors of {dtype} cannot travel: use one of {', '.join(sorted(DTYPES))}.")
    return _NAMES[dtype]


def _describe(name: str, shape: tuple[int, ...]) -> str:
    sides = " by ".join(str(side) for side in shape[:4]) or "one"
    return f"{sides}{' by more' if len(shape) > 4 else ''} {name}"


def _raw(leaf: Tensor) -> np.ndarray:
    """The bytes of a leaf on the CPU whose numbers lie in order, not copied."""
    flat = leaf.as_strided((leaf.numel(),), (1,))  # one number may have any stride, which a view refuses
    return flat.view(torch.uint8).numpy()


def _bytes(leaf: Tensor) -> np.ndarray:
    return np.ascontiguousarray(_swap_bytes(_raw(leaf), leaf.itemsize))


def _swap_bytes(raw: np.ndarray, size: int) -> np.ndarray:
    """Between the machine's order of bytes and little endian."""
    return raw if sys.byteorder == "little" else raw.reshape(-1, size)[:, ::-1].reshape(-1)
