"""What can go wrong that is not a bug: each error is one sentence for the person at the keyboard."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something the user gave cannot work; the message says what and what to do."""


class DivergedError(ArithmeticError):
    """A loss, an update or the model became NaN or infinite."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> InputError:
    """An unknown name, with the nearest known ones."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(names)}."
    return InputError(f"unknown {kind} '{name}': {hint}")
