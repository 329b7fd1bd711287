"""`offbeat compare`: several methods on the same clients, delays and batches, side by side."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from offbeat.algorithms import find
from offbeat.cli import show
from offbeat.cli.options import experiment_options, parameters
from offbeat.errors import DivergedError, InputError
from offbeat.experiment import Experiment, fetch, prepare
from offbeat.folder import Folder, next_free, read_lines
from offbeat.running import run as run_experiment

_AXES = {"version": "server steps", "trips": "client trips", "time": "virtual time"}
_MARKS = (0.1, 0.25, 0.5, 1.0)


def compare(given: argparse.Namespace) -> int:
    """Train each, then print one table an axis and one summary."""
    names: list[str] = given.algorithms
    if len(names) < 2 or len(set(names)) < len(names):
        raise InputError("compare takes two or more different methods.")
    experiments = {name: _experiment(given, name) for name in names}
    source = fetch(experiments[names[0]])
    trials = {name: prepare(experiment, source) for name, experiment in experiments.items()}
    out = Path(given.out) if "out" in given else next_free(Path("runs"), "compare")
    records: dict[str, list[dict[str, Any]]] = {}
    failures: dict[str, str] = {}
    for name, experiment in experiments.items():
        with Folder(out / name, experiment.settings(), resume=False) as folder:
            try:
                with show.bar(name, experiment.rounds) as bar:
                    for step in run_experiment(experiment, trials[name], folder):
                        bar(step)
            except DivergedError as error:
                failures[name] = str(error)
        records[name] = list(read_lines(out / name, "records"))
    best = max(record["accuracy"] for each in records.values() for record in each)
    target = getattr(given, "target", 0.95 * best)
    rows = {name: _summary(each, target, failures.get(name)) for name, each in records.items()}
    if "json" in given:
        print(json.dumps({"target": target, "methods": rows, "records": records, "out": str(out)}))
        return 0
    for axis, title in _AXES.items():
        _show_axis(records, axis, title)
    _show_summary(rows, target)
    print(f"written to {out}")
    return 0


def _experiment(given: argparse.Namespace, name: str) -> Experiment:
    """The same settings for all; a method that steps on each arrival gets as many client trips."""
    options = experiment_options(given)
    own = parameters(name, getattr(given, "set", []))
    experiment = Experiment.of(**options | {"algorithm": name, "parameters": own})
    fixed = find(name).buffer
    if fixed is None:
        return experiment
    scale = max(1, options.get("buffer", Experiment.buffer) // fixed)
    return dataclasses.replace(
        experiment, buffer=fixed, rounds=experiment.rounds * scale, every=experiment.every * scale
    )


def _summary(records: list[dict[str, Any]], target: float, failure: str | None) -> dict[str, Any]:
    last = records[-1]
    reached = next((record for record in records if record["accuracy"] >= target), {})
    ages = [record["staleness_mean"] for record in records[1:]]
    return {
        "accuracy": None if failure else last["accuracy"],
        "best": max(record["accuracy"] for record in records),
        "steps": reached.get("version"),
        "trips": reached.get("trips"),
        "time": reached.get("time"),
        "staleness": sum(ages) / len(ages) if ages else 0.0,
        "worst": max(record["staleness_max"] for record in records),
        "wasted": last["dropped"] + last["lost"],
        "failure": failure,
    }


def _show_axis(records: dict[str, list[dict[str, Any]]], axis: str, title: str) -> None:
    """Accuracy at the same places along an axis, as far as every method went."""
    end = min(each[-1][axis] for each in records.values())
    marks = [mark * end for mark in _MARKS]
    rows = [[name, *[_at(each, axis, mark) for mark in marks]] for name, each in records.items()]
    show.table(f"accuracy by {title}", ["", *[show.figure(round(mark, 1)) for mark in marks]], rows)


def _at(records: list[dict[str, Any]], axis: str, mark: float) -> float | None:
    """The last accuracy recorded up to there."""
    before = [record["accuracy"] for record in records if record[axis] <= mark * (1 + 1e-9)]
    return before[-1] if before else None


def _show_summary(rows: dict[str, dict[str, Any]], target: float) -> None:
    columns = [name for name in next(iter(rows.values())) if name != "failure"]
    table = [[name, *[row[column] for column in columns]] for name, row in rows.items()]
    show.table(f"at the end; steps, trips and time until accuracy {target:.3f}", ["", *columns], table)
    for name, row in rows.items():
        if row["failure"]:
            print(f"{name} did not finish: {row['failure']}")
