"""The tracker interface, protection from failing trackers, and the file with a run's trackers."""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from offbeat.errors import InputError


class Tracker(Protocol):
    """Receives every record of a run and a summary at the end."""

    def record(self, record: Mapping[str, Any]) -> None:
        """Log a record; one that was logged before has no effect."""
        ...

    def close(self, summary: Mapping[str, Any]) -> None:
        """The run ended or was stopped; see `run_state`."""
        ...


@dataclass(frozen=True)
class TrackerGroup:
    """All trackers of a run as one; they are not sent fields of records that are secret."""

    trackers: tuple[Tracker, ...] = ()
    secret: frozenset[str] = frozenset()

    def record(self, record: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.record(self._public(record))

    def close(self, summary: Mapping[str, Any]) -> None:
        last = summary.get("last")
        public = summary if last is None else {**summary, "last": self._public(last)}
        for tracker in self.trackers:
            tracker.close(public)

    def _public(self, record: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in record.items() if name not in self.secret}


class SafeTracker:
    """A tracker that is disabled after its first error, so that the run continues."""

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
    """The finite numbers of a record except the version, which is the step."""
    return {
        name: float(value)
        for name, value in record.items()
        if name != "version"
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    }


def flatten(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested settings as one level, with names such as `resolved.engine`."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value
    return found


def run_state(summary: Mapping[str, Any]) -> str:
    """The state of a run that is closed: `failed`, `stopped` (it can be resumed) or `finished`."""
    if summary.get("error"):
        return "failed"
    return "finished" if summary.get("finished") or summary.get("ended") else "stopped"


def first_line(error: Exception) -> str:
    """The type and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


_TRACKERS_FILE = "trackers.json"


class TrackedRun(NamedTuple):
    """A folder, a project or an address, and the identity of the run there."""

    place: str
    run: str


@dataclass(frozen=True)
class TrackerOptions:
    """The destination of each tracker; None: the tracker is not used."""

    tensorboard: str | None = None  # a folder, in which each run gets its own
    wandb: str | None = None  # a project
    mlflow: str | None = None  # an address


class TrackedRuns(NamedTuple):
    """The tracked run of each tracker."""

    tensorboard: TrackedRun | None = None
    wandb: TrackedRun | None = None
    mlflow: TrackedRun | None = None


def save_tracked_runs(folder: Path, placed: TrackedRuns) -> None:
    """Write the tracked runs to a run's folder."""
    held = {name: list(place) for name, place in placed._asdict().items() if place is not None}
    if held:
        (folder / _TRACKERS_FILE).write_text(json.dumps(held, indent=1) + "\n")


def load_tracked_runs(folder: Path) -> TrackedRuns:
    """Read what `save_tracked_runs` wrote, if anything."""
    path = folder / _TRACKERS_FILE
    if not path.exists():
        return TrackedRuns()
    try:
        held: Mapping[str, list[str]] = json.loads(path.read_text())
        return TrackedRuns(**{name: TrackedRun(*place) for name, place in held.items()})
    except (ValueError, TypeError, AttributeError):
        raise InputError(
            f"{path} cannot be read: delete it, and trackers that are named again start new runs."
        ) from None
