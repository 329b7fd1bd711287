"""The folder of a run: settings, records, trace and checkpoint, consistent even if the process is killed.

Records and trace are appended line by line. A checkpoint contains their lengths and checksums, and resuming
truncates them to these lengths. The checkpoint before the last one is kept as well: where the last one is
damaged or missing, a run continues from it. The state of clients may be here as well, in a file `memory`. The
folder is locked by one process at a time. Only the owner can read the records and the trace of a private run:
they show who contributed when.
"""

import json
import logging
import math
import os
import shlex
import zlib
from collections.abc import Iterator, Mapping
from io import BufferedWriter
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from offbeat.errors import InputError, setting_name
from offbeat.files import PART_SUFFIX, replace_file
from offbeat.renamed import present_record
from offbeat.training import checkpoint, settings_file
from offbeat.training.checkpoint import Checkpoint

_JSONL_FILES = ("trace", "records")  # in the order of writing: no record is ahead of the trace
FAILURE_FILE, STUDY_FILE = "failure.json", "study.json"  # the latter of the folder of a study
_NEWEST, _PREVIOUS = "state.safetensors", "previous.safetensors"  # in the folder `checkpoint`
_LOG = logging.getLogger("offbeat")


class RunFolder:
    """The folder of one run, locked until it is closed; made by `begin` or `resume`."""

    def __init__(
        self,
        path: Path,
        lock: FileLock,
        resumed: Checkpoint | None,
        private: bool = False,
        notice: str | None = None,
    ) -> None:
        self.path = path
        self.resumed = resumed
        self.notice = notice  # what was lost, if the last checkpoint could not be used
        self.version: int | None = resumed.facts["version"] if resumed else None  # of the last checkpoint
        self._lock = lock
        lengths = resumed.facts["lengths"] if resumed else dict.fromkeys(_JSONL_FILES, 0)
        known = resumed.facts.get("checksums", {}) if resumed else {}  # earlier versions wrote none
        self._checksums = {
            name: _check_lines(path / f"{name}.jsonl", lengths[name], known.get(name))
            for name in _JSONL_FILES
        }
        self._mode = 0o600 if private else None
        self._files = {
            name: _open_truncated(path / f"{name}.jsonl", lengths[name], self._mode) for name in _JSONL_FILES
        }
        (path / FAILURE_FILE).unlink(missing_ok=True)  # of an earlier attempt

    @classmethod
    def begin(cls, path: Path, settings: Mapping[str, Any]) -> Self:
        """Start a run in a folder without one."""
        check_free(path)
        lock = _acquire_lock(path)
        try:
            _check_no_run(path)  # again, now that the folder is locked
            settings_file.write(path, settings)
            return cls(path, lock, None, settings.get("clip") is not None)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def resume(cls, path: Path, settings: Mapping[str, Any]) -> Self:
        """Resume a run from its last checkpoint, or from the beginning if it has none."""
        settings_file.compare(path, settings)
        lock = _acquire_lock(path)
        try:
            private = settings.get("clip") is not None
            resumed, notice = _load_checkpoint(path, private=private)
            if notice is not None:
                _LOG.warning("%s", notice)
            return cls(path, lock, resumed, private, notice)
        except BaseException:
            lock.release()
            raise

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        """Append a line to records or trace."""
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        self._files[name].write(data)
        self._checksums[name] = zlib.crc32(data, self._checksums[name])

    def note(self, **facts: Any) -> None:
        """Add facts on how the run computes to its settings."""
        settings_file.note(self.path, **facts)

    def save(self, state: Checkpoint) -> None:
        """Write a checkpoint, from which the run resumes."""
        lengths = {}
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            lengths[name] = file.tell()
        self._save(state, lengths)

    def take_back(self, name: str, state: Checkpoint) -> None:
        """Remove the last line of a file, and resume from a state without it."""
        path = self.path / f"{name}.jsonl"
        text = path.read_bytes()
        length = text.rfind(b"\n", 0, len(text) - 1) + 1
        self._checksums[name] = zlib.crc32(text[:length])
        self.resumed = self._save(state, state.facts["lengths"] | {name: length})  # first, in case of a kill
        self._files[name].close()
        self._files[name] = _open_truncated(path, length, self._mode)

    def flush(self) -> None:
        """Make the lines so far visible to other processes."""
        for file in self._files.values():
            file.flush()

    def write_clients(self, version: int, values: Mapping[str, Mapping[str, float]]) -> None:
        """Write the metrics of each client; those that are not defined for a client are null."""
        found = {
            metric: {name: value if math.isfinite(value) else None for name, value in each.items()}
            for metric, each in values.items()
        }
        text = json.dumps({"version": version, "clients": found}) + "\n"
        replace_file(self.path / "clients.json", text.encode())

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
        counted = {"lengths": dict(lengths), "checksums": dict(self._checksums)}
        saved = Checkpoint(state.facts | counted, state.tensors)
        newest, previous = (self.path / "checkpoint" / name for name in (_NEWEST, _PREVIOUS))
        if newest.exists():
            link = previous.with_name(previous.name + PART_SUFFIX)
            link.unlink(missing_ok=True)
            os.link(newest, link)
            link.replace(previous)
            link.unlink(missing_ok=True)  # renaming does nothing where both are links to one file
        checkpoint.save(newest, saved)
        self.version = saved.facts["version"]
        return saved

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def check_free(path: Path) -> None:
    """Reject a path where no run can start, without writing anything."""
    existing = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not existing.is_dir():
        raise InputError(f"{existing} is a file: name a folder with {setting_name('out')}.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"{existing} cannot be written to: name another {setting_name('out')}.")
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
    """The complete lines of records or trace; an incomplete last line is skipped."""
    file_path = path / f"{name}.jsonl"
    with file_path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError):
                    found = None
                if not isinstance(found, dict):
                    raise InputError(f"{file_path} is damaged in line {number}: restore it from a backup.")
                yield present_record(found) if name == "records" else found


