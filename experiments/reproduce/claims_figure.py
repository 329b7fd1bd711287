"""Claims of the papers as values, and one picture of all: what is claimed beside what was measured."""

from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

PAPERS = {
    "adamasfl": "AdaMasFL",
    "fadas": "FADAS",
    "language": "FADAS on language",
    "momentum": "Momentum approximation",
    "padamfed": "PAdaMFed",
}
_ROW, _LEFT, _RIGHT, _WIDTH, _TOP = 15, 430, 30, 940, 84
_LOW, _HIGH = -60.0, 80.0
_YES, _NO, _INK, _FAINT = "#1a7f5a", "#c0392b", "#222222", "#d5d5d5"


class Point(NamedTuple):
    """By how much a claim holds in one case; infinite where a run diverged or never came so far."""

    case: str
    measured: float
    claimed: float | None = None
    agrees: bool = True


class Claim(NamedTuple):
    """One claim of a paper, in all cases that were run."""

    paper: str  # the folder of its page
    words: str
    unit: str
    points: tuple[Point, ...]
    why: str

    @property
    def agreeing(self) -> int:
        return sum(point.agrees for point in self.points)

    @property
    def verdict(self) -> str:
        """Yes, no, or in how many cases."""
        if self.agreeing == len(self.points):
            return "yes"
        return f"in {self.agreeing} of {len(self.points)}" if self.agreeing else "no"


def _across(value: float) -> float:
    inside = min(_HIGH, max(_LOW, value))
    return _LEFT + (inside - _LOW) / (_HIGH - _LOW) * (_WIDTH - _LEFT - _RIGHT)


def draw(every: Sequence[Claim]) -> str:
    """All points: hollow what is claimed, filled what was measured."""
    parts: list[str] = []
    y = float(_TOP)
    for paper, title in PAPERS.items():
        own = [claim for claim in every if claim.paper == paper]
        agreeing, count = sum(c.agreeing for c in own), sum(len(c.points) for c in own)
        y += 10
        parts.append(_text(8, y + 4, f"{title}: {agreeing} of {count} agree", "13", weight="bold"))
        y += _ROW + 2
        for claim in own:
            parts.append(
                _text(8, y + 4, _shorten(f"{claim.words} ({claim.unit})", 150), "10.5", fill="#555555")
            )
            y += _ROW
            for point in claim.points:
                parts += _point(y, point)
                y += _ROW
            y += 4
    height = y + 30
    ticks = range(int(_LOW), int(_HIGH) + 1, 20)
    grid = [
        f'<line x1="{_across(t):.1f}" y1="{_TOP - 8}" x2="{_across(t):.1f}" y2="{height - 22:.1f}" '
        f'stroke="{_INK if t == 0 else _FAINT}" stroke-width="{1.2 if t == 0 else 0.8}"/>'
        for t in ticks
    ]
    names = [_text(_across(t), _TOP - 12, f"{t:+d}" if t else "0", "11", "middle") for t in ticks]
    legend = [
        _text(8, 20, "Claimed and measured, for every claim of the reproduced papers", "15", weight="bold"),
        _circle(16, 38, None, "#555555"),
        _text(26, 42, "claimed, where the paper has a number", "11"),
        _circle(262, 38, _YES, _YES),
        _text(272, 42, "measured, agrees", "11"),
        _diamond(388, 38),
        _text(398, 42, "measured, does not agree; at the left edge: diverged, never reached, or less", "11"),
    ]
    foot = _text(
        _across(0), height - 6, "right of 0: as claimed, or above the paper's figure", "11", "middle"
    )
    body = "\n".join([*grid, *names, *legend, *parts, foot])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" '
        f'height="{height:.0f}" font-family="system-ui, sans-serif">\n'
        f'<rect width="{_WIDTH}" height="{height:.0f}" fill="white"/>\n{body}\n</svg>\n'
    )


def _point(y: float, point: Point) -> list[str]:
    made = [_text(_LEFT - 12, y + 4, _shorten(point.case, 60), "11", "end")]
    x = _across(point.measured)
    if point.claimed is not None:
        there = _across(point.claimed)
        ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{there:.1f}" y2="{y:.1f}"'
        made.append(f'<line {ends} stroke="#999999" stroke-width="1"/>')
        made.append(_circle(there, y, None, "#555555"))
    made.append(_circle(x, y, _YES, _YES) if point.agrees else _diamond(x, y))
    return made


def _circle(x: float, y: float, fill: str | None, stroke: str) -> str:
    colours = f'fill="{fill or "white"}" stroke="{stroke}" stroke-width="1.4"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" {colours}/>'


def _diamond(x: float, y: float) -> str:
    place = f"{x:.1f},{y - 5.5:.1f} {x + 5.5:.1f},{y:.1f} {x:.1f},{y + 5.5:.1f} {x - 5.5:.1f},{y:.1f}"
    return f'<polygon points="{place}" fill="{_NO}"/>'


def _text(
    x: float, y: float, words: str, size: str, anchor: str = "start", weight: str = "normal", fill: str = _INK
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{fill}" stroke="white" stroke-width="3" paint-order="stroke">{escape(words)}</text>'
    )


def _shorten(words: str, most: int) -> str:
    return words if len(words) <= most else f"{words[: most - 1]}…"
