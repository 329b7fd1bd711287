"""CIFAR-10's official binary layout: rows of one label byte and 3 x 32 x 32 pixel bytes."""

import numpy as np
from numpy.typing import NDArray

CLASSES = 10
_SHAPE = (3, 32, 32)
_ROW = 1 + 3 * 32 * 32


def parse(data: bytes) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images, (n, 3, 32, 32), and labels, (n,)."""
    if not data or len(data) % _ROW:
        raise ValueError(f"its {len(data)} bytes are not whole rows of {_ROW}")
    rows = np.frombuffer(data, np.uint8).reshape(-1, _ROW)
    if (rows[:, 0] >= CLASSES).any():
        raise ValueError(f"it has a label that is not below {CLASSES}")
    return rows[:, 1:].reshape(-1, *_SHAPE), rows[:, 0]
