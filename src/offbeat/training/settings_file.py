"""A run's settings.json: every setting, and the version of the code that runs it."""

import json
import logging
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from offbeat.errors import InputError, setting_name
from offbeat.files import replace_file
from offbeat.training.experiment import Experiment, present_settings
from offbeat.training.schema import settings_of

FORMAT = 1  # of a run's folder; folders without a number have the first


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
        raise InputError(
            f"{folder} holds no run to resume: leave out {setting_name('resume')} to start one there."
        ) from None
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise InputError(f"{folder / 'settings.json'} is damaged: start the run anew in another folder.")
    form = settings.get("format", 1)
    if type(form) is not int or form > FORMAT:
        raise InputError(
            f"{folder} was written by a newer version of offbeat ({settings.get('version')}): use that one."
        )
    return present_settings(settings)


def compare(folder: Path, asked: Mapping[str, Any]) -> None:
    """Reject other settings than a run began with, naming the differences; warn of other code."""
    known = read(folder)
    before, now = _flat(known), _flat(json.loads(json.dumps(dict(asked))))
    movable = {name for name, each in settings_of(Experiment).items() if each.info.placement}
    names = [name for name in before | now if name in now or name.startswith("parameters.")]
    names = [name for name in names if name not in movable]
    different = [
        f"{setting_name(name)} was {_word(before.get(name))} and is now {_word(now.get(name))}"
        for name in names
        if before.get(name) != now.get(name)
    ]
    if different:
        raise InputError(
            f"{folder} was started with other settings ({'; '.join(different)}): "
            f"leave these out to resume it, or name another {setting_name('out')}."
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
    # A run is known by this file, so it is on disk before everything that would be lost without it.
    replace_file(folder / "settings.json", (json.dumps(settings, indent=1) + "\n").encode())


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name, with `parameters.local_lr` for a hyperparameter."""
    own = dict(settings)
    parameters = own.pop("parameters", {})
    return own | {f"parameters.{name}": value for name, value in parameters.items()}


def _word(value: Any) -> str:
    return "not set" if value is None else str(value)


def _origin() -> dict[str, str | None]:
    """The version, and the commit if the package runs from its own checkout; `+` tells of changes."""
    here = Path(__file__).parent.parent
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
