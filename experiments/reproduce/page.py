"""A table as text and as Markdown, with what it took, and its place in a page."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from experiments.reproduce import cost_figure, sweep_figure
from experiments.reproduce.measures import AccuracyMeasure
from experiments.reproduce.records import Curve
from experiments.reproduce.study import DrawnTable, Study, Table, Version
from experiments.reproduce.tables import Best, Swept, whole_seeds
from experiments.reproduce.tuning_cost import Cost, cost_table, costs
from experiments.reproduce.weights import FINE_TUNED
from offbeat.errors import InputError

_END = "<!-- end -->"
_SHOWN = 16  # digits of a digest, enough to tell folders apart


def aligned(table: Table) -> str:
    """For a terminal of any width: a long line is not cut."""
    lines = [table.head, *table.rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(table.head))]
    texts = ("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(text.rstrip() for text in texts)


def markdown(table: Table) -> str:
    """The table and the sentences below it."""
    lines = [table.head, tuple("---" for _ in table.head), *table.rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = "\n".join(f"- {note}" for note in table.notes)
    return f"{text}\n\n{notes}" if notes else text


def terms(
    study: Study, version: Version, found: Mapping[str, Curve], quick: bool, rounds: int | None = None
) -> str:
    """How many runs there are, with which seeds, where, when, how long, from which weights, and how."""
    keys = {cell.key for cell in version.cells}
    done = [found[key] for key in keys & found.keys()]
    seeds = sorted({cell.experiment.seed for cell in version.cells if cell.key in found})
    words = [f"{len(done)} of {len(keys)} runs"]
    if not done:
        place = "two cores" if quick else "an H200"
        words.append(f"not run yet, about {max(1, round(version.minutes))} minutes of {place}")
    else:
        words.append(f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}")
        words.append(" and ".join(sorted({curve.device for curve in done})))
        words.append(" and ".join(sorted({curve.date for curve in done})))
        words.append(f"{sum(curve.seconds for curve in done) / 60:.0f} minutes of processes")
        begun = sorted({curve.weights[:_SHOWN] for curve in done if curve.weights})
        if begun:
            words.append(f"from weights and a tokenizer of digest {' and '.join(begun)}")
    command = f"python -m experiments {study.name}" + (" --quick" if quick else " --device cuda")
    if not quick or any(cell.experiment.data != "digits" for cell in version.cells):
        command += " --data-dir DIR"
    if any(cell.experiment.model == FINE_TUNED for cell in version.cells):
        command += " --weights DIR"
    cut = "" if rounds is None else f" --rounds {rounds}"
    return f"{', '.join(words)}: `{command}{cut}`"


def section(
    study: Study, version: Version, found: Mapping[str, Curve], quick: bool, rounds: int | None = None
) -> str:
    """What stands between the markers of a page: the table, its terms, and what tuning costs."""
    table = version.tabulate(version.cells, found)
    parts = [markdown(table), terms(study, version, found, quick, rounds)]
    names = figures(study, version, found, quick)
    if names and isinstance(version.tabulate, Swept):
        parts.append(_shown(sweep_figure.caption(version.tabulate), names))
    if names and isinstance(version.tabulate, DrawnTable):
        parts.append(_shown(version.tabulate.caption, names))
    spent = cost(version, found)
    if spent is not None:
        parts += ["The cost of tuning:", _shown("Accuracy by runs spent on a grid", names), markdown(spent)]
    return "\n\n".join(parts)


def cost(version: Version, found: Mapping[str, Curve]) -> Table | None:
    """What tuning costs, where rates are chosen from grids by accuracy; None: elsewhere, or without runs."""
    measure, made = _graded(version, found)
    return None if measure is None else cost_table(made, measure.say)


def figures(study: Study, version: Version, found: Mapping[str, Curve], quick: bool) -> dict[str, str]:
    """What tuning costs, or what a sweep gives, as drawings, by the names of their files."""
    name = f"{study.name}{'-quick' if quick else ''}"
    if isinstance(version.tabulate, Swept):
        return sweep_figure.drawings(version.tabulate, version.cells, found, f"{name}-sweep")
    if isinstance(version.tabulate, DrawnTable):
        return version.tabulate.drawings(version.cells, found, name)
    measure, made = _graded(version, found)
    return {} if measure is None else cost_figure.drawings(made, f"{name}-cost", measure.unit)


def _shown(caption: str, names: Iterable[str]) -> str:
    return " ".join(f"![{caption}]({name})" for name in names)


def _graded(version: Version, found: Mapping[str, Curve]) -> tuple[AccuracyMeasure | None, tuple[Cost, ...]]:
    if not isinstance(version.tabulate, Best) or not isinstance(version.tabulate.measure, AccuracyMeasure):
        return None, ()
    measure = version.tabulate.measure
    shown, _ = whole_seeds(version.cells, found)
    made = costs(shown, found, measure.accuracy)
    return (measure, made) if any(each.best for each in made) else (None, ())


def marker(study: Study, quick: bool) -> str:
    """What stands before a table in a page."""
    return f"<!-- {study.name}{' quick' if quick else ''} -->\n"


def written(page: str, start: str, text: str) -> str:
    """The page with a table between its marker and the next end; lines end as the marker's does."""
    name = start.strip()
    lines = page.splitlines(keepends=True)
    places = [place for place, line in enumerate(lines) if line.rstrip("\r\n") == name]
    if len(places) != 1:
        raise InputError(f"the page must have one line '{name}', not {len(places)}: add it.")
    first = places[0] + 1
    comments = (place for place in range(first, len(lines)) if lines[place].lstrip().startswith("<!--"))
    last = next(comments, None)
    if last is None or lines[last].strip() != _END:
        before = "" if last is None else f" and before '{lines[last].strip()}'"
        raise InputError(f"the page must have a line '{_END}' after '{name}'{before}: add it.")
    made = f"\n{text}\n\n".replace("\n", lines[first - 1].removeprefix(name))
    return "".join([*lines[:first], made, *lines[last:]])


def fill_sections(page: str, made: Mapping[str, str]) -> str:
    """The page with each text between the marker of its name and the next end."""
    for name, text in made.items():
        page = written(page, f"<!-- {name} -->\n", text)
    return page


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table without notes."""
    return markdown(Table(tuple(head), tuple(tuple(row) for row in rows)))


def table_command(path: Path, tables: Callable[[], Mapping[str, str]]) -> None:
    """Print the tables of a page, or with --write put them between their markers in it."""
    parser = argparse.ArgumentParser(description=f"Make the tables of {path.name} from the records.")
    parser.add_argument("--write", action="store_true", help=f"put them between their markers in {path.name}")
    write, made = parser.parse_args().write, tables()
    if write:
        path.write_text(fill_sections(path.read_text(), made))
    else:
        print("\n\n".join(f"{name}\n\n{text}" for name, text in made.items()))
