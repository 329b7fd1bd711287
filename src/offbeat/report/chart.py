"""Figures as data: series over shared axes, units and ticks of the axes, and the numbers as CSV."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from offbeat.report.trace import Floats

_NICE = (1.0, 2.0, 5.0, 10.0)
_FLAT = 1e-4  # relative range below which values are shown as equal
_TINY = 1e-300  # smaller values are drawn as zero, since the distance of ticks would be subnormal
_DECADES = 5  # up to which a logarithmic axis has ticks at 3, 30, ... as well
_AROUND = 0.05  # relative margin of an axis on which all values are equal


class UnitSize(NamedTuple):
    """One size of a unit."""

    least: float  # the smallest value that is shown in this size
    each: float
    name: str


@dataclass(frozen=True)
class Unit:
    """The sizes in which a quantity is shown, from small to large."""

    sizes: tuple[UnitSize, ...]
    whole: bool = False  # whether values are integers

    def size(self, largest: float) -> UnitSize:
        """The size for values up to `largest`."""
        return [self.sizes[0], *(size for size in self.sizes if size.least <= largest)][-1]

    def format(self, value: float, largest: float | None = None) -> str:
        """A value as text, in the size for values up to `largest`."""
        size = self.size(abs(value) if largest is None else largest)
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
    """The range of an axis and its ticks."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False  # logarithmic

    def position(self, value: float) -> float:
        """The relative position of a value: 0 at the low end of the axis, 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear_scale(
    low: float, high: float, size: UnitSize, wanted: int, *, snug: bool, whole: bool = False
) -> AxisScale:
    """An axis for values from `low` to `high`; it is extended to ticks at both ends unless `snug`."""
    largest = max(abs(low), abs(high))
    if largest < _TINY:
        low = high = largest = 0.0
    if high - low <= _FLAT * largest:  # all values are equal
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
    """A logarithmic axis for positive values, with ticks at 1, 3, 10, 30, ..."""
    if high <= (1 + _FLAT) * low:
        low, high = low / 2, high * 2
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 3) if len(powers) <= _DECADES else (1,)
    ticks = (digit * 10.0**power for power in powers for digit in digits)
    slack = min(1.001, (high / low) ** 0.005)  # a tick may stand a little beyond the ends of the axis
    shown = tuple((tick, f"{tick:g}") for tick in ticks if low / slack <= tick <= high * slack)
    return AxisScale(low, high, shown, log=True)


def format_number(value: float, *, whole: bool = False) -> str:
    """A number as text."""
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if whole:
        return f"{value:,.0f}"
    if value and not 1e-4 <= abs(value) < 1e9:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _step(span: float, wanted: int) -> float:
    """A round distance of ticks, for about `wanted` ticks."""
    rough = span / wanted
    ten = 10.0 ** math.floor(math.log10(rough))
    return next((nice * ten for nice in _NICE if nice * ten >= rough * 0.999), 10 * ten)


def _tick(value: float, step: float) -> str:
    """A tick with as many digits as it takes to distinguish it from its neighbours."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if abs(value) < 1e6 and decimals <= 5:
        return f"{value:,.{decimals}f}"
    digits = 1 + max(0, math.ceil(math.log10(max(abs(value) / step, 1))))
    return f"{value:.{digits}g}"


_MAX_POINTS = 240  # about the number of points of a line that a drawing can resolve
_FORMULA = ("=", "+", "-", "@")  # the first characters of what spreadsheets treat as a formula


@dataclass(frozen=True)
class Series:
    """The values of one run in a figure."""

    style: int  # the same for a run in all figures
    label: str
    xs: Floats
    ys: Floats
    tops: Floats | None = None  # the upper edge of a band above the line


@dataclass(frozen=True)
class Axis:
    """The quantity on an axis."""

    label: str
    unit: Unit = PLAIN
    zero: bool = False  # whether it begins at zero
    log: bool = False  # logarithmic; all values are positive
    zoom: bool = False  # leave out the start of the lines where it would squeeze the rest


@dataclass(frozen=True)
class Figure:
    """Series over shared axes; without series, the notes say why."""

    name: str
    title: str
    x: Axis
    y: Axis
    lines: tuple[Series, ...] = ()
    notes: tuple[str, ...] = ()
    top: str = "at most"  # the meaning of a band's upper edge
    stair: float = 0.0  # the width of the bars of a histogram; 0: points are joined by lines
    runs: tuple[str, ...] = ()  # labels of all runs of the page; with several, each line is labelled


def figure_csv(figure: Figure) -> str:
    """All values of a figure as CSV.

    Values are in base units, independent of the units of the drawing, and each column's name ends in its
    unit: seconds, bytes, or the fraction that the drawing shows in percent. Counts have no unit, and the
    unit of a rate is part of its label.
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
    """The name of the base unit."""
    return next((size.name for size in unit.sizes if size.each == 1), "fraction")


def thin_points(xs: Floats, ys: Floats) -> Sequence[int]:
    """Indices of the points that a drawing needs: the first, lowest and highest point of each interval."""
    if len(xs) <= _MAX_POINTS:
        return range(len(xs))
    kept = {len(xs) - 1}
    for part in np.array_split(np.arange(len(xs)), _MAX_POINTS // 3):
        kept |= {int(part[0]), int(part[ys[part].argmin()]), int(part[ys[part].argmax()])}
    return sorted(kept)
