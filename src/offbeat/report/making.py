"""From folders of runs to a report: read, compare, draw, write."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from offbeat.errors import InputError
from offbeat.report.comparing import check_comparable
from offbeat.report.drawing import alone, draw
from offbeat.report.fairness import spreads
from offbeat.report.figure import Figure, table
from offbeat.report.learning import OVERS, learning, privacy
from offbeat.report.page import page
from offbeat.report.palette import RUNS
from offbeat.report.picture import converter
from offbeat.report.reading import read_runs
from offbeat.report.summary import summary
from offbeat.report.taking_part import fairness, participation
from offbeat.report.working import working
from offbeat.report.writing import place, write

_METRICS = ("accuracy", "loss")
_KINDS = ("svg", "png", "csv")
# Every name that a figure can have, in this version.
_NAMES = (
    *(f"{metric}-by-{over.name}" for metric in _METRICS for over in OVERS),
    *("privacy", "staleness", "staleness-course", "concurrency", "arrivals", "wasted"),
    *("participation", "fairness"),
)


class Made(NamedTuple):
    """A report that was written."""

    page: Path
    folder: Path
    runs: tuple[str, ...]
    size: int  # of the page, in bytes
    figures: tuple[str, ...]
    without_png: str | None  # why
    secret: tuple[str, ...]  # runs whose privacy rests on what the page tells


def make(folders: Sequence[Path], out: Path, *, anyway: bool = False, with_fairness: bool = False) -> Made:
    """Write a report of these runs; `anyway`: although their accuracies may not mean the same."""
    if not folders:
        raise InputError("a report needs a run: name the folder of one.")
    if len(folders) > RUNS:
        raise InputError(f"a report tells {RUNS} runs apart at most, not {len(folders)}: name fewer.")
    spot = place(out)
    runs = read_runs(folders)
    if not anyway:
        check_comparable(runs)
    labels = tuple(run.label for run in runs)
    learned = [_together(learning(runs, metric), labels) for metric in _METRICS]
    served = spreads(runs) if with_fairness else {}
    single = [participation(runs), *([fairness(runs, served)] if with_fairness else [])]
    others = _together([*privacy(runs), *working(runs), *single], labels)
    figures = [*(figure for each in learned for figure in each), *others]
    contents, without_png = _files(figures)
    links = {
        figure.name: {
            kind.upper(): quote(os.fsencode(f"{spot.folder.name}/{figure.name}.{kind}"))
            for kind in _KINDS
            if f"{figure.name}.{kind}" in contents
        }
        for figure in figures
    }
    text = page(runs, learned, others, summary(runs, served), links)
    write(spot, text, contents, (f"{name}.{kind}" for name in _NAMES for kind in _KINDS))
    drawn = tuple(figure.name for figure in figures if figure.lines)
    secret = tuple(run.label for run in runs if run.hides_sample)
    return Made(spot.page, spot.folder, labels, len(text.encode()), drawn, without_png, secret)


def _together(figures: Iterable[Figure], labels: tuple[str, ...]) -> tuple[Figure, ...]:
    """The figures, as those of a page of all these runs."""
    return tuple(replace(figure, runs=labels) for figure in figures)


def _files(figures: Sequence[Figure]) -> tuple[dict[str, bytes], str | None]:
    """Each figure that has lines, as files; and why there is no PNG, where there is none."""
    contents: dict[str, bytes] = {}
    convert = converter()
    for figure in figures:
        if not figure.lines:
            continue
        drawing = alone(draw(figure))
        contents[f"{figure.name}.svg"] = drawing.encode()
        contents[f"{figure.name}.csv"] = table(figure).encode()
        if not isinstance(convert, str):
            contents[f"{figure.name}.png"] = convert(drawing)
    return contents, convert if isinstance(convert, str) else None
