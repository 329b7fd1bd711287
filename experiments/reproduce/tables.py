"""Tables of claimed beside measured."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from experiments.reproduce.measures import PAIRED, AccuracyMeasure, Measure, Score, paired
from experiments.reproduce.records import Curve
from experiments.reproduce.study import Cell, Table
from offbeat.report.chart import Axis

UNTOLD = "–"


class TableEntry(NamedTuple):
    """What one place of the table came to: the best of the rates that were tried."""

    figure: Score
    rates: str
    tried: int  # rates


@dataclass(frozen=True)
class Best:
    """Rows by columns: of each the rates with the best figure, beside what is claimed."""

    measure: Measure
    claimed: Mapping[tuple[str, str], str]  # by row and column
    above: tuple[tuple[str, tuple[str, ...]], ...] = ()  # rows, and those that they are claimed to beat
    delays: str = ""  # what the paper tells of each buffer's stalest update: largest, mean, median

    def __call__(self, cells: tuple[Cell, ...], found: Mapping[str, Curve]) -> Table:
        rows, columns = _distinct(cell.row for cell in cells), _distinct(cell.column for cell in cells)
        shown, notes = whole_seeds(cells, found)
        entries = entries_of(shown, found, self.measure)
        told = {column: any((row, column) in self.claimed for row in rows) for column in columns}
        head = [""]
        for column in columns:
            head += [f"{column}: claimed", "measured"] if told[column] else [column]
        lines = []
        for row in rows:
            line = [row]
            for column in columns:
                if told[column]:
                    line.append(self.claimed.get((row, column), UNTOLD))
                line.append(_text(entries.get((row, column)), (row, column), cells, found))
            lines.append((*line, _runs(row, cells, found)))
        meant = {(cell.row, cell.column) for cell in cells}
        notes += [
            _ranked(row, others, column, entries) + self._tested(row, others, column, shown, found, entries)
            for column in columns
            for row, others in self.above
            if meant.issuperset((one, column) for one in (row, *others))
        ]
        if self.delays:
            notes.append(_delays(self.delays, cells, found))
        return Table((*head, "runs"), tuple(lines), tuple(notes))

    def _tested(
        self,
        row: str,
        others: tuple[str, ...],
        column: str,
        cells: Iterable[Cell],
        found: Mapping[str, Curve],
        entries: Mapping[tuple[str, str], TableEntry],
    ) -> str:
        """A row minus each of the others, seed by seed, at their best rates; nothing but for three seeds."""
        if not isinstance(self.measure, AccuracyMeasure):
            return ""
        curves: dict[str, dict[int, Curve]] = {}
        for cell in cells:
            place = entries.get((cell.row, column))
            if (
                cell.column == column
                and place is not None
                and place.rates == cell.rates
                and cell.key in found
            ):
                curves.setdefault(cell.row, {})[cell.experiment.seed] = found[cell.key]
        words = []
        for other in others:
            one, two = curves.get(row, {}), curves.get(other, {})
            seeds = sorted(one.keys() & two.keys())
            if len(seeds) == PAIRED and not any(each[seed].failure for each in (one, two) for seed in seeds):
                gaps = [self.measure.accuracy(one[seed]) - self.measure.accuracy(two[seed]) for seed in seeds]
                words.append(f"minus {other} {paired(gaps, self.measure.say)}")
        return f" Paired over seeds: {', '.join(words)}." if words else ""


@dataclass(frozen=True)
class Swept:
    """Rows by the values of what is swept; then one figure for the whole row, beside what is claimed.

    Once some rows have runs, those without any are named below the table.
    """

    measure: Measure
    whole: str
    of_row: Callable[[Sequence[float]], str]  # from merits, in the order of the columns
    claimed: Mapping[str, str]  # by row
    over: Axis = Axis("what is swept")
    among: tuple[str, ...] = ()  # columns that the whole is of; none: all

    def __call__(self, cells: tuple[Cell, ...], found: Mapping[str, Curve]) -> Table:
        rows = _distinct(cell.row for cell in cells)
        columns = sorted(_distinct(cell.column for cell in cells), key=float)
        judged = [column for column in columns if column in self.among] or columns
        shown, notes = whole_seeds(cells, found)
        entries = entries_of(shown, found, self.measure)
        begun = _distinct(cell.row for cell in cells if cell.key in found) or rows
        lines = []
        for row in begun:
            merits = [entries[row, column].figure.merit for column in judged if (row, column) in entries]
            whole = self.of_row(merits) if len(merits) == len(judged) else ""
            texts = [_text(entries.get((row, column)), (row, column), cells, found) for column in columns]
            lines.append((row, *texts, whole, self.claimed.get(row, UNTOLD), _runs(row, cells, found)))
        waiting = [row for row in rows if row not in begun]
        if waiting:
            notes.append(f"Not run: {'; '.join(waiting)}.")
        return Table(("", *columns, self.whole, "claimed", "runs"), tuple(lines), tuple(notes))


def change(merits: Sequence[float]) -> str:
    """From the first to the last."""
    first, last = merits[0], merits[-1]
    return f"{last - first:+.3f}" if math.isfinite(first) and math.isfinite(last) else "diverged"


def least(merits: Sequence[float]) -> str:
    """The worst of them."""
    return f"{min(merits):.3f}" if math.isfinite(min(merits)) else "diverged"


def entries_of(
    cells: Iterable[Cell], found: Mapping[str, Curve], measure: Measure
) -> dict[tuple[str, str], TableEntry]:
    """The best rates of each row and column, among those all of whose seeds have run."""
    groups: dict[tuple[str, str], dict[str, list[Cell]]] = {}
    for cell in cells:
        groups.setdefault((cell.row, cell.column), {}).setdefault(cell.rates, []).append(cell)
    entries = {}
    for place, tried in groups.items():
        figures = {
            rates: measure([found[cell.key] for cell in same])
            for rates, same in tried.items()
            if all(cell.key in found for cell in same)
        }
        if figures:
            rates = max(figures, key=lambda one: figures[one].merit)
            entries[place] = TableEntry(figures[rates], rates, len(figures))
    return entries


def whole_seeds(cells: tuple[Cell, ...], found: Mapping[str, Curve]) -> tuple[tuple[Cell, ...], list[str]]:
    """The cells of seeds all of whose runs are there, where some are, and a note that others are not."""
    seeds = sorted({cell.experiment.seed for cell in cells})
    lacking = {cell.experiment.seed for cell in cells if cell.key not in found}
    whole = [seed for seed in seeds if seed not in lacking]
    if not whole or not lacking:
        return cells, []
    listed = ", ".join(map(str, whole))
    note = f"Shown: seed{'s' if len(whole) > 1 else ''} {listed} of {', '.join(map(str, seeds))}."
    return tuple(cell for cell in cells if cell.experiment.seed in whole), [note]


def _text(
    entry: TableEntry | None, place: tuple[str, str], cells: tuple[Cell, ...], found: Mapping[str, Curve]
) -> str:
    """A figure with its rates where there was a choice, or why there is none."""
    own = [cell for cell in cells if (cell.row, cell.column) == place]
    if entry is not None:
        several = len({cell.rates for cell in own}) > 1
        return f"{entry.figure.text} ({entry.rates})" if several else entry.figure.text
    if any(cell.key in found for cell in own):
        return "seeds are missing"
    return "not run" if own else ""


def _runs(row: str, cells: tuple[Cell, ...], found: Mapping[str, Curve]) -> str:
    keys = {cell.key for cell in cells if cell.row == row}
    done = len(keys & found.keys())
    return str(done) if done == len(keys) else f"{done} of {len(keys)}"


def _ranked(
    row: str, others: tuple[str, ...], column: str, entries: Mapping[tuple[str, str], TableEntry]
) -> str:
    """Whether a row came out better than others, as claimed."""
    words = f"{column}: {row} is claimed to be better than {', '.join(others)}:"
    if any((one, column) not in entries for one in (row, *others)):
        return f"{words} not known yet."
    merit = entries[row, column].figure.merit
    wrong = [other for other in others if entries[other, column].figure.merit >= merit]
    return f"{words} it is not better than {', '.join(wrong)}." if wrong else f"{words} it is."


def _delays(claimed: str, cells: tuple[Cell, ...], found: Mapping[str, Curve]) -> str:
    """The stalest update of each buffer, where the schedule is the published one and came to its end."""
    seen = {
        found[cell.key].worst
        for cell in cells
        if cell.key in found and cell.scale == 1 and cell.experiment.dispatch == "round-refill"
        if found[cell.key].failure is None
    }
    texts = "; ".join(sorted(f"{one[0]:g} / {one[1]:.2f} / {one[2]:.1f}" for one in seen if one is not None))
    return (
        "Staleness of each buffer's stalest update, largest / mean / median: "
        f"claimed {claimed}, measured {texts or 'not yet'}."
    )


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
