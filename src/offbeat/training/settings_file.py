"""A run's settings.json: all that was asked for, and which code it was made with."""

import json
import logging
import os
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from offbeat import algorithms
from offbeat.errors import InputError
from offbeat.schedule import dispatch

FORMAT = 1  # of a run's folder; a folder that says nothing is of the first
_WHERE = ("--workers", "--ray-address")  # where it is computed, which may change on the way


def write(folder: Path, settings: Mapping[str, Any]) -> None:
    """What was asked for, with the code that is running."""
    _replace(folder, dict(settings) | _origin() | {"format": FORMAT})


def lengthen(folder: Path, rounds: int) -> None:
    """Let the run in a folder end later; which code it was begun with stays."""
    _replace(folder, read(folder) | {"rounds": rounds})


def read(folder: Path) -> dict[str, Any]:
    """The settings of the run in a folder."""
    try:
        settings = json.loads((folder / "settings.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{folder} holds no run to resume: leave out --resume to start one there.") from None
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise InputError(f"{folder / 'settings.json'} is damaged: start the run anew in another folder.")
    form = settings.get("format", 1)
    if type(form) is not int or form > FORMAT:
        raise InputError(
            f"{folder} was written by a newer version of offbeat ({settings.get('version')}): use that one."
        )
    return renamed(settings)


def renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """With today's names of settings, methods and dispatches; `amplified` never was a guarantee."""
    kept = dict(settings)
    if "amplified" in kept:
        kept.setdefault("simulate_amplification", kept.pop("amplified"))
    if isinstance(kept.get("algorithm"), str):
        kept["algorithm"] = algorithms.current_name(kept["algorithm"])
    if isinstance(kept.get("dispatch"), str):
        kept["dispatch"] = dispatch.current_name(kept["dispatch"])
    return kept


def compare(folder: Path, asked: Mapping[str, Any]) -> None:
    """Refuse to go on with other settings, naming the differences; other code is worth a warning."""
    known = read(folder)
    before, now = _flat(known), _flat(json.loads(json.dumps(dict(asked))))
    names = [name for name in before | now if name in now or name.startswith("--set ")]
    names = [name for name in names if name not in _WHERE]
    different = [
        f"{name} was {_word(before.get(name))} and is now {_word(now.get(name))}"
        for name in names
        if before.get(name) != now.get(name)
    ]
    if different:
        raise InputError(
            f"{folder} was started with other settings ({'; '.join(different)}): "
            "leave these out to resume it, or name another --out."
        )
    origin = _origin()
    if any(known.get(name) != value for name, value in origin.items()):
        logging.getLogger("offbeat").warning(
            "%s was begun by version %s (commit %s) and goes on with %s (commit %s): the result may differ.",
            folder,
            *(known.get(name) for name in origin),
            *origin.values(),
        )


def _replace(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write, then move into place."""
    part = folder / ".settings.json.part"
    with part.open("w") as file:
        file.write(json.dumps(settings, indent=1) + "\n")
        file.flush()
        os.fsync(
            file.fileno()
        )  # a run is known by it, so it is on the disk before all that is lost without it
    part.replace(folder / "settings.json")


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """By the words of the command line."""
    own = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    method = {"the method": own.pop("--algorithm", None)}
    parameters = own.pop("--parameters", {})
    return method | own | {f"--set {name}": value for name, value in parameters.items()}


def _word(value: Any) -> str:
    return "not set" if value is None else str(value)


def _origin() -> dict[str, str | None]:
    """The version, and the commit where the package runs from its own checkout; `+`: with changes."""
    here = Path(__file__).parent
    commit = None
    if _git(here, "ls-files", "--error-unmatch", "__init__.py") is not None:
        changed = _git(here, "status", "--porcelain", "--untracked-files=no", ".")
        commit = f"{_git(here, 'rev-parse', 'HEAD')}{'+' if changed else ''}"
    return {"version": version("offbeat"), "commit": commit}


def _git(folder: Path, *words: str) -> str | None:
    command = ["git", "--no-optional-locks", *words]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
