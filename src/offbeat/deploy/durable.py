"""Files that are whole or not there, whatever happens while they are written."""

import os
from collections.abc import Iterable
from pathlib import Path

from offbeat.errors import InputError

PART = ".part"  # the end of the name of what is being written


def replace(path: Path, pieces: Iterable[bytes]) -> None:
    """Write beside it and move into place; when this is over it is on the disk."""
    part = path.with_name(path.name + PART)
    try:
        with part.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        sync(path.parent)
    except OSError as error:
        raise unwritable(path, error) from None


def sync(folder: Path) -> None:
    """What was moved or removed in it is on the disk, too."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def unwritable(path: Path, error: OSError) -> InputError:
    """The disk will not have it."""
    reason = error.strerror or error
    return InputError(f"{path} cannot be written ({reason}): see to the disk, then resume the run.")
