"""The weight of an update that started from an older version."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from offbeat.schedule.parsing import check_number, format_spec, parse_spec


class StalenessWeights(Protocol):
    """The weight of a staleness; `str` gives the text that `parse_weights` reads."""

    def __call__(self, staleness: int) -> float: ...


@dataclass(frozen=True)
class Equal:
    """Weight 1 for every staleness."""

    def __str__(self) -> str:
        return "constant"

    def __call__(self, staleness: int) -> float:
        return 1.0


@dataclass(frozen=True)
class Polynomial:
    """(1 + staleness) to the power of minus `exponent`.

    Attributes:
        exponent: How fast the weight falls, at least 0.
    """

    exponent: float = 0.5

    def __post_init__(self) -> None:
        check_number("the exponent of polynomial weights", self.exponent)

    def __str__(self) -> str:
        return format_spec("polynomial", self.exponent)

    def __call__(self, staleness: int) -> float:
        return float((1 + staleness) ** -self.exponent)


@dataclass(frozen=True)
class Hinge:
    """1 up to the knee, then 1 / (slope (staleness - knee) + 1).

    Attributes:
        slope: How fast the weight falls beyond the knee.
        knee: The staleness up to which the weight is 1.
    """

    slope: float = 10.0
    knee: float = 4.0

    def __post_init__(self) -> None:
        check_number("the slope of hinge weights", self.slope)
        check_number("the knee of hinge weights", self.knee)

    def __str__(self) -> str:
        return format_spec("hinge", self.slope, self.knee)

    def __call__(self, staleness: int) -> float:
        return 1.0 if staleness <= self.knee else 1 / (self.slope * (staleness - self.knee) + 1)


STALENESS_WEIGHTS: Mapping[str, type[StalenessWeights]] = {
    "constant": Equal,
    "polynomial": Polynomial,
    "hinge": Hinge,
}


def parse_weights(text: str) -> StalenessWeights:
    """The weights that a text such as `constant`, `polynomial:0.5` or `hinge:10:4` names."""
    return parse_spec("staleness weights", text, STALENESS_WEIGHTS)
