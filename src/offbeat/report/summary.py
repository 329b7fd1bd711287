"""What runs came to, one measure a line."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from offbeat.report.fairness import Spread
from offbeat.report.reading import Run
from offbeat.report.scale import BYTES, COUNT, PERCENT, PLAIN, SECONDS, Unit, say
from offbeat.report.taking_part import gini

_TARGET = 0.95  # of the best accuracy of all
_OVERS = (("version", "server steps", COUNT), ("trips", "client trips", COUNT), ("bytes", "bytes", BYTES))


class Measure(NamedTuple):
    """A name, and a text for each run; None: it is not known, or does not apply."""

    name: str
    texts: tuple[str | None, ...]


def summary(runs: Sequence[Run], spreads: Mapping[str, Spread | str]) -> list[Measure]:
    """All measures that at least one run has."""
    target = _target(runs)
    columns = [_state(run) | _cost(run) | _learned(run, target) | _worked(run) for run in runs]
    for column, run in zip(columns, runs, strict=True):
        column |= _served(spreads.get(run.label)) | _told(run)
    names = dict.fromkeys(name for column in columns for name in column)
    measures = [Measure(name, tuple(column.get(name) for column in columns)) for name in names]
    return [measure for measure in measures if any(measure.texts)]


def state(run: Run) -> str:
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
        return say(self.value) if self.version is None else f"at least {say(self.value)}"


def epsilon(run: Run) -> Epsilon | None:
    """At the end, or as it was recorded last; None: that is not known of any server step."""
    privacy = run.ending.privacy
    if privacy and privacy.epsilon is not None:
        return Epsilon(privacy.epsilon, None)
    versions, values = run.records["version"], run.records["epsilon"]
    known = np.flatnonzero(~np.isnan(values) & (versions > 0))
    return Epsilon(float(values[known[-1]]), int(versions[known[-1]])) if len(known) else None


def _state(run: Run) -> dict[str, str | None]:
    method = run.settings.get("algorithm")
    return {"method": method if isinstance(method, str) else None, "state": state(run)}


def _cost(run: Run) -> dict[str, str | None]:
    last = {name: column[-1] for name, column in run.records.items()}
    return {
        "server steps": _say(last["version"], COUNT),
        "client trips": _say(last["trips"], COUNT),
        _time(run): _say(last["time"], SECONDS),
        "bytes sent, down and up": _say(last["bytes"], BYTES),
        "computing took": _say(last["elapsed"], SECONDS),
    }


def _learned(run: Run, target: float | None) -> dict[str, str | None]:
    accuracy, loss = run.records["accuracy"], run.records["loss"]
    if target is None or np.isnan(accuracy).all():
        return {}
    found: dict[str, str | None] = {
        "accuracy at the end": _say(accuracy[-1], PLAIN),
        "best accuracy": _say(np.nanmax(accuracy), PLAIN),
        "loss at the end": _say(loss[-1], PLAIN),
    }
    reached = np.flatnonzero(accuracy >= target)
    overs = (*_OVERS[:2], ("time", _time(run), SECONDS), _OVERS[2])
    for column, label, unit in overs:
        text = _say(run.records[column][reached[0]], unit) if len(reached) else "not reached"
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
        "staleness, mean": say(float((ages * counts).sum() / max(1.0, counts.sum()))),
        "staleness, largest": say(float(ages.max(initial=0)), whole=True),
        "clients at work, on average": say(float(trace.busy.mean())),
        "dropped as too stale": say(dropped, whole=True),
        "lost on the way": say(lost, whole=True),
        "work that was wasted": PERCENT.say((dropped + lost) / max(1, dropped + lost + used)),
    }
    if not run.hides_sample:
        there = np.count_nonzero(trace.taken)
        found["clients that took part"] = f"{there:,} of {len(trace.taken):,}"
        found["inequality of their updates (Gini)"] = say(round(gini(trace.taken), 4))
    return found


def _served(spread: Spread | str | None) -> dict[str, str | None]:
    if not isinstance(spread, Spread):
        return {}
    return {
        "accuracy over clients, mean": say(spread.mean),
        "accuracy over clients, standard deviation": say(spread.deviation),
        "accuracy of the worst served tenth": say(spread.worst),
    }


def _told(run: Run) -> dict[str, str | None]:
    privacy, value = run.ending.privacy, epsilon(run)
    if value is None or privacy is None:
        return {}
    said = f"{value} (simulation, no guarantee)" if run.simulated else str(value)
    return {"epsilon": said, "delta": f"{privacy.delta:g}"}


def _target(runs: Sequence[Run]) -> float | None:
    """Near the best accuracy of all, so that every run can be asked when it got there."""
    every = np.concatenate([run.records["accuracy"] for run in runs])
    return None if np.isnan(every).all() else _TARGET * float(np.nanmax(every))


def _time(run: Run) -> str:
    return "time" if run.deployed else "virtual time"


def _say(value: float, unit: Unit) -> str | None:
    return None if math.isnan(value) else unit.say(float(value))
