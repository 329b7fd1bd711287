"""Files of records, one line for each run, whole after a kill at any moment."""

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.errors import InputError
from offbeat.training.experiment import Experiment, present_settings

# Settings that say where a run is computed and not what comes out; they are not part of a cell's key.
PLACE = ("data_dir", "engine", "device", "execution", "memory", "workers", "ray_address")
_DEFAULTS = {name: value for name, value in Experiment().settings().items() if name not in PLACE}


class Curve(NamedTuple):
    """What a run gave, by version, and under which circumstances."""

    versions: tuple[int, ...]
    times: tuple[float, ...]  # NaN: not recorded
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


def check_place(folder: Path) -> None:
    """Refuse a folder that cannot be made; one that is made to see that is removed."""
    made: list[Path] = []
    try:
        made += [each for each in (folder, *folder.parents) if not each.exists()]
        file = next((each for each in (folder, *folder.parents) if each.is_file()), None)
        if file is not None:
            raise InputError(f"{file} is a file: name a folder with --out.")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be made ({error.strerror or error}): name a folder with --out."
        ) from None
    finally:
        for each in made:
            with suppress(OSError):  # it was not made, or others have put something there
                each.rmdir()


def begin(path: Path) -> None:
    """Make the file where there is none, or refuse one that cannot be written to."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise InputError(
            f"{path} cannot be written to ({error.strerror or error}): name another --out."
        ) from None


def recorded(path: Path) -> dict[str, Curve]:
    """The runs of a file, by the key of their cell; a line that a kill cut short is left out."""
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error}): name another --out.") from None
    found = {}
    for number, line in enumerate(lines, 1):
        try:
            one = json.loads(line.decode())
            found[present_key(_text(one["key"]))] = _curve(one)
        except json.JSONDecodeError:
            continue
        except (KeyError, TypeError, ValueError, RecursionError):
            raise InputError(
                f"line {number} of {path} is no record: remove that line, or name another --out."
            ) from None
    return found


def present_key(key: str) -> str:
    """The key of a cell with the present names of settings, and the defaults of settings added since."""
    try:
        settings, *others = json.loads(key)
        return json.dumps([_DEFAULTS | present_settings(settings), *others], sort_keys=True)
    except (ValueError, TypeError, AttributeError):
        return key


def append(path: Path, record: Mapping[str, Any]) -> None:
    """One more line, on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("a") as file:
        file.write("\n" * torn + json.dumps(record, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _curve(one: Mapping[str, Any]) -> Curve:
    versions, accuracies = _numbers(one["version"], whole=True), _numbers(one["accuracy"], most=1.0)
    times = _numbers(one["time"]) or (nan,) * len(versions)
    worst = None if one["staleness_of_worst"] is None else _numbers(one["staleness_of_worst"])
    failure = one["failure"]
    weights = None if one.get("weights") is None else _text(one["weights"])
    if not len(versions) == len(times) == len(accuracies) or [*versions] != sorted({*versions}):
        raise ValueError("a curve goes from version to version")
    if not isinstance(failure, str) and (failure is not None or not versions):
        raise ValueError("a run has a curve, or says why not")
    if worst is not None and len(worst) != 3:
        raise ValueError("largest, mean and median are three")
    (seconds,) = _numbers([one["seconds"]])
    device, date = _text(one["device"]), _text(one["date"])
    return Curve(versions, times, accuracies, failure, worst, seconds, device, date, weights)


def _numbers(values: Any, *, most: float = sys.float_info.max, whole: bool = False) -> tuple[Any, ...]:
    kinds = (int,) if whole else (int, float)
    if not isinstance(values, list) or not all(type(each) in kinds and 0 <= each <= most for each in values):
        raise ValueError("these are no such numbers")
    return tuple(values)


def _text(value: Any) -> str:
    """What a page can show."""
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError("this is no line of text")
    return value
