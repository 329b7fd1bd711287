"""What hyperparameters may be, by the role that their name tells."""

import dataclasses
import logging
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from offbeat.errors import InputError

log = logging.getLogger(__name__)

_RANGES: Mapping[str, str] = MappingProxyType(
    {
        "local_lr": "[0, inf)",
        "server_lr": "[0, inf)",
        "alpha": "(0, 1]",
        "beta": "[0, 1]",
        "bound": "(0, inf)",
        "c": "(0, inf)",
        "eps": "[0, inf)",
        "floor": "[0, inf)",
        "lower": "(-inf, inf)",
        "rho": "[0, inf)",
        "start": "[0, 1]",
        "steps": "[1, inf)",
        "threshold": "[0, inf]",
    }
)


def check_ranges(method: Any) -> None:
    """Refuse what no method can use; called as a frozen dataclass is made."""
    for field in dataclasses.fields(method):
        if field.name in _RANGES:
            check_interval(
                f"{field.name} of {type(method).__name__}", getattr(method, field.name), _RANGES[field.name]
            )


def cap_beta(method: str, beta: float) -> float:
    """A theorem's beta, which weighs the new gradient and so is at most 1; above, that is said."""
    if beta > 1:
        log.warning(
            "the theorem's beta for %s is %.3g, above 1: it is taken as 1; more rounds lower it.",
            method,
            beta,
        )
    return min(1.0, beta)


def check_interval(name: str, value: float, interval: str) -> None:
    """Refuse a number outside an interval such as (0, 1]."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = value > low if interval[0] == "(" else value >= low
    below = value < high if interval[-1] == ")" else value <= high
    if not (above and below) or math.isnan(value):
        raise InputError(f"the {name} must lie in {interval}, not be {value}.")
