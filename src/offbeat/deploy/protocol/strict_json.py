"""Strict decoding of untrusted JSON, and the exception that everything invalid ends in.

Text is parsed by the standard library with hooks, because msgspec's own parser keeps the last of two equal
keys and decodes integers of any size; what was parsed is then converted to an annotated type by msgspec.
"""

import json
import math
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

_MAX_DEPTH = 8
_MAX_DIGITS = 19
_INT64_END = 2**63
_MAX_QUOTED = 40  # characters of an untrusted value in an error message
_MAX_REASON = 120  # characters of a parser's error message

_T = TypeVar("_T")


class Reason(StrEnum):
    """Why something that came over the network is not used: one word for counts and logs."""

    MALFORMED = "malformed"  # a message that cannot be read
    RUN = "run"  # belongs to another run
    SIGNATURE = "signature"  # not signed with the key of the node
    TASK = "task"  # not expected, or given to another node
    REPEATED = "repeated"
    VERSION = "version"  # a version that does not exist yet
    SIZE = "size"
    FORM = "form"  # dtypes or shapes
    INFINITE = "infinite"  # NaN or infinity
    NORM = "norm"  # above the method's own bound, or far above what is usual in the run
    RANGE = "range"  # a number outside its range
    SETTINGS = "settings"  # the site is configured for something else
    FAILED = "failed"  # the site raised an exception
    LATE = "late"  # after the deadline
    GONE = "gone"  # the node left
    AWAY = "away"  # the node left before its task was sent


class Rejected(Exception):  # noqa: N818 - an outcome that is counted, not a fault of the program
    """Nothing of what was rejected is used; the sentence is for the log and safe to print."""

    def __init__(self, reason: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence


def malformed(sentence: str) -> Rejected:
    """A rejection of a message that cannot be read."""
    return Rejected(Reason.MALFORMED, sentence)


def quote(value: object) -> str:
    """An untrusted value for an error message: shortened and escaped to ASCII on one line."""
    if isinstance(value, dict | list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    shown = ascii(value[:_MAX_QUOTED] if isinstance(value, str) else value)
    return shown if len(shown) <= _MAX_QUOTED + 2 else f"{shown[:_MAX_QUOTED]}..."


def decode_json(text: str, max_chars: int) -> Any:
    """The value of ASCII text with unique keys, finite numbers, 64-bit integers and limited nesting."""
    if type(text) is not str or len(text) > max_chars or not text.isascii():
        raise malformed(f"the message is not ASCII text of at most {max_chars} characters.")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_int=_int64,
            parse_float=_finite_float,
            parse_constant=_finite_float,
        )
    except RecursionError:
        raise malformed("the message is nested too deeply.") from None
    except ValueError as error:
        raise malformed(f"the message is not valid JSON: {_shorten(error)}.") from None
    _check_nesting(value, _MAX_DEPTH)
    return value


def convert(value: Any, kind: type[_T]) -> _T:
    """A decoded value as an annotated type; nothing is coerced except integers to floats."""
    try:
        return msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        raise malformed(f"the message is invalid: {_shorten(error)}.") from None


def _shorten(error: Exception) -> str:
    """A parser's message may quote what it parsed."""
    return ascii(str(error))[1:-1][:_MAX_REASON]


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def _int64(digits: str) -> int:
    if len(digits) > _MAX_DIGITS + 1 or not -_INT64_END <= int(digits) < _INT64_END:
        raise ValueError("an integer has more than 64 bits")
    return int(digits)


def _finite_float(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError("a number is not finite")
    return number


def _check_nesting(value: Any, depth: int) -> None:
    """Reject deep nesting, and unpaired surrogates, which no encoding can represent."""
    if isinstance(value, dict | list):
        if not depth:
            raise malformed(f"the message is nested more than {_MAX_DEPTH} levels deep.")
        for item in value.values() if isinstance(value, dict) else value:
            _check_nesting(item, depth - 1)
    for text in [value] if isinstance(value, str) else value if isinstance(value, dict) else ():
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise malformed("the message contains an unpaired surrogate.")
