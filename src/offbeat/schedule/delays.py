"""How long a task takes: delay distributions, each given by its quantile function at one uniform draw."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, isfinite, log1p
from pathlib import Path
from statistics import NormalDist
from typing import Any, Protocol, TypeAlias

from offbeat.draws import randbelow
from offbeat.errors import InputError, check_whole, describe, unknown_name
from offbeat.schedule.devices import DeviceFile, Phones
from offbeat.schedule.parsing import check_number, format_number, format_spec, parse_spec
from offbeat.schedule.rng import Rng


@dataclass(frozen=True)
class Recorded:
    """Durations that were measured: in a text file, in a sequence or array, or by client in a dictionary.

    A file with one column, with or without a heading, or a sequence of seconds is a pool that every client
    draws from. A file with two columns, client and seconds, or a dictionary from the number of a client to
    its durations gives each client its own durations, which it repeats in order; a client without any draws
    from the pool of all durations.

    Attributes:
        durations: A path, a sequence of seconds, or a dictionary from the number of a client to its seconds.
    """

    durations: str | Path | Sequence[float] | Mapping[int, Sequence[float]] = field(metadata={"text": "PATH"})

    def __post_init__(self) -> None:
        given = self.durations
        if isinstance(given, str | Path):
            object.__setattr__(self, "durations", str(given))
            return
        if not isinstance(given, Mapping) and not hasattr(given, "__len__"):
            raise InputError(
                f"recorded delays are {describe(given)}: give a path, a sequence of seconds, or a dictionary "
                "from the number of a client to its seconds."
            )
        rows = given.items() if isinstance(given, Mapping) else [(None, given)]
        object.__setattr__(self, "durations", tuple(_check_rows(rows)))

    def __str__(self) -> str:
        return format_spec("recorded", self.durations) if isinstance(self.durations, str) else "recorded"

    def bind(self, draws: Rng, population: int) -> Callable[[int, int, float], float]:
        own: dict[int, array[float]] = {}
        pool = array("d")
        given: Any = self.durations
        for client, seconds in _read_rows(given) if isinstance(given, str) else given:
            pool.append(seconds)
            if client is not None:
                own.setdefault(client, array("d")).append(seconds)
        if not pool:
            where = given if isinstance(given, str) else "the record of delays"
            raise InputError(f"{where} holds no durations: give at least one number.")
        pool = array("d", sorted(pool))

        def seconds_of(client: int, visit: int, u: float) -> float:
            durations = own.get(client)
            return durations[visit % len(durations)] if durations else pool[int(u * len(pool))]

        return seconds_of


@dataclass(frozen=True)
class Observed:
    """Observed durations of each client, from which each of its tasks draws one.

    A client without observations draws from those of another client, which is chosen at random.
    """

    by_client: Mapping[int, Sequence[float]]

    def __post_init__(self) -> None:
        if not any(self.by_client.values()):
            raise InputError("there is no duration of any task: give a trace with finished tasks.")

    def __str__(self) -> str:
        return "observed"

    def bind(self, draws: Rng, population: int) -> Callable[[int, int, float], float]:
        own = {client: sorted(seen) for client, seen in sorted(self.by_client.items()) if seen}
        seen = list(own.values())

        def seconds_of(client: int, visit: int, u: float) -> float:
            durations = own.get(client) or seen[randbelow(len(seen), draws.seed, "stand-in", client)]
            return durations[int(u * len(durations))]

        return seconds_of


def read_recorded(path: str) -> dict[int, list[float]]:
    """The durations of each client in a file of two columns; empty if it has one column."""
    found: dict[int, list[float]] = {}
    for client, seconds in _read_rows(path):
        if client is not None:
            found.setdefault(client, []).append(seconds)
    return found


def _check_rows(rows: Iterable[tuple[Any, Any]]) -> Iterator[tuple[int | None, float]]:
    """Client and seconds of durations that are given as values."""
    for client, durations in rows:
        if client is not None:
            check_whole("the client of a recorded delay", client, 0)
        for seconds in durations:
            check_number("a recorded delay", seconds)
            yield (None if client is None else int(client)), float(seconds)


def _read_rows(path: str) -> Iterator[tuple[int | None, float]]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise InputError(f"cannot read the recorded delays in {path}: {reason}.") from None
    columns = 0
    for number, line in enumerate(text.splitlines(), start=1):
        cells = [cell.strip() for cell in line.split(",")]
        if cells == [""]:
            continue
        if not columns:
            columns = len(cells)
            if not any(_is_number(cell) for cell in cells):
                continue  # a heading
        if len(cells) != columns or columns > 2:
            wanted = "seconds, or client and seconds" if columns > 2 else f"{columns} as above"
            raise InputError(f"{path}, line {number}: '{line}' has {len(cells)} columns: write {wanted}.")
        *clients, seconds = cells
        if not _is_number(seconds) or not isfinite(float(seconds)) or float(seconds) < 0:
            raise InputError(f"{path}, line {number}: '{seconds}' is not a finite number of at least 0.")
        if clients and not clients[0].isdecimal():
            raise InputError(f"{path}, line {number}: '{clients[0]}' is not a client: count from 0.")
        yield (int(clients[0]) if clients else None), float(seconds)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


DelayFunction: TypeAlias = Callable[[int, int, float], float]  # client, visit, uniform draw in [0, 1)


class Delay(Protocol):
    """A distribution of delays; `str` gives the text that `parse_delay` reads."""

    def bind(self, draws: Rng, population: int) -> DelayFunction: ...


@dataclass(frozen=True)
class Constant:
    """The same duration for every task.

    Attributes:
        seconds: The duration of a task.
    """

    seconds: float

    def __post_init__(self) -> None:
        check_number("a constant delay", self.seconds)

    def __str__(self) -> str:
        return format_spec("constant", self.seconds)

    def bind(self, draws: Rng, population: int) -> DelayFunction:
        return lambda client, visit, u: self.seconds


@dataclass(frozen=True)
class Uniform:
    """Uniform between low and high.

    Attributes:
        low: The shortest duration in seconds.
        high: The longest duration in seconds.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        check_number("the lower end of a uniform delay", self.low)
        check_number("the upper end of a uniform delay", self.high, self.low)

    def __str__(self) -> str:
        return format_spec("uniform", self.low, self.high)

    def bind(self, draws: Rng, population: int) -> DelayFunction:
        low, span = self.low, self.high - self.low
        return lambda client, visit, u: low + span * u


