"""What a run tells a tracker, and how it goes on without one that fails.

Which trackers a run has, and where it is kept so that a resumed run finds them again.
"""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from offbeat.errors import InputError


class Tracker(Protocol):
    """A place that is told of every record, and at the end of all of them in short."""

    def record(self, record: Mapping[str, Any]) -> None:
        """One record of a run; one that the place holds already changes nothing."""
        ...

    def close(self, summary: Mapping[str, Any]) -> None:
        """The end, or the end for now: see `state`."""
        ...


@dataclass(frozen=True)
class TrackerGroup:
    """All that were asked for, as one."""

    trackers: tuple[Tracker, ...] = ()

    def record(self, record: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.record(record)

    def close(self, summary: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.close(summary)


class SafeTracker:
    """A tracker that may fail: after its first error it is left alone, and the run goes on."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker: Tracker | None = tracker

    def record(self, record: Mapping[str, Any]) -> None:
        if self._tracker is not None:
            try:
                self._tracker.record(record)
            except Exception as error:
                self._leave(error)

    def close(self, summary: Mapping[str, Any]) -> None:
        if self._tracker is not None:
            try:
                self._tracker.close(summary)
            except Exception as error:
                self._leave(error)

    def _leave(self, error: Exception) -> None:
        self._tracker = None
        logging.getLogger("offbeat").warning(
            "%s failed and gets no more records (%s); the run and its folder are not affected.",
            *(self._name, first_line(error)),
        )


def finite_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """What can be drawn: finite numbers by name, but for the version, which is their place."""
    return {
        name: float(value)
        for name, value in record.items()
        if name != "version"
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    }


def flatten(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested settings as one level, `resolved.engine` for one within another."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value
    return found


def run_state(summary: Mapping[str, Any]) -> str:
    """How a run stands when it is closed: `failed`, `stopped` (it can be resumed) or `finished`."""
    if summary.get("error"):
        return "failed"
    return "finished" if summary.get("finished") or summary.get("ended") else "stopped"


def first_line(error: Exception) -> str:
    """An error in a few words."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


_TRACKERS_FILE = "trackers.json"


class TrackedRun(NamedTuple):
    """A folder, a project or an address, and the name that the run has there."""

    place: str
    run: str


@dataclass(frozen=True)
class TrackerOptions:
    """Places that were asked for, by tracker; None where it was not."""

    tensorboard: str | None = None  # a folder, in which each run gets its own
    wandb: str | None = None  # a project
    mlflow: str | None = None  # an address


class TrackedRuns(NamedTuple):
    """Where a run is, by tracker."""

    tensorboard: TrackedRun | None = None
    wandb: TrackedRun | None = None
    mlflow: TrackedRun | None = None


def save_tracked_runs(folder: Path, placed: TrackedRuns) -> None:
    """Write them into a run's folder."""
    held = {name: list(place) for name, place in placed._asdict().items() if place is not None}
    if held:
        (folder / _TRACKERS_FILE).write_text(json.dumps(held, indent=1) + "\n")


def load_tracked_runs(folder: Path) -> TrackedRuns:
    """What `remember` wrote there, if anything."""
    path = folder / _TRACKERS_FILE
    if not path.exists():
        return TrackedRuns()
    try:
        held: Mapping[str, list[str]] = json.loads(path.read_text())
        return TrackedRuns(**{name: TrackedRun(*place) for name, place in held.items()})
    except (ValueError, TypeError, AttributeError):
        raise InputError(
            f"{path} cannot be read: delete it, and the trackers begin new runs if they are named again."
        ) from None
