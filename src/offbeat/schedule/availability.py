"""When clients are available, and how often they drop out in the middle of a task."""

import gzip
import lzma
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np

from offbeat.draws import randbelow, uniform
from offbeat.errors import InputError
from offbeat.schedule.parsing import check_kind, check_number, format_spec, parse_spec

# client, now -> now if the client is available, otherwise the time when it will be
NextAvailable: TypeAlias = Callable[[int, float], float]


class Availability(Protocol):
    """When clients can be given a task; `str` gives the text that `parse_availability` reads.

    A true attribute `by_client` states that the availability of a client depends only on this client, its
    earlier tasks and independent random draws: not on other clients, and not on what is drawn for it later.
    """

    def bind(self, seed: int) -> NextAvailable: ...


@runtime_checkable
class ListedAvailability(Availability, Protocol):
    """Availability that lists the clients that are available now; others may never become available."""

    @property
    def there(self) -> Collection[int]: ...

    @property
    def pause(self) -> float:
        """Seconds to wait before looking again for available clients."""
        ...


@dataclass(frozen=True)
class Always:
    """Every client is always available."""

    by_client: ClassVar[bool] = True

    def __str__(self) -> str:
        return "always"

    def bind(self, seed: int) -> NextAvailable:
        return lambda client, now: now


@dataclass(frozen=True)
class Cycle:
    """Each client is available for the same share of every period, with a phase of its own.

    Attributes:
        period: The length of a period in seconds.
        share: The part of each period in which a client is available, above 0 and at most 1.
    """

    by_client: ClassVar[bool] = True
    period: float
    share: float

    def __post_init__(self) -> None:
        check_number("the period of a cycle", self.period, strict=True)
        check_number("the share of a cycle", self.share)
        if not 0 < self.share <= 1:
            raise InputError(f"the share of a cycle is {self.share}: give a number above 0 and at most 1.")

    def __str__(self) -> str:
        return format_spec("cycle", self.period, self.share)

    def bind(self, seed: int) -> NextAvailable:
        def back(client: int, now: float) -> float:
            phase = (now / self.period + uniform(seed, "phase", client)) % 1
            return now if phase < self.share else now + (1 - phase) * self.period

        return back


@dataclass(frozen=True)
class ClientCycle:
    """As `Cycle`, with another share for each client.

    Attributes:
        period: The length of a period in seconds.
        shares: The part of each period in which a client is available: a sequence, or a function of the
            client's number.
    """

    period: float
    shares: Sequence[float] | Callable[[int], float]

    def __post_init__(self) -> None:
        check_number("the period of a cycle", self.period, strict=True)
        for share in () if callable(self.shares) else self.shares:
            _check_share(share)

    def bind(self, seed: int) -> NextAvailable:
        shares, period = self.shares, self.period

        def back(client: int, now: float) -> float:
            if callable(shares):
                share = shares(client)
                _check_share(share)
            elif client < len(shares):
                share = shares[client]
            else:
                raise InputError(
                    f"there are {len(shares)} shares, and client {client} has none: give it one."
                )
            phase = (now / period + uniform(seed, "phase", client)) % 1
            return now if phase < share else now + (1 - phase) * period

        return back


def _check_share(share: float) -> None:
    check_kind("the share of a cycle", share)
    if not 0 < share <= 1:
        raise InputError(f"the share of a cycle is {share}: give a number above 0 and at most 1.")


@runtime_checkable
class DataAvailability(Availability, Protocol):
    """Availability that depends on the data of a client."""

    @property
    def measure(self) -> str:
        """What the share of a client is proportional to: its examples or its classes."""
        ...

    def with_weights(self, weights: Sequence[float]) -> Availability:
        """The availability of clients with this measure."""
        ...


def _check_data_cycle(rule: "ByExamples | ByClasses") -> None:
    check_number("the period of a cycle", rule.period, strict=True)
    _check_share(rule.least)


def _format_data_cycle(rule: "ByExamples | ByClasses") -> str:
    return format_spec(f"by-{rule.measure}", rule.period, rule.least)


def _cycle_by_weights(rule: "ByExamples | ByClasses", weights: Sequence[float]) -> Availability:
    top = max(weights)
    return ClientCycle(rule.period, tuple(max(rule.least, weight / top) for weight in weights))


