"""A figure as data: lines over shared axes, from which its drawing and its table follow."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offbeat.report.bins import Numbers
from offbeat.report.scale import PLAIN, Unit

_MOST = 240  # points of a line, about: more than a screen shows of one this wide
_FORMULA = ("=", "+", "-", "@")  # how spreadsheets know one


@dataclass(frozen=True)
class Line:
    """One run's part of a figure; several of the same style and label are pieces of one line."""

    style: int  # the same for a run in all figures
    label: str
    xs: Numbers
    ys: Numbers
    tops: Numbers | None = None  # the upper edge of a band above the line


@dataclass(frozen=True)
class Axis:
    """What is measured."""

    label: str
    unit: Unit = PLAIN
    zero: bool = False  # whether it begins at zero
    log: bool = False  # whether the same factor is the same length everywhere; all numbers are positive


@dataclass(frozen=True)
class Figure:
    """Lines that share their axes; without lines the notes say why."""

    name: str
    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...] = ()
    notes: tuple[str, ...] = ()
    top: str = "at most"  # what a band's upper edge is
    stair: float = 0.0  # how wide each point is; 0: points are joined by straight lines
    runs: tuple[str, ...] = ()  # of its page: where there are several, each line is named


def table(figure: Figure) -> str:
    """Its numbers as CSV, all of them.

    They are in base units, whatever size the drawing shows them in, and each column's name ends in its
    unit: seconds, bytes, or the part of 1 that the drawing has in percent. Counts have none,
    and a rate is what its label says.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    banded = any(line.tops is not None for line in figure.lines)
    heads = [(figure.x.label, figure.x.unit), (figure.y.label, figure.y.unit)]
    heads += [(figure.top, figure.y.unit)] if banded else []
    writer.writerow(["run", *(", ".join(filter(None, (label, _base(unit)))) for label, unit in heads)])
    for line in figure.lines:
        name = f"'{line.label}" if line.label.startswith(_FORMULA) else line.label
        columns = [line.xs, line.ys] + ([line.ys if line.tops is None else line.tops] if banded else [])
        for row in zip(*(column.tolist() for column in columns), strict=True):
            writer.writerow([name, *(f"{value:.15g}" for value in row)])
    return file.getvalue()


def _base(unit: Unit) -> str:
    """What one of it is; percent have no name for that."""
    return next((size.name for size in unit.sizes if size.each == 1), "part of 1")


def thinned(xs: Numbers, ys: Numbers) -> Sequence[int]:
    """Places of the points that a drawing needs: of each stretch the first, the lowest and the highest."""
    if len(xs) <= _MOST:
        return range(len(xs))
    kept = {len(xs) - 1}
    for part in np.array_split(np.arange(len(xs)), _MOST // 3):
        kept |= {int(part[0]), int(part[ys[part].argmin()]), int(part[ys[part].argmax()])}
    return sorted(kept)
