"""What can go wrong that is not a bug: each error is one sentence for the person at the keyboard."""

import difflib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

Renamed = TypeVar("Renamed", bound=Callable[..., Any])


class InputError(ValueError):
    """Something the user gave cannot work; the message says what and what to do."""


class DiskFullError(InputError):
    """There is no space left to write a file."""

    def __init__(self, path: object) -> None:
        super().__init__(
            f"{path} cannot be written because the disk is full: free some space, then resume the run."
        )


class DivergedError(ArithmeticError):
    """A loss, an update or the model became NaN or infinite."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """An unknown name, with the nearest known ones."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(names)}."
    return InputError(f"unknown {kind} '{name}': {hint}")


_naming: ContextVar[Callable[[str], str]] = ContextVar("naming", default=str)


def setting_name(name: str) -> str:
    """A setting as the user wrote it: its own name, unless `naming_settings` says otherwise."""
    return _naming.get()(name)


@contextmanager
def naming_settings(rule: Callable[[str], str]) -> Iterator[None]:
    """Let errors name settings by a rule, as a front end such as the command line spells them."""
    token = _naming.set(rule)
    try:
        yield
    finally:
        _naming.reset(token)


def renamed_parameters(**new_names: str) -> Callable[[Renamed], Renamed]:
    """Let a function or class answer a parameter's former name with one sentence."""

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
