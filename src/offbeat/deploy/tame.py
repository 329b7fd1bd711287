"""Values out of a stranger's JSON: each is of the type and range that was asked for, or is rejected."""

import json
import math
from typing import Any

from offbeat.deploy.rejections import Reason, Rejected, quote

_MOST_DEPTH = 8
_MOST_DIGITS = 19
_MOST_WHOLE = 2**63


def read(text: str, most: int) -> Any:
    """What the text says, where each key is there once and all numbers are finite and of 64 bits."""
    if type(text) is not str or len(text) > most or not text.isascii():
        raise Rejected(Reason.MALFORMED, f"the note is not plain ASCII of at most {most} characters.")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_once,
            parse_int=_whole,
            parse_float=_finite,
            parse_constant=_finite,
        )
    except RecursionError:
        raise Rejected(Reason.MALFORMED, "the note is nested too deeply.") from None
    except ValueError as error:
        raise Rejected(
            Reason.MALFORMED, f"the note is not JSON as it should be: {str(error)[:100]}."
        ) from None
    _check(value, _MOST_DEPTH)
    return value


def whole(what: str, value: Any, least: int, end: int) -> int:
    """A whole number from `least` to before `end`."""
    if type(value) is not int or not least <= value < end:
        raise malformed(what, f"a whole number from {least} to below {end}", value)
    return value


def words(what: str, value: Any, most: int) -> str:
    """Text of one line that can be printed as it is."""
    if type(value) is not str or not 0 < len(value) <= most or not value.isprintable():
        raise malformed(what, f"printable text of 1 to {most} characters", value)
    return value


def record(what: str, value: Any, most: int) -> dict[str, Any]:
    """An object of at most so many characters; what is in it is its reader's to check."""
    if type(value) is not dict or len(json.dumps(value, separators=(",", ":"))) > most:
        raise malformed(what, f"an object of at most {most} characters", value)
    return value


def malformed(what: str, wanted: str, value: object) -> Rejected:
    """Something of a note is not what it should be."""
    return Rejected(Reason.MALFORMED, f"the note's {what} must be {wanted}, not {quote(value)}.")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is there twice")
    return result


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS + 1 or not -_MOST_WHOLE <= int(digits) < _MOST_WHOLE:
        raise ValueError("a whole number has more than 64 bits")
    return int(digits)


def _finite(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError("a number is not finite")
    return number


def _check(value: Any, depth: int) -> None:
    """Refuse what is nested deeply, and text that no encoding can hold."""
    if isinstance(value, dict | list):
        if not depth:
            raise Rejected(Reason.MALFORMED, f"the note is nested more than {_MOST_DEPTH} deep.")
        for one in value.values() if isinstance(value, dict) else value:
            _check(one, depth - 1)
    for text in [value] if isinstance(value, str) else value if isinstance(value, dict) else ():
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise Rejected(Reason.MALFORMED, "the note has half a character in it.")
