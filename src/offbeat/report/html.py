"""The page of a report as one HTML file, whose security policy forbids requests and other scripts.

Runs and the axis of learning curves are chosen by style rules alone. The script draws one more figure, whose
axes the reader chooses; without scripts that figure is absent and nothing else changes.
"""

import base64
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files

import numpy as np
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from offbeat.report.chart import PLAIN, SECONDS, Figure, format_number, thin_points
from offbeat.report.figures import LEARNING_AXES, time_label
from offbeat.report.load import Run, has_values, metric_columns
from offbeat.report.svg import (
    LIGHT,
    coinciding,
    colour_class,
    dark_style_rules,
    dash_pattern,
    draw,
    draw_marker,
    element,
    escape_text,
    run_class,
    style_rules,
)
from offbeat.report.tables import (
    SummaryRow,
    epsilon_spent,
    join_words,
    main_metric,
    metric_names,
    run_state,
    settings_table,
    verdict,
)

SECRET_SAMPLE = (
    "This page reveals which clients took part, which has to stay secret: protect it like the run's folder."
)
_MISSING = "–"
_LONG_CELL = 24  # characters of a cell above which it may be broken anywhere


def render_page(
    runs: Sequence[Run],
    learned: Sequence[Sequence[Figure]],
    others: Sequence[Figure],
    summary: Sequence[SummaryRow],
    clients: Sequence[SummaryRow],
    links: Mapping[str, Mapping[str, str]],
) -> str:
    """The page as HTML.

    `learned` has the figures of each metric over each axis, `links` the files of each figure by format.
    """
    style, script = _style(len(runs)), _resource("page.js")
    rows = settings_table(runs)
    shown = [figure for figure in others if figure.lines]
    notes = dict.fromkeys(
        note for figure in (*_flat(learned), *others) if not figure.lines for note in figure.notes
    )
    return _template().render(
        policy=(
            f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
            "img-src data:; base-uri 'none'; form-action 'none'"
        ),
        style=Markup(style),
        script=Markup(script),
        records=Markup(_records_json(runs)),
        verdict=verdict(runs),
        title=" · ".join(run.label for run in runs),
        names=[run.label for run in runs],
        about=_about(runs),
        axes=LEARNING_AXES,
        learned=[list(zip(LEARNING_AXES, figures, strict=True)) for figures in learned],
        others=shown,
        omitted=list(notes),
        coinciding=lambda figure: [join_words(group) for group in coinciding(figure)],
        links={figure.name: links.get(figure.name, {}) for figure in (*_flat(learned), *others)},
        summary=[(row.name, row.texts, False, row.best) for row in summary],
        clients=[(row.name, row.texts, False, row.best) for row in clients],
        client_metric=main_metric(runs)[0],
        privacy=list(_privacy(runs)),
        settings=[(row.name, row.values, row.differs, ()) for row in rows],
        differences=_differences(sum(row.differs for row in rows)) if len(runs) > 1 else "",
        version=version("offbeat"),
        missing=_MISSING,
        long=_LONG_CELL,
        draw=lambda figure: Markup(draw(figure)),
        legend_line=_legend_line,
    )


def _template() -> Template:
    """The template; values that are not markup are escaped."""

    def escaped(value: object) -> Markup:
        return value if isinstance(value, Markup) else Markup(escape_text(str(value)))

    environment = Environment(autoescape=True, finalize=escaped, undefined=StrictUndefined)
    return environment.from_string(_resource("page.html.j2"))