@dataclass(frozen=True)
class HalfNormal:
    """The absolute value of a normal variable.

    Attributes:
        scale: The standard deviation of the normal variable, in seconds.
    """

    scale: float

    def __post_init__(self) -> None:
        check_number("the scale of a half-normal delay", self.scale)

    def __str__(self) -> str:
        return format_spec("half-normal", self.scale)

    def bind(self, draws: Rng, population: int) -> DelayFunction:
        quantile = NormalDist().inv_cdf
        return lambda client, visit, u: -self.scale * quantile((1 - u) / 2)  # the lower tail keeps its digits


@dataclass(frozen=True)
class Exponential:
    """Exponential with this mean.

    Attributes:
        mean: The mean duration in seconds.
    """

    mean: float

    def __post_init__(self) -> None:
        check_number("the mean of an exponential delay", self.mean)

    def __str__(self) -> str:
        return format_spec("exponential", self.mean)

    def bind(self, draws: Rng, population: int) -> DelayFunction:
        return lambda client, visit, u: -self.mean * log1p(-u)


@dataclass(frozen=True)
class LogNormal:
    """Log-normal: the exponential of a normal variable.

    Attributes:
        mu: The mean of the logarithm of the seconds.
        sigma: The standard deviation of that logarithm.
    """

    mu: float
    sigma: float

    def __post_init__(self) -> None:
        check_number("the sigma of a log-normal delay", self.sigma)
        if not abs(self.mu) + 9 * self.sigma < 700:
            raise InputError(f"the log-normal delay '{self}' overflows: give a smaller mu or sigma.")

    def __str__(self) -> str:
        return format_spec("log-normal", self.mu, self.sigma)

    def bind(self, draws: Rng, population: int) -> DelayFunction:
        quantile = NormalDist().inv_cdf
        return lambda client, visit, u: exp(self.mu + self.sigma * quantile(u or 2**-54))


TIER_RANGES: Mapping[str, tuple[tuple[float, float], ...]] = {
    "mild": ((1, 2), (3, 5), (5, 8)),
    "large": ((1, 2), (3, 5), (50, 80)),
}


@dataclass(frozen=True)
class Tiers:
    """Fast, medium and slow clients, as in FADAS; a smaller gamma makes more of them slow.

    The numbers are the paper's, whose unit of time is 10 s.

    Attributes:
        kind: How slow the slow clients are: mild or large.
        gamma: The concentration of the tiers, above 0.
    """

    kind: str
    gamma: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in TIER_RANGES:
            raise unknown_name("kind of tiers", self.kind, TIER_RANGES)
        check_number("the gamma of tiers", self.gamma, strict=True)

    def __str__(self) -> str:
        return format_spec("tiers", self.kind, *([format_number(self.gamma)] if self.gamma != 1 else []))

    def bind(self, draws: Rng, population: int) -> DelayFunction:
        tier = draws.tiers(self.gamma, population)
        spans = [(low, high - low) for low, high in TIER_RANGES[self.kind]]

        def seconds(client: int, visit: int, u: float) -> float:
            low, span = spans[tier(client)]
            return low + span * u

        return seconds


DELAYS: Mapping[str, type[Delay]] = {
    "constant": Constant,
    "uniform": Uniform,
    "half-normal": HalfNormal,
    "exponential": Exponential,
    "log-normal": LogNormal,
    "tiers": Tiers,
    "recorded": Recorded,
    "devices": DeviceFile,
    "phones": Phones,
}


def parse_delay(text: str) -> Delay:
    """The delays that a text such as `tiers:mild` or `exponential:1` names."""
    return parse_spec("delay", text, DELAYS)
