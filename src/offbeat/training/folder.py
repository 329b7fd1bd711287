"""A run's folder: settings, records, trace and checkpoint, consistent after a kill at any moment.

Records and trace are appended line by line; a checkpoint knows how long they were when it was
taken, and resuming cuts them back to that. What clients keep may lie here too, in a file `memory`.
One process at a time holds the folder.
"""

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from io import BufferedWriter
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from offbeat.errors import InputError, setting_name
from offbeat.files import replace_file
from offbeat.renamed import present_record
from offbeat.training import checkpoint, settings_file
from offbeat.training.checkpoint import Checkpoint

_JSONL_FILES = (
    "trace",
    "records",
)  # in the order of writing: no record is ahead of the trace
FAILURE_FILE = "failure.json"


class RunFolder:
    """The folder of one run, locked until it is closed; made by `begin` or `resume`."""

    def __init__(self, path: Path, lock: FileLock, resumed: Checkpoint | None) -> None:
        self.path = path
        self.resumed = resumed
        self.version: int | None = resumed.facts["version"] if resumed else None  # of the last checkpoint
        self._lock = lock
        lengths = resumed.facts["lengths"] if resumed else dict.fromkeys(_JSONL_FILES, 0)
        for name in _JSONL_FILES:
            _check_length(path / f"{name}.jsonl", lengths[name])
        self._files = {name: _open_truncated(path / f"{name}.jsonl", lengths[name]) for name in _JSONL_FILES}
        (path / FAILURE_FILE).unlink(missing_ok=True)  # of an earlier attempt

    @classmethod
    def begin(cls, path: Path, asked: Mapping[str, Any]) -> Self:
        """Start a run in a folder without one."""
        check_free(path)
        lock = _acquire_lock(path)
        try:
            _check_no_run(path)  # now that the folder is locked
            settings_file.write(path, asked)
            return cls(path, lock, None)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def resume(cls, path: Path, asked: Mapping[str, Any]) -> Self:
        """Resume a run from its last checkpoint, or from the beginning if it has none."""
        settings_file.compare(path, asked)
        lock = _acquire_lock(path)
        try:
            place = path / "checkpoint" / "state.safetensors"
            if asked.get("clip") is not None and not place.exists():
                _check_ledger_kept(path)
            return cls(path, lock, checkpoint.load(place) if place.exists() else None)
        except BaseException:
            lock.release()
            raise

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        """Append a line to records or trace."""
        self._files[name].write(json.dumps(line, allow_nan=False).encode() + b"\n")

    def save(self, state: Checkpoint) -> None:
        """Write a checkpoint, from which the run resumes."""
        lengths = {}
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            lengths[name] = file.tell()
        self._save(state, lengths)

    def take_back(self, name: str, state: Checkpoint) -> None:
        """Remove the last line, and resume from a state without it."""
        path = self.path / f"{name}.jsonl"
        text = path.read_bytes()
        length = text.rfind(b"\n", 0, len(text) - 1) + 1
        self.resumed = self._save(state, state.facts["lengths"] | {name: length})  # first, in case of a kill
        self._files[name].close()
        self._files[name] = _open_truncated(path, length)

    def flush(self) -> None:
        """Make the lines so far visible to other processes."""
        for file in self._files.values():
            file.flush()

    def fail(self, why: str) -> None:
        """Write why the run failed, until it is resumed."""
        replace_file(self.path / FAILURE_FILE, (json.dumps({"diverged": why}) + "\n").encode())

    def close(self) -> None:
        """Close the files and release the lock."""
        try:
            for file in self._files.values():
                file.close()
        finally:
            self._lock.release()

    def _save(self, state: Checkpoint, lengths: Mapping[str, int]) -> Checkpoint:
        saved = Checkpoint(state.facts | {"lengths": dict(lengths)}, state.tensors)
        checkpoint.save(self.path / "checkpoint" / "state.safetensors", saved)
        self.version = saved.facts["version"]
        return saved

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def check_free(path: Path) -> None:
    """Refuse a path where no run can start, without writing anything."""
    place = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not place.is_dir():
        raise InputError(f"{place} is a file: name a folder with {setting_name('out')}.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"{place} cannot be written to: name another {setting_name('out')}.")
    if (path / "lock").exists():
        _acquire_lock(path).release()
    _check_no_run(path)


def claim_folder(parent: Path, stem: str) -> Path:
    """Make the first folder of `stem-1`, `stem-2` ... that does not exist."""
    number = 1
    while True:
        path = parent / f"{stem}-{number}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        except OSError as error:
            raise InputError(
                f"{path} cannot be made ({error.strerror}): name a folder with {setting_name('out')}."
            ) from None
        else:
            return path


def read_jsonl(path: Path, name: str) -> Iterator[dict[str, Any]]:
    """The complete lines of records or trace, without one that a kill cut short."""
    with (path / f"{name}.jsonl").open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                found: dict[str, Any] = json.loads(line)
                yield present_record(found) if name == "records" else found


def _check_ledger_kept(path: Path) -> None:
    """Refuse to resume a private run that has lost the count of what it released."""
    if any(line["version"] > 0 for line in read_jsonl(path, "trace")):
        raise InputError(
            f"the private run in {path} has lost its checkpoint, which counts what it told of its clients: "
            "it cannot go on, and what another run tells adds up with it."
        )


def _acquire_lock(path: Path) -> FileLock:
    """Lock the folder; the operating system releases the lock when the process ends."""
    lock = FileLock(path / "lock")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(
            f"{path} is in use by another run: wait for it, or name another {setting_name('out')}."
        ) from None
    except (OSError, NotImplementedError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{path} cannot be written to ({reason}): name another {setting_name('out')}."
        ) from None
    return lock


def _check_no_run(path: Path) -> None:
    if (path / "settings.json").exists():
        raise InputError(
            f"{path} holds a run already: name another {setting_name('out')}, or go on with it by "
            f"'offbeat run --out {shlex.quote(str(path))} --resume'."
        )
    for name in ("records.jsonl", "trace.jsonl", "checkpoint", "memory", FAILURE_FILE):
        if (path / name).exists():
            raise InputError(
                f"{path} has a '{name}' that is not of a run: name another {setting_name('out')}."
            )


def _check_length(path: Path, length: int) -> None:
    if length and (not path.exists() or path.stat().st_size < length):
        raise InputError(
            f"{path} is shorter than when the checkpoint was taken: "
            "put it back, or start the run anew in another folder."
        )


def _open_truncated(path: Path, length: int) -> BufferedWriter:
    """The file, open for writing after its first `length` bytes."""
    file = path.open("ab")
    file.truncate(length)
    file.seek(0, os.SEEK_END)
    return file
