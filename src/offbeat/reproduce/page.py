"""A table as text and as Markdown, with what it took, and its place in a page."""

from collections.abc import Mapping

from offbeat.errors import InputError
from offbeat.reproduce.records import Curve
from offbeat.reproduce.study import Study, Table, Version


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
    """How many runs there are, with which seeds, where, when, how long it took, and the command."""
    keys = {cell.key for cell in version.cells}
    done = [found[key] for key in keys & found.keys()]
    seeds = sorted({cell.experiment.seed for cell in version.cells if cell.key in found})
    words = [f"{len(done)} of {len(keys)} runs"]
    if done:
        words.append(f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}")
        words.append(" and ".join(sorted({curve.device for curve in done})))
        words.append(" and ".join(sorted({curve.date for curve in done})))
        words.append(f"{sum(curve.seconds for curve in done) / 60:.0f} minutes of processes")
    command = f"offbeat reproduce {study.name}" + (" --quick" if quick else " --device cuda --data-dir DIR")
    cut = "" if rounds is None else f" --rounds {rounds}"
    return f"{', '.join(words)}: `{command}{cut}`"


def section(
    study: Study, version: Version, found: Mapping[str, Curve], quick: bool, rounds: int | None = None
) -> str:
    """What stands between the markers of a page: the table, then its terms."""
    table = version.tabulate(version.cells, found)
    return f"{markdown(table)}\n\n{terms(study, version, found, quick, rounds)}"


def marker(study: Study, quick: bool) -> str:
    """What stands before a table in a page."""
    return f"<!-- {study.name}{' quick' if quick else ''} -->\n"


def written(page: str, start: str, text: str) -> str:
    """The page with a table between its marker and the next end."""
    if page.count(start) != 1:
        raise InputError(f"the page must have one line '{start.strip()}', not {page.count(start)}: add it.")
    before, _, rest = page.partition(start)
    if "<!-- end -->" not in rest:
        raise InputError(f"the page must have a line '<!-- end -->' after '{start.strip()}': add it.")
    return f"{before}{start}\n{text}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
