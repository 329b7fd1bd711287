"""What tuning costs: the accuracy to expect of a method by the number of runs that are spent on its grid."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import comb
from statistics import mean
from typing import NamedTuple

from experiments.reproduce.records import Curve
from experiments.reproduce.study import Cell, Table

_SHOWN = 3  # numbers of runs that have a column of their own
_UNTOLD = "–"
_MEANING = (
    "Accuracy to expect of the best of so many settings of a method's grid, taken at random; mean over "
    "seeds, each with a grid of its own. A run that diverged counts as the untrained model, or as 0 where "
    "not even that was recorded."
)


class Cost(NamedTuple):
    """What a method comes to."""

    method: str
    column: str
    best: tuple[float, ...]  # accuracy by runs spent, from one to all of the grid; none: runs are missing
    tuned: bool = True  # False: its rates come from the system, so one run is all there is


def expected_best(values: Sequence[float]) -> tuple[float, ...]:
    """The best of k of the n values to expect when each k of them are as likely, for k from 1 to n."""
    ordered, count = sorted(values), len(values)
    return tuple(
        # the value at a place is the best of C(place, k - 1) of all C(n, k) choices
        sum(value * (comb(place, spent - 1) / comb(count, spent)) for place, value in enumerate(ordered))
        for spent in range(1, count + 1)
    )


def costs(
    cells: Iterable[Cell], found: Mapping[str, Curve], accuracy: Callable[[Curve], float]
) -> tuple[Cost, ...]:
    """By column, of each method with a grid or with no rates to give; none where no method has a grid.

    A method at one setting of given rates is left out: somebody else has tuned it. So is a variant, whose
    row has another name than its method.
    """
    places: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if cell.row == cell.experiment.algorithm:
            places.setdefault((cell.column, cell.row), []).append(cell)
    made = []
    for (column, row), tried in places.items():
        grid = {cell.rates for cell in tried}
        if grid == {""} or len(grid) > 1:
            made.append(Cost(row, column, _best(tried, found, accuracy), tuned=len(grid) > 1))
    return tuple(made) if any(cost.tuned for cost in made) else ()


def cost_table(made: Sequence[Cost], say: Callable[[float], str]) -> Table:
    """Methods by runs spent."""
    several = len({cost.column for cost in made}) > 1
    shown = range(min(_SHOWN, max(len(cost.best) for cost in made)))
    rows = []
    for cost in made:
        name = f"{cost.column}: {cost.method}" if several else cost.method
        texts = [say(cost.best[place]) if place < len(cost.best) else _UNTOLD for place in shown]
        rows.append((name, *texts, _whole(cost, say)))
    head = "", *(f"{place + 1} run{'s' if place else ''}" for place in shown), "whole grid"
    return Table(head, tuple(rows), (_MEANING, *_catching_up(made, several)))


def _best(
    tried: Sequence[Cell], found: Mapping[str, Curve], accuracy: Callable[[Curve], float]
) -> tuple[float, ...]:
    """Mean over seeds, once all their runs are there."""
    if any(cell.key not in found for cell in tried):
        return ()
    seeds: dict[int, list[float]] = {}
    for cell in tried:
        seeds.setdefault(cell.experiment.seed, []).append(accuracy(found[cell.key]))
    return tuple(mean(values) for values in zip(*map(expected_best, seeds.values()), strict=True))


def _whole(cost: Cost, say: Callable[[float], str]) -> str:
    if not cost.best:
        return "runs are missing"
    return f"{say(cost.best[-1])} ({len(cost.best)} runs)" if cost.tuned else "no grid"


def _catching_up(made: Sequence[Cost], several: bool) -> Iterable[str]:
    """How many runs the tuned methods need for what one run of a tuning-free one gives."""
    for free in made:
        tuned = [cost for cost in made if cost.tuned and cost.best and cost.column == free.column]
        if free.tuned or not free.best or not tuned:
            continue
        where = f"{free.column}: runs" if several else "Runs"
        words = ", ".join(f"{cost.method} {_needed(cost, free.best[0])}" for cost in tuned)
        yield f"{where} to expect as much as from one of {free.method}: {words}."


def _needed(cost: Cost, level: float) -> str:
    enough = next((place + 1 for place, value in enumerate(cost.best) if value >= level), None)
    return f"more than all {len(cost.best)}" if enough is None else str(enough)
