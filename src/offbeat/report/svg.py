"""Text from outside, made safe for HTML and SVG.

How runs are told apart: colours that the colour-blind can tell (Okabe and Ito), dashes and marks.

Names at the ends of lines, near where they end but never on top of each other, nor out of sight.

A figure as SVG: two axes, lines with marks, and each run's name where its line ends.

Drawings as PNG, where the package that converts them is there, and letters to draw them with.
"""

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import count, takewhile
from typing import NamedTuple

from offbeat.report.chart import (
    Axis,
    AxisScale,
    Figure,
    Series,
    UnitSize,
    linear_scale,
    log_scale,
    thin_points,
)

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def escape_text(value: str) -> str:
    """As text or as an attribute's value: nothing in it is markup, and nothing in it is invisible."""
    return escape("".join(each if each.isprintable() else _REPLACEMENT for each in value))


def element(tag: str, attributes: Mapping[str, object], inside: str = "") -> str:
    """One element; `inside` is markup already."""
    words = "".join(f' {name}="{escape_text(str(value))}"' for name, value in attributes.items())
    return f"<{tag}{words}>{inside}</{tag}>" if inside else f"<{tag}{words}/>"


MAX_RUNS = 12  # that one page can show
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DARK = ("#56b4e9", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#f0e442")
_DASHES = ("", "7 3", "2 3", "9 3 2 3")


class Theme(NamedTuple):
    """Colours of what is not a run."""

    ground: str
    ink: str
    soft: str
    rail: str


LIGHT = Theme("#ffffff", "#1b1f24", "#57606a", "#e3e7eb")
DARK = Theme("#161b22", "#e6edf3", "#9aa4af", "#2d343d")


def dash_pattern(style: int) -> str:
    """The dashes of a run's lines; empty: none."""
    return _DASHES[style % len(_DASHES)]


def colour_class(style: int) -> str:
    """The class of a run's colour."""
    return f"c{style % len(_COLOURS)}"


def style_rules(theme: Theme, colours: tuple[str, ...] = _COLOURS) -> str:
    """The style of what is drawn."""
    runs = "".join(f".c{n}{{stroke:{each};fill:{each}}}" for n, each in enumerate(colours))
    return (
        f"{runs}text{{fill:{theme.soft};stroke:none;font-size:12px}}"
        f"text.name{{fill:{theme.ink}}}"
        f".grid{{stroke:{theme.rail}}}.axis{{stroke:{theme.soft}}}"
        f".leader{{stroke:{theme.soft};stroke-dasharray:1 2}}"
        ".line{fill:none;stroke-width:2;stroke-linejoin:round}"
        ".band{stroke:none;fill-opacity:.08}.edge{stroke-width:.9;stroke-opacity:.7}"
        f".ground{{fill:{theme.ground}}}"
    )


def dark_style_rules() -> str:
    """The same on a dark ground."""
    return style_rules(DARK, _DARK)


_WIDTHS = {"fijlrt.,:;'|!()[]-/ ": 5.0, "mwMW@%…": 12.0}  # of letters 12 pixels high, in a wide font
_CAPITAL, _OTHER, _SQUARE = 9.0, 7.7, 12.5
_LETTER_WIDTHS = {letter: width for letters, width in _WIDTHS.items() for letter in letters}


def text_width(text: str) -> float:
    """Pixels that a text takes at most, about."""
    return sum(_LETTER_WIDTHS.get(letter) or _letter_width(letter) for letter in text)


def shorten(text: str, room: float) -> str:
    """The text, without its middle where it is too long: names of runs often differ at their ends."""
    if text_width(text) <= room:
        return text
    cut = len(text)
    while (
        cut > 2 and text_width(short := f"{text[: cut // 2]}…{text[len(text) - (cut - cut // 2) :]}") > room
    ):
        cut -= 1
    return short


def distinct_labels(texts: Iterable[str], room: float) -> dict[str, str]:
    """Each text, shortened where it is too long, but no two of them to the same."""
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts), 1)}
    found = {text: text for text in numbers if text_width(text) <= room}
    alike: dict[str, list[str]] = {}
    for text in (text for text in numbers if text not in found):
        alike.setdefault(shorten(text, room), []).append(text)
    for group in alike.values():
        used = set(found.values())
        ways = _ways(group, numbers, room)
        found |= zip(group, next(way for way in ways if len({*way} - used) == len(group)), strict=True)
    return found


