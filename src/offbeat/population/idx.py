"""The idx format of MNIST and its relatives: a header with the sizes, then bytes."""

import math

import numpy as np
from numpy.typing import NDArray

CLASSES = 10
_UNSIGNED_BYTES = 8


def parse(data: bytes) -> NDArray[np.uint8]:
    """The array in an idx file of unsigned bytes."""
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != _UNSIGNED_BYTES:
        raise ValueError("it is not an idx file of unsigned bytes")
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise ValueError("it ends within its header")
    shape = [int(size) for size in np.frombuffer(data, ">u4", data[3], offset=4)]
    promised, held = math.prod(shape), len(data) - start
    if held != promised:
        raise ValueError(f"its header promises {promised} values and it holds {held}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def parse_images(data: bytes) -> NDArray[np.uint8]:
    """Images, (n, 1, height, width)."""
    return _of_axes(parse(data), 3)[:, None]


def parse_labels(data: bytes) -> NDArray[np.uint8]:
    """Labels, (n,)."""
    labels = _of_axes(parse(data), 1)
    if (labels >= CLASSES).any():
        raise ValueError(f"it has a label that is not below {CLASSES}")
    return labels


def _of_axes(values: NDArray[np.uint8], axes: int) -> NDArray[np.uint8]:
    if values.ndim != axes:
        raise ValueError(f"it has {values.ndim} axes instead of {axes}")
    return values
