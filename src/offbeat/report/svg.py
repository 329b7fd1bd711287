"""Figures as SVG and PNG: axes, lines with markers, and the label of each run at the end of its line.

Runs differ in colour (the palette of Okabe and Ito, which colour-blind readers can distinguish), dashes and
markers. Lines that coincide alternate in dashes, so that each of them is visible.
"""

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import count, takewhile
from typing import NamedTuple

import numpy as np

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
    """Escape text for HTML and SVG; characters that are not printable are replaced."""
    return escape("".join(each if each.isprintable() else _REPLACEMENT for each in value))


def element(tag: str, attributes: Mapping[str, object], inside: str = "") -> str:
    """One element; `inside` is markup."""
    words = "".join(f' {name}="{escape_text(str(value))}"' for name, value in attributes.items())
    return f"<{tag}{words}>{inside}</{tag}>" if inside else f"<{tag}{words}/>"


MAX_RUNS = 12  # of one page
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DARK = ("#56b4e9", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#f0e442")
_DASHES = ("", "7 3", "2 3", "9 3 2 3")


class Theme(NamedTuple):
    """Colours of everything but the runs."""

    ground: str
    ink: str
    soft: str
    rail: str


LIGHT = Theme("#ffffff", "#1b1f24", "#57606a", "#e3e7eb")
DARK = Theme("#161b22", "#e6edf3", "#9aa4af", "#2d343d")


def dash_pattern(style: int) -> str:
    """The dashes of a run's lines; empty: a solid line."""
    return _DASHES[style % len(_DASHES)]


def run_class(style: int) -> str:
    """The class of everything that belongs to a run, by which a page hides it."""
    return f"r{style}"


def colour_class(style: int) -> str:
    """The class of a run's colour."""
    return f"c{style % len(_COLOURS)}"


def style_rules(theme: Theme, colours: tuple[str, ...] = _COLOURS) -> str:
    """The style sheet of drawings."""
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
    """The style sheet for a dark background."""
    return style_rules(DARK, _DARK)


_WIDTHS = {"fijlrt.,:;'|!()[]-/ ": 5.0, "mwMW@%…": 12.0}  # of letters 12 pixels high, in a wide font
_CAPITAL, _OTHER, _SQUARE = 9.0, 7.7, 12.5
_LETTER_WIDTHS = {letter: width for letters, width in _WIDTHS.items() for letter in letters}


def text_width(text: str) -> float:
    """An upper estimate of a text's width in pixels."""
    return sum(_LETTER_WIDTHS.get(letter) or _letter_width(letter) for letter in text)


def shorten(text: str, room: float) -> str:
    """The text, without its middle if it is too long: names of runs often differ at their ends."""
    if text_width(text) <= room:
        return text
    cut = len(text)
    while (
        cut > 2 and text_width(short := f"{text[: cut // 2]}…{text[len(text) - (cut - cut // 2) :]}") > room
    ):
        cut -= 1
    return short


def distinct_labels(texts: Iterable[str], room: float) -> dict[str, str]:
    """Each text, shortened if it is too long, such that all stay distinct."""
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
    """Ways to shorten labels, the best first: keep the ends, keep the differing part, add a number."""
    yield [shorten(text, room) for text in group]
    before = _shared(group)
    after = _shared([text[before:][::-1] for text in group])
    yield [_part(text, before, len(text) - after, room) for text in group]
    for more in count(step=len(numbers)):
        marks = {text: f" ({numbers[text] + more})" for text in group}
        yield [f"{shorten(text, room - text_width(mark))}{mark}" for text, mark in marks.items()]


def _shared(texts: Sequence[str]) -> int:
    """The length of the common prefix."""
    return sum(1 for _ in takewhile(lambda letters: len({*letters}) == 1, zip(*texts, strict=False)))


def _part(text: str, start: int, end: int, room: float) -> str:
    """The text from `start` to `end`, with as much of the rest as fits."""

    def fits(start: int, end: int) -> bool:
        return start >= 0 and end <= len(text) and text_width(_cut(text, start, end)) <= room

    if not fits(start, end):
        return f"…{shorten(text[start:end], room - text_width('……'))}…"
    # prefer a part that reaches the end or the start of the text
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
    """Positions near the wanted ones and in their order, at least `gap` apart, between `low` and `high`.

    If there is not enough room, the gap is as large as possible.
    """
    count = len(wanted)
    if count > 1:
        gap = min(gap, (high - low) / (count - 1))
    order = sorted(range(count), key=lambda index: wanted[index])
    groups: list[list[int]] = []  # neighbours that touch and therefore move together
    for index in order:
        groups.append([index])
        while len(groups) > 1 and _start(groups[-1], wanted, gap, low, high) < (
            _start(groups[-2], wanted, gap, low, high) + gap * len(groups[-2])
        ):
            last = groups.pop()
            groups[-1] += last
    positions = [0.0] * count
    for group in groups:
        start = _start(group, wanted, gap, low, high)
        for number, index in enumerate(group):
            positions[index] = start + gap * number
    return positions


def _start(group: Sequence[int], wanted: Sequence[float], gap: float, low: float, high: float) -> float:
    """The position of the first label of a group that minimises the distances of all."""
    length = gap * (len(group) - 1)
    middle = sum(wanted[index] for index in group) / len(group)
    return max(low, min(high - length, middle - length / 2))


WIDTH, HEIGHT = 420, 270
_TOP, _BOTTOM = 24, 40
_LABEL_WIDTH = 135  # pixels that a run's name may take
_LABEL_GAP = 15  # between names
_MARKERS = 7  # on a line with many points
_ALL_MARKED = 30  # points of a line that are all marked
_MARGIN = 5  # pixels around the plot area for markers
_START_SHARE = 0.2  # of a line that a zoomed axis may leave out
_SQUEEZED = 0.6  # share of the axis below which it is zoomed
_PROBES, _STROKE, _DASH = 60, 1.5, 9  # points at which lines are compared; pixels
FONT = (
    "'Segoe UI', Roboto, 'DejaVu Sans', 'Liberation Sans', 'Noto Sans', Helvetica, Arial, Verdana, sans-serif"
)


class _PlotArea(NamedTuple):
    """The part of the drawing between the axes."""

    left: float
    right: float
    x: AxisScale
    y: AxisScale

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = self.left + (self.right - self.left) * self.x.position(x)
        return across, HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * self.y.position(y)


def draw(figure: Figure) -> str:
    """The drawing, styled by the page that it is in."""
    named = max(len(figure.lines), len(figure.runs)) > 1
    short = distinct_labels([*figure.runs, *(line.label for line in figure.lines)], _LABEL_WIDTH)
    plane, sizes = _plot_area(
        figure, max(text_width(short[line.label]) for line in figure.lines) if named else 0
    )
    alternating = _alternating_dashes(coinciding(figure, plane))
    inside = [
        f"<title>{escape_text(figure.title)}</title>",
        *_draw_axes(figure, plane, *sizes),
        _clipped("".join(_draw_line(figure, line, plane, alternating) for line in figure.lines), plane),
        *(_labels(figure.lines, short, plane) if named else ()),
    ]
    box = f"0 0 {WIDTH} {HEIGHT}"
    return element("svg", {"viewBox": box, "role": "img", "aria-label": _describe(figure)}, "".join(inside))


def _plot_area(figure: Figure, label_width: float) -> tuple[_PlotArea, list[UnitSize]]:
    """The plot area, with room for labels at its right, and the units of both axes."""
    values = _axis_values(figure)
    sizes = [_unit_size(axis, numbers) for axis, numbers in zip((figure.x, figure.y), values, strict=True)]
    x, y = (
        _axis_scale(axis, numbers, size, snug=axis is figure.x)
        for axis, numbers, size in zip((figure.x, figure.y), values, sizes, strict=True)
    )
    left = 8 + max((text_width(word) for _, word in y.ticks), default=0)
    return _PlotArea(left, WIDTH - (18 + label_width if label_width else 16), x, y), sizes


def coinciding(figure: Figure, plane: _PlotArea | None = None) -> list[tuple[str, ...]]:
    """The labels of lines that lie on top of each other over at least half of their length."""
    if len(figure.lines) < 2:
        return []
    plane = plane or _plot_area(figure, 0)[0]
    groups: list[list[Series]] = []
    for line in figure.lines:
        group = next((each for each in groups if _same_course(each[0], line, plane)), None)
        if group is None:
            groups.append([line])
        elif group[-1].label != line.label:
            group.append(line)
    return [tuple(line.label for line in group) for group in groups if len(group) > 1]


def _same_course(one: Series, two: Series, plane: _PlotArea) -> bool:
    """Whether two lines are nowhere more than a stroke's width apart where both are drawn."""
    low, high = max(one.xs[0], two.xs[0]), min(one.xs[-1], two.xs[-1])
    longest = max(one.xs[-1] - one.xs[0], two.xs[-1] - two.xs[0])
    if high - low < longest / 2 or (np.diff(one.xs) <= 0).any() or (np.diff(two.xs) <= 0).any():
        return False
    at = np.linspace(low, high, _PROBES)
    first, second = (np.interp(at, line.xs, line.ys) for line in (one, two))
    return all(
        abs(plane.at(low, a)[1] - plane.at(low, b)[1]) <= _STROKE
        for a, b in zip(first.tolist(), second.tolist(), strict=True)
    )


def _alternating_dashes(groups: Sequence[Sequence[str]]) -> dict[str, dict[str, str]]:
    """Dashes by label that let each of several coinciding lines show in turn."""
    return {
        label: {
            "stroke-dasharray": f"{_DASH} {_DASH * (len(group) - 1)}",
            "stroke-dashoffset": str(-_DASH * number),
        }
        for group in groups
        for number, label in enumerate(group)
    }


def _clipped(inside: str, plane: _PlotArea) -> str:
    """Markup that is visible within the plot area only; markers may reach over its edge."""
    x, y = plane.left - _MARGIN, _TOP - _MARGIN
    width, height = plane.right - plane.left + 2 * _MARGIN, HEIGHT - _TOP - _BOTTOM + 2 * _MARGIN
    box = " ".join(map(_number, (x, y, width, height)))
    look = {"x": _number(x), "y": _number(y), "width": _number(width), "height": _number(height)}
    return element("svg", look | {"viewBox": box, "class": "plot"}, inside)


def standalone(drawing: str, *, dark: bool = False) -> str:
    """The drawing as a file with its own style; `dark`: it follows the reader's colour scheme."""
    style = style_rules(LIGHT) + (
        f"@media (prefers-color-scheme:dark){{{dark_style_rules()}}}" if dark else ""
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="{FONT}"'
    ground = f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}"/>'
    tag, _, rest = drawing.removeprefix("<svg").partition(">")
    return f"{head}{tag}><style>{style}</style>{ground}{rest}\n"


def _describe(figure: Figure) -> str:
    """A description for screen readers: where each line ends."""
    ends = (
        f"{line.label} ends at {figure.y.unit.format(float(line.ys[-1]))}"
        for line in _last_series(figure.lines)
        if len(line.ys)
    )
    return f"{figure.title}: {figure.y.label} over {figure.x.label}; {', '.join(ends)}."


def _axis_values(figure: Figure) -> tuple[list[float], list[float]]:
    """The values that have to be on each axis."""
    side = figure.stair / 2
    xs = [
        value for line in figure.lines for value in (float(line.xs.min()) - side, float(line.xs.max()) + side)
    ]
    ys = [float(line.ys.min()) for line in figure.lines]
    ys += [float((line.ys if line.tops is None else line.tops).max()) for line in figure.lines]
    return xs, _without_start(figure.lines, ys) if figure.y.zoom else ys


def _without_start(lines: Sequence[Series], ys: list[float]) -> list[float]:
    """The range of values after the first part of each line, if the first parts take most of the axis."""
    later = [line.ys[line.xs >= line.xs[0] + _START_SHARE * (line.xs[-1] - line.xs[0])] for line in lines]
    low, high = min(float(each.min()) for each in later), max(float(each.max()) for each in later)
    return [low, high] if 0 < high - low < _SQUEEZED * (max(ys) - min(ys)) else ys


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


def _draw_line(
    figure: Figure, line: Series, plane: _PlotArea, alternating: Mapping[str, Mapping[str, str]]
) -> str:
    """All of a run but its label; a page can hide the group."""
    band = "" if line.tops is None else _draw_band(line, plane)
    return element(
        "g",
        {"class": run_class(line.style)},
        band + _draw_series(figure, line, plane, alternating.get(line.label)),
    )


def _draw_series(figure: Figure, line: Series, plane: _PlotArea, dashes: Mapping[str, str] | None) -> str:
    kept = thin_points(line.xs, line.ys)
    points = [plane.at(float(line.xs[index]), float(line.ys[index])) for index in kept]
    look = {
        "class": f"line {colour_class(line.style)}",
        "d": _path(_steps(line, figure.stair, plane) or points),
    }
    if dashes:
        look |= dashes
    elif dash_pattern(line.style):
        look["stroke-dasharray"] = dash_pattern(line.style)
    few = len(points) <= _ALL_MARKED
    apart = 1 if few else len(points) / _MARKERS
    # markers are at different points for each run, so that those of close lines do not cover each other
    first = 0.0 if few else apart * (0.3 + 0.17 * (line.style % 5))
    marks = []
    while first < len(points):
        index = kept[int(first)]
        x, y = figure.x.unit.format(float(line.xs[index])), figure.y.unit.format(float(line.ys[index]))
        marks.append(draw_marker(line.style, *points[int(first)], f"{line.label}: {y} at {x}"))
        first += apart
    return element("path", look) + "".join(marks)


def _steps(line: Series, width: float, plane: _PlotArea) -> list[tuple[float, float]]:
    """The outline of a histogram; empty if bars have no width."""
    if not width:
        return []
    pairs = list(zip(line.xs.tolist(), line.ys.tolist(), strict=True))
    level = [plane.at(x + side * width / 2, y) for x, y in pairs for side in (-1, 1)]
    ends = [plane.at(pairs[0][0] - width / 2, 0.0), plane.at(pairs[-1][0] + width / 2, 0.0)]
    return [ends[0], *level, ends[1]]


def _draw_band(line: Series, plane: _PlotArea) -> str:
    assert line.tops is not None
    kept = thin_points(line.xs, line.tops)
    above = [plane.at(float(line.xs[index]), float(line.tops[index])) for index in kept]
    below = [plane.at(float(line.xs[index]), float(line.ys[index])) for index in reversed(kept)]
    inside = element("path", {"class": f"band {colour_class(line.style)}", "d": f"{_path(above + below)}Z"})
    return inside + element("path", {"class": f"line edge {colour_class(line.style)}", "d": _path(above)})


def _last_series(lines: Sequence[Series]) -> list[Series]:
    """The last line of each run."""
    return list({(line.style, line.label): line for line in lines}.values())


def _labels(lines: Sequence[Series], short: Mapping[str, str], plane: _PlotArea) -> Iterable[str]:
    lines = _last_series(lines)
    ends = [plane.at(float(line.xs[-1]), float(line.ys[-1])) for line in lines]
    heights = spread_labels([y for _, y in ends], _LABEL_GAP, _TOP, HEIGHT - _BOTTOM)
    for line, (x, y), height in zip(lines, ends, heights, strict=True):
        side = plane.right + 9
        visible = min(max(y, _TOP), HEIGHT - _BOTTOM)
        name = element(
            "text",
            {"class": "name", "x": _number(side + 7), "y": _number(height + 4)},
            escape_text(short[line.label]),
        )
        leader = _segment("leader", x, visible, side - 5, height)
        marker = draw_marker(line.style, side, height, line.label)
        yield element("g", {"class": run_class(line.style)}, leader + marker + name)


def draw_marker(style: int, x: float, y: float, title: str) -> str:
    """The marker of a run, with a tooltip."""
    shapes = (
        ((-3, -1.2), (-1.2, -3), (1.2, -3), (3, -1.2), (3, 1.2), (1.2, 3), (-1.2, 3), (-3, 1.2)),
        ((-2.7, -2.7), (2.7, -2.7), (2.7, 2.7), (-2.7, 2.7)),
        ((0, -3.7), (3.5, 2.5), (-3.5, 2.5)),
        ((0, -3.9), (3.9, 0), (0, 3.9), (-3.9, 0)),
        ((0, 3.7), (3.5, -2.5), (-3.5, -2.5)),
    )
    shape = shapes[style % len(shapes)]
    path = f"{_path([(x + across, y + down) for across, down in shape])}Z"
    return element("path", {"class": colour_class(style), "d": path}, f"<title>{escape_text(title)}</title>")


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _segment(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return element("path", {"class": kind, "d": _path([(x1, y1), (x2, y2)])})


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    look = {"x": _number(x), "y": _number(y)} | ({} if anchor == "start" else {"text-anchor": anchor})
    return element("text", look, escape_text(words))


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


_PNG_ZOOM = 2.5  # sharp enough for print
_FONT_PROBE = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20">'
    '<text x="2" y="15" font-family="{family}" font-size="14">{word}</text></svg>'
)

ConvertToPng = Callable[[str], bytes]


def png_converter() -> ConvertToPng | str:
    """A function from SVG to PNG, or the reason why there is none."""
    try:
        from resvg_py import svg_to_bytes
    except ImportError:
        return (
            "figures are not written as PNG, since resvg-py is not installed: pip install 'offbeat[report]'."
        )

    def convert(drawing: str) -> bytes:
        return bytes(svg_to_bytes(svg_string=drawing, zoom=_PNG_ZOOM))

    written, blank = (convert(_FONT_PROBE.format(family=FONT, word=word)) for word in ("on", ""))
    if written == blank:
        return "figures are not written as PNG, since no font was found: install DejaVu Sans."
    return convert
