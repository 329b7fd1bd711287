"""Folders that are there whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from offbeat.errors import InputError


@contextmanager
def placed(path: Path, mode: int) -> Iterator[Path]:
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
        _move(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write(path: Path, data: bytes, *, secret: bool = False) -> None:
    """A new file in a new folder; one that is secret is never readable to others, not for a moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def _move(part: Path, path: Path) -> None:
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
