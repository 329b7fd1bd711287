"""Settings as text: `name:value:value`, the way a command line and a settings file hold them."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from math import isfinite
from typing import Any, TypeVar

from offbeat.errors import InputError, unknown_name

Spec = TypeVar("Spec")


def parse_spec(kind: str, text: str, forms: Mapping[str, type[Spec]]) -> Spec:
    """Build the dataclass that `text` names, from the values that follow the name."""
    name, *values = text.strip().split(":")
    if name not in forms:
        raise unknown_name(kind, name, forms)
    form: Any = forms[name]
    slots = fields(form)
    if [slot.type for slot in slots] == [str] and values:
        values = [":".join(values)]  # a path may hold colons
    needed = sum(slot.default is MISSING for slot in slots)
    usage = name + "".join(
        f":{slot.name.upper()}" if slot.default is MISSING else f"[:{slot.name.upper()}]" for slot in slots
    )
    if not needed <= len(values) <= len(slots) or "" in values:
        raise InputError(f"'{text}' is not a {kind}: write it as {usage}.")
    arguments = [
        value if slot.type is str else _parse_number(value, text, kind, usage)
        for slot, value in zip(slots, values, strict=False)
    ]
    made: Spec = form(*arguments)
    return made


def _parse_number(value: str, text: str, kind: str, usage: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InputError(f"'{value}' in the {kind} '{text}' is not a number: write it as {usage}.") from None


def format_spec(name: str, *values: float | str) -> str:
    """The text that `read` turns back into the same values."""
    return ":".join([name, *(value if isinstance(value, str) else format_number(value) for value in values)])


def format_number(value: float) -> str:
    """A number as short as it can be without loss."""
    return repr(float(value)).removesuffix(".0")


def check_number(name: str, value: float, least: float = 0.0, *, strict: bool = False) -> None:
    """Refuse a number that is not finite or too small."""
    if not isfinite(value) or value < least or (strict and value == least):
        bound = f"{'above' if strict else 'at least'} {format_number(least)}"
        raise InputError(f"{name} is {value}: give a finite number {bound}.")
