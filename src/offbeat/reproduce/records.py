"""Files of records, one line for each run, whole after a kill at any moment."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.errors import InputError


class Curve(NamedTuple):
    """What a run gave, by version, and under which circumstances."""

    versions: tuple[int, ...]
    times: tuple[float, ...]
    accuracies: tuple[float, ...]
    failure: str | None
    worst: tuple[float, float, float] | None  # of each buffer's stalest update: largest, mean, median
    seconds: float
    device: str
    date: str
    weights: str | None = None  # what tells those that it started from; None: random ones

    def reached(self, target: float) -> int | None:
        """The place of the first record that is as good."""
        return next((place for place, value in enumerate(self.accuracies) if value >= target), None)

    @property
    def best(self) -> float:
        """The highest point, even if it diverged later."""
        return max(self.accuracies, default=0.0)


def recorded(path: Path) -> dict[str, Curve]:
    """The runs of a file, by the key of their cell; a line that a kill cut short is left out."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            one = json.loads(line)
            try:
                found[str(one["key"])] = _curve(one)
            except (KeyError, TypeError):
                raise InputError(f"{path} holds a line that is no record: name another --out.") from None
    return found


def append(path: Path, record: Mapping[str, Any]) -> None:
    """One more line, on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("a") as file:
        file.write("\n" * torn + json.dumps(record, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _curve(one: Mapping[str, Any]) -> Curve:
    worst = one["staleness_of_worst"]
    return Curve(
        tuple(one["version"]),
        tuple(one["time"]),
        tuple(one["accuracy"]),
        one["failure"],
        None if worst is None else (worst[0], worst[1], worst[2]),
        one["seconds"],
        one["device"],
        one["date"],
        one.get("weights"),
    )
