"""The last whole number at which a rising function keeps to a bound, with few calls of a slow function."""

from collections.abc import Callable
from math import inf, isfinite


def last(value: Callable[[int], float], bound: float, start: int, stride: int, least: int, most: int) -> int:
    """`least` - 1 where none keeps to it; any other answer has been tried. `start` is a guess."""
    low, high = least - 1, most + 1  # keeps to the bound, or is out of range; does not keep to it
    below, above = -inf, inf  # their values

    def narrow(guess: int) -> bool:
        nonlocal low, high, below, above
        if low < guess < high:
            found = value(guess)
            if found <= bound:
                low, below = guess, found
                return True
            high, above = guess, found
        return guess <= low

    guess = min(max(start, least), most)
    rising = narrow(guess)
    while high - low > 1 and (low < least or high > most):  # stride out until it lies between two values
        guess = min(guess + stride, most) if rising else max(guess - stride, least)
        narrow(guess)
        stride *= 2
    while high - low > 1:
        width = high - low
        if isfinite(below) and isfinite(above):
            guess = low + int(width * (bound - below) / (above - below))
            # The neighbour ends the search where the line through the two was a good guess.
            narrow(guess + 1 if narrow(guess) else guess - 1)
        if high - low > width // 2:
            narrow((low + high) // 2)
    return low
