"""Numbers and places as the command line has them."""

import argparse
from decimal import Decimal, InvalidOperation

_DIGITS = 18  # that a count may have


def place(text: str) -> str:
    """Of a folder; an empty one would be the folder of now, which nobody means."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a folder, or leave it out")
    return text


def whole(text: str) -> int:
    """Digits."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None


def number(text: str) -> float:
    """Any."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None


def count(text: str) -> int:
    """A whole number that may be written as 1e7."""
    try:
        value = Decimal(text)
    except InvalidOperation:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
    if not value.is_finite() or value.adjusted() > _DIGITS or value != value.to_integral_value():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number, or far too large")
    return int(value)
