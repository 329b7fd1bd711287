"""The page: all that is in it is in one file, and a browser is told to fetch and to run nothing."""

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files

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
    measures: Sequence[SummaryRow],
    links: Mapping[str, Mapping[str, str]],
) -> str:
    """HTML; `learned` has a metric's figures over each axis, `links` the files of each figure by kind."""
    style = _style()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    title = " · ".join(run.label for run in runs)
    names = [run.label for run in runs]
    body = [
        f"<h1>{escape_text(title)}</h1>",
        f'<p class="soft">{escape_text(_about(runs))}</p>',
        _legend(runs) if len(runs) > 1 else "",
        _figures(learned, others, links),
        "<h2>In numbers</h2>",
        _table("measure", names, ((each.name, each.texts, False) for each in measures)),
        _privacy(runs),
        "<h2>Settings</h2>",
        _settings(runs, names),
        f"<footer>offbeat {escape_text(version('offbeat'))}</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape_text(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f'<title>{escape_text(title)}</title><link rel="icon" href="data:,"><style>{style}</style></head>\n'
        f"<body>{chr(10).join(body)}</body></html>\n"
    )


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


def _legend(runs: Sequence[Run]) -> str:
    entries = "".join(_legend_entry(style, run.label) for style, run in enumerate(runs))
    return f'<ul class="legend">{entries}</ul>'


def _legend_entry(style: int, label: str) -> str:
    look = {
        "class": f"line {colour_class(style)}",
        "d": "M1,6L33,6",
        "stroke-dasharray": dash_pattern(style) or "none",
    }
    line = element("path", look) + draw_marker(style, 17, 6, label)
    return f'<li><svg viewBox="0 0 34 12" aria-hidden="true">{line}</svg>{escape_text(label)}</li>'


def _figures(
    learned: Sequence[Sequence[Figure]], others: Sequence[Figure], links: Mapping[str, Mapping[str, str]]
) -> str:
    """One card a metric, whose axis is chosen above; all of them in print."""
    choosers = "".join(
        f'<input class="chooser" type="radio" name="over" id="over-{over.name}"{" checked" * (place == 0)}>'
        for place, over in enumerate(LEARNING_AXES)
    )
    labels = "".join(
        f'<label for="over-{over.name}">{escape_text(figure.x.label)}</label>'
        for over, figure in zip(LEARNING_AXES, learned[0], strict=True)
    )
    cards = "".join(
        _card(figure, links, f"over over-{over.name}")
        for figures in learned
        for over, figure in zip(LEARNING_AXES, figures, strict=True)
    )
    # what could not be drawn comes last, so that it leaves no hole
    cards += "".join(_card(figure, links) for figure in sorted(others, key=lambda each: not each.lines))
    return (
        f'<div>{choosers}<div class="switch"><span class="soft">accuracy and loss over</span>{labels}</div>'
        f'<div class="cards">{cards}</div></div>'
    )


def _card(figure: Figure, links: Mapping[str, Mapping[str, str]], kind: str = "") -> str:
    notes = "".join(f'<p class="soft">{escape_text(note)}</p>' for note in figure.notes)
    named = ", ".join(
        f'<a href="{escape_text(place)}" download>{escape_text(word)}</a>'
        for word, place in links.get(figure.name, {}).items()
    )
    drawing = draw(figure) if figure.lines else ""
    shown = f'<p class="soft files">{named}</p>' if named else ""
    return (
        f'<figure class="{f"card {kind}".strip()}"><figcaption>'
        f"<h3>{escape_text(figure.title)}</h3></figcaption>"
        f"{drawing}{notes}{shown}</figure>"
    )


def _privacy(runs: Sequence[Run]) -> str:
    """What is claimed, and on which terms."""
    parts = []
    for run in runs:
        if run.settings.get("clip") is None:
            continue
        privacy, value = run.ending.privacy, epsilon_spent(run)
        if privacy is None or value is None:
            why = run.ending.unread or "the run has not ended, and no record of a server step says"
            parts.append((run.label, f"What was spent is not known: {why}."))
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
            parts.append((run.label, f"{pair} {since}. {terms}"))
        if run.hides_sample:
            parts[-1] = (run.label, f"{parts[-1][1]} {SECRET_SAMPLE}")
    if not parts:
        return ""
    rows = "".join(f"<dt>{escape_text(name)}</dt><dd>{escape_text(words)}</dd>" for name, words in parts)
    return f"<h2>Privacy spent</h2><dl>{rows}</dl>"


def _settings(runs: Sequence[Run], names: Sequence[str]) -> str:
    rows = settings_table(runs)
    differing = sum(row.differs for row in rows)
    said = ""
    if len(runs) > 1:
        words = "Nothing differs." if not differing else f"The first {differing} differ, and are marked ≠."
        said = f'<p class="soft">{words}</p>'
    return said + _table("setting", names, ((row.name, row.values, row.differs) for row in rows))


def _table(what: str, names: Sequence[str], rows: Iterable[tuple[str, Sequence[str | None], bool]]) -> str:
    head = "".join(f'<th scope="col">{escape_text(name)}</th>' for name in names)
    lines = []
    for name, values, differs in rows:
        cells = "".join(_cell(_MISSING if value is None else value) for value in values)
        kind, sign = (' class="differs"', "≠ ") if differs else ("", "")
        lines.append(f'<tr{kind}><th scope="row">{sign}{escape_text(name)}</th>{cells}</tr>')
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape_text(what)}"><table><thead><tr>'
        f'<th scope="col">{escape_text(what)}</th>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _cell(value: str) -> str:
    kind = ' class="long"' if len(value) > _LONG_CELL else ""
    return f"<td{kind}>{escape_text(value)}</td>"
