"""Data files as bytes, packed or not."""

import gzip
import lzma
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from offbeat.errors import InputError

Parsed = TypeVar("Parsed")


class MissingFileError(InputError):
    """A file that a data set needs is not in its folder."""


def find(folder: Path, names: Sequence[str], places: Sequence[str] = (".",)) -> Path:
    """The first of the names that exists, as it is, as .gz or as .xz, in the first place that has one."""
    for place in places:
        for name in names:
            for suffix in ("", ".gz", ".xz"):
                path = folder / place / f"{name}{suffix}"
                if path.is_file():
                    return path
    wanted = " or ".join(names)
    raise MissingFileError(
        f"the data file {wanted} is not in {folder}: put it there (it may be packed, as .gz or .xz), "
        "or name no folder to have it downloaded."
    )


def parsed(path: Path, parse: Callable[[bytes], Parsed]) -> Parsed:
    """What `parse` makes of the unpacked file; its ValueError says what is wrong with the bytes."""
    try:
        return parse(contents(path))
    except InputError:
        raise
    except ValueError as error:
        raise InputError(
            f"the data file {path} cannot be used, {error}: replace it by a good copy."
        ) from error


def contents(path: Path) -> bytes:
    """The unpacked bytes of a file."""
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
            f"the data file {path} is truncated or corrupt: replace it by a good copy."
        ) from error
    except OSError as error:
        raise InputError(
            f"the data file {path} cannot be read, {error.strerror}: check its rights."
        ) from error
