"""Axes: the units they are shown in, where their ticks go, and numbers as people read them."""

import math
from dataclasses import dataclass
from typing import NamedTuple

_NICE = (1.0, 2.0, 5.0, 10.0)
_FLAT = 1e-4  # of the largest number: what spreads less is shown as all the same
_DECADES = 5  # up to which an axis by factors has ticks at threes, too
_AROUND = 0.05  # of it: how far an axis then goes to both sides


class Size(NamedTuple):
    """One size of a unit."""

    least: float  # from which on it is used
    each: float
    name: str


@dataclass(frozen=True)
class Unit:
    """Sizes in which a quantity is shown, from small to large."""

    sizes: tuple[Size, ...]
    whole: bool = False  # whether there is nothing between two numbers

    def size(self, largest: float) -> Size:
        """The one for numbers up to `largest`."""
        return [self.sizes[0], *(size for size in self.sizes if size.least <= largest)][-1]

    def say(self, value: float) -> str:
        """One number, by itself."""
        size = self.size(abs(value))
        number = value / size.each
        return f"{say(number, whole=self.whole and size.each == 1)} {size.name}".strip()


PLAIN = Unit((Size(0, 1, ""),))
COUNT = Unit((Size(0, 1, ""), Size(2e4, 1e3, "thousand"), Size(2e6, 1e6, "million")), whole=True)
SECONDS = Unit((Size(0, 1, "s"), Size(180, 60, "min"), Size(10_800, 3600, "h"), Size(259_200, 86_400, "d")))
BYTES = Unit(
    (
        Size(0, 1, "B"),
        Size(1e3, 1e3, "kB"),
        Size(1e6, 1e6, "MB"),
        Size(1e9, 1e9, "GB"),
        Size(1e12, 1e12, "TB"),
    )
)
PERCENT = Unit((Size(0, 0.01, "%"),))


class Scale(NamedTuple):
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


def scale(low: float, high: float, size: Size, wanted: int, *, snug: bool, whole: bool = False) -> Scale:
    """An axis for numbers from `low` to `high`; unless it is snug, it begins and ends at ticks."""
    largest = max(abs(low), abs(high))
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
    return Scale(low, high, ticks)


def decades(low: float, high: float) -> Scale:
    """An axis for positive numbers on which the same factor is the same length; ticks are ones and threes."""
    if high <= (1 + _FLAT) * low:
        low, high = low / 2, high * 2
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 3) if len(powers) <= _DECADES else (1,)
    ticks = (digit * 10.0**power for power in powers for digit in digits)
    shown = tuple((tick, f"{tick:g}") for tick in ticks if low / 1.001 <= tick <= high * 1.001)
    return Scale(low, high, shown, log=True)


def say(value: float, *, whole: bool = False) -> str:
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
