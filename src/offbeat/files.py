"""Files that survive a killed process: atomic replacement, new folders, JSONL with an incomplete last line.

Checksums detect damaged files, and a full disk has an error of its own.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from offbeat.errors import DiskFullError, InputError

PART_SUFFIX = ".part"  # of a file that is being written
_TAIL_BYTES = 1 << 16  # read at a time from the end of a file
_PROBE_BYTES, _PLENTY_BYTES = 1 << 20, 1 << 26  # written to test a disk; free space that needs no test


def cache_root() -> Path:
    """The folder for what can be downloaded or computed again: $OFFBEAT_DATA, or ~/.cache/offbeat."""
    root = os.environ.get("OFFBEAT_DATA")
    return Path(root) if root else Path.home() / ".cache" / "offbeat"


def replace_file(path: Path, data: bytes | Iterable[bytes], mode: int | None = None) -> None:
    """Write beside a file and move into place; when this returns the new contents are on disk."""
    part = path.with_name(path.name + PART_SUFFIX)
    part.unlink(missing_ok=True)
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
    try:
        with os.fdopen(handle, "wb") as file:
            for piece in [data] if isinstance(data, bytes) else data:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except Exception:
        part.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def write_atomic(path: Path, data: bytes | Iterable[bytes]) -> None:
    """`replace_file`, with an `InputError` in one sentence if it fails."""
    try:
        replace_file(path, data)
    except OSError as error:
        raise unwritable(path, error) from None


def drop_partial_line(path: Path) -> None:
    """Remove what a killed process had begun to append, so that nothing continues that line."""
    data = path.read_bytes() if path.exists() else b""
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def fsync_dir(folder: Path) -> None:
    """Flush a folder to disk, so that files moved or removed in it stay so."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_CHECKSUM = "checksum"


def with_checksum(facts: dict[str, Any]) -> dict[str, Any]:
    """A dictionary to be written as JSON, with a checksum of it added."""
    text = json.dumps(facts, sort_keys=True).encode()
    return facts | {_CHECKSUM: hashlib.blake2b(text, digest_size=8).hexdigest()}


def without_checksum(facts: dict[str, Any]) -> dict[str, Any]:
    """The dictionary without its checksum; `ValueError` if they do not match.

    A dictionary without a checksum, as earlier versions wrote it, is returned unchecked.
    """
    kept = {name: value for name, value in facts.items() if name != _CHECKSUM}
    if _CHECKSUM in facts and with_checksum(kept) != facts:
        raise ValueError("its contents have changed since it was written")
    return kept


def is_disk_full(error: OSError) -> bool:
    """Whether a write failed because there is no space, or no quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def disk_full(folder: Path, *, quick: bool = False) -> bool:
    """Whether a folder's disk is full, found by writing to it.

    With `quick`, nothing is written if the disk has much free space, so an exhausted quota may be missed.
    """
    if quick and shutil.disk_usage(folder).free > _PLENTY_BYTES:
        return False
    probe = folder / ".space"
    try:
        with probe.open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return is_disk_full(error)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return False


def unwritable(path: Path, error: OSError) -> InputError:
    """The error for a failed write."""
    if is_disk_full(error):
        return DiskFullError(path)
    reason = error.strerror or error
    return InputError(f"{path} cannot be written ({reason}): check the disk, then resume the run.")


@contextmanager
def atomic_dir(path: Path, mode: int) -> Iterator[Path]:
    """A hidden folder to fill; it is renamed to `path` at the end, and removed after an exception."""
    if os.path.lexists(path):
        raise _exists(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{path.name}.part-", dir=path.parent))
    except OSError as error:
        raise InputError(
            f"{path} cannot be created ({error.strerror}): name a folder that can be written to."
        ) from None
    try:
        yield part
        part.chmod(mode)
        _move_into_place(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_new(path: Path, data: bytes, *, secret: bool = False) -> None:
    """Write a file that does not exist yet; a secret one is readable by its owner only, from the start."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def _move_into_place(part: Path, path: Path) -> None:
    try:
        part.rename(path)
    except (FileExistsError, NotADirectoryError):
        raise _exists(path) from None
    except OSError as error:
        if not os.path.lexists(path):
            raise
        raise _exists(path) from error


def _exists(path: Path) -> InputError:
    return InputError(f"{path} already exists and is left as it is: name another path, or move it away.")


def last_line(path: Path) -> tuple[bytes, int]:
    """The last complete line of a file, and the position of its end; an incomplete line is ignored."""
    with path.open("rb") as file:
        start = file.seek(0, os.SEEK_END)
        tail = b""
        while start and tail.count(b"\n") < 2:
            size = min(start, _TAIL_BYTES + len(tail))
            start -= size
            file.seek(start)
            tail = file.read(size) + tail
    complete = tail[: tail.rfind(b"\n") + 1]
    return complete[complete.rfind(b"\n", 0, -1) + 1 :], start + len(complete)


def open_jsonl(path: Path) -> FileIO:
    """A file to append lines to, without buffering; an incomplete last line is removed first."""
    file = path.open("ab", buffering=0)
    try:
        file.truncate(last_line(path)[1])
        file.seek(0, os.SEEK_END)
    except OSError:
        file.close()
        raise
    return file


class JsonlTail:
    """Follows a JSONL file that another process appends to; yields each complete line once."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._position = path.stat().st_size if from_end and path.exists() else 0

    def new(self) -> Iterator[dict[str, Any]]:
        """The lines since the last call."""
        try:
            size = self._path.stat().st_size
            self._position = min(self._position, size)
            if self._position == size:
                return
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read(size - self._position)
        except FileNotFoundError:
            return
        complete = data[: data.rfind(b"\n") + 1]
        self._position += len(complete)
        for line in complete.splitlines():
            try:
                value = json.loads(line)
            except ValueError:  # truncated and written again while it was read
                continue
            if isinstance(value, dict):
                yield value
