"""Hyperparameters from a settings file, checked against the method that takes them."""

import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any

from offbeat.algorithms import find
from offbeat.deploy.tables import Kind, fits
from offbeat.errors import InputError, unknown

_KINDS = {float: Kind.NUMBER, int: Kind.WHOLE, bool: Kind.SWITCH, str: Kind.WORD}


def check_parameters(algorithm: str, given: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Sorted by name, each of the kind that the method declares."""
    known = find(algorithm).parameters()
    for name, value in given.items():
        if name not in known:
            raise unknown(f"parameter of {algorithm}", name, known)
        kind = _kind(known[name])
        if not fits(value, kind):
            raise InputError(f"the parameter {name} of {algorithm} must be {kind.value}, not {value!r}.")
    return tuple(
        (name, float(value) if _kind(known[name]) is Kind.NUMBER else value)
        for name, value in sorted(given.items())
    )


def _kind(parameter: inspect.Parameter) -> Kind:
    """Also where None is allowed."""
    annotation = parameter.annotation
    if isinstance(annotation, types.UnionType):
        annotation = next(kind for kind in typing.get_args(annotation) if kind is not types.NoneType)
    return _KINDS[annotation]
