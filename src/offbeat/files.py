"""Files that are whole or not there, whatever happens while they are written.

Folders that are there whole or not at all.

New lines of a file that another process writes.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offbeat.errors import InputError

PART_SUFFIX = ".part"  # the end of the name of what is being written


def write_atomic(path: Path, pieces: Iterable[bytes]) -> None:
    """Write beside it and move into place; when this is over it is on the disk."""
    part = path.with_name(path.name + PART_SUFFIX)
    try:
        with part.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        fsync_dir(path.parent)
    except OSError as error:
        raise unwritable(path, error) from None


def fsync_dir(folder: Path) -> None:
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


@contextmanager
def atomic_dir(path: Path, mode: int) -> Iterator[Path]:
    """A hidden folder to fill, which becomes `path` at the end; anything that goes wrong removes it."""
    if os.path.lexists(path):
        raise _taken(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{path.name}.part-", dir=path.parent))
    except OSError as error:
        raise InputError(
            f"{path} cannot be made ({error.strerror}): name a place that can be written to."
        ) from None
    try:
        yield part
        part.chmod(mode)
        _move_into_place(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_new(path: Path, data: bytes, *, secret: bool = False) -> None:
    """A new file in a new folder; one that is secret is never readable to others, not for a moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def _move_into_place(part: Path, path: Path) -> None:
    """Somebody else may have been quicker."""
    try:
        part.rename(path)
    except (FileExistsError, NotADirectoryError):
        raise _taken(path) from None
    except OSError as error:
        if not os.path.lexists(path):
            raise
        raise _taken(path) from error


def _taken(path: Path) -> InputError:
    return InputError(f"{path} is there already and is left as it is: name another place, or move it away.")


class JsonlTail:
    """Each whole line once; a file that was cut back is read on from its new end."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._place = path.stat().st_size if from_end and path.exists() else 0

    def new(self) -> Iterator[dict[str, Any]]:
        """What has come since the last time."""
        try:
            size = self._path.stat().st_size
            self._place = min(self._place, size)
            if self._place == size:
                return
            with self._path.open("rb") as file:
                file.seek(self._place)
                data = file.read(size - self._place)
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._place += len(whole)
        for line in whole.splitlines():
            try:
                read = json.loads(line)
            except ValueError:  # cut and written again while it was read
                continue
            if isinstance(read, dict):
                yield read
