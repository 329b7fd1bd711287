"""What hyperparameters may be, by the role that their name tells."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from offbeat.errors import InputError

_RANGES: Mapping[str, str] = MappingProxyType(
    {
        "local_lr": "[0, inf)",
        "server_lr": "[0, inf)",
        "alpha": "(0, 1]",
        "beta": "(-1, 1]",
        "bound": "(0, inf)",
        "c": "(0, inf)",
        "eps": "[0, inf)",
        "floor": "[0, inf)",
        "lower": "(-inf, inf)",
        "rho": "[0, inf)",
        "start": "[0, 1]",
        "threshold": "[0, inf]",
    }
)


def check(method: Any) -> None:
    """Refuse what no method can use; called as a frozen dataclass is made."""
    for field in dataclasses.fields(method):
        if field.name in _RANGES:
            within(
                f"{field.name} of {type(method).__name__}", getattr(method, field.name), _RANGES[field.name]
            )


def within(name: str, value: float, interval: str) -> None:
    """Refuse a number outside an interval such as (0, 1]."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = value > low if interval[0] == "(" else value >= low
    below = value < high if interval[-1] == ")" else value <= high
    if not (above and below) or math.isnan(value):
        raise InputError(f"the {name} must lie in {interval}, not be {value}.")
