"""A run's folder: settings, records, trace and checkpoint; a kill at any moment loses nothing whole.

Records and trace are appended line by line; a checkpoint knows how long they were when it was
taken, and resuming cuts them back to that. One process at a time holds the folder.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from offbeat import checkpoint
from offbeat.checkpoint import Checkpoint
from offbeat.errors import InputError

_LINES = ("records", "trace")


class Folder:
    """The folder of one run, held until closed."""

    def __init__(self, path: Path, settings: Mapping[str, Any], *, resume: bool) -> None:
        self.path = path
        self.resumed: Checkpoint | None = None
        self._lock = _hold(path)
        try:
            self._open(settings, resume)
        except BaseException:
            self._lock.release()
            raise

    def _open(self, settings: Mapping[str, Any], resume: bool) -> None:
        known = read_settings(self.path) if (self.path / "settings.json").exists() else None
        if known is not None and not resume:
            raise InputError(
                f"{self.path} holds a run already: add --resume to go on with it, or name another --out."
            )
        if known is None and resume:
            raise InputError(f"{self.path} holds no run to resume: leave out --resume to start one.")
        if known is None:
            _write(self.path / "settings.json", dict(settings) | _origin())
        elif differences := _differences(known, settings):
            raise InputError(f"{self.path} was started with other settings: {'; '.join(differences)}.")
        if (self.path / "checkpoint" / "state.safetensors").exists():
            self.resumed = checkpoint.load(self.path / "checkpoint" / "state.safetensors")
        lengths = self.resumed.facts["lengths"] if self.resumed else dict.fromkeys(_LINES, 0)
        self._files = {name: (self.path / f"{name}.jsonl").open("ab") for name in _LINES}
        for name, file in self._files.items():
            file.truncate(lengths[name])
            file.seek(0, os.SEEK_END)

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        """One more line of records or trace, whole."""
        self._files[name].write(json.dumps(line, allow_nan=False).encode() + b"\n")

    def save(self, state: Checkpoint) -> None:
        """Make everything up to here the state to resume from."""
        lengths = {}
        for name, file in self._files.items():
            file.flush()
            lengths[name] = file.tell()
        facts = state.facts | {"lengths": lengths}
        checkpoint.save(self.path / "checkpoint" / "state.safetensors", Checkpoint(facts, state.tensors))

    def flush(self) -> None:
        """Let other processes see the lines so far."""
        for file in self._files.values():
            file.flush()

    def close(self) -> None:
        """Let go of the folder."""
        for file in self._files.values():
            file.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of the run in a folder."""
    try:
        settings: dict[str, Any] = json.loads((path / "settings.json").read_text())
    except FileNotFoundError:
        raise InputError(f"{path} holds no run: name a folder that 'offbeat run --out' wrote.") from None
    except ValueError as error:
        raise InputError(
            f"{path / 'settings.json'} cannot be read ({error}): start the run anew elsewhere."
        ) from None
    return settings


def read_lines(path: Path, name: str) -> Iterator[dict[str, Any]]:
    """The whole lines of records or trace; one that a kill cut short is left out."""
    with (path / f"{name}.jsonl").open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def next_free(parent: Path, stem: str) -> Path:
    """A folder name that nobody uses yet."""
    number = 1
    while (parent / f"{stem}-{number}").exists():
        number += 1
    return parent / f"{stem}-{number}"


def _hold(path: Path) -> FileLock:
    """The operating system lets go of it when the process ends, however it ends."""
    lock = FileLock(path / "lock")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(f"{path} is in use by another run: wait for it, or name another --out.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be written to ({error.strerror}): name another --out.") from None
    return lock


def _differences(known: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    plain = json.loads(json.dumps(dict(asked)))
    return [
        f"{name} was {known.get(name)}, now {value}"
        for name, value in plain.items()
        if known.get(name) != value
    ]


def _write(path: Path, content: Mapping[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)


def _origin() -> dict[str, Any]:
    """The version, and the commit where the package runs from its own checkout."""
    here = Path(__file__).parent
    commit = None
    if _git(here, "ls-files", "--error-unmatch", Path(__file__).name) is not None:
        commit = _git(here, "rev-parse", "HEAD")
    return {"version": version("offbeat"), "commit": commit}


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
