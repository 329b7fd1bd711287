"""Axes: the units they are shown in, where their ticks go, and numbers as people read them.

A figure as data: lines over shared axes, from which its drawing and its table follow.
"""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from offbeat.report.trace import Floats

_NICE = (1.0, 2.0, 5.0, 10.0)
_FLAT = 1e-4  # of the largest number: what spreads less is shown as all the same
_TINY = 1e-300  # numbers below it are drawn as zero: a tick's distance would not be a normal number
_DECADES = 5  # up to which an axis by factors has ticks at threes, too
_AROUND = 0.05  # of it: how far an axis then goes to both sides


class UnitSize(NamedTuple):
    """One size of a unit."""

    least: float  # from which on it is used
    each: float
    name: str


@dataclass(frozen=True)
class Unit:
    """Sizes in which a quantity is shown, from small to large."""

    sizes: tuple[UnitSize, ...]
    whole: bool = False  # whether there is nothing between two numbers

    def size(self, largest: float) -> UnitSize:
        """The one for numbers up to `largest`."""
        return [self.sizes[0], *(size for size in self.sizes if size.least <= largest)][-1]

    def say(self, value: float) -> str:
        """One number, by itself."""
        size = self.size(abs(value))
        number = value / size.each
        return f"{format_number(number, whole=self.whole and size.each == 1)} {size.name}".strip()


PLAIN = Unit((UnitSize(0, 1, ""),))
COUNT = Unit((UnitSize(0, 1, ""), UnitSize(2e4, 1e3, "thousand"), UnitSize(2e6, 1e6, "million")), whole=True)
SECONDS = Unit(
    (
        UnitSize(0, 1, "s"),
        UnitSize(180, 60, "min"),
        UnitSize(10_800, 3600, "h"),
        UnitSize(259_200, 86_400, "d"),
    )
)
BYTES = Unit(
    (
        UnitSize(0, 1, "B"),
        UnitSize(1e3, 1e3, "kB"),
        UnitSize(1e6, 1e6, "MB"),
        UnitSize(1e9, 1e9, "GB"),
        UnitSize(1e12, 1e12, "TB"),
    )
)
PERCENT = Unit((UnitSize(0, 0.01, "%"),))


class AxisScale(NamedTuple):
    """A stretch of an axis and its ticks."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False  # whether the same factor is the same length everywhere

    def place(self, value: float) -> float:
        """Where a number lies, from 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear_scale(
    low: float, high: float, size: UnitSize, wanted: int, *, snug: bool, whole: bool = False
) -> AxisScale:
    """An axis for numbers from `low` to `high`; unless it is snug, it begins and ends at ticks."""
    largest = max(abs(low), abs(high))
    if largest < _TINY:
        low = high = largest = 0.0
    if high - low <= _FLAT * largest:  # nothing to spread out
        side = _AROUND * largest or size.each
        low, high = low - (side if largest else 0.0), high + side
    step = _step((high - low) / size.each, wanted)
    if whole and size.each == 1 and step < 1:
        step, low, high = 1.0, math.floor(low), math.ceil(high)
    unit = step * size.each
    first, last = math.floor(low / unit + 1e-6), math.ceil(high / unit - 1e-6)
    if snug:
        first, last = math.ceil(low / unit - 1e-6), math.floor(high / unit + 1e-6)
    else:
        low, high = min(low, first * unit), max(high, last * unit)
    ticks = tuple((n * unit, _tick(n * step, step)) for n in range(first, last + 1))
    return AxisScale(low, high, ticks)


def log_scale(low: float, high: float) -> AxisScale:
    """An axis for positive numbers on which the same factor is the same length; ticks are ones and threes."""
    if high <= (1 + _FLAT) * low:
        low, high = low / 2, high * 2
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 3) if len(powers) <= _DECADES else (1,)
    ticks = (digit * 10.0**power for power in powers for digit in digits)
    slack = min(1.001, (high / low) ** 0.005)  # a tick may stand a little beyond the ends of the axis
    shown = tuple((tick, f"{tick:g}") for tick in ticks if low / slack <= tick <= high * slack)
    return AxisScale(low, high, shown, log=True)


def format_number(value: float, *, whole: bool = False) -> str:
    """A number in running text."""
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if whole:
        return f"{value:,.0f}"
    if value and not 1e-4 <= abs(value) < 1e9:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _step(span: float, wanted: int) -> float:
    """A nice number that goes into the span about so often."""
    rough = span / wanted
    ten = 10.0 ** math.floor(math.log10(rough))
    return next((nice * ten for nice in _NICE if nice * ten >= rough * 0.999), 10 * ten)


def _tick(value: float, step: float) -> str:
    """With as many digits as tell it from its neighbours."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if abs(value) < 1e6 and decimals <= 5:
        return f"{value:,.{decimals}f}"
    digits = 1 + max(0, math.ceil(math.log10(max(abs(value) / step, 1))))
    return f"{value:.{digits}g}"


_MAX_POINTS = 240  # points of a line, about: more than a screen shows of one this wide
_FORMULA = ("=", "+", "-", "@")  # how spreadsheets know one


@dataclass(frozen=True)
class Series:
    """One run's part of a figure; several of the same style and label are pieces of one line."""

    style: int  # the same for a run in all figures
    label: str
    xs: Floats
    ys: Floats
    tops: Floats | None = None  # the upper edge of a band above the line


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
    lines: tuple[Series, ...] = ()
    notes: tuple[str, ...] = ()
    top: str = "at most"  # what a band's upper edge is
    stair: float = 0.0  # how wide each point is; 0: points are joined by straight lines
    runs: tuple[str, ...] = ()  # of its page: where there are several, each line is named


def figure_csv(figure: Figure) -> str:
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
    writer.writerow(["run", *(", ".join(filter(None, (label, _base_unit(unit)))) for label, unit in heads)])
    for line in figure.lines:
        name = f"'{line.label}" if line.label.startswith(_FORMULA) else line.label
        columns = [line.xs, line.ys] + ([line.ys if line.tops is None else line.tops] if banded else [])
        for row in zip(*(column.tolist() for column in columns), strict=True):
            writer.writerow([name, *(f"{value:.15g}" for value in row)])
    return file.getvalue()


def _base_unit(unit: Unit) -> str:
    """What one of it is; percent have no name for that."""
    return next((size.name for size in unit.sizes if size.each == 1), "part of 1")


def thin_points(xs: Floats, ys: Floats) -> Sequence[int]:
    """Places of the points that a drawing needs: of each stretch the first, the lowest and the highest."""
    if len(xs) <= _MAX_POINTS:
        return range(len(xs))
    kept = {len(xs) - 1}
    for part in np.array_split(np.arange(len(xs)), _MAX_POINTS // 3):
        kept |= {int(part[0]), int(part[ys[part].argmin()]), int(part[ys[part].argmax()])}
    return sorted(kept)
