"""Builds a report: reads run folders, compares the runs, draws the figures and writes the files.

Figures are written before the page, and each file is replaced atomically.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from offbeat.errors import InputError
from offbeat.files import replace_file
from offbeat.report.chart import Figure, figure_csv
from offbeat.report.figures import (
    LEARNING_AXES,
    client_metric_figure,
    fairness_figure,
    file_name,
    learning_figures,
    participation_figure,
    privacy_figures,
    work_figures,
)
from offbeat.report.html import render_page
from offbeat.report.load import client_accuracies, read_runs
from offbeat.report.svg import MAX_RUNS, draw, png_converter, standalone
from offbeat.report.tables import (
    check_comparable,
    client_table,
    main_metric,
    metric_names,
    summary_table,
)


class ReportPaths(NamedTuple):
    """The files of a report."""

    page: Path
    folder: Path  # of the figures


def report_paths(out: Path) -> ReportPaths:
    """The paths of a report; raises `InputError` if they cannot be written to. Nothing is written."""
    if out.suffix not in (".html", ".htm"):
        raise InputError(f"a report is an HTML page, but '{out}' does not end in .html: change -o.")
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {out.parent}: make it first, or name another -o.")
    paths = ReportPaths(out, out.with_name(f"{out.stem}-files"))
    if out.is_dir():
        raise InputError(f"{out} is a folder: name another -o.")
    if paths.folder.exists() and not paths.folder.is_dir():
        raise InputError(
            f"{paths.folder} is a file, but figures need a folder of that name: name another -o."
        )
    for each in (out.parent, paths.folder):
        if each.exists() and not os.access(each, os.W_OK | os.X_OK):
            raise InputError(f"{each} cannot be written to: name another -o.")
    return paths


def write_report(paths: ReportPaths, page: str, contents: Mapping[str, bytes], known: Iterable[str]) -> None:
    """Write all files, and remove files with `known` names that are left from an earlier report."""
    paths.folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        replace_file(paths.folder / name, content)
    for name in known:
        if name not in contents:
            (paths.folder / name).unlink(missing_ok=True)
    replace_file(paths.page, page.encode())


_FORMATS = ("svg", "png", "csv")
_OTHER_FIGURES = (
    *("privacy", "staleness", "staleness-course", "concurrency", "arrivals", "wasted"),
    *("participation", "clients", "fairness"),
)


def figure_names(metrics: Iterable[str]) -> tuple[str, ...]:
    """Every name that a figure of runs with these metrics can have."""
    learning = (f"{file_name(metric)}-by-{over.name}" for metric in metrics for over in LEARNING_AXES)
    return (*learning, *_OTHER_FIGURES)


class WrittenReport(NamedTuple):
    """A report that was written."""

    page: Path
    folder: Path
    runs: tuple[str, ...]
    size: int  # of the page, in bytes
    figures: tuple[str, ...]
    without_png: str | None  # why there are no PNG files, if there are none
    secret: tuple[str, ...]  # runs whose privacy analysis assumes that what the page shows stays secret


def make_report(
    folders: Sequence[Path], out: Path, *, anyway: bool = False, with_fairness: bool = False
) -> WrittenReport:
    """Write a report of these runs; `anyway` skips the check that their metrics are comparable."""
    if not folders:
        raise InputError("a report needs a run: name the folder of one.")
    if len(folders) > MAX_RUNS:
        raise InputError(f"a report can show at most {MAX_RUNS} runs, not {len(folders)}: name fewer.")
    paths = report_paths(out)
    runs = read_runs(folders)
    if not anyway:
        check_comparable(runs)
    labels = tuple(run.label for run in runs)
    metrics = metric_names(runs)
    learned = [_for_runs(learning_figures(runs, metric), labels) for metric in metrics]
    served = client_accuracies(runs) if with_fairness else {}
    by_client = client_metric_figure(runs, *main_metric(runs))
    single = [participation_figure(runs), by_client]
    single += [fairness_figure(runs, served)] if with_fairness else []
    others = _for_runs([*privacy_figures(runs), *work_figures(runs), *single], labels)
    figures = [*(figure for each in learned for figure in each), *others]
    contents, without_png = _files(figures)
    links = {
        figure.name: {
            kind.upper(): quote(os.fsencode(f"{paths.folder.name}/{figure.name}.{kind}"))
            for kind in _FORMATS
            if f"{figure.name}.{kind}" in contents
        }
        for figure in figures
    }
    text = render_page(runs, learned, others, summary_table(runs, served), client_table(runs), links)
    known = figure_names({*metrics, "accuracy", "loss"})
    write_report(paths, text, contents, (f"{name}.{kind}" for name in known for kind in _FORMATS))
    drawn = tuple(figure.name for figure in figures if figure.lines)
    secret = tuple(run.label for run in runs if run.hides_sample)
    return WrittenReport(paths.page, paths.folder, labels, len(text.encode()), drawn, without_png, secret)


def _for_runs(figures: Iterable[Figure], labels: tuple[str, ...]) -> tuple[Figure, ...]:
    """The figures with the labels of all runs of the page."""
    return tuple(replace(figure, runs=labels) for figure in figures)


def _files(figures: Sequence[Figure]) -> tuple[dict[str, bytes], str | None]:
    """The files of all figures that have lines; and the reason if there are no PNG files."""
    contents: dict[str, bytes] = {}
    convert = png_converter()
    for figure in figures:
        if not figure.lines:
            continue
        drawing = standalone(draw(figure))
        contents[f"{figure.name}.svg"] = drawing.encode()
        contents[f"{figure.name}.csv"] = figure_csv(figure).encode()
        if not isinstance(convert, str):
            contents[f"{figure.name}.png"] = convert(drawing)
    return contents, convert if isinstance(convert, str) else None
