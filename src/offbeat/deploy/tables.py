"""A settings file in TOML, table by table: known keys, each of its kind."""

import math
import tomllib
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from offbeat.errors import InputError, unknown

_LARGEST = 1 << 20  # bytes of a settings file


class Kind(Enum):
    """What a key holds; the words are for the sentence that asks for it."""

    WORD = "a text, in quotes"
    WHOLE = "a whole number"
    NUMBER = "a finite number"
    SWITCH = "true or false"
    TABLE = "a table"
    BOUND = "a number, a text such as 'delta=1', or a table of numbers"


def read(path: Path) -> dict[str, Any]:
    """The tables of a settings file."""
    try:
        if path.stat().st_size > _LARGEST:
            raise InputError(f"{path} is too large for a settings file: name another.")
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"there is no settings file {path}: name one, or write one by 'offbeat new'."
        ) from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder: name the settings file in it.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the settings file {path} cannot be read ({_first(error)}): mend it.") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not TOML ({_first(error)}): mend it.") from None


def check(
    place: str, table: Mapping[str, Any], known: Mapping[str, Kind], refused: Mapping[str, str]
) -> None:
    """Refuse keys that nobody reads, keys that mean nothing here, and values of another kind."""
    for name, value in table.items():
        if name in refused:
            raise InputError(f"{place} has '{name}', {refused[name]}: leave it out.")
        if name not in known:
            raise unknown(f"key of {place}", name, known)
        if not fits(value, known[name]):
            raise InputError(f"{name} of {place} must be {known[name].value}, not {_shown(value)}.")


def fits(value: Any, kind: Kind) -> bool:
    """Whether a value is of a kind; true and false are no numbers."""
    match kind:
        case Kind.WORD:
            return isinstance(value, str) and bool(value.strip())
        case Kind.WHOLE:
            return isinstance(value, int) and not isinstance(value, bool)
        case Kind.NUMBER:
            return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        case Kind.SWITCH:
            return isinstance(value, bool)
        case Kind.TABLE:
            return isinstance(value, dict)
        case Kind.BOUND:
            if isinstance(value, dict):
                return bool(value) and all(fits(each, Kind.NUMBER) for each in value.values())
            return fits(value, Kind.NUMBER) or fits(value, Kind.WORD)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
