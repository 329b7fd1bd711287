"""Which trackers a run has, and where it is kept so that a resumed run finds them again."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from offbeat.errors import InputError

_FILE = "trackers.json"


class Place(NamedTuple):
    """A folder, a project or an address, and the name that the run has there."""

    place: str
    run: str


@dataclass(frozen=True)
class Wanted:
    """Places that were asked for, by tracker; None where it was not."""

    tensorboard: str | None = None  # a folder, in which each run gets its own
    wandb: str | None = None  # a project
    mlflow: str | None = None  # an address


class Placed(NamedTuple):
    """Where a run is, by tracker."""

    tensorboard: Place | None = None
    wandb: Place | None = None
    mlflow: Place | None = None


def remember(folder: Path, placed: Placed) -> None:
    """Write them into a run's folder."""
    held = {name: list(place) for name, place in placed._asdict().items() if place is not None}
    if held:
        (folder / _FILE).write_text(json.dumps(held, indent=1) + "\n")


def remembered(folder: Path) -> Placed:
    """What `remember` wrote there, if anything."""
    path = folder / _FILE
    if not path.exists():
        return Placed()
    try:
        held: Mapping[str, list[str]] = json.loads(path.read_text())
        return Placed(**{name: Place(*place) for name, place in held.items()})
    except (ValueError, TypeError, AttributeError):
        raise InputError(
            f"{path} cannot be read: delete it, and the trackers begin new runs if they are named again."
        ) from None
