"""Who wrote which digit of MNIST, from the labels of QMNIST (Yadav and Bottou 2019)."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offbeat.data.datasets import Source
from offbeat.data.download import MissingFileError, find_file, parse_file
from offbeat.errors import InputError

_NAME = "qmnist-train-labels-idx2-int"
_INTEGERS = 12  # the mark of 32-bit whole numbers in an idx file
_LABEL, _WRITER = 0, 2  # columns


def by_writer(source: Source, folder: Path) -> Source:
    """MNIST whose natural clients are the writers of its training digits; row i of both is the same digit."""
    try:
        path = find_file(folder, [_NAME], (".", "QMNIST/raw"))
    except MissingFileError:
        raise InputError(
            f"the file {_NAME}, which tells who wrote MNIST's digits, is not in {folder}: get it from "
            "QMNIST's repository (torchvision's QMNIST downloads it, too) into the folder mnist-writers of "
            "--data-dir."
        ) from None
    rows = parse_file(path, parse_rows)
    count = len(source.labels)
    if len(rows) < count or (rows[:count, _LABEL] != source.labels).any():
        raise InputError(f"the labels in {path} are not those of this MNIST: replace one by a good copy.")
    return source._replace(groups=rows[:count, _WRITER].astype(np.int64))


def parse_rows(data: bytes) -> NDArray[np.int32]:
    """An idx file of rows of 32-bit whole numbers."""
    if len(data) < 12 or data[:2] != b"\0\0" or data[2] != _INTEGERS or data[3] != 2:
        raise ValueError("it is not an idx file of rows of whole numbers")
    rows, columns = (int(size) for size in np.frombuffer(data, ">u4", 2, offset=4))
    if len(data) != 12 + 4 * rows * columns or columns <= _WRITER:
        raise ValueError(f"its header promises {rows} rows of {columns}, which it does not hold")
    return np.frombuffer(data, ">i4", offset=12).reshape(rows, columns).astype(np.int32)
