"""The verdict of a report, its tables of results and settings, and which runs are comparable."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from offbeat.errors import InputError
from offbeat.report.chart import BYTES, COUNT, PERCENT, PLAIN, SECONDS, Unit, format_number
from offbeat.report.figures import gini
from offbeat.report.load import CLIENT_SUMMARIES, ClientAccuracies, Run
from offbeat.training.evaluate import summarise_clients

# settings that must agree for metrics to be comparable
_MUST_MATCH = ("data", "model", "clients", "partition", "task")
# shown separately, or not settings
_NOT_SETTINGS = ("parameters", "resolved", "format", "algorithm", "metrics", "client_names")
_MACHINE_PATHS = ("data_dir", "ray_address")  # locations on the machine of the run
_ORIGIN = ("version", "commit")
_COMMIT_LENGTH = 10  # characters of a commit hash that are shown
_MAX_LENGTH = 160  # characters of a value that are shown


class SettingRow(NamedTuple):
    """One setting and its value for each run; None: the run does not have it."""

    name: str
    values: tuple[str | None, ...]
    differs: bool


def check_comparable(runs: Sequence[Run]) -> None:
    """Raise `InputError` if the metrics of these runs are not comparable."""
    first = runs[0]
    for other in runs[1:]:
        if first.deployed != other.deployed:
            raise _incomparable(first, other, "one is a deployment and the other a simulation")
        for name in _MUST_MATCH:
            one, two = first.settings.get(name), other.settings.get(name)
            if one != two:
                values = f"{_format_setting(one)} in one and {_format_setting(two)} in the other"
                raise _incomparable(first, other, f"{name} is {values}")
        if first.metrics != other.metrics:
            one, two = (", ".join(run.metrics) for run in (first, other))
            raise _incomparable(first, other, f"the metrics of one are {one} and of the other {two}")
        sizes = [_resolved(run).get("model_size") for run in (first, other)]
        if None not in sizes and sizes[0] != sizes[1]:
            raise _incomparable(first, other, f"their models have {sizes[0]} and {sizes[1]} parameters")


def settings_table(runs: Sequence[Run]) -> list[SettingRow]:
    """All settings, those that differ first."""
    columns = [_flat(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [_row(name, [column.get(name) for column in columns]) for name in names]
    return sorted(rows, key=lambda row: not row.differs)


def _row(name: str, values: Sequence[Any]) -> SettingRow:
    """A row; numbers are rounded unless that would hide a difference."""
    exact = [None if value is None else json.dumps(value, sort_keys=True) for value in values]
    differs = len(set(exact)) > 1
    texts = [None if value is None else _format_setting(value) for value in values]
    if differs and len(set(texts)) == 1:
        texts = exact
    return SettingRow(name, tuple(texts), differs)


def _flat(run: Run) -> dict[str, Any]:
    """The settings of a run by name; hyperparameters of the method have a dot before their name."""
    resolved = _resolved(run)
    given, worked_out = run.settings.get("parameters"), resolved.get("hyperparameters")
    parameters = _mapping(given) | _mapping(worked_out)
    own = {
        name: value
        for name, value in run.settings.items()
        if name not in (*_NOT_SETTINGS, *_MACHINE_PATHS, *_ORIGIN)
    }
    values = {
        "method": run.settings.get("algorithm"),
        **{f"method.{name}": value for name, value in parameters.items()},
        **own,
        "model size": resolved.get("model_size"),
        "engine used": resolved.get("engine"),
        "offbeat version": run.settings.get("version"),
        "commit": _commit(run.settings.get("commit")),
    }
    return {name: value for name, value in values.items() if value is not None}


def _commit(value: Any) -> str | None:
    return f"{value[:_COMMIT_LENGTH]}{'+' if value.endswith('+') else ''}" if isinstance(value, str) else None


def _resolved(run: Run) -> dict[str, Any]:
    return _mapping(run.settings.get("resolved"))


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _format_setting(value: Any) -> str:
    """A value as it is written in settings; a path is reduced to the name of the file."""
    if isinstance(value, str):
        kind, colon, path = value.partition(":")
        text = f"{kind}:{PurePath(path).name}" if colon and kind == "recorded" else value
    elif value is None:
        text = "not set"
    elif isinstance(value, bool):
        text = "yes" if value else "no"
    elif isinstance(value, float):
        text = f"{value:.6g}"
    else:
        text = json.dumps(value)
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}…"


def _incomparable(first: Run, other: Run, why: str) -> InputError:
    return InputError(
        f"{first.label} and {other.label} cannot be compared, since {why}: "
        "make a report of each, or add --anyway."
    )


_TARGET_SHARE = 0.05  # how far a target is from the best value of all runs, relative to it
_COST_AXES = (
    ("version", "server steps", COUNT),
    ("client_updates", "client updates", COUNT),
    ("time", "virtual time", SECONDS),
    ("bytes", "bytes", BYTES),
)
_EQUAL = 1e-3  # relative difference below which two values are called equal in words
_MAX_CLIENT_ROWS = 40


class SummaryRow(NamedTuple):
    """A measure and its text for each run; None: unknown, or not applicable."""

    name: str
    texts: tuple[str | None, ...]
    best: tuple[bool, ...]  # runs with the best value, unless all have it


class _Measure(NamedTuple):
    """One value of a run, with its unit, or as text."""

    value: float | None = None
    unit: Unit = PLAIN
    higher_is_better: bool | None = None  # None: neither is better
    text: str | None = None


_Column: TypeAlias = dict[str, _Measure]


class Target(NamedTuple):
    """A value of the main metric that is near the best of all runs, to compare what reaching it costs."""

    metric: str
    higher_is_better: bool
    value: float

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Target | None":
        """The target of these runs; None if none of them has the metric."""
        metric, higher = main_metric(runs)
        known = [run.records[metric] for run in runs if metric in run.records]
        values = np.concatenate([column[np.isfinite(column)] for column in known]) if known else np.empty(0)
        if not len(values):
            return None
        best = float(values.max() if higher else values.min())
        margin = _TARGET_SHARE * abs(best)
        return cls(metric, higher, best - margin if higher else best + margin)

    def reached(self, run: Run) -> int | None:
        """The index of the first record at which a run has reached the target."""
        values = run.records.get(self.metric, np.empty(0))
        indices = np.flatnonzero(values >= self.value if self.higher_is_better else values <= self.value)
        return int(indices[0]) if len(indices) else None


def main_metric(runs: Sequence[Run]) -> tuple[str, bool]:
    """The metric by which runs are compared, and whether higher values are better."""
    return next(iter(runs[0].metrics.items()))


def metric_names(runs: Sequence[Run]) -> tuple[str, ...]:
    """The metrics of all runs, the main one first."""
    return tuple(dict.fromkeys(name for run in runs for name in run.metrics))


def summary_table(runs: Sequence[Run], spreads: Mapping[str, ClientAccuracies | str]) -> list[SummaryRow]:
    """All measures that at least one run has."""
    target = Target.of(runs)
    columns = [_state(run) | _learned(run, target) | _cost(run) | _worked(run) for run in runs]
    for column, run in zip(columns, runs, strict=True):
        column |= _served(spreads.get(run.label)) | _privacy(run)
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [_summary_row(name, [column.get(name, _Measure()) for column in columns]) for name in names]
    return [row for row in rows if any(row.texts)]


def client_table(runs: Sequence[Run]) -> list[SummaryRow]:
    """The main metric of each client at the end, the worst clients first."""
    metric, higher = main_metric(runs)
    values = [run.clients.get(metric, {}) for run in runs]
    clients = dict.fromkeys(client for each in values for client in each)

    def worst(client: str) -> float:
        known = [each[client] for each in values if not math.isnan(each.get(client, math.nan))]
        return math.inf if not known else float(np.mean(known)) * (1 if higher else -1)

    return [
        _summary_row(
            client, [_Measure(each.get(client, math.nan), PLAIN, higher_is_better=higher) for each in values]
        )
        for client in sorted(clients, key=worst)[:_MAX_CLIENT_ROWS]
    ]


def _summary_row(name: str, cells: Sequence[_Measure]) -> SummaryRow:
    """A row in which all values have the same unit, and the best are marked."""
    values = [math.nan if cell.value is None else cell.value for cell in cells]
    known = [value for value in values if not math.isnan(value)]
    largest = max((abs(value) for value in known if math.isfinite(value)), default=0.0)
    texts = tuple(
        cell.text or (None if math.isnan(value) else cell.unit.format(value, largest))
        for cell, value in zip(cells, values, strict=True)
    )
    directions = {cell.higher_is_better for cell in cells} - {None}
    if len(known) < 2 or len(directions) != 1 or min(known) == max(known):
        return SummaryRow(name, texts, (False,) * len(texts))
    best = max(known) if True in directions else min(known)
    return SummaryRow(name, texts, tuple(value == best for value in values))


def verdict(runs: Sequence[Run]) -> list[str]:
    """The result in words: the best run by the main metric, its margin, its cost and its staleness."""
    metric, higher = main_metric(runs)
    finals = {run.label: _final(run, metric) for run in runs}
    known = {label: value for label, value in finals.items() if not math.isnan(value)}
    if not known:
        return [f"No run has a recorded {metric}, so none can be called best."]
    ranked = sorted(known, key=lambda label: known[label], reverse=higher)
    best = next(run for run in runs if run.label == ranked[0])
    sentences = [_comparison(metric, higher, ranked, known), _effort(best, runs)]
    sentences += [_reach(best, runs, Target.of(runs)), *_staleness(best, runs)]
    sentences += [f"{run.label} diverged." for run in runs if run.ending.diverged]
    if len(known) > 1:
        sentences.append(
            "Each run has one seed: repeat close results with other seeds before you rely on an order."
        )
    return [sentence for sentence in sentences if sentence]


def _comparison(metric: str, higher: bool, ranked: Sequence[str], values: Mapping[str, float]) -> str:
    best = values[ranked[0]]
    if len(ranked) == 1:
        return f"{ranked[0]} ends with {metric} {format_number(best)}."
    second = values[ranked[1]]
    close = [label for label in ranked[1:] if abs(values[label] - best) <= _EQUAL * abs(best)]
    if close:
        names = join_words([ranked[0], *close])
        return f"{names} are equal within {_EQUAL:.1%}: {metric} {format_number(best)} at the end."
    side = "above" if higher else "below"
    last = f", and {ranked[-1]} is last with {format_number(values[ranked[-1]])}" if len(ranked) > 2 else ""
    return (
        f"{ranked[0]} is best: {metric} {format_number(best)} at the end, "
        f"{format_number(abs(best - second))} {side} {ranked[1]} ({format_number(second)}){last}."
    )


def _effort(best: Run, runs: Sequence[Run]) -> str:
    last = {column: float(best.records[column][-1]) for column, *_ in _COST_AXES}
    parts = [
        f"{unit.format(last[column])}{'' if column == 'bytes' or column == 'time' else f' {label}'}"
        f"{f' of {_time_label(best)}' if column == 'time' else ''}"
        for column, label, unit in _COST_AXES
        if not math.isnan(last[column])
    ]
    epsilon = epsilon_spent(best)
    if epsilon is not None:
        parts.append(f"epsilon {epsilon}{' (simulation, not a guarantee)' if best.simulated else ''}")
    name = f"{best.label} took" if len(runs) > 1 else "It took"
    return f"{name} {join_words(parts)}."


def _reach(best: Run, runs: Sequence[Run], target: Target | None) -> str:
    """Which run is the first to get near the best value."""
    if target is None or len(runs) < 2:
        return ""
    times = {
        run.label: float(run.records["time"][at]) for run in runs if (at := target.reached(run)) is not None
    }
    ranked = sorted(times, key=lambda label: times[label])
    if not ranked:
        return ""
    goal = f"{target.metric} {format_number(target.value)}"
    fewest = f"{ranked[0]} is the first to reach {goal}, after {SECONDS.format(times[ranked[0]])}"
    if len(ranked) > 1 and times[ranked[0]] > 0:
        factor = times[ranked[1]] / times[ranked[0]]
        fewest += f"; {ranked[1]} takes {format_number(round(factor, 2))} times as long"
    never = [run.label for run in runs if run.label not in times]
    return f"{fewest}." + (f" {join_words(never)} did not reach it." if never else "")


def _staleness(best: Run, runs: Sequence[Run]) -> list[str]:
    ages = {run.label: _mean_staleness(run) for run in runs if run.trace}
    if best.label not in ages or not any(ages.values()):
        return []
    others = [f"{label} {format_number(age)}" for label, age in ages.items() if label != best.label]
    rest = f" ({', '.join(others)})" if others else ""
    assert best.trace is not None
    largest = max(best.trace.staleness, default=0)
    return [
        f"Updates of {best.label} had a mean staleness of {format_number(ages[best.label])}{rest}, "
        f"and at most {largest}."
    ]


def join_words(words: Sequence[str]) -> str:
    """`a`, `a and b`, or `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _final(run: Run, metric: str) -> float:
    column = run.records.get(metric, np.empty(0))
    known = column[~np.isnan(column)]
    return float(known[-1]) if len(known) else math.nan


def _mean_staleness(run: Run) -> float:
    assert run.trace is not None
    ages, counts = (
        np.array(list(each), dtype=np.float64) for each in (run.trace.staleness, run.trace.staleness.values())
    )
    return float((ages * counts).sum() / max(1.0, counts.sum()))


def run_state(run: Run) -> str:
    """The progress of a run in words."""
    version, rounds = int(run.records["version"][-1]), run.settings.get("rounds")
    if version == rounds:
        return "finished"
    if run.ending.diverged:
        return "diverged"
    if run.ending.ended:
        return "ended early"
    return f"at server step {version:,}" + (f" of {rounds:,}" if isinstance(rounds, int) else "")


class Epsilon(NamedTuple):
    """The privacy loss of a run."""

    value: float
    version: int | None  # the version up to which it is known; None: this is the final value

    def __str__(self) -> str:
        return format_number(self.value) if self.version is None else f"at least {format_number(self.value)}"


def epsilon_spent(run: Run) -> Epsilon | None:
    """Epsilon at the end or in the last record; None: no record has one."""
    privacy = run.ending.privacy
    if privacy and privacy.epsilon is not None:
        return Epsilon(privacy.epsilon, None)
    versions, values = run.records["version"], run.records["epsilon"]
    known = np.flatnonzero(~np.isnan(values) & (versions > 0))
    return Epsilon(float(values[known[-1]]), int(versions[known[-1]])) if len(known) else None


def _state(run: Run) -> _Column:
    method = run.settings.get("algorithm")
    return {
        "method": _Measure(text=method if isinstance(method, str) else None),
        "state": _Measure(text=run_state(run)),
    }


def _learned(run: Run, target: Target | None) -> _Column:
    found: _Column = {}
    for metric, higher in run.metrics.items():
        column = run.records.get(metric, np.empty(0))
        if not len(column) or np.isnan(column).all():
            continue
        found[f"{metric} at the end"] = _Measure(float(column[-1]), PLAIN, higher)
        extreme = float(np.nanmax(column) if higher else np.nanmin(column))
        found[f"best {metric}"] = _Measure(extreme, PLAIN, higher)
        for kind, words in CLIENT_SUMMARIES.items():
            better = False if kind == "spread" else higher
            found[f"{metric} over clients, {words}"] = _Measure(
                float(run.records[f"{metric}_{kind}"][-1]), PLAIN, better
            )
    if target is None or run.metrics.keys().isdisjoint({target.metric}):
        return found
    at = target.reached(run)
    for column_name, label, unit in _COST_AXES:
        name = f"{_time_label(run) if column_name == 'time' else label} to {target.metric} {target.value:.3f}"
        value = math.nan if at is None else float(run.records[column_name][at])
        found[name] = _Measure(value, unit, False, "not reached" if at is None else None)
    return found


def _cost(run: Run) -> _Column:
    last = {name: float(column[-1]) for name, column in run.records.items()}
    return {
        "server steps": _Measure(last["version"], COUNT),
        "client updates": _Measure(last["client_updates"], COUNT),
        _time_label(run): _Measure(last["time"], SECONDS),
        "bytes sent and received": _Measure(last["bytes"], BYTES),
        "computing time": _Measure(last["elapsed"], SECONDS),
    }


def _worked(run: Run) -> _Column:
    trace = run.trace
    if trace is None:
        return {}
    dropped, lost, used = int(trace.dropped.sum()), int(trace.lost.sum()), int(trace.used.sum())
    found: _Column = {
        "staleness, mean": _Measure(_mean_staleness(run)),
        "staleness, largest": _Measure(float(max(trace.staleness, default=0)), COUNT),
        "clients at work, mean": _Measure(float(trace.busy.mean())),
    }
    if dropped or lost:
        found |= {
            "dropped as too stale": _Measure(float(dropped), COUNT),
            "lost": _Measure(float(lost), COUNT),
        }
    found["wasted work"] = _Measure((dropped + lost) / max(1, dropped + lost + used), PERCENT, False)
    if not run.hides_sample:
        participants = np.count_nonzero(trace.taken)
        found["participating clients"] = _Measure(text=f"{participants:,} of {len(trace.taken):,}")
        found["Gini coefficient of participation"] = _Measure(round(gini(trace.taken), 4))
    return found


def _served(spread: ClientAccuracies | str | None) -> _Column:
    if not isinstance(spread, ClientAccuracies):
        return {}
    values = summarise_clients("accuracy", spread.accuracies, lower_is_better=False)
    return {
        f"training accuracy over clients, {words}": _Measure(
            values[f"accuracy_{kind}"], PLAIN, kind != "spread"
        )
        for kind, words in CLIENT_SUMMARIES.items()
    }


def _privacy(run: Run) -> _Column:
    privacy, value = run.ending.privacy, epsilon_spent(run)
    if value is None or privacy is None:
        return {}
    text = f"{value} (simulation, not a guarantee)" if run.simulated else str(value)
    comparable = not run.simulated and value.version is None
    return {
        "epsilon": _Measure(value.value if comparable else None, PLAIN, False, text),
        "delta": _Measure(text=f"{privacy.delta:g}"),
    }


def _time_label(run: Run) -> str:
    return "time" if run.deployed else "virtual time"
