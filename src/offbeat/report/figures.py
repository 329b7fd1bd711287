"""The figures of a report as data: learning curves, staleness and concurrency, privacy, and clients."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from offbeat.report.chart import BYTES, COUNT, PERCENT, PLAIN, SECONDS, Axis, Figure, Series, Unit
from offbeat.report.load import ClientAccuracies, Run
from offbeat.report.trace import Floats, Integers, TraceSummary


class LearningAxis(NamedTuple):
    """The horizontal axis of a learning curve."""

    name: str
    column: str
    label: str
    unit: Unit


LEARNING_AXES = (
    LearningAxis("steps", "version", "server steps", COUNT),
    LearningAxis("updates", "client_updates", "client updates", COUNT),
    LearningAxis("time", "time", "virtual time", SECONDS),
    LearningAxis("bytes", "bytes", "bytes sent and received", BYTES),
)


def time_label(runs: Sequence[Run]) -> str:
    """`time` for deployments, `virtual time` for simulations."""
    return "time" if all(run.deployed for run in runs) else "virtual time"


def file_name(metric: str) -> str:
    """A metric's name as part of the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", metric.lower()).strip("-") or "metric"


def learning_figures(runs: Sequence[Run], metric: str) -> Iterator[Figure]:
    """A metric of the records over each axis."""
    for over in LEARNING_AXES:
        label = time_label(runs) if over.column == "time" else over.label
        lines, notes = [], []
        for style, run in enumerate(runs):
            xs = run.records[over.column]
            ys = run.records.get(metric, np.full(len(xs), np.nan))
            valid = ~(np.isnan(xs) | np.isnan(ys))
            if valid.any():
                lines.append(Series(style, run.label, xs[valid], ys[valid]))
            else:
                what = metric if np.isnan(ys).all() else label
                notes.append(f"{run.label} has no {what} in its records.")
        yield Figure(
            f"{file_name(metric)}-by-{over.name}",
            f"{metric[:1].upper()}{metric[1:]}",
            Axis(label, over.unit),
            Axis(metric, zoom=True),
            tuple(lines),
            tuple(notes),
        )


def privacy_figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """Epsilon over server steps; no figure if no run is private."""
    private = [(style, run) for style, run in enumerate(runs) if run.settings.get("clip") is not None]
    if not private:
        return
    lines, notes = [], []
    for style, run in private:
        xs, ys = run.records["version"], run.records["epsilon"]
        valid = ~np.isnan(ys)
        if (valid & (xs > 0)).any():
            label = f"{run.label} (simulation, not a guarantee)" if run.simulated else run.label
            lines.append(Series(style, label, xs[valid], ys[valid]))
        else:
            notes.append(f"{run.label} has no finite epsilon of a server step in its records.")
    simulated = [run.label for _, run in private if run.simulated]
    notes += [f"SIMULATION, not a privacy guarantee: {', '.join(simulated)}."] if simulated else []
    partly = "" if len(simulated) == len(private) else " of some"
    note = f" (simulation{partly}, not a guarantee)" if simulated else ""
    plain = [run.label for run in runs if run.settings.get("clip") is None]
    notes += [f"Not private: {', '.join(plain)}."] if plain else []
    yield Figure(
        "privacy",
        f"Privacy spent{note}",
        Axis("server steps", COUNT),
        Axis(f"epsilon{note}", zero=True),
        tuple(lines),
        tuple(notes),
    )


_MAX_STALENESS_BINS = 60  # bins of the histogram
_ESTIMATED_TIMES = "The times of dropped and lost tasks are estimated from the server steps around them."


def work_figures(runs: Sequence[Run]) -> Iterator[Figure]:
    """Figures from traces: staleness, concurrency, arrivals and wasted work."""
    yield _staleness_histogram(runs)
    yield _staleness_over_steps(runs)
    yield from _figures_over_time(runs)


