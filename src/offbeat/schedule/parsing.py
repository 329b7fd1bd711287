"""Settings as text, `name:value:value`, as on the command line and in settings files."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from math import inf, isfinite
from typing import Any, TypeVar

from offbeat.errors import InputError, is_number, unknown_name, with_article

Spec = TypeVar("Spec")


def parse_spec(kind: str, text: str, forms: Mapping[str, type[Spec]]) -> Spec:
    """Build the dataclass that `text` names, from the values that follow the name."""
    name, *values = text.strip().split(":")
    if name not in forms:
        raise unknown_name(kind, name, forms)
    form: Any = forms[name]
    slots = fields(form)
    texts = {slot.name for slot in slots if slot.type is str or "text" in slot.metadata}
    if texts == {slot.name for slot in slots} and values:
        values = [":".join(values)]  # a path may contain colons
    needed = sum(slot.default is MISSING for slot in slots)
    words = {slot.name: slot.metadata.get("text", slot.name.upper()) for slot in slots}
    usage = name + "".join(
        f":{words[slot.name]}" if slot.default is MISSING else f"[:{words[slot.name]}]" for slot in slots
    )
    if not needed <= len(values) <= len(slots) or "" in values:
        raise InputError(f"'{text}' is not {with_article(kind)}: write it as {usage}.")
    arguments = [
        value if slot.name in texts else _parse_number(value, text, kind, usage)
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
    """The text that `parse_spec` turns back into the same values."""
    return ":".join([name, *(value if isinstance(value, str) else format_number(value) for value in values)])


def format_number(value: float) -> str:
    """The shortest text of a number without loss of precision."""
    return repr(float(value)).removesuffix(".0")


def check_kind(name: str, value: object) -> None:
    """Reject a value that is not a number."""
    if not is_number(value):
        raise InputError(f"{name} is {value!r}: give a number.")


def check_number(
    name: str, value: float, least: float = 0.0, *, strict: bool = False, infinite: bool = False
) -> None:
    """Reject a number that is too small, or not finite unless that is allowed."""
    check_kind(name, value)
    if infinite and value == inf:
        return
    if not isfinite(value) or value < least or (strict and value == least):
        bound = f"{'above' if strict else 'at least'} {format_number(least)}"
        raise InputError(f"{name} is {value}: give a finite number {bound}.")
