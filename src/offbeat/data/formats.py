"""Readers of data files: plain or compressed, the idx format of MNIST and the binary one of CIFAR-10."""

import gzip
import lzma
import math
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import InputError

Parsed = TypeVar("Parsed")


class MissingFileError(InputError):
    """A file that a data set needs is not in its folder."""


def find_file(folder: Path, names: Sequence[str], places: Sequence[str] = (".",)) -> Path:
    """The first existing file of these names, plain or with .gz or .xz, in the given subfolders in order."""
    for place in places:
        for name in names:
            for suffix in ("", ".gz", ".xz"):
                path = folder / place / f"{name}{suffix}"
                if path.is_file():
                    return path
    wanted = " or ".join(names)
    raise MissingFileError(
        f"the data file {wanted} is not in {folder}: put it there (.gz and .xz are accepted), "
        "or leave out the folder to download it."
    )


def parse_file(path: Path, parse: Callable[[bytes], Parsed]) -> Parsed:
    """The decompressed file parsed by `parse`, whose ValueError says what is wrong with the bytes."""
    try:
        return parse(read_file(path))
    except InputError:
        raise
    except ValueError as error:
        raise InputError(
            f"the data file {path} cannot be used, {error}: replace it with a good copy."
        ) from error


def read_file(path: Path) -> bytes:
    """The decompressed content of a file."""
    try:
        packed = path.read_bytes()
        match path.suffix:
            case ".gz":
                return gzip.decompress(packed)
            case ".xz":
                return lzma.decompress(packed)
            case _:
                return packed
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise InputError(
            f"the data file {path} is truncated or corrupt: replace it with a good copy."
        ) from error
    except OSError as error:
        raise InputError(
            f"the data file {path} cannot be read, {error.strerror}: check its permissions."
        ) from error


IDX_CLASSES = 10
_UNSIGNED_BYTES = 8


def parse_idx(data: bytes) -> NDArray[np.uint8]:
    """The array in an idx file of unsigned bytes."""
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != _UNSIGNED_BYTES:
        raise ValueError("it is not an idx file of unsigned bytes")
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise ValueError("its header is truncated")
    shape = [int(size) for size in np.frombuffer(data, ">u4", data[3], offset=4)]
    expected, found = math.prod(shape), len(data) - start
    if found != expected:
        raise ValueError(f"its header announces {expected} values but it has {found}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def parse_idx_images(data: bytes) -> NDArray[np.uint8]:
    """Images of shape (n, 1, height, width)."""
    return _with_axes(parse_idx(data), 3)[:, None]


def parse_idx_labels(data: bytes) -> NDArray[np.uint8]:
    """Labels of shape (n,)."""
    labels = _with_axes(parse_idx(data), 1)
    if (labels >= IDX_CLASSES).any():
        raise ValueError(f"it has a label that is not below {IDX_CLASSES}")
    return labels


def _with_axes(values: NDArray[np.uint8], axes: int) -> NDArray[np.uint8]:
    if values.ndim != axes:
        raise ValueError(f"it has {values.ndim} axes instead of {axes}")
    return values


CIFAR10_CLASSES = 10
_CIFAR10_SHAPE = (3, 32, 32)
_CIFAR10_ROW = 1 + 3 * 32 * 32


def parse_cifar10(data: bytes) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images of shape (n, 3, 32, 32) and labels of shape (n,)."""
    if not data or len(data) % _CIFAR10_ROW:
        raise ValueError(f"its {len(data)} bytes are not whole rows of {_CIFAR10_ROW}")
    rows = np.frombuffer(data, np.uint8).reshape(-1, _CIFAR10_ROW)
    if (rows[:, 0] >= CIFAR10_CLASSES).any():
        raise ValueError(f"it has a label that is not below {CIFAR10_CLASSES}")
    return rows[:, 1:].reshape(-1, *_CIFAR10_SHAPE), rows[:, 0]
