"""Figures of single clients: how often each took part, and how well the model serves each."""

from collections.abc import Mapping, Sequence

import numpy as np

from offbeat.report.bins import Numbers, Places
from offbeat.report.fairness import Spread
from offbeat.report.figure import Axis, Figure, Line
from offbeat.report.reading import Run
from offbeat.report.scale import COUNT, PERCENT, PLAIN

_POINTS = 100_000  # clients that a curve shows one by one


def gini(counts: Places) -> float:
    """0 where all have the same, near 1 where one has all."""
    ordered = np.sort(counts)
    total = float(ordered.sum())
    if not total:
        return 0.0
    ranks = np.arange(1, len(ordered) + 1)
    return float(2 * (ranks * ordered).sum() / (len(ordered) * total) - (len(ordered) + 1) / len(ordered))


def participation(runs: Sequence[Run]) -> Figure:
    """Updates of each client, from the most to the fewest."""
    lines, notes = [], []
    for style, run in enumerate(runs):
        if run.trace is None:
            notes.append(f"{run.label} has no trace of a server step.")
        elif run.hides_sample:
            notes.append(
                f"{run.label} is left out: the epsilon that it simulates rests on nobody learning who took "
                "part how often."
            )
        else:
            lines.append(Line(style, run.label, *_curve(np.sort(run.trace.taken)[::-1])))
    return Figure(
        "participation",
        "Updates of each client, the most active first",
        Axis("clients", PERCENT, zero=True),
        Axis("updates used", COUNT, zero=True),
        tuple(lines),
        tuple(notes),
    )


def fairness(runs: Sequence[Run], spreads: Mapping[str, Spread | str]) -> Figure:
    """The accuracy on each client's own examples, from the worst served on; or why it is not known."""
    lines, notes = [], []
    for style, run in enumerate(runs):
        spread = spreads[run.label]
        if isinstance(spread, str):
            notes.append(f"{run.label}: {spread}")
            continue
        lines.append(Line(style, run.label, *_curve(np.sort(spread.accuracies))))
        if run.settings.get("clip") is not None:
            notes.append(
                f"{run.label} is private, but these numbers are not: they come from clients' own examples."
            )
    return Figure(
        "fairness",
        "Accuracy on each client's own training examples, the worst served first",
        Axis("clients", PERCENT, zero=True),
        Axis("accuracy", PLAIN),
        tuple(lines),
        tuple(notes),
    )


def _curve(ordered: Numbers | Places) -> tuple[Numbers, Numbers]:
    """Values over the share of clients; of a hundred thousand of them where there are more."""
    count = len(ordered)
    places = np.unique(np.linspace(0, count - 1, min(count, _POINTS)).round().astype(np.int64))
    return (places + 1) / count, ordered[places].astype(np.float64)
