"""The binary payload: a tree of tensors as bytes, leaf after leaf, in C order and little endian."""

import math
import sys
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from offbeat import trees
from offbeat.deploy.protocol.strict_json import Reason, Rejected, malformed
from offbeat.errors import InputError
from offbeat.trees import Tree

TensorSpecs: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]  # such as ("float32", (3, 4)), for each leaf

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
    """The dtype and shape of each leaf."""
    return tuple((_dtype_name(leaf.dtype), tuple(leaf.shape)) for leaf in trees.leaves(tree))


def byte_size(specs: TensorSpecs) -> int:
    """The number of bytes of a payload with these specs."""
    return sum(DTYPES[name].itemsize * math.prod(shape) for name, shape in specs)


def pack(tree: Tree) -> bytes:
    """The bytes of the leaves, and nothing else."""
    specs_of(tree)  # raises for dtypes that cannot be sent
    return b"".join(_to_bytes(leaf.detach().cpu().contiguous()).data for leaf in trees.leaves(tree))


def unpack(data: bytes | memoryview, specs: TensorSpecs) -> list[Tensor]:
    """The leaves, in memory of their own."""
    expected, actual = byte_size(specs), len(memoryview(data).cast("B"))
    if actual != expected:
        raise Rejected(Reason.SIZE, f"the payload has {actual} bytes, but its specs take {expected}.")
    result, start = [], 0
    for name, shape in specs:
        leaf = torch.empty(shape, dtype=DTYPES[name])
        source = np.frombuffer(data, np.uint8, leaf.nbytes, start) if leaf.nbytes else np.empty(0, np.uint8)
        if name == "bool" and leaf.nbytes and source.max() > 1:  # torch does not check the bytes of a bool
            raise malformed("the payload has a boolean that is neither 0 nor 1.")
        _raw_bytes(leaf)[:] = _swap_bytes(source, leaf.itemsize)
        result.append(leaf)
        start += leaf.nbytes
    return result


def describe_difference(actual: TensorSpecs, expected: TensorSpecs) -> str:
    """The first difference between two specs in words; empty if they are equal."""
    if actual == expected:
        return ""
    if len(actual) != len(expected):
        return f"{len(actual)} tensors, not {len(expected)}"
    number = next(n for n, (one, other) in enumerate(zip(actual, expected, strict=True)) if one != other)
    return f"tensor {number} is {_describe(*actual[number])}, not {_describe(*expected[number])}"


def is_finite(leaf: Tensor) -> bool:
    """Whether a tensor has neither NaN nor infinity."""
    # A sum over either is not finite, and one pass is cheap; only a sum that overflows needs a second one.
    return bool(torch.isfinite(leaf.sum())) or bool(torch.isfinite(leaf).all())


def _dtype_name(dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise InputError(f"tensors of {dtype} cannot be sent: use one of {', '.join(sorted(DTYPES))}.")
    return _NAMES[dtype]


def _describe(name: str, shape: tuple[int, ...]) -> str:
    sizes = " by ".join(str(size) for size in shape[:4]) or "one"
    return f"{sizes}{' by more' if len(shape) > 4 else ''} {name}"


def _raw_bytes(leaf: Tensor) -> np.ndarray:
    """The bytes of a contiguous tensor on the CPU, not copied."""
    flat = leaf.as_strided((leaf.numel(),), (1,))  # a single number may have any stride, which view() refuses
    return flat.view(torch.uint8).numpy()


def _to_bytes(leaf: Tensor) -> np.ndarray:
    return np.ascontiguousarray(_swap_bytes(_raw_bytes(leaf), leaf.itemsize))


def _swap_bytes(raw: np.ndarray, size: int) -> np.ndarray:
    """Between the machine's byte order and little endian."""
    return raw if sys.byteorder == "little" else raw.reshape(-1, size)[:, ::-1].reshape(-1)