def _resource(name: str) -> str:
    return files("offbeat.report").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """How a security policy names an inline style or script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _records_json(runs: Sequence[Run]) -> str:
    """The records that the script draws: columns that any run has, thinned to what a screen shows."""
    metrics = [column for name in metric_names(runs) for column in metric_columns(name)]
    axes = {over.column: (over.label, over.unit) for over in LEARNING_AXES} | {
        "time": (time_label(runs), SECONDS),
        "elapsed": ("computing time", SECONDS),
        "epsilon": ("epsilon", PLAIN),
    }
    axes |= {name: (name.replace("_", " "), PLAIN) for name in metrics}
    known = [name for name in axes if any(has_values(run, name) for run in runs)]
    content = {
        "columns": [{"label": axes[name][0], "sizes": axes[name][1].sizes} for name in known],
        "x": known.index("version"),
        "y": known.index(metrics[0]) if metrics[0] in known else len(known) - 1,
        "runs": [
            {
                "label": run.label,
                "dash": dash_pattern(style),
                "values": _thinned_columns(run, known, metrics[0]),
            }
            for style, run in enumerate(runs)
        ],
    }
    return json.dumps(content).replace("<", "\\u003c")


def _thinned_columns(run: Run, names: Sequence[str], metric: str) -> list[list[float | None]]:
    rows = len(run.records["version"])
    ys = np.nan_to_num(run.records.get(metric, np.zeros(rows)))
    kept = list(thin_points(run.records["version"], ys))
    columns = [run.records.get(name, np.full(rows, np.nan))[kept].tolist() for name in names]
    return [[None if math.isnan(value) else float(f"{value:.6g}") for value in column] for column in columns]


def _flat(learned: Sequence[Sequence[Figure]]) -> list[Figure]:
    return [figure for figures in learned for figure in figures]


def _differences(count: int) -> str:
    return f"The first {count} differ and are marked ≠." if count else "All settings are equal."


def _style(runs: int) -> str:
    sheet = _resource("page.css")
    hidden = "".join(f"body:has(#run-{n}:not(:checked)) .{run_class(n)}{{display:none}}" for n in range(runs))
    chosen = "".join(
        f"#over-{over.name}:checked~.cards .over-{over.name}{{display:flex}}"
        f"#over-{over.name}:checked~.switch [for=over-{over.name}]{{border-color:var(--link);font-weight:600;"
        "box-shadow:inset 0 0 0 1px var(--link)}"
        f"#over-{over.name}:focus-visible~.switch [for=over-{over.name}]"
        "{outline:2px solid var(--link);outline-offset:2px}"
        for over in LEARNING_AXES
    )
    dark = f"@media screen and (prefers-color-scheme:dark){{{dark_style_rules()}}}"
    return f"{sheet}{chosen}{hidden}{style_rules(LIGHT)}{dark}"


def _about(runs: Sequence[Run]) -> str:
    """Data, model and clients if all runs share them, and the progress of unfinished runs."""
    words = []
    for name, word in (("data", ""), ("model", ""), ("clients", " clients"), ("partition", "")):
        values = {str(run.settings.get(name)) for run in runs if run.settings.get(name) is not None}
        if len(values) == 1:
            words.append(f"{values.pop()}{word}")
    ended = [
        f"{f'{run.label} ' if len(runs) > 1 else ''}{run_state(run)}" + _ending_reason(run)
        for run in runs
        if run_state(run) != "finished"
    ]
    return "; ".join([", ".join(words), *ended])


def _ending_reason(run: Run) -> str:
    """Why the run ended early; without naming a client if participation has to stay secret."""
    words = run.ending.ended if run.hides_sample else run.ending.diverged or run.ending.ended
    return f": {words.removesuffix('.')}" if words else ""


def _legend_line(style: int, label: str) -> Markup:
    """A sample of a run's line with its marker."""
    look = {
        "class": f"line {colour_class(style)}",
        "d": "M1,6L33,6",
        "stroke-dasharray": dash_pattern(style) or "none",
    }
    line = element("path", look) + draw_marker(style, 17, 6, label)
    return Markup(f'<svg viewBox="0 0 34 12" aria-hidden="true">{line}</svg>')


def _privacy(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    """For each private run its guarantee and the assumptions of it."""
    for run in runs:
        if run.settings.get("clip") is None:
            continue
        privacy, value = run.ending.privacy, epsilon_spent(run)
        if privacy is None or value is None:
            why = run.ending.unread or "the run has not ended, and no record has an epsilon"
            words = f"The privacy loss is not known: {why}."
        else:
            before = "SIMULATION, not a privacy guarantee: " if run.simulated else ""
            pair = f"{before}(epsilon, delta) = ({format_number(value.value)}, {privacy.delta:g})"
            terms = f"{privacy.terms[:1].upper()}{privacy.terms[1:]}"
            since = f"after {privacy.releases:,} releases"
            if value.version is not None:
                since = (
                    f"up to server step {value.version:,}, and more since then: the run has not ended, and "
                    f"its checkpoint counts {privacy.releases:,} releases"
                )
            words = f"{pair} {since}. {terms}"
            if privacy.unamplified is not None:
                words += (
                    " Against those who see which clients contribute when, epsilon is "
                    f"{format_number(privacy.unamplified)}."
                )
        yield run.label, f"{words} {SECRET_SAMPLE}" if run.hides_sample else words