def _staleness_histogram(runs: Sequence[Run]) -> Figure:
    largest = max((max(run.trace.staleness, default=0) for run in runs if run.trace), default=0)
    width = -(-(largest + 1) // _MAX_STALENESS_BINS)

    def shares(trace: TraceSummary) -> tuple[Floats, Floats]:
        ages, counts = (np.array(list(each)) for each in (trace.staleness, trace.staleness.values()))
        height = np.bincount(ages // width, weights=counts) / max(1, counts.sum())
        return width * np.arange(len(height)).astype(float), height

    lines, notes = _trace_series(runs, shares)
    if not largest:
        lines, notes = (), (*notes, "No update was stale.")
    return Figure(
        "staleness",
        "Staleness of updates" + (f", in bins of {width} versions" if width > 1 else ""),
        Axis("staleness, versions", COUNT, zero=True),
        Axis("updates", PERCENT, zero=True),
        lines,
        notes,
        stair=width,
    )


def _staleness_over_steps(runs: Sequence[Run]) -> Figure:
    lines, notes = _trace_series(runs, lambda trace: (trace.steps.edges, trace.age_mean))
    tops = {run.label: run.trace.age_max for run in runs if run.trace}
    if not any(top.any() for top in tops.values()):
        lines = ()
    return Figure(
        "staleness-course",
        "Staleness over server steps: mean and maximum",
        Axis("server steps", COUNT, zero=True),
        Axis("staleness, versions", PLAIN, zero=True),
        tuple(Series(each.style, each.label, each.xs, each.ys, tops[each.label]) for each in lines),
        notes,
    )


def _figures_over_time(runs: Sequence[Run]) -> Iterator[Figure]:
    time = Axis(time_label(runs), SECONDS, zero=True)
    lines, notes = _trace_series(runs, lambda trace: (trace.time.centres, trace.busy))
    wasted = any(run.trace and (run.trace.dropped.any() or run.trace.lost.any()) for run in runs)
    open_ended = tuple(
        f"{run.label}: the tasks in flight at the end are not known, so the line falls too early."
        for run in runs
        if run.trace and not run.whole
    )
    yield Figure(
        "concurrency",
        "Clients at work",
        time,
        Axis("clients at work, mean", PLAIN, zero=True),
        lines,
        notes + ((_ESTIMATED_TIMES,) if wasted else ()) + open_ended,
    )
    size = SECONDS.size(max((run.trace.time.end for run in runs if run.trace), default=1.0))
    yield Figure(
        "arrivals",
        "Arrivals of updates that were used",
        time,
        Axis(f"arrivals per {size.name}", PLAIN, zero=True),
        *_trace_series(
            runs,
            lambda trace: (
                trace.time.centres,
                trace.used.astype(np.float64) * (size.each / trace.time.width),
            ),
        ),
    )
    yield _wasted_work(runs, time, wasted)


def _wasted_work(runs: Sequence[Run], time: Axis, any_wasted: bool) -> Figure:
    """The sum of dropped and lost tasks; for a single run one line for each."""
    lines: tuple[Series, ...]
    lines, notes = _trace_series(runs, lambda trace: _cumulative(trace, trace.dropped + trace.lost))
    if len(runs) == 1 and (trace := runs[0].trace):
        lines = (
            Series(0, "dropped", *_cumulative(trace, trace.dropped)),
            Series(1, "lost", *_cumulative(trace, trace.lost)),
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


def _cumulative(trace: TraceSummary, counts: Integers) -> tuple[Floats, Floats]:
    return np.append(0.0, trace.time.edges), np.append(0.0, counts.cumsum())


def _trace_series(
    runs: Sequence[Run], of: Callable[[TraceSummary], tuple[Floats, Floats]]
) -> tuple[tuple[Series, ...], tuple[str, ...]]:
    """A series for each run that has a trace, and a note for each that has none."""
    lines = tuple(
        Series(style, run.label, *of(run.trace)) for style, run in enumerate(runs) if run.trace is not None
    )
    notes = tuple(f"{run.label} has no trace of a server step." for run in runs if run.trace is None)
    return lines, notes


_MAX_CLIENTS = 100_000  # points of a curve over clients


def gini(counts: Integers) -> float:
    """The Gini coefficient: 0 if all counts are equal, near 1 if one client has all."""
    ordered = np.sort(counts)
    total = float(ordered.sum())
    if not total:
        return 0.0
    ranks = np.arange(1, len(ordered) + 1)
    return float(2 * (ranks * ordered).sum() / (len(ordered) * total) - (len(ordered) + 1) / len(ordered))


def participation_figure(runs: Sequence[Run]) -> Figure:
    """Updates of each client, in descending order."""
    lines, notes = [], []
    for style, run in enumerate(runs):
        if run.trace is None:
            notes.append(f"{run.label} has no trace of a server step.")
        elif run.hides_sample:
            notes.append(f"{run.label} is left out: its epsilon assumes that participation stays secret.")
        else:
            lines.append(Series(style, run.label, *_sorted_curve(np.sort(run.trace.taken)[::-1])))
    return Figure(
        "participation",
        "Updates of each client, the most active first",
        Axis("clients", PERCENT, zero=True),
        Axis("updates used", COUNT, zero=True),
        tuple(lines),
        tuple(notes),
    )


def client_metric_figure(runs: Sequence[Run], metric: str, higher_is_better: bool) -> Figure:
    """A metric on the test examples of each client at the end, the worst clients first."""
    lines, notes = [], []
    for style, run in enumerate(runs):
        values = np.array([value for value in run.clients.get(metric, {}).values() if not np.isnan(value)])
        if not len(values):
            continue
        ordered = np.sort(values) if higher_is_better else np.sort(values)[::-1]
        lines.append(Series(style, run.label, *_sorted_curve(ordered)))
        if run.settings.get("clip") is not None:
            notes.append(f"{run.label} is private, but these values are not: they use clients' own data.")
    return Figure(
        "clients",
        f"{metric[:1].upper()}{metric[1:]} on each client's test examples, the worst first",
        Axis("clients", PERCENT, zero=True),
        Axis(metric),
        tuple(lines),
        tuple(notes),
    )


def fairness_figure(runs: Sequence[Run], spreads: Mapping[str, ClientAccuracies | str]) -> Figure:
    """The accuracy on each client's own examples, in ascending order; or why it is not known."""
    lines, notes = [], []
    for style, run in enumerate(runs):
        spread = spreads[run.label]
        if isinstance(spread, str):
            notes.append(f"{run.label}: {spread}")
            continue
        lines.append(Series(style, run.label, *_sorted_curve(np.sort(spread.accuracies))))
        if run.settings.get("clip") is not None:
            notes.append(
                f"{run.label} is private, but these values are not: they come from clients' own examples."
            )
    return Figure(
        "fairness",
        "Accuracy on each client's own training examples, the lowest first",
        Axis("clients", PERCENT, zero=True),
        Axis("accuracy", PLAIN),
        tuple(lines),
        tuple(notes),
    )


def _sorted_curve(ordered: Floats | Integers) -> tuple[Floats, Floats]:
    """Values over the fraction of clients, with at most `_MAX_CLIENTS` points."""
    count = len(ordered)
    indices = np.unique(np.linspace(0, count - 1, min(count, _MAX_CLIENTS)).round().astype(np.int64))
    return (indices + 1) / count, ordered[indices].astype(np.float64)


def tuning_figure(
    method: str,
    metric: str,
    curve: Sequence[tuple[int, int, float | None]],
    untuned: tuple[str, int, float] | None,
) -> Figure | None:
    """The best value over client updates spent, with a method that was not tuned as a line."""
    points: list[tuple[float, float]] = []
    for _, spent, best in curve:
        if best is not None:
            if points and best != points[-1][1]:
                points.append((float(spent), points[-1][1]))  # until then the earlier trial was the best
            points.append((float(spent), best))
    if not points:
        return None
    end = max(points[-1][0], untuned[1] if untuned else 0.0)
    if end > points[-1][0]:
        points.append((end, points[-1][1]))
    lines = [Series(0, f"{method}, tuned", *map(np.array, zip(*points, strict=True)))]
    if untuned is not None:
        name, once, value = untuned
        lines.append(Series(1, f"{name}, one run", np.array([once, end], float), np.array([value, value])))
    return Figure(
        "cost",
        f"The cost of tuning: {metric} of the best trial so far",
        Axis("client updates spent", COUNT, zero=True),
        Axis(metric),
        tuple(lines),
    )
