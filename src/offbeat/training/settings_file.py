"""The settings.json of a run: every setting, and the version of offbeat that started it."""

import json
import logging
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from offbeat.errors import InputError, setting_name
from offbeat.files import replace_file, with_checksum, without_checksum
from offbeat.training.experiment import Experiment, present_settings
from offbeat.training.schema import settings_of

FORMAT = 1  # of a run's folder; folders without a number have the first


def write(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a run and the version of offbeat."""
    _replace(folder, dict(settings) | _origin() | {"format": FORMAT})


def note(folder: Path, **facts: Any) -> None:
    """Add how the run computes: `engine_reason`, and the `execution_report` of `Snapshot.execution`."""
    _replace(folder, read(folder) | facts)


def revise(folder: Path, **changed: Any) -> None:
    """Change when a run ends; the version that started it stays as it is."""
    known = read(folder, verify=True)
    if known | changed != known:
        _replace(folder, known | changed)


def read(folder: Path, *, verify: bool = False) -> dict[str, Any]:
    """The settings of the run in a folder; `verify` their checksum in order to continue the run."""
    try:
        settings = json.loads((folder / "settings.json").read_bytes())
        if verify:
            without_checksum(settings)
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f"{folder} contains no run to resume: leave out {setting_name('resume')} to start one there."
        ) from None
    except (ValueError, AttributeError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise InputError(
            f"{folder / 'settings.json'} is damaged or was edited: restore it from a backup, or start the "
            "run again in another folder."
        )
    settings.pop("checksum", None)
    form = settings.get("format", 1)
    if type(form) is not int or form > FORMAT:
        raise InputError(
            f"{folder} was written by a newer version of offbeat ({settings.get('version')}): use that one."
        )
    return present_settings(settings)


def main_metric(settings: Mapping[str, Any]) -> tuple[str, bool]:
    """The metric by which a run is compared with others, and whether higher values are better."""
    name, goal = next(iter(settings.get("metrics", {"accuracy": "max"}).items()))
    return name, goal == "max"


def compare(folder: Path, settings: Mapping[str, Any]) -> None:
    """Reject settings that differ from those of the run; warn if the version of offbeat differs."""
    known = read(folder, verify=True)
    before, now = _flat(known), _flat(json.loads(json.dumps(dict(settings))))
    for name, each in settings_of(Experiment).items():  # a setting that is newer than the run
        if name in now and name != "parameters":
            before.setdefault(name, each.default)
    movable = {
        name for name, each in settings_of(Experiment).items() if each.info.placement or each.info.revisable
    }
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
            f"give these as they were to resume it, or name another {setting_name('out')}."
        )
    origin = _origin()
    if any(known.get(name) != value for name, value in origin.items()):
        logging.getLogger("offbeat").warning(
            "%s was started by %s (commit %s) and is resumed with %s (commit %s): results may differ.",
            folder,
            *(known.get(name) for name in origin),
            *origin.values(),
        )


def _replace(folder: Path, settings: Mapping[str, Any]) -> None:
    # A folder is recognised as a run by this file, so it is on disk before all other files.
    text = json.dumps(with_checksum(json.loads(json.dumps(settings))), indent=1)
    replace_file(folder / "settings.json", f"{text}\n".encode())


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name, with `parameters.local_lr` for a hyperparameter."""
    own = dict(settings)
    parameters = own.pop("parameters", {})
    return own | {f"parameters.{name}": value for name, value in parameters.items()}


def _word(value: Any) -> str:
    return "not set" if value is None else str(value)


def _origin() -> dict[str, str | None]:
    """The version, and the commit if the package runs from a checkout; `+` marks uncommitted changes."""
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
