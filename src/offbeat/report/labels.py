"""Names at the ends of lines, near where they end but never on top of each other, nor out of sight."""

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, takewhile

_WIDTHS = {"fijlrt.,:;'|!()[]-/ ": 5.0, "mwMW@%…": 12.0}  # of letters 12 pixels high, in a wide font
_CAPITAL, _OTHER, _SQUARE = 9.0, 7.7, 12.5
_EACH = {letter: width for letters, width in _WIDTHS.items() for letter in letters}


def width(text: str) -> float:
    """Pixels that a text takes at most, about."""
    return sum(_EACH.get(letter) or _width(letter) for letter in text)


def shortened(text: str, room: float) -> str:
    """The text, without its middle where it is too long: names of runs often differ at their ends."""
    if width(text) <= room:
        return text
    cut = len(text)
    while cut > 2 and width(short := f"{text[: cut // 2]}…{text[len(text) - (cut - cut // 2) :]}") > room:
        cut -= 1
    return short


def told_apart(texts: Iterable[str], room: float) -> dict[str, str]:
    """Each text, shortened where it is too long, but no two of them to the same."""
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts), 1)}
    found = {text: text for text in numbers if width(text) <= room}
    alike: dict[str, list[str]] = {}
    for text in (text for text in numbers if text not in found):
        alike.setdefault(shortened(text, room), []).append(text)
    for group in alike.values():
        used = set(found.values())
        ways = _ways(group, numbers, room)
        found |= zip(group, next(way for way in ways if len({*way} - used) == len(group)), strict=True)
    return found


def _ways(group: Sequence[str], numbers: Mapping[str, int], room: float) -> Iterator[list[str]]:
    """How names can be shortened, the best first: to their ends, to where they differ, with a number."""
    yield [shortened(text, room) for text in group]
    before = _shared(group)
    after = _shared([text[before:][::-1] for text in group])
    yield [_part(text, before, len(text) - after, room) for text in group]
    for more in count(step=len(numbers)):
        marks = {text: f" ({numbers[text] + more})" for text in group}
        yield [f"{shortened(text, room - width(mark))}{mark}" for text, mark in marks.items()]


def _shared(texts: Sequence[str]) -> int:
    """How many letters all begin with."""
    return sum(1 for _ in takewhile(lambda letters: len({*letters}) == 1, zip(*texts, strict=False)))


def _part(text: str, start: int, end: int, room: float) -> str:
    """The text from `start` to `end`, with as much around it as there is room for."""

    def fits(start: int, end: int) -> bool:
        return start >= 0 and end <= len(text) and width(_cut(text, start, end)) <= room

    if not fits(start, end):
        return f"…{shortened(text[start:end], room - width('……'))}…"
    # up to the end of the text, or from its start on, rather than nearly so
    start, end = next((wide for wide in ((start, len(text)), (0, end)) if fits(*wide)), (start, end))
    while fits(start - 1, end) or fits(start, end + 1):
        start -= fits(start - 1, end)
        end += fits(start, end + 1)
    return _cut(text, start, end)


def _cut(text: str, start: int, end: int) -> str:
    return f"{'…' * (start > 0)}{text[start:end]}{'…' * (end < len(text))}"


def _width(letter: str) -> float:
    if unicodedata.east_asian_width(letter) in "WF":
        return _SQUARE
    return _OTHER if letter.isascii() and not letter.isupper() else _CAPITAL


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places at least `gap` apart between `low` and `high`, in the order of those wanted and near them.

    Where there is not room for all, the gap is as large as it can be.
    """
    count = len(wanted)
    if count > 1:
        gap = min(gap, (high - low) / (count - 1))
    order = sorted(range(count), key=lambda place: wanted[place])
    groups: list[list[int]] = []  # neighbours that touch and so move together
    for place in order:
        groups.append([place])
        while len(groups) > 1 and _start(groups[-1], wanted, gap, low, high) < (
            _start(groups[-2], wanted, gap, low, high) + gap * len(groups[-2])
        ):
            last = groups.pop()
            groups[-1] += last
    places = [0.0] * count
    for group in groups:
        start = _start(group, wanted, gap, low, high)
        for number, place in enumerate(group):
            places[place] = start + gap * number
    return places


def _start(group: Sequence[int], wanted: Sequence[float], gap: float, low: float, high: float) -> float:
    """Where the first of a group goes so that all are near what they want, on average."""
    length = gap * (len(group) - 1)
    middle = sum(wanted[place] for place in group) / len(group)
    return max(low, min(high - length, middle - length / 2))
