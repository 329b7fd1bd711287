"""A sweep as drawings: a line for each row over what is swept, which breaks off where a run diverged."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from experiments.reproduce.measures import AccuracyMeasure
from experiments.reproduce.records import Curve
from experiments.reproduce.study import Cell
from experiments.reproduce.tables import Swept, entries_of, whole_seeds
from offbeat.report.chart import Axis, Figure, Series
from offbeat.report.svg import draw, standalone


def drawings(made: Swept, cells: tuple[Cell, ...], found: Mapping[str, Curve], name: str) -> dict[str, str]:
    """SVG by file name, one for all rows that are named alike up to a colon; none without runs.

    What stands after the colon is the name of a line, and looks the same in all of them.
    """
    if not isinstance(made.measure, AccuracyMeasure):
        return {}
    merits: dict[str, dict[str, dict[float, float]]] = {}
    for (row, column), entry in entries_of(whole_seeds(cells, found)[0], found, made.measure).items():
        group, _, label = row.rpartition(": ")
        merits.setdefault(group, {}).setdefault(label, {})[float(column)] = entry.figure.merit
    labels = list(dict.fromkeys(label for rows in merits.values() for label in rows))
    files = {}
    for number, (group, rows) in enumerate(merits.items(), 1):
        lines = tuple(
            Series(
                labels.index(label), label, np.array([x for x, _ in piece]), np.array([y for _, y in piece])
            )
            for label, points in rows.items()
            for piece in _pieces(sorted(points.items()))
        )
        if lines:
            title = Axis(f"{group}: accuracy" if group else "accuracy", made.measure.unit)
            figure = Figure(name, caption(made), made.over, title, lines)
            files[f"{name}{f'-{number}' if len(merits) > 1 else ''}.svg"] = standalone(
                draw(figure), dark=True
            )
    return files


def caption(made: Swept) -> str:
    """What the drawings show."""
    return f"Accuracy by {made.over.label}, where no run diverged"


def _pieces(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Neighbours that all have a figure."""
    runs = groupby(points, key=lambda point: math.isfinite(point[1]))
    return [list(piece) for finite, piece in runs if finite]
