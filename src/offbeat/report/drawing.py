"""A figure as SVG: two axes, lines with marks, and each run's name where its line ends."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from offbeat.report.figure import Axis, Figure, Line, thinned
from offbeat.report.labels import spread, told_apart, width
from offbeat.report.markup import element, text
from offbeat.report.palette import LIGHT, colour, dark_rules, dash, rules
from offbeat.report.scale import Scale, Size, decades, scale

WIDTH, HEIGHT = 420, 270
_TOP, _BOTTOM = 24, 40
_NAME = 135  # pixels that a run's name may take
_GAP = 15  # between names
_MARKS = 7  # on a line with many points
_FEW = 30  # points of a line that are all marked
FONT = (
    "'Segoe UI', Roboto, 'DejaVu Sans', 'Liberation Sans', 'Noto Sans', Helvetica, Arial, Verdana, sans-serif"
)


class _Plane(NamedTuple):
    """Where numbers lie in the drawing."""

    left: float
    right: float
    x: Scale
    y: Scale

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = self.left + (self.right - self.left) * self.x.place(x)
        return across, HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * self.y.place(y)


def draw(figure: Figure) -> str:
    """The drawing, styled by the page that it is in."""
    named = max(len(figure.lines), len(figure.runs)) > 1
    short = told_apart([*figure.runs, *(line.label for line in figure.lines)], _NAME)
    sizes = [
        _size(axis, numbers) for axis, numbers in zip((figure.x, figure.y), _numbers(figure), strict=True)
    ]
    x, y = (
        _scale(axis, numbers, size, snug=axis is figure.x)
        for axis, numbers, size in zip((figure.x, figure.y), _numbers(figure), sizes, strict=True)
    )
    longest = max(width(short[line.label]) for line in figure.lines)
    left = 8 + max((width(word) for _, word in y.ticks), default=0)
    plane = _Plane(left, WIDTH - (18 + longest if named else 16), x, y)
    inside = [
        f"<title>{text(figure.title)}</title>",
        *_axes(figure, plane, *sizes),
        *(_band(line, plane) for line in figure.lines if line.tops is not None),
        *(_line(figure, line, plane) for line in figure.lines),
        *(_names(figure.lines, short, plane) if named else ()),
    ]
    box = f"0 0 {WIDTH} {HEIGHT}"
    return element("svg", {"viewBox": box, "role": "img", "aria-label": _tell(figure)}, "".join(inside))


def alone(drawing: str, *, dark: bool = False) -> str:
    """The same as a file of its own, on a white ground, or on a dark one, too, where the reader's is dark."""
    style = rules(LIGHT) + (f"@media (prefers-color-scheme:dark){{{dark_rules()}}}" if dark else "")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="{FONT}"'
    ground = f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}"/>'
    tag, _, rest = drawing.removeprefix("<svg").partition(">")
    return f"{head}{tag}><style>{style}</style>{ground}{rest}\n"


def _tell(figure: Figure) -> str:
    """For whoever cannot see it: where each line ends."""
    ends = (
        f"{line.label} ends at {figure.y.unit.say(float(line.ys[-1]))}"
        for line in _last_pieces(figure.lines)
        if len(line.ys)
    )
    return f"{figure.title}: {figure.y.label} over {figure.x.label}; {', '.join(ends)}."


def _numbers(figure: Figure) -> tuple[list[float], list[float]]:
    """All that has to be on each axis."""
    side = figure.stair / 2
    xs = [
        value for line in figure.lines for value in (float(line.xs.min()) - side, float(line.xs.max()) + side)
    ]
    ys = [float(line.ys.min()) for line in figure.lines]
    ys += [float((line.ys if line.tops is None else line.tops).max()) for line in figure.lines]
    return xs, ys


def _size(axis: Axis, numbers: Sequence[float]) -> Size:
    return axis.unit.size(max(abs(number) for number in numbers))


