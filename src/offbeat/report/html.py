"""The page as one HTML file, which tells the browser to fetch nothing and to run no scripts."""

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from offbeat.report.chart import Figure, format_number
from offbeat.report.figures import LEARNING_AXES
from offbeat.report.load import Run
from offbeat.report.svg import (
    LIGHT,
    colour_class,
    dark_style_rules,
    dash_pattern,
    draw,
    draw_marker,
    element,
    escape_text,
    style_rules,
)
from offbeat.report.tables import SummaryRow, epsilon_spent, run_state, settings_table

SECRET_SAMPLE = (
    "This page tells of its sample, which has to stay a secret: keep it as secret as the run's folder."
)
_MISSING = "–"
_LONG_CELL = 24  # letters of a cell that may be broken anywhere


def render_page(
    runs: Sequence[Run],
    learned: Sequence[Sequence[Figure]],
    others: Sequence[Figure],
    summary: Sequence[SummaryRow],
    links: Mapping[str, Mapping[str, str]],
) -> str:
    """The page as HTML.

    `learned` has the figures of a metric over each axis, `links` the files of each figure by format.
    """
    style = _style()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    rows = settings_table(runs)
    return _template().render(
        policy=(
            f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; "
            "form-action 'none'"
        ),
        style=Markup(style),
        title=" · ".join(run.label for run in runs),
        names=[run.label for run in runs],
        about=_about(runs),
        axes=LEARNING_AXES,
        learned=[list(zip(LEARNING_AXES, figures, strict=True)) for figures in learned],
        others=sorted(others, key=lambda each: not each.lines),  # those without a drawing leave no gap
        links={figure.name: links.get(figure.name, {}) for figure in (*_flat(learned), *others)},
        summary=[(row.name, row.texts, False) for row in summary],
        privacy=list(_privacy(runs)),
        settings=[(row.name, row.values, row.differs) for row in rows],
        differences=_differences(sum(row.differs for row in rows)) if len(runs) > 1 else "",
        version=version("offbeat"),
        missing=_MISSING,
        long=_LONG_CELL,
        draw=lambda figure: Markup(draw(figure)),
        legend_line=_legend_line,
    )


def _template() -> Template:
    """The template; every value that is not markup already is escaped."""

    def escaped(value: object) -> Markup:
        return value if isinstance(value, Markup) else Markup(escape_text(str(value)))

    environment = Environment(autoescape=True, finalize=escaped, undefined=StrictUndefined)
    text = files("offbeat.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    return environment.from_string(text)


def _flat(learned: Sequence[Sequence[Figure]]) -> list[Figure]:
    return [figure for figures in learned for figure in figures]


def _differences(count: int) -> str:
    return f"The first {count} differ, and are marked ≠." if count else "Nothing differs."


def _style() -> str:
    sheet = files("offbeat.report").joinpath("page.css").read_text(encoding="utf-8")
    chosen = "".join(
        f"#over-{over.name}:checked~.cards .over-{over.name}{{display:flex}}"
        f"#over-{over.name}:checked~.switch [for=over-{over.name}]{{border-color:var(--link);font-weight:600;"
        "box-shadow:inset 0 0 0 1px var(--link)}"
        f"#over-{over.name}:focus-visible~.switch [for=over-{over.name}]"
        "{outline:2px solid var(--link);outline-offset:2px}"
        for over in LEARNING_AXES
    )
    dark = f"@media screen and (prefers-color-scheme:dark){{{dark_style_rules()}}}"
    return f"{sheet}{chosen}{style_rules(LIGHT)}{dark}"


def _about(runs: Sequence[Run]) -> str:
    """Data, model and clients where all share them, and where each run is."""
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
    """Why it went no further, though not by whose update where nobody may learn who took part."""
    words = run.ending.ended if run.hides_sample else run.ending.diverged or run.ending.ended
    return f": {words.removesuffix('.')}" if words else ""


def _legend_line(style: int, label: str) -> Markup:
    """A piece of a run's line with its marker."""
    look = {
        "class": f"line {colour_class(style)}",
        "d": "M1,6L33,6",
        "stroke-dasharray": dash_pattern(style) or "none",
    }
    line = element("path", look) + draw_marker(style, 17, 6, label)
    return Markup(f'<svg viewBox="0 0 34 12" aria-hidden="true">{line}</svg>')


def _privacy(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    """For each private run what is claimed, and on which terms."""
    for run in runs:
        if run.settings.get("clip") is None:
            continue
        privacy, value = run.ending.privacy, epsilon_spent(run)
        if privacy is None or value is None:
            why = run.ending.unread or "the run has not ended, and no record of a server step says"
            words = f"What was spent is not known: {why}."
        else:
            before = "SIMULATION, not a privacy guarantee: " if run.simulated else ""
            pair = f"{before}(epsilon, delta) = ({format_number(value.value)}, {privacy.delta:g})"
            terms = f"{privacy.terms[:1].upper()}{privacy.terms[1:]}"
            since = f"after {privacy.releases:,} releases"
            if value.version is not None:
                since = (
                    f"up to server step {value.version:,}, and more since: the run has not ended, and its "
                    f"checkpoint counts {privacy.releases:,} releases"
                )
            words = f"{pair} {since}. {terms}"
        yield run.label, f"{words} {SECRET_SAMPLE}" if run.hides_sample else words