def _load_checkpoint(path: Path, *, private: bool) -> tuple[Checkpoint | None, str | None]:
    """The checkpoint to resume from, if there was any; and a sentence if it is not the last one."""
    newest, previous = (path / "checkpoint" / name for name in (_NEWEST, _PREVIOUS))
    if newest.exists():
        try:
            return checkpoint.load(newest), None
        except InputError as error:
            problem = str(error).rpartition(":")[0]
    elif not previous.exists() and not _has_steps(path):
        return None, None
    else:
        problem = f"the checkpoint {newest} is missing"
    if private:
        raise InputError(
            f"{problem}, which counts what this private run has released: restore it from a backup; without "
            "it the run cannot continue, and what another run releases adds to what this one did."
        )
    try:
        resumed = checkpoint.load(previous)
    except InputError:
        raise InputError(
            f"{problem}, and there is no earlier one that can be read: restore it from a backup, or start "
            "the run again in another folder."
        ) from None
    version = resumed.facts["version"]
    return resumed, (
        f"{problem}: the run continues from the checkpoint before it, of version {version}; what was "
        "computed and accepted since that step is lost."
    )


def _has_steps(path: Path) -> bool:
    """Whether the trace of a run has a server step, before which there is always a checkpoint."""
    if not (path / "trace.jsonl").exists():
        return False
    return any(line.get("version", 1) > 0 for line in read_jsonl(path, "trace"))


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
    if (path / STUDY_FILE).exists():
        raise InputError(
            f"{path} already contains a study: name another {setting_name('out')}, or resume it with "
            f"'offbeat tune --out {shlex.quote(str(path))} --resume'."
        )
    if (path / "settings.json").exists():
        raise InputError(
            f"{path} already contains a run: name another {setting_name('out')}, or resume it with "
            f"'offbeat run --out {shlex.quote(str(path))} --resume'."
        )
    for name in ("records.jsonl", "trace.jsonl", "checkpoint", "memory", FAILURE_FILE):
        if (path / name).exists():
            raise InputError(
                f"{path} contains a '{name}' but no settings of a run: name another {setting_name('out')}."
            )


def _check_lines(path: Path, length: int, checksum: int | None) -> int:
    """The checksum of the first `length` bytes, which must be that of the checkpoint."""
    data = b""
    if length:
        data = path.read_bytes()[:length] if path.exists() else b""
        if len(data) < length:
            raise InputError(
                f"{path} is shorter than when the checkpoint was taken: "
                "restore it from a backup, or start the run again in another folder."
            )
    found = zlib.crc32(data)
    if checksum is not None and found != checksum:
        raise InputError(
            f"{path} has changed since the checkpoint was taken: "
            "restore it from a backup, or start the run again in another folder."
        )
    return found


def _open_truncated(path: Path, length: int, mode: int | None) -> BufferedWriter:
    """The file, open for writing after its first `length` bytes; a mode is also set on an existing file."""

    def create(name: str, flags: int) -> int:
        return os.open(name, flags, 0o666 if mode is None else mode)

    if mode is not None and path.exists():
        path.chmod(mode)
    file = open(path, "ab", opener=create)  # noqa: SIM115 - closed with the folder
    file.truncate(length)
    file.seek(0, os.SEEK_END)
    return file
