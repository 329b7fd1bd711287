"""Figures of what was learned, from records: over server steps, client trips, time and bytes."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from offbeat.report.figure import Axis, Figure, Line
from offbeat.report.reading import Run
from offbeat.report.scale import BYTES, COUNT, SECONDS, Unit


class Over(NamedTuple):
    """An axis to learn over."""

    name: str
    column: str
    label: str
    unit: Unit


OVERS = (
    Over("steps", "version", "server steps", COUNT),
    Over("trips", "trips", "client trips", COUNT),
    Over("time", "time", "virtual time", SECONDS),
    Over("bytes", "bytes", "bytes sent, down and up", BYTES),
)


def time_label(runs: Sequence[Run]) -> str:
    """Time is virtual where nobody had to wait."""
    return "time" if all(run.deployed for run in runs) else "virtual time"


def learning(runs: Sequence[Run], metric: str) -> Iterator[Figure]:
    """A metric, by its name in records, over each axis."""
    for over in OVERS:
        label = time_label(runs) if over.column == "time" else over.label
        lines, notes = [], []
        for style, run in enumerate(runs):
            xs, ys = run.records[over.column], run.records[metric]
            there = ~(np.isnan(xs) | np.isnan(ys))
            if there.any():
                lines.append(Line(style, run.label, xs[there], ys[there]))
            else:
                what = metric if np.isnan(ys).all() else label
                notes.append(f"{run.label} has no {what} in its records.")
        yield Figure(
            f"{metric}-by-{over.name}",
            metric.capitalize(),
            Axis(label, over.unit),
            Axis(metric),
            tuple(lines),
            tuple(notes),
        )


def privacy(runs: Sequence[Run]) -> Iterator[Figure]:
    """Epsilon over server steps; no figure where nothing is private."""
    private = [(style, run) for style, run in enumerate(runs) if run.settings.get("clip") is not None]
    if not private:
        return
    lines, notes = [], []
    for style, run in private:
        xs, ys = run.records["version"], run.records["epsilon"]
        there = ~np.isnan(ys)
        if (there & (xs > 0)).any():
            label = f"{run.label} (simulation, no guarantee)" if run.simulated else run.label
            lines.append(Line(style, label, xs[there], ys[there]))
        else:
            notes.append(f"{run.label} has no finite epsilon of a server step in its records.")
    simulated = [run.label for _, run in private if run.simulated]
    notes += [f"SIMULATION, not a privacy guarantee: {', '.join(simulated)}."] if simulated else []
    partly = "" if len(simulated) == len(private) else " of some"
    said = f" (simulation{partly}, no guarantee)" if simulated else ""
    plain = [run.label for run in runs if run.settings.get("clip") is None]
    notes += [f"Not private: {', '.join(plain)}."] if plain else []
    yield Figure(
        "privacy",
        f"Privacy spent{said}",
        Axis("server steps", COUNT),
        Axis(f"epsilon{said}", zero=True),
        tuple(lines),
        tuple(notes),
    )