def _scale(axis: Axis, numbers: Sequence[float], size: Size, *, snug: bool) -> Scale:
    if axis.log:
        return decades(min(numbers), max(numbers))
    low = min(0.0, *numbers) if axis.zero else min(numbers)
    return scale(low, max(numbers), size, 5, snug=snug, whole=axis.unit.whole)


def _axes(figure: Figure, plane: _Plane, across: Size, up: Size) -> Iterable[str]:
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
    yield _text(2, 12, _titled(figure.y.label, up))
    yield _text((plane.left + plane.right) / 2, HEIGHT - 6, _titled(figure.x.label, across), "middle")


def _titled(label: str, size: Size) -> str:
    return f"{label}, {size.name}" if size.name else label


def _line(figure: Figure, line: Line, plane: _Plane) -> str:
    kept = thinned(line.xs, line.ys)
    points = [plane.at(float(line.xs[place]), float(line.ys[place])) for place in kept]
    look = {"class": f"line {colour(line.style)}", "d": _path(_stairs(line, figure.stair, plane) or points)}
    if dash(line.style):
        look["stroke-dasharray"] = dash(line.style)
    few = len(points) <= _FEW
    apart = 1 if few else len(points) / _MARKS
    # runs are marked at different places, so that marks of lines that lie together can be seen
    first = 0.0 if few else apart * (0.3 + 0.17 * (line.style % 5))
    marks = []
    while first < len(points):
        place = kept[int(first)]
        x, y = figure.x.unit.say(float(line.xs[place])), figure.y.unit.say(float(line.ys[place]))
        marks.append(mark(line.style, *points[int(first)], f"{line.label}: {y} at {x}"))
        first += apart
    return element("path", look) + "".join(marks)


def _stairs(line: Line, width: float, plane: _Plane) -> list[tuple[float, float]]:
    """Level pieces around each point, from the ground up and back; none where there is no width."""
    if not width:
        return []
    pairs = list(zip(line.xs.tolist(), line.ys.tolist(), strict=True))
    level = [plane.at(x + side * width / 2, y) for x, y in pairs for side in (-1, 1)]
    ends = [plane.at(pairs[0][0] - width / 2, 0.0), plane.at(pairs[-1][0] + width / 2, 0.0)]
    return [ends[0], *level, ends[1]]


def _band(line: Line, plane: _Plane) -> str:
    assert line.tops is not None
    kept = thinned(line.xs, line.tops)
    above = [plane.at(float(line.xs[place]), float(line.tops[place])) for place in kept]
    below = [plane.at(float(line.xs[place]), float(line.ys[place])) for place in reversed(kept)]
    inside = element("path", {"class": f"band {colour(line.style)}", "d": f"{_path(above + below)}Z"})
    return inside + element("path", {"class": f"line edge {colour(line.style)}", "d": _path(above)})


def _last_pieces(lines: Sequence[Line]) -> list[Line]:
    """Of each run the line that ends last."""
    return list({(line.style, line.label): line for line in lines}.values())


def _names(lines: Sequence[Line], short: Mapping[str, str], plane: _Plane) -> Iterable[str]:
    lines = _last_pieces(lines)
    ends = [plane.at(float(line.xs[-1]), float(line.ys[-1])) for line in lines]
    places = spread([y for _, y in ends], _GAP, _TOP, HEIGHT - _BOTTOM)
    for line, (x, y), place in zip(lines, ends, places, strict=True):
        side = plane.right + 9
        yield _segment("leader", x, y, side - 5, place)
        yield mark(line.style, side, place, line.label)
        yield element(
            "text",
            {"class": "name", "x": _number(side + 7), "y": _number(place + 4)},
            text(short[line.label]),
        )


def mark(style: int, x: float, y: float, told: str) -> str:
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
    return element("path", {"class": colour(style), "d": path}, f"<title>{text(told)}</title>")


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_number(x)},{_number(y)}" for x, y in points)


def _segment(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return element("path", {"class": kind, "d": _path([(x1, y1), (x2, y2)])})


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    look = {"x": _number(x), "y": _number(y)} | ({} if anchor == "start" else {"text-anchor": anchor})
    return element("text", look, text(words))


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
