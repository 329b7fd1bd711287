"""Why something that came over the network is not used.

Values out of a stranger's JSON: each is of the type and range that was asked for, or is rejected.
"""

import json
import math
from enum import Enum
from typing import Any

_SHOWN = 40  # characters of what a stranger sent, in a sentence


class Reason(Enum):
    """One word for counts and logs."""

    MALFORMED = "malformed"  # a note that cannot be read
    RUN = "run"  # of another run
    TASK = "task"  # not expected, or not this node's
    REPEATED = "repeated"
    VERSION = "version"  # from the future
    SIZE = "size"
    FORM = "form"  # dtype or shape
    INFINITE = "infinite"  # NaN too
    NORM = "norm"  # above the method's own bound, or what is usual in the run
    RANGE = "range"  # a number where none such can be
    SETTINGS = "settings"  # the site is set up for something else
    FAILED = "failed"  # the site raised
    LATE = "late"  # after the deadline
    GONE = "gone"  # the node left
    AWAY = "away"


class Rejected(Exception):  # noqa: N818 - an outcome that is counted, not a fault of the program
    """Nothing of it was used; the sentence is for the log, and safe to print."""

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence


def quote(value: object) -> str:
    """A stranger's value for a sentence: shortened, and escaped to plain ASCII on one line."""
    if isinstance(value, dict | list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    shown = ascii(value[:_SHOWN] if isinstance(value, str) else value)
    return shown if len(shown) <= _SHOWN + 2 else f"{shown[:_SHOWN]}..."


_MAX_DEPTH = 8
_MAX_DIGITS = 19
_INT64_END = 2**63


def decode_json(text: str, most: int) -> Any:
    """What the text says, where each key is there once and all numbers are finite and of 64 bits."""
    if type(text) is not str or len(text) > most or not text.isascii():
        raise Rejected(Reason.MALFORMED, f"the note is not plain ASCII of at most {most} characters.")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_int=_int64,
            parse_float=_finite_float,
            parse_constant=_finite_float,
        )
    except RecursionError:
        raise Rejected(Reason.MALFORMED, "the note is nested too deeply.") from None
    except ValueError as error:
        raise Rejected(
            Reason.MALFORMED, f"the note is not JSON as it should be: {str(error)[:100]}."
        ) from None
    _check_nesting(value, _MAX_DEPTH)
    return value


def integer(what: str, value: Any, least: int, end: int) -> int:
    """A whole number from `least` to before `end`."""
    if type(value) is not int or not least <= value < end:
        raise malformed(what, f"a whole number from {least} to below {end}", value)
    return value


def printable_text(what: str, value: Any, most: int) -> str:
    """Text of one line that can be printed as it is."""
    if type(value) is not str or not 0 < len(value) <= most or not value.isprintable():
        raise malformed(what, f"printable text of 1 to {most} characters", value)
    return value


def json_object(what: str, value: Any, most: int) -> dict[str, Any]:
    """An object of at most so many characters; what is in it is its reader's to check."""
    if type(value) is not dict or len(json.dumps(value, separators=(",", ":"))) > most:
        raise malformed(what, f"an object of at most {most} characters", value)
    return value


def malformed(what: str, wanted: str, value: object) -> Rejected:
    """Something of a note is not what it should be."""
    return Rejected(Reason.MALFORMED, f"the note's {what} must be {wanted}, not {quote(value)}.")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is there twice")
    return result


def _int64(digits: str) -> int:
    if len(digits) > _MAX_DIGITS + 1 or not -_INT64_END <= int(digits) < _INT64_END:
        raise ValueError("a whole number has more than 64 bits")
    return int(digits)


def _finite_float(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError("a number is not finite")
    return number


def _check_nesting(value: Any, depth: int) -> None:
    """Refuse what is nested deeply, and text that no encoding can hold."""
    if isinstance(value, dict | list):
        if not depth:
            raise Rejected(Reason.MALFORMED, f"the note is nested more than {_MAX_DEPTH} deep.")
        for one in value.values() if isinstance(value, dict) else value:
            _check_nesting(one, depth - 1)
    for text in [value] if isinstance(value, str) else value if isinstance(value, dict) else ():
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise Rejected(Reason.MALFORMED, "the note has half a character in it.")
