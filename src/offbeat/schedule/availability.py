"""When clients are available, and how often they drop out in the middle of a task."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from offbeat.draws import uniform
from offbeat.errors import InputError
from offbeat.schedule.parsing import check_number, format_spec, parse_spec

NextAvailable: TypeAlias = Callable[
    [int, float], float
]  # client, now -> now if it is there, else when it returns


class Availability(Protocol):
    """When clients can be given a task; `str` gives the text that `parse_availability` reads."""

    def bind(self, seed: int) -> NextAvailable: ...


@runtime_checkable
class ListedAvailability(Availability, Protocol):
    """It knows who is there now: clients are chosen among those, since others may never come."""

    @property
    def there(self) -> Collection[int]: ...

    @property
    def pause(self) -> float:
        """Seconds to wait for a client to come."""
        ...


@dataclass(frozen=True)
class Always:
    """Every client is always available."""

    def __str__(self) -> str:
        return "always"

    def bind(self, seed: int) -> NextAvailable:
        return lambda client, now: now


@dataclass(frozen=True)
class Cycle:
    """Each client is available for the same share of every period, with a phase of its own."""

    period: float
    share: float

    def __post_init__(self) -> None:
        check_number("the period of a cycle", self.period, strict=True)
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
class Dropout:
    """A task is lost with this probability; the server notices after `patience` times its duration."""

    probability: float = 0.0
    patience: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.probability < 1:
            raise InputError(f"the drop-out probability is {self.probability}: give one from 0 to below 1.")
        check_number("the patience with drop-outs", self.patience)

    def loses(self, seed: int, client: int, visit: int) -> bool:
        """Whether this task is lost."""
        return self.probability > 0 and uniform(seed, "dropout", client, visit) < self.probability


AVAILABILITIES: Mapping[str, type[Availability]] = {"always": Always, "cycle": Cycle}


def parse_availability(text: str) -> Availability:
    """The pattern that `always` or `cycle:PERIOD:SHARE` names."""
    return parse_spec("availability", text, AVAILABILITIES)