def _ways(group: Sequence[str], numbers: Mapping[str, int], room: float) -> Iterator[list[str]]:
    """How names can be shortened, the best first: to their ends, to where they differ, with a number."""
    yield [shorten(text, room) for text in group]
    before = _shared(group)
    after = _shared([text[before:][::-1] for text in group])
    yield [_part(text, before, len(text) - after, room) for text in group]
    for more in count(step=len(numbers)):
        marks = {text: f" ({numbers[text] + more})" for text in group}
        yield [f"{shorten(text, room - text_width(mark))}{mark}" for text, mark in marks.items()]


def _shared(texts: Sequence[str]) -> int:
    """How many letters all begin with."""
    return sum(1 for _ in takewhile(lambda letters: len({*letters}) == 1, zip(*texts, strict=False)))


def _part(text: str, start: int, end: int, room: float) -> str:
    """The text from `start` to `end`, with as much around it as there is room for."""

    def fits(start: int, end: int) -> bool:
        return start >= 0 and end <= len(text) and text_width(_cut(text, start, end)) <= room

    if not fits(start, end):
        return f"…{shorten(text[start:end], room - text_width('……'))}…"
    # up to the end of the text, or from its start on, rather than nearly so
    start, end = next((wide for wide in ((start, len(text)), (0, end)) if fits(*wide)), (start, end))
    while fits(start - 1, end) or fits(start, end + 1):
        start -= fits(start - 1, end)
        end += fits(start, end + 1)
    return _cut(text, start, end)


def _cut(text: str, start: int, end: int) -> str:
    return f"{'…' * (start > 0)}{text[start:end]}{'…' * (end < len(text))}"


def _letter_width(letter: str) -> float:
    if unicodedata.east_asian_width(letter) in "WF":
        return _SQUARE
    return _OTHER if letter.isascii() and not letter.isupper() else _CAPITAL