def _reject_without_data(rule: "ByExamples | ByClasses", seed: int) -> NextAvailable:
    raise InputError(
        f"availability by the {rule.measure} of clients needs their data, which a schedule alone does not "
        "have: use a run, or another availability."
    )


@dataclass(frozen=True)
class ByExamples:
    """A cycle whose share grows with the number of a client's examples, up to 1 for the largest client."""

    period: float
    least: float = 0.1  # share
    measure: ClassVar[str] = "examples"

    __str__ = _format_data_cycle
    with_weights = _cycle_by_weights
    bind = _reject_without_data

    def __post_init__(self) -> None:
        _check_data_cycle(self)


@dataclass(frozen=True)
class ByClasses:
    """A cycle whose share grows with a client's effective number of classes, so skewed labels lower it.

    The effective number is the exponential of the entropy of the client's labels.
    """

    period: float
    least: float = 0.1  # share
    measure: ClassVar[str] = "classes"

    __str__ = _format_data_cycle
    with_weights = _cycle_by_weights
    bind = _reject_without_data

    def __post_init__(self) -> None:
        _check_data_cycle(self)


@dataclass(frozen=True)
class RecordedLinks:
    """Recorded links in Mahimahi's format: a client is away while its link delivers no packet for a second.

    The path is a file or a folder of files, which may be compressed (.xz or .gz). Each line is the time in
    milliseconds at which the link could deliver a packet. Each client has one of the links, which repeats,
    with a random offset.

    Attributes:
        path: The file, or the folder of files.
    """

    path: str

    def __str__(self) -> str:
        return format_spec("recorded", self.path)

    def bind(self, seed: int) -> NextAvailable:
        links = [_read_link(path) for path in _trace_files(Path(self.path))]

        def back(client: int, now: float) -> float:
            length, starts, ends = links[randbelow(len(links), seed, "link", client)]
            position = (now + uniform(seed, "phase", client) * length) % length
            gap = bisect_right(starts, position) - 1
            return now + (ends[gap] - position) if gap >= 0 and position < ends[gap] else now

        return back


_OUTAGE = 1.0  # seconds without a packet after which a client is away


def _trace_files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.is_file() and not each.name.startswith("."))
        if not files:
            raise InputError(f"the folder {path} has no recorded link: name another.")
        return files
    return [path]


def _read_link(path: Path) -> tuple[float, list[float], list[float]]:
    """The length of a trace in seconds, and where its outages start and end."""
    openers: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
    try:
        with openers.get(path.suffix, open)(path, "rt", encoding="ascii") as file:
            times = np.array([float(line) for line in file.read().split()]) / 1000
    except (OSError, EOFError, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or "it is damaged"
        raise InputError(f"cannot read the recorded link {path}: {reason}.") from None
    except ValueError:
        raise InputError(
            f"{path} is not a recorded link: each line must be a time in milliseconds."
        ) from None
    if not len(times) or not times[-1] > 0 or (np.diff(times) < 0).any() or times[0] < 0:
        raise InputError(f"{path} is not a recorded link: its times must grow from 0.")
    before = np.concatenate([[0.0], times[:-1]])
    away = times - before >= _OUTAGE
    return float(times[-1]), before[away].tolist(), times[away].tolist()


@dataclass(frozen=True)
class Dropout:
    """A task is lost with this probability; the server notices after `patience` times its duration.

    Attributes:
        probability: The probability that a task is lost.
        patience: How long the server waits for a lost task, in multiples of its duration.
    """

    probability: float = 0.0
    patience: float = 1.0

    def __post_init__(self) -> None:
        check_number("the drop-out probability", self.probability)
        if not 0 <= self.probability < 1:
            raise InputError(f"the drop-out probability is {self.probability}: give one from 0 to below 1.")
        check_number("the patience with drop-outs", self.patience)

    def loses(self, seed: int, client: int, visit: int) -> bool:
        """Whether this task is lost."""
        return self.probability > 0 and uniform(seed, "dropout", client, visit) < self.probability


AVAILABILITIES: Mapping[str, type[Availability]] = {
    "always": Always,
    "cycle": Cycle,
    "recorded": RecordedLinks,
    "by-examples": ByExamples,
    "by-classes": ByClasses,
}


def parse_availability(text: str) -> Availability:
    """The pattern that a text such as `always`, `cycle:PERIOD:SHARE` or `recorded:FOLDER` names."""
    return parse_spec("availability", text, AVAILABILITIES)
