"""Which runs can be set side by side, and how their settings differ.

What runs came to, one measure a line.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from offbeat.errors import InputError
from offbeat.report.chart import BYTES, COUNT, PERCENT, PLAIN, SECONDS, Unit, format_number
from offbeat.report.fairness import ClientAccuracies
from offbeat.report.figures import gini
from offbeat.report.load import Run

# What accuracies must share to mean the same.
_MUST_MATCH = ("data", "model", "clients", "partition", "task")
_NOT_SETTINGS = ("parameters", "resolved", "format", "algorithm")  # shown in another way, or not settings
_MACHINE_PATHS = ("data_dir", "ray_address")  # where things were on somebody's machine
_ORIGIN = ("version", "commit")
_COMMIT_LENGTH = 10  # letters of a commit that tell it from others
_MAX_LENGTH = 160  # characters of a value that are shown


class SettingRow(NamedTuple):
    """One setting, and what it is for each run; None: it has none."""

    name: str
    values: tuple[str | None, ...]
    differs: bool


def check_comparable(runs: Sequence[Run]) -> None:
    """Refuse runs whose accuracies do not mean the same, and say why."""
    first = runs[0]
    for other in runs[1:]:
        if first.deployed != other.deployed:
            raise _incomparable(first, other, "one is a deployment and the other a simulation")
        for name in _MUST_MATCH:
            one, two = first.settings.get(name), other.settings.get(name)
            if one != two:
                word = f"--{name.replace('_', '-')}"
                raise _incomparable(
                    first,
                    other,
                    f"{word} is {_format_setting(one)} in one and {_format_setting(two)} in the other",
                )
        sizes = [_resolved(run).get("model_size") for run in (first, other)]
        if None not in sizes and sizes[0] != sizes[1]:
            raise _incomparable(first, other, f"their models have {sizes[0]} and {sizes[1]} parameters")


def settings_table(runs: Sequence[Run]) -> list[SettingRow]:
    """Every setting, those that differ first."""
    columns = [_flat(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [_row(name, [column.get(name) for column in columns]) for name in names]
    return sorted(rows, key=lambda row: not row.differs)


def _row(name: str, values: Sequence[Any]) -> SettingRow:
    """Numbers are shortened where that hides no difference."""
    exact = [None if value is None else json.dumps(value, sort_keys=True) for value in values]
    differs = len(set(exact)) > 1
    texts = [None if value is None else _format_setting(value) for value in values]
    if differs and len(set(texts)) == 1:
        texts = exact
    return SettingRow(name, tuple(texts), differs)


def _flat(run: Run) -> dict[str, Any]:
    """By the words of the command line."""
    resolved = _resolved(run)
    given, worked_out = run.settings.get("parameters"), resolved.get("hyperparameters")
    parameters = _mapping(given) | _mapping(worked_out)
    own = {
        f"--{name.replace('_', '-')}": value
        for name, value in run.settings.items()
        if name not in (*_NOT_SETTINGS, *_MACHINE_PATHS, *_ORIGIN)
    }
    values = {
        "method": run.settings.get("algorithm"),
        **{f"--set {name}": value for name, value in parameters.items()},
        **own,
        "model size": resolved.get("model_size"),
        "engine that was used": resolved.get("engine"),
        "offbeat": run.settings.get("version"),
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
    """As it is typed; of a file only its name."""
    if isinstance(value, str):
        law, colon, path = value.partition(":")
        text = f"{law}:{PurePath(path).name}" if colon and law == "recorded" else value
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
        f"{first.label} and {other.label} cannot be compared, for {why}: "
        "make a report of each, or add --anyway."
    )


_TARGET_SHARE = 0.95  # of the best accuracy of all
_COST_AXES = (
    ("version", "server steps", COUNT),
    ("client_updates", "client updates", COUNT),
    ("bytes", "bytes", BYTES),
)


class SummaryRow(NamedTuple):
    """A name, and a text for each run; None: it is not known, or does not apply."""

    name: str
    texts: tuple[str | None, ...]


def summary_table(runs: Sequence[Run], spreads: Mapping[str, ClientAccuracies | str]) -> list[SummaryRow]:
    """All measures that at least one run has."""
    target = _target(runs)
    columns = [_state(run) | _cost(run) | _learned(run, target) | _worked(run) for run in runs]
    for column, run in zip(columns, runs, strict=True):
        column |= _served(spreads.get(run.label)) | _privacy(run)
    names = dict.fromkeys(name for column in columns for name in column)
    measures = [SummaryRow(name, tuple(column.get(name) for column in columns)) for name in names]
    return [measure for measure in measures if any(measure.texts)]


def run_state(run: Run) -> str:
    """Where a run is, in words."""
    version, rounds = int(run.records["version"][-1]), run.settings.get("rounds")
    if version == rounds:
        return "finished"
    if run.ending.diverged:
        return "diverged"
    if run.ending.ended:
        return "ended early"
    return f"at server step {version:,}" + (f" of {rounds:,}" if isinstance(rounds, int) else "")


class Epsilon(NamedTuple):
    """What was spent."""

    value: float
    version: int | None  # up to which; more has been spent since. None: this is all

    def __str__(self) -> str:
        return format_number(self.value) if self.version is None else f"at least {format_number(self.value)}"


def epsilon_spent(run: Run) -> Epsilon | None:
    """At the end, or as it was recorded last; None: that is not known of any server step."""
    privacy = run.ending.privacy
    if privacy and privacy.epsilon is not None:
        return Epsilon(privacy.epsilon, None)
    versions, values = run.records["version"], run.records["epsilon"]
    known = np.flatnonzero(~np.isnan(values) & (versions > 0))
    return Epsilon(float(values[known[-1]]), int(versions[known[-1]])) if len(known) else None


def _state(run: Run) -> dict[str, str | None]:
    method = run.settings.get("algorithm")
    return {"method": method if isinstance(method, str) else None, "state": run_state(run)}


def _cost(run: Run) -> dict[str, str | None]:
    last = {name: column[-1] for name, column in run.records.items()}
    return {
        "server steps": _format(last["version"], COUNT),
        "client updates": _format(last["client_updates"], COUNT),
        _time_label(run): _format(last["time"], SECONDS),
        "bytes sent, down and up": _format(last["bytes"], BYTES),
        "computing took": _format(last["elapsed"], SECONDS),
    }


def _learned(run: Run, target: float | None) -> dict[str, str | None]:
    accuracy, loss = run.records["accuracy"], run.records["loss"]
    if target is None or np.isnan(accuracy).all():
        return {}
    found: dict[str, str | None] = {
        "accuracy at the end": _format(accuracy[-1], PLAIN),
        "best accuracy": _format(np.nanmax(accuracy), PLAIN),
        "loss at the end": _format(loss[-1], PLAIN),
    }
    reached = np.flatnonzero(accuracy >= target)
    overs = (*_COST_AXES[:2], ("time", _time_label(run), SECONDS), _COST_AXES[2])
    for column, label, unit in overs:
        text = _format(run.records[column][reached[0]], unit) if len(reached) else "not reached"
        found[f"{label} to accuracy {target:.3f}"] = text
    return found


def _worked(run: Run) -> dict[str, str | None]:
    trace = run.trace
    if trace is None:
        return {}
    ages, counts = (
        np.array(list(each), dtype=np.float64) for each in (trace.staleness, trace.staleness.values())
    )
    dropped, lost, used = int(trace.dropped.sum()), int(trace.lost.sum()), int(trace.used.sum())
    found: dict[str, str | None] = {
        "staleness, mean": format_number(float((ages * counts).sum() / max(1.0, counts.sum()))),
        "staleness, largest": format_number(float(ages.max(initial=0)), whole=True),
        "clients at work, on average": format_number(float(trace.busy.mean())),
        "dropped as too stale": format_number(dropped, whole=True),
        "lost on the way": format_number(lost, whole=True),
        "work that was wasted": PERCENT.say((dropped + lost) / max(1, dropped + lost + used)),
    }
    if not run.hides_sample:
        there = np.count_nonzero(trace.taken)
        found["clients that took part"] = f"{there:,} of {len(trace.taken):,}"
        found["inequality of their updates (Gini)"] = format_number(round(gini(trace.taken), 4))
    return found


def _served(spread: ClientAccuracies | str | None) -> dict[str, str | None]:
    if not isinstance(spread, ClientAccuracies):
        return {}
    return {
        "accuracy over clients, mean": format_number(spread.mean),
        "accuracy over clients, standard deviation": format_number(spread.deviation),
        "accuracy of the worst served tenth": format_number(spread.worst),
    }


def _privacy(run: Run) -> dict[str, str | None]:
    privacy, value = run.ending.privacy, epsilon_spent(run)
    if value is None or privacy is None:
        return {}
    said = f"{value} (simulation, no guarantee)" if run.simulated else str(value)
    return {"epsilon": said, "delta": f"{privacy.delta:g}"}


def _target(runs: Sequence[Run]) -> float | None:
    """Near the best accuracy of all, so that every run can be asked when it got there."""
    every = np.concatenate([run.records["accuracy"] for run in runs])
    return None if np.isnan(every).all() else _TARGET_SHARE * float(np.nanmax(every))


def _time_label(run: Run) -> str:
    return "time" if run.deployed else "virtual time"


def _format(value: float, unit: Unit) -> str | None:
    return None if math.isnan(value) else unit.say(float(value))