def spread_labels(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
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


WIDTH, HEIGHT = 420, 270
_TOP, _BOTTOM = 24, 40
_LABEL_WIDTH = 135  # pixels that a run's name may take
_LABEL_GAP = 15  # between names
_MARKERS = 7  # on a line with many points
_ALL_MARKED = 30  # points of a line that are all marked
FONT = (
    "'Segoe UI', Roboto, 'DejaVu Sans', 'Liberation Sans', 'Noto Sans', Helvetica, Arial, Verdana, sans-serif"
)


class _PlotArea(NamedTuple):
    """Where numbers lie in the drawing."""

    left: float
    right: float
    x: AxisScale
    y: AxisScale

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = self.left + (self.right - self.left) * self.x.place(x)
        return across, HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * self.y.place(y)


def draw(figure: Figure) -> str:
    """The drawing, styled by the page that it is in."""
    named = max(len(figure.lines), len(figure.runs)) > 1
    short = distinct_labels([*figure.runs, *(line.label for line in figure.lines)], _LABEL_WIDTH)
    sizes = [
        _unit_size(axis, numbers)
        for axis, numbers in zip((figure.x, figure.y), _axis_values(figure), strict=True)
    ]
    x, y = (
        _axis_scale(axis, numbers, size, snug=axis is figure.x)
        for axis, numbers, size in zip((figure.x, figure.y), _axis_values(figure), sizes, strict=True)
    )
    longest = max(text_width(short[line.label]) for line in figure.lines)
    left = 8 + max((text_width(word) for _, word in y.ticks), default=0)
    plane = _PlotArea(left, WIDTH - (18 + longest if named else 16), x, y)
    inside = [
        f"<title>{escape_text(figure.title)}</title>",
        *_draw_axes(figure, plane, *sizes),
        *(_draw_band(line, plane) for line in figure.lines if line.tops is not None),
        *(_draw_series(figure, line, plane) for line in figure.lines),
        *(_labels(figure.lines, short, plane) if named else ()),
    ]
    box = f"0 0 {WIDTH} {HEIGHT}"
    return element("svg", {"viewBox": box, "role": "img", "aria-label": _describe(figure)}, "".join(inside))


def standalone(drawing: str, *, dark: bool = False) -> str:
    """The same as a file of its own, on a white ground, or on a dark one, too, where the reader's is dark."""
    style = style_rules(LIGHT) + (
        f"@media (prefers-color-scheme:dark){{{dark_style_rules()}}}" if dark else ""
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="{FONT}"'
    ground = f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}"/>'
    tag, _, rest = drawing.removeprefix("<svg").partition(">")
    return f"{head}{tag}><style>{style}</style>{ground}{rest}\n"


def _describe(figure: Figure) -> str:
    """For whoever cannot see it: where each line ends."""
    ends = (
        f"{line.label} ends at {figure.y.unit.say(float(line.ys[-1]))}"
        for line in _last_series(figure.lines)
        if len(line.ys)
    )
    return f"{figure.title}: {figure.y.label} over {figure.x.label}; {', '.join(ends)}."


def _axis_values(figure: Figure) -> tuple[list[float], list[float]]:
    """All that has to be on each axis."""
    side = figure.stair / 2
    xs = [
        value for line in figure.lines for value in (float(line.xs.min()) - side, float(line.xs.max()) + side)
    ]
    ys = [float(line.ys.min()) for line in figure.lines]
    ys += [float((line.ys if line.tops is None else line.tops).max()) for line in figure.lines]
    return xs, ys


def _unit_size(axis: Axis, numbers: Sequence[float]) -> UnitSize:
    return axis.unit.size(max(abs(number) for number in numbers))


def _axis_scale(axis: Axis, numbers: Sequence[float], size: UnitSize, *, snug: bool) -> AxisScale:
    if axis.log:
        return log_scale(min(numbers), max(numbers))
    low = min(0.0, *numbers) if axis.zero else min(numbers)
    return linear_scale(low, max(numbers), size, 5, snug=snug, whole=axis.unit.whole)


def _draw_axes(figure: Figure, plane: _PlotArea, across: UnitSize, up: UnitSize) -> Iterable[str]:
    floor = HEIGHT - _BOTTOM
    for value, word in plane.y.ticks:
        _, y = plane.at(plane.x.low, value)
        yield _segment("grid", plane.left, y, plane.right, y)
        yield _text(plane.left - 5, y + 4, word, "end")
    for value, word in plane.x.ticks:
        x, _ = plane.at(value, plane.y.low)
        yield _segment("axis", x, floor, x, floor + 4)
        yield _text(x, floor + 17, word, "middle")
    yield _segment("axis", plane.left, floor, plane.right, floor)
    yield _text(2, 12, _axis_title(figure.y.label, up))
    yield _text((plane.left + plane.right) / 2, HEIGHT - 6, _axis_title(figure.x.label, across), "middle")


def _axis_title(label: str, size: UnitSize) -> str:
    return f"{label}, {size.name}" if size.name else label


def _draw_series(figure: Figure, line: Series, plane: _PlotArea) -> str:
    kept = thin_points(line.xs, line.ys)
    points = [plane.at(float(line.xs[place]), float(line.ys[place])) for place in kept]
    look = {
        "class": f"line {colour_class(line.style)}",
        "d": _path(_steps(line, figure.stair, plane) or points),
    }
    if dash_pattern(line.style):
        look["stroke-dasharray"] = dash_pattern(line.style)
    few = len(points) <= _ALL_MARKED
    apart = 1 if few else len(points) / _MARKERS
    # runs are marked at different places, so that marks of lines that lie together can be seen
    first = 0.0 if few else apart * (0.3 + 0.17 * (line.style % 5))
    marks = []
    while first < len(points):
        place = kept[int(first)]
        x, y = figure.x.unit.say(float(line.xs[place])), figure.y.unit.say(float(line.ys[place]))
        marks.append(draw_marker(line.style, *points[int(first)], f"{line.label}: {y} at {x}"))
        first += apart
    return element("path", look) + "".join(marks)


def _steps(line: Series, width: float, plane: _PlotArea) -> list[tuple[float, float]]:
    """Level pieces around each point, from the ground up and back; none where there is no width."""
    if not width:
        return []
    pairs = list(zip(line.xs.tolist(), line.ys.tolist(), strict=True))
    level = [plane.at(x + side * width / 2, y) for x, y in pairs for side in (-1, 1)]
    ends = [plane.at(pairs[0][0] - width / 2, 0.0), plane.at(pairs[-1][0] + width / 2, 0.0)]
    return [ends[0], *level, ends[1]]


def _draw_band(line: Series, plane: _PlotArea) -> str:
    assert line.tops is not None
    kept = thin_points(line.xs, line.tops)
    above = [plane.at(float(line.xs[place]), float(line.tops[place])) for place in kept]
    below = [plane.at(float(line.xs[place]), float(line.ys[place])) for place in reversed(kept)]
    inside = element("path", {"class": f"band {colour_class(line.style)}", "d": f"{_path(above + below)}Z"})
    return inside + element("path", {"class": f"line edge {colour_class(line.style)}", "d": _path(above)})


def _last_series(lines: Sequence[Series]) -> list[Series]:
    """Of each run the line that ends last."""
    return list({(line.style, line.label): line for line in lines}.values())


def _labels(lines: Sequence[Series], short: Mapping[str, str], plane: _PlotArea) -> Iterable[str]:
    lines = _last_series(lines)
    ends = [plane.at(float(line.xs[-1]), float(line.ys[-1])) for line in lines]
    places = spread_labels([y for _, y in ends], _LABEL_GAP, _TOP, HEIGHT - _BOTTOM)
    for line, (x, y), place in zip(lines, ends, places, strict=True):
        side = plane.right + 9
        yield _segment("leader", x, y, side - 5, place)
        yield draw_marker(line.style, side, place, line.label)
        yield element(
            "text",
            {"class": "name", "x": _number(side + 7), "y": _number(place + 4)},
            escape_text(short[line.label]),
        )


def draw_marker(style: int, x: float, y: float, told: str) -> str:
    """A shape that goes with the run."""
    shapes = (
        ((-3, -1.2), (-1.2, -3), (1.2, -3), (3, -1.2), (3, 1.2), (1.2, 3), (-1.2, 3), (-3, 1.2)),
        ((-2.7, -2.7), (2.7, -2.7), (2.7, 2.7), (-2.7, 2.7)),
        ((0, -3.7), (3.5, 2.5), (-3.5, 2.5)),
        ((0, -3.9), (3.9, 0), (0, 3.9), (-3.9, 0)),
        ((0, 3.7), (3.5, -2.5), (-3.5, -2.5)),
    )
    shape = shapes[style % len(shapes)]
    path = f"{_path([(x + across, y + down) for across, down in shape])}Z"
    return element("path", {"class": colour_class(style), "d": path}, f"<title>{escape_text(told)}</title>")


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _segment(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return element("path", {"class": kind, "d": _path([(x1, y1), (x2, y2)])})


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    look = {"x": _number(x), "y": _number(y)} | ({} if anchor == "start" else {"text-anchor": anchor})
    return element("text", look, escape_text(words))


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


_PNG_ZOOM = 2.5  # sharp on paper, too
_FONT_PROBE = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20">'
    '<text x="2" y="15" font-family="{family}" font-size="14">{word}</text></svg>'
)

ConvertToPng = Callable[[str], bytes]


def png_converter() -> ConvertToPng | str:
    """From SVG to PNG; or why there is none, in a sentence."""
    try:
        from resvg_py import svg_to_bytes
    except ImportError:
        return "figures are not written as PNG, for resvg-py is not installed: pip install 'offbeat[report]'."

    def convert(drawing: str) -> bytes:
        return bytes(svg_to_bytes(svg_string=drawing, zoom=_PNG_ZOOM))

    written, blank = (convert(_FONT_PROBE.format(family=FONT, word=word)) for word in ("on", ""))
    if written == blank:
        return "figures are not written as PNG, for no font was found to write in: install DejaVu Sans."
    return convert
