"""Settings that describe themselves.

A dataclass field made by `setting` carries its help text, its range and where it may be given. The options
of the command line, the keys of a deployment's settings file, the checks of values and the table in the
documentation are all derived from it, so a new setting is written in one place.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, get_args, get_type_hints

from offbeat.errors import InputError, setting_name, unknown_name
from offbeat.renamed import check_value

COUNT = "[1, 2^31)"


class ValueKind(Enum):
    """The type of a value in a settings file; the text completes the sentence "must be ..."."""

    TEXT = "a text, in quotes"
    INTEGER = "a whole number"
    NUMBER = "a finite number"
    SWITCH = "true or false"
    TABLE = "a table"
    DEADLINE = "a number of seconds, or a text such as 'quantile:0.9'"
    CLIP = "a number, a text such as 'delta=1', or a table of numbers"

    def fits(self, value: object) -> bool:
        """Whether a value has this type; true and false are not numbers."""
        match self:
            case ValueKind.TEXT:
                return isinstance(value, str) and bool(value.strip())
            case ValueKind.INTEGER:
                return isinstance(value, int) and not isinstance(value, bool)
            case ValueKind.NUMBER:
                return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            case ValueKind.SWITCH:
                return isinstance(value, bool)
            case ValueKind.TABLE:
                return isinstance(value, dict)
            case ValueKind.DEADLINE:
                return ValueKind.NUMBER.fits(value) or ValueKind.TEXT.fits(value)
            case ValueKind.CLIP:
                if isinstance(value, dict):
                    return bool(value) and all(ValueKind.NUMBER.fits(each) for each in value.values())
                return ValueKind.NUMBER.fits(value) or ValueKind.TEXT.fits(value)


KINDS = {str: ValueKind.TEXT, int: ValueKind.INTEGER, float: ValueKind.NUMBER, bool: ValueKind.SWITCH}


@dataclass(frozen=True)
class Interval:
    """Numbers between two ends, written as in `[1, 2^31)`; NaN is never inside."""

    text: str

    def __contains__(self, value: float) -> bool:
        low, high = self._ends()
        above = value > low if self.text[0] == "(" else value >= low
        return above and (value < high if self.text[-1] == ")" else value <= high)

    def __str__(self) -> str:
        """In words, to complete the sentence "must be ..."."""
        first, last = (end.strip() for end in self.text[1:-1].split(","))
        low = f"{'above' if self.text[0] == '(' else 'at least'} {first}"
        if last == "inf":
            return f"{low} and finite" if self.text[-1] == ")" else low
        return f"{low} and {'below' if self.text[-1] == ')' else 'at most'} {last}"

    def _ends(self) -> tuple[float, ...]:
        parts = (end.partition("^") for end in self.text[1:-1].split(","))
        return tuple(float(base) ** int(power or 1) for base, _, power in parts)


@dataclass(frozen=True)
class SettingInfo:
    """The description of a setting besides its name, type and default."""

    metavar: str
    help: str  # `{choices}` stands for the names to choose from
    interval: Interval | None = None
    choices: tuple[str, ...] = ()
    noun: str = ""  # what a choice is called: "unknown <noun> 'x'"
    unit: str = ""
    group: str = ""  # the command line's options that it is among; empty: it has no option of that kind
    table: str = ""  # the table of a deployment's settings file that has it; empty: none
    default_text: str = ""  # describes a default that follows from other settings
    kind: ValueKind | None = None  # in a settings file, if the type of the field does not determine it
    private: bool = False  # whether it is for private runs only
    placement: bool = False  # whether it says only where a run is computed, so it may change on resuming
    revisable: bool = False  # whether it says when a run ends, and may change on resuming


def setting(default: Any, metavar: str, help: str, *, within: str | None = None, **facts: Any) -> Any:
    """A dataclass field that is a setting; it is required if the default is `dataclasses.MISSING`."""
    info = SettingInfo(metavar, help, None if within is None else Interval(within), **facts)
    return dataclasses.field(default=default, metadata={"setting": info})


@dataclass(frozen=True)
class NamedSetting:
    """One setting of a class: its name, type, default and the rest."""

    name: str
    types: tuple[type, ...]
    default: Any
    info: SettingInfo

    @property
    def type(self) -> type:
        """The type other than None."""
        return next(each for each in self.types if each is not NoneType)

    @property
    def help(self) -> str:
        """The help text, with the names to choose from."""
        *others, last = self.info.choices or ("",)
        return self.info.help.replace("{choices}", f"{', '.join(others)} or {last}")

    @property
    def kind(self) -> ValueKind:
        return self.info.kind or KINDS[self.type]

    @property
    def required(self) -> bool:
        return self.default is MISSING

    def accepts(self, value: object) -> bool:
        """Whether a value from JSON has the type."""
        return type(value) in self.types or (type(value) is int and float in self.types)

    def check(self, value: Any) -> None:
        """Reject a value that is out of range or not among the choices."""
        info = self.info
        if value is None:
            return
        if info.choices and value not in info.choices:
            check_value(self.name, value)
            raise unknown_name(info.noun or self.name, str(value), info.choices)
        if info.interval is not None and value not in info.interval:
            unit = f" {info.unit}" if info.unit else ""
            raise InputError(f"{setting_name(self.name)} must be {info.interval}{unit}, not {value}.")


def settings_of(cls: type) -> Mapping[str, NamedSetting]:
    """The settings of a dataclass, by name, in the order of its fields."""
    return _settings_of(cls)


@cache
def _settings_of(cls: Any) -> Mapping[str, NamedSetting]:
    hints = get_type_hints(cls)
    return {
        field.name: NamedSetting(
            field.name,
            get_args(hints[field.name]) or (hints[field.name],),
            field.default,
            field.metadata["setting"],
        )
        for field in dataclasses.fields(cls)
        if "setting" in field.metadata
    }


def check_settings(instance: Any) -> None:
    """Reject values that are out of range or unknown; for `__post_init__` of a dataclass of settings."""
    for name, each in settings_of(type(instance)).items():
        each.check(getattr(instance, name))


def keys_of(cls: type, table: str) -> dict[str, NamedSetting]:
    """The settings of a table of a deployment's settings file."""
    return {name: each for name, each in settings_of(cls).items() if each.info.table == table}
