"""Figures of how work went, from traces: staleness, who was at work, what arrived and what was wasted."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from offbeat.report.bins import Numbers, Places
from offbeat.report.digest import Digest
from offbeat.report.figure import Axis, Figure, Line
from offbeat.report.learning import time_label
from offbeat.report.reading import Run
from offbeat.report.scale import COUNT, PERCENT, PLAIN, SECONDS

_KINDS = 60  # of staleness that a figure tells apart
_UNTIMED = (
    "Traces have no times of tasks that were dropped or lost: they are estimated from the steps around them."
)


def working(runs: Sequence[Run]) -> Iterator[Figure]:
    """All of them."""
    yield _staleness(runs)
    yield _course(runs)
    yield from _over_time(runs)


def _staleness(runs: Sequence[Run]) -> Figure:
    largest = max((max(run.trace.staleness, default=0) for run in runs if run.trace), default=0)
    width = -(-(largest + 1) // _KINDS)

    def shares(trace: Digest) -> tuple[Numbers, Numbers]:
        ages, counts = (np.array(list(each)) for each in (trace.staleness, trace.staleness.values()))
        height = np.bincount(ages // width, weights=counts) / max(1, counts.sum())
        return width * np.arange(len(height)).astype(float), height

    return Figure(
        "staleness",
        "Staleness of updates" + (f", {width} versions together" if width > 1 else ""),
        Axis("staleness, versions", COUNT, zero=True),
        Axis("updates", PERCENT, zero=True),
        *_lines(runs, shares),
        stair=width,
    )


def _course(runs: Sequence[Run]) -> Figure:
    lines, notes = _lines(runs, lambda trace: (trace.steps.edges, trace.age_mean))
    tops = {run.label: run.trace.age_max for run in runs if run.trace}
    return Figure(
        "staleness-course",
        "Staleness as it went: mean, and up to the largest",
        Axis("server steps", COUNT, zero=True),
        Axis("staleness, versions", PLAIN, zero=True),
        tuple(Line(each.style, each.label, each.xs, each.ys, tops[each.label]) for each in lines),
        notes,
    )


def _over_time(runs: Sequence[Run]) -> Iterator[Figure]:
    time = Axis(time_label(runs), SECONDS, zero=True)
    lines, notes = _lines(runs, lambda trace: (trace.time.centres, trace.busy))
    wasted = any(run.trace and (run.trace.dropped.any() or run.trace.lost.any()) for run in runs)
    open_ended = tuple(
        f"{run.label}: who was still at work at the end is not known, so the line falls too early."
        for run in runs
        if run.trace and not run.whole
    )
    yield Figure(
        "concurrency",
        "Clients at work",
        time,
        Axis("clients at work, on average", PLAIN, zero=True),
        lines,
        notes + ((_UNTIMED,) if wasted else ()) + open_ended,
    )
    size = SECONDS.size(max((run.trace.time.end for run in runs if run.trace), default=1.0))
    yield Figure(
        "arrivals",
        "Updates that arrived and were used",
        time,
        Axis(f"arrivals per {size.name}", PLAIN, zero=True),
        *_lines(
            runs,
            lambda trace: (
                trace.time.centres,
                trace.used.astype(np.float64) * (size.each / trace.time.width),
            ),
        ),
    )
    yield _wasted(runs, time, wasted)


def _wasted(runs: Sequence[Run], time: Axis, any_wasted: bool) -> Figure:
    """Of one run dropped and lost apart, of several together."""
    lines: tuple[Line, ...]
    lines, notes = _lines(runs, lambda trace: _added(trace, trace.dropped + trace.lost))
    if len(runs) == 1 and (trace := runs[0].trace):
        lines = (
            Line(0, "dropped", *_added(trace, trace.dropped)),
            Line(1, "lost", *_added(trace, trace.lost)),
        )
    if not any_wasted:
        lines, notes = (), (*notes, "No work was wasted: nothing was dropped and nothing was lost.")
    return Figure(
        "wasted",
        "Wasted work: dropped as too stale, or lost",
        time,
        Axis("tasks so far", COUNT, zero=True),
        lines,
        notes,
    )


def _added(trace: Digest, counts: Places) -> tuple[Numbers, Numbers]:
    return np.append(0.0, trace.time.edges), np.append(0.0, counts.cumsum())


def _lines(
    runs: Sequence[Run], of: Callable[[Digest], tuple[Numbers, Numbers]]
) -> tuple[tuple[Line, ...], tuple[str, ...]]:
    """A line for each run that has a trace, and a note for each that has none."""
    lines = tuple(
        Line(style, run.label, *of(run.trace)) for style, run in enumerate(runs) if run.trace is not None
    )
    notes = tuple(f"{run.label} has no trace of a server step." for run in runs if run.trace is None)
    return lines, notes
