"""What a server leaves in its run's folder for whoever started it: that it runs, and how it ended."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

STOP = "stop"  # a file of this name asks the server to save and end
SET_ASIDE = "set-aside"  # one of this name: it is not to use the uploads that wait in its buffer, once
_OUTCOME = "outcome.json"
_SERVER = "server.json"


class Outcome(NamedTuple):
    """How a run ended; neither `ended` nor `error` nor `stopped`: it took all its steps."""

    version: int | None  # the last that was saved
    ended: str | None = None  # why it ended before the last version asked for
    error: str | None = None  # what went wrong, in a sentence
    stopped: bool = False  # it was asked to, and can be resumed
    spent: dict[str, Any] | None = None  # privacy, where it is counted


class Server(NamedTuple):
    """The process that a run is in."""

    pid: int
    born: str | None  # when, as the operating system has it; a number may be given to somebody else later


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """The last thing that a server does."""
    _write(folder / _OUTCOME, outcome._asdict())


def read_outcome(folder: Path) -> Outcome | None:
    """None while there is none."""
    facts = _read(folder / _OUTCOME)
    return None if facts is None else Outcome(**facts)


def forget_outcome(folder: Path) -> None:
    """It is of an earlier server."""
    (folder / _OUTCOME).unlink(missing_ok=True)


def write_server(folder: Path) -> None:
    """Say that this process is the server."""
    _write(folder / _SERVER, Server(os.getpid(), _born(os.getpid()))._asdict())


def read_server(folder: Path) -> Server | None:
    """None while none has begun."""
    facts = _read(folder / _SERVER)
    return None if facts is None else Server(**facts)


def forget_server(folder: Path) -> None:
    """It is gone."""
    (folder / _SERVER).unlink(missing_ok=True)


def is_running(server: Server) -> bool:
    """Whether that very process is still there, and is more than a name in a table."""
    try:
        os.kill(server.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return _state(server.pid) not in ("Z", "X") and _born(server.pid) == server.born


def _state(pid: int) -> str | None:
    fields = _stat(pid)
    return fields[0] if fields else None


def _born(pid: int) -> str | None:
    fields = _stat(pid)
    return fields[19] if fields else None


def _stat(pid: int) -> list[str] | None:
    """From its state on; None where there is no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _write(path: Path, facts: dict[str, Any]) -> None:
    part = path.with_name(f".{path.name}.part")
    with part.open("w") as file:
        json.dump(facts, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return facts
