"""Errors that are not bugs, each with a message of one sentence for the user, and checks that raise them."""

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral, Real
from typing import Any, TypeVar

_MAX_HINTS = 3  # known names that are suggested for an unknown one
Renamed = TypeVar("Renamed", bound=Callable[..., Any])


class InputError(ValueError):
    """The user's input cannot be used; the message says what is wrong and what to do."""


class DiskFullError(InputError):
    """There is no space left to write a file."""

    def __init__(self, path: object) -> None:
        super().__init__(
            f"{path} cannot be written because the disk is full: free some space, then resume the run."
        )


class DivergedError(ArithmeticError):
    """A loss, an update or the model became NaN or infinite."""


def check_whole(what: str, value: object, least: int | None = 1) -> None:
    """Reject a value that is not a whole number or is below `least`; `what` names it in the message."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or (least is not None and value < least):  # type: ignore[operator]
        bound = "" if least is None else f" of at least {least}"
        raise InputError(f"{what} is {value!r}: give a whole number{bound}.")


def is_number(value: object) -> bool:
    """Whether a value is a real number of Python or NumPy."""
    return isinstance(value, Real)


def check_attributes(what: str, value: object, attributes: Iterable[str], wanted: str) -> None:
    """Reject a class, or a value that lacks one of these attributes; `wanted` says what to give instead."""
    if isinstance(value, type) or not all(hasattr(value, name) for name in attributes):
        raise InputError(f"{what} is {describe(value)}: give {wanted}.")


def describe(value: object) -> str:
    """A value of the wrong kind, in a few words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    return f"a value of type {type(value).__name__}"


def with_article(noun: str) -> str:
    """The noun after `a` or `an`."""
    return f"{'an' if noun[:1] in 'aeiou' else 'a'} {noun}"


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """The error for an unknown name: it suggests similar names, first those that share a word with it."""
    names, name = sorted(known), str(name)
    bare = {each.strip("-"): each for each in names}
    words = _words(name)
    related = [each for each in names if words & _words(each)]
    near = difflib.get_close_matches(name, related, n=_MAX_HINTS, cutoff=0.0)
    if not near:
        alike = difflib.get_close_matches(name.strip("-").lower(), bare, n=_MAX_HINTS, cutoff=0.5)
        near = [bare[each] for each in alike]
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(names)}."
    return InputError(f"unknown {kind} '{name}': {hint}")


def error_summary(error: BaseException) -> str:
    """The type of an error and the first line of its message, without a full stop."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def first_sentence(error: Exception) -> str:
    """What an error says first, for a log; torch goes on for long."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.split(r"(?<=[\w)])\.\s+(?=[A-Z])", line)[0].removesuffix(".")


def _words(name: str) -> set[str]:
    return {word for word in re.split(r"[^a-z0-9]+", name.lower()) if len(word) > 1}


_naming: ContextVar[Callable[[str], str]] = ContextVar("naming", default=str)


def setting_name(name: str) -> str:
    """A setting's name as the user writes it: the name itself, unless `naming_settings` changes it."""
    return _naming.get()(name)


@contextmanager
def naming_settings(rule: Callable[[str], str]) -> Iterator[None]:
    """Let error messages spell settings as a front end does, such as the command line with `--`."""
    token = _naming.set(rule)
    try:
        yield
    finally:
        _naming.reset(token)


def renamed_parameters(**new_names: str) -> Callable[[Renamed], Renamed]:
    """A decorator that rejects the former names of parameters with a sentence that gives the present name."""

    def decorate(callee: Renamed) -> Renamed:
        original: Any = callee.__init__ if isinstance(callee, type) else callee  # type: ignore[misc]

        @functools.wraps(original)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name in new_names.keys() & kwargs.keys():
                raise InputError(f"{callee.__name__}: the parameter {name} is now {new_names[name]}.")
            return original(*args, **kwargs)

        if isinstance(callee, type):
            callee.__init__ = checked  # type: ignore[misc]
            return callee
        return checked  # type: ignore[return-value]

    return decorate
