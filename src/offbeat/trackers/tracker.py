"""What a run tells a tracker, and how it goes on without one that fails."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Tracker(Protocol):
    """A place that is told of every record, and at the end of all of them in short."""

    def record(self, record: Mapping[str, Any]) -> None:
        """One record of a run; one that the place holds already changes nothing."""
        ...

    def close(self, summary: Mapping[str, Any]) -> None:
        """The end, or the end for now: see `state`."""
        ...


@dataclass(frozen=True)
class Several:
    """All that were asked for, as one."""

    trackers: tuple[Tracker, ...] = ()

    def record(self, record: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.record(record)

    def close(self, summary: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.close(summary)


class Guarded:
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


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """What can be drawn: finite numbers by name, but for the version, which is their place."""
    return {
        name: float(value)
        for name, value in record.items()
        if name != "version"
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    }


def flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested settings as one level, `resolved.engine` for one within another."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value
    return found


def state(summary: Mapping[str, Any]) -> str:
    """How a run stands when it is closed: `failed`, `stopped` (it can be resumed) or `finished`."""
    if summary.get("error"):
        return "failed"
    return "finished" if summary.get("finished") or summary.get("ended") else "stopped"


def first_line(error: Exception) -> str:
    """An error in a few words."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
