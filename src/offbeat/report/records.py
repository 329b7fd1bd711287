"""A run's records as columns of numbers."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from offbeat.report.bins import Numbers
from offbeat.report.digest import DamagedError

NAMES = ("version", "time", "trips", "loss", "accuracy", "epsilon", "bytes", "dropped", "lost", "elapsed")
_ALWAYS = ("version", "time", "trips")
_FAR = 1e150  # no run counts, or diverges, as far

Records = Mapping[str, Numbers]  # NaN: not recorded


def columns(lines: Iterable[Any]) -> Records:
    """All records; a number that a run cannot have written is refused."""
    rows = []
    last = -1.0
    for line in lines:
        if not isinstance(line, Mapping):
            raise DamagedError("a line is no record")
        if "simulated_epsilon" in line:
            line = {**line, "epsilon": line["simulated_epsilon"]}
        row = [_number(line.get(name), name) for name in NAMES]
        if any(math.isnan(row[NAMES.index(name)]) for name in _ALWAYS) or row[0] <= last:
            raise DamagedError("a line is no record, or out of order")
        last = row[0]
        rows.append(row)
    table = np.array(rows, dtype=np.float64).reshape(len(rows), len(NAMES))
    return {name: table[:, place] for place, name in enumerate(NAMES)}


def _number(value: Any, name: str) -> float:
    if value is None:
        return math.nan
    if type(value) not in (int, float) or not abs(value) < _FAR:
        raise DamagedError(f"a {name} is {str(value)[:40]!r}")
    return float(value)
