"""What tuning costs as drawings: accuracy over the runs spent; a tuning-free method is a point at one."""

from collections.abc import Sequence

import numpy as np

from experiments.reproduce.tuning_cost import Cost
from offbeat.report.chart import COUNT, Axis, Figure, Series, Unit
from offbeat.report.svg import draw, standalone


def drawings(made: Sequence[Cost], name: str, unit: Unit) -> dict[str, str]:
    """SVG by file name, one for each column; a method looks the same in all of them.

    The unit is that of accuracy.
    """
    columns = list(dict.fromkeys(cost.column for cost in made))
    methods = list(dict.fromkeys(cost.method for cost in made))
    files = {}
    for number, column in enumerate(columns, 1):
        lines = tuple(
            _line(methods.index(cost.method), cost) for cost in made if cost.column == column and cost.best
        )
        if lines:
            several = len(columns) > 1
            title = f"{column}: accuracy" if several else "accuracy"
            figure = Figure(name, "The cost of tuning", _SPENT, Axis(title, unit), lines)
            files[f"{name}{f'-{number}' if several else ''}.svg"] = standalone(draw(figure), dark=True)
    return files


_SPENT = Axis("runs spent on the grid", COUNT)


def _line(style: int, cost: Cost) -> Series:
    return Series(style, cost.method, np.arange(1.0, 1 + len(cost.best)), np.asarray(cost.best))
