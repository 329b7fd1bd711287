"""How long a task takes: laws of delay, each the inverse of a distribution function at one uniform draw."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp, log1p
from statistics import NormalDist
from typing import Protocol, TypeAlias

from offbeat.errors import InputError, unknown
from offbeat.schedule.chance import Draws
from offbeat.schedule.recorded import Recorded
from offbeat.schedule.wording import check, plain, read, write

Seconds: TypeAlias = Callable[[int, int, float], float]  # client, visit, uniform draw in [0, 1)


class Delay(Protocol):
    """A law of delay; `str` gives the text that `parse_delay` reads."""

    def bind(self, draws: Draws, population: int) -> Seconds: ...


@dataclass(frozen=True)
class Constant:
    """Always the same."""

    seconds: float

    def __post_init__(self) -> None:
        check("a constant delay", self.seconds)

    def __str__(self) -> str:
        return write("constant", self.seconds)

    def bind(self, draws: Draws, population: int) -> Seconds:
        return lambda client, visit, u: self.seconds


@dataclass(frozen=True)
class Uniform:
    """Anything from low to high."""

    low: float
    high: float

    def __post_init__(self) -> None:
        check("the lower end of a uniform delay", self.low)
        check("the upper end of a uniform delay", self.high, self.low)

    def __str__(self) -> str:
        return write("uniform", self.low, self.high)

    def bind(self, draws: Draws, population: int) -> Seconds:
        low, span = self.low, self.high - self.low
        return lambda client, visit, u: low + span * u


@dataclass(frozen=True)
class HalfNormal:
    """The size of a normal variable."""

    scale: float

    def __post_init__(self) -> None:
        check("the scale of a half-normal delay", self.scale)

    def __str__(self) -> str:
        return write("half-normal", self.scale)

    def bind(self, draws: Draws, population: int) -> Seconds:
        quantile = NormalDist().inv_cdf
        return lambda client, visit, u: -self.scale * quantile((1 - u) / 2)  # the lower tail keeps its digits


@dataclass(frozen=True)
class Exponential:
    """Memoryless."""

    mean: float

    def __post_init__(self) -> None:
        check("the mean of an exponential delay", self.mean)

    def __str__(self) -> str:
        return write("exponential", self.mean)

    def bind(self, draws: Draws, population: int) -> Seconds:
        return lambda client, visit, u: -self.mean * log1p(-u)


@dataclass(frozen=True)
class LogNormal:
    """The exponential of a normal variable."""

    mu: float
    sigma: float

    def __post_init__(self) -> None:
        check("the sigma of a log-normal delay", self.sigma)
        if not abs(self.mu) + 9 * self.sigma < 700:
            raise InputError(f"the log-normal delay '{self}' overflows: give a smaller mu or sigma.")

    def __str__(self) -> str:
        return write("log-normal", self.mu, self.sigma)

    def bind(self, draws: Draws, population: int) -> Seconds:
        quantile = NormalDist().inv_cdf
        return lambda client, visit, u: exp(self.mu + self.sigma * quantile(u or 2**-54))


TIERS: Mapping[str, tuple[tuple[float, float], ...]] = {
    "mild": ((1, 2), (3, 5), (5, 8)),
    "large": ((1, 2), (3, 5), (50, 80)),
}


@dataclass(frozen=True)
class Tiers:
    """Fast, middling and slow clients, as in FADAS; a smaller gamma makes more of them slow.

    The numbers are the paper's, whose unit of time is 10 s.
    """

    kind: str
    gamma: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in TIERS:
            raise unknown("kind of tiers", self.kind, TIERS)
        check("the gamma of tiers", self.gamma, strict=True)

    def __str__(self) -> str:
        return write("tiers", self.kind, *([plain(self.gamma)] if self.gamma != 1 else []))

    def bind(self, draws: Draws, population: int) -> Seconds:
        tier = draws.tiers(self.gamma, population)
        spans = [(low, high - low) for low, high in TIERS[self.kind]]

        def seconds(client: int, visit: int, u: float) -> float:
            low, span = spans[tier(client)]
            return low + span * u

        return seconds


LAWS: Mapping[str, type[Delay]] = {
    "constant": Constant,
    "uniform": Uniform,
    "half-normal": HalfNormal,
    "exponential": Exponential,
    "log-normal": LogNormal,
    "tiers": Tiers,
    "recorded": Recorded,
}


def parse_delay(text: str) -> Delay:
    """The law that a text such as `tiers:mild` or `exponential:1` names."""
    return read("delay", text, LAWS)
