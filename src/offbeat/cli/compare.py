"""`offbeat compare`: several methods on the same clients, delays and batches, side by side."""

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.algorithms import find
from offbeat.api import RunOptions, train_in_folder
from offbeat.cli import terminal
from offbeat.cli.options import experiment_options, parse_parameters, warn_of_unused_concurrency
from offbeat.cli.run import task_defaults
from offbeat.errors import InputError
from offbeat.training.build import RunSpec, build_run, describe_run, with_computed_noise
from offbeat.training.experiment import Experiment, clip_of
from offbeat.training.folder import RunFolder, check_free, claim_folder, read_jsonl
from offbeat.training.progress import StopRequest, stop_signals
from offbeat.training.runner import RunOutcome
from offbeat.training.task import LearningTask

_AXES = {
    "version": "server steps",
    "client_updates": "client updates",
    "time": "virtual time",
    "bytes": "{unit} sent, down and up",
}
_COLUMNS = ("best", "steps", "client_updates", "time", "staleness", "worst", "wasted")
_MARKS = (0.1, 0.25, 0.5, 1.0)


class Score(NamedTuple):
    """The metric by which methods are compared."""

    name: str
    higher_is_better: bool

    def best(self, records: Iterable[dict[str, Any]]) -> float | None:
        """The best value in some records."""
        values = [record[self.name] for record in records if record.get(self.name) is not None]
        return (max if self.higher_is_better else min)(values, default=None)

    def reaches(self, value: float, target: float) -> bool:
        """Whether a value is as good as the target."""
        return value >= target if self.higher_is_better else value <= target

    def default_target(self, best: float) -> float:
        """Within 5 % of the best value."""
        return best - 0.05 * abs(best) if self.higher_is_better else best + 0.05 * abs(best)


def compare_command(given: argparse.Namespace) -> int:
    """Train each method, then print one table for each axis and a summary."""
    names: list[str] = given.algorithms
    if len(names) < 2 or len(set(names)) < len(names):
        raise InputError(
            "compare takes two or more different methods: name them, as in 'compare fedavg fedadam'."
        )
    task, _ = task_defaults(experiment_options(given), names[0])
    experiments = {name: _experiment(given, name, task) for name in names}
    if given.target is not None and task is None and not 0 < given.target <= 1:
        raise InputError(f"--target must be above 0 and at most 1, not {given.target}.")
    if given.out is not None:
        for folder in ("", *names):
            check_free(Path(given.out) / folder)
    specs: dict[str, RunSpec] = {}
    for name, experiment in experiments.items():
        specs[name] = build_run(experiment, task, Path(given.out or "runs"))
        task = specs[name].task  # the data are loaded once
    unscaled = specs[names[0]].unscaled
    if unscaled is not None:
        logging.getLogger("offbeat").warning("%s", unscaled)
    assert task is not None
    experiments = {name: with_computed_noise(each, specs[name]) for name, each in experiments.items()}
    out = claim_folder(Path("runs"), "compare") if given.out is None else Path(given.out)
    warn_of_unused_concurrency(given, experiments.values())
    failures: dict[str, str] = {}
    outcomes: dict[str, RunOutcome] = {}
    with stop_signals() as stop:
        for name, experiment in experiments.items():
            failure, outcomes[name] = _train(experiment, specs[name], out / name, stop)
            if failure:
                failures[name] = failure
            if stop():
                break
    records = {name: list(read_jsonl(out / name, "records")) for name in names if (out / name).exists()}
    metric, goal = next(iter(task.goals.items()))
    _print_report(given, records, failures, outcomes, out, Score(metric, goal == "max"))
    if stop():
        print(f"offbeat: stopped; the runs so far are in {out}.", file=sys.stderr)
        return stop.code
    return 1 if len(failures) == len(names) else 0


def _train(
    experiment: Experiment, spec: RunSpec, out: Path, stop: StopRequest
) -> tuple[str | None, RunOutcome]:
    """Run one method; return why it did not finish, if so, and its outcome."""
    with RunFolder.begin(out, describe_run(experiment, spec)) as folder:
        outcome, failure = train_in_folder(experiment, spec, folder, RunOptions(), stop)
        if failure or folder.version == experiment.rounds or outcome.ended:
            return failure, outcome
        return f"it was stopped at version {folder.version}.", outcome


def _print_report(
    given: argparse.Namespace,
    records: dict[str, list[dict[str, Any]]],
    failures: dict[str, str],
    outcomes: dict[str, RunOutcome],
    out: Path,
    score: Score,
) -> None:
    best = score.best(record for each in records.values() for record in each) or 0.0
    target = score.default_target(best) if given.target is None else given.target
    rows = {
        name: _summary(each, target, failures.get(name), score) | {"ended": outcomes[name].ended}
        for name, each in records.items()
    }
    if given.json:
        found = {"metric": score.name, "target": target, "methods": rows, "records": records, "out": str(out)}
        print(json.dumps(found))
        return
    shown = {name: each for name, each in records.items() if each}
    for axis, title in _AXES.items():
        _print_axis(shown, axis, title, score.name)
    _print_summary(rows, target, score.name)
    for name, outcome in outcomes.items():
        if outcome.ended:
            print(f"{name} ended early: {outcome.ended}")
        if outcome.spent:
            print(f"{name}: {terminal.privacy_sentence(outcome.spent)}")
    print(f"written to {out}")


def _experiment(given: argparse.Namespace, name: str, task: LearningTask | None) -> Experiment:
    """The settings of one method; one with a fixed buffer size has as many client updates as the others."""
    options = experiment_options(given)
    own = parse_parameters(name, given.set, given.algorithms)
    if "=" not in options.get("clip", "=") and clip_of(name, own) is not None:
        del options["clip"]  # a single bound is for methods that do not bound their uploads
    defaults = task.defaults(name) if task else {}
    defaults = {key: value for key, value in defaults.items() if value is not None}
    experiment = Experiment.of(**defaults | options | {"algorithm": name, "parameters": own})
    fixed = find(name).buffer
    if fixed is None:
        return experiment
    usual = task.default_buffer if task else None
    scale = max(1, options.get("buffer", usual or Experiment.buffer) // fixed)
    return dataclasses.replace(
        experiment, buffer=fixed, rounds=experiment.rounds * scale, eval_every=experiment.eval_every * scale
    )


def _summary(
    records: list[dict[str, Any]], target: float, failure: str | None, score: Score
) -> dict[str, Any]:
    if not records:
        return dict.fromkeys((score.name, *_COLUMNS)) | {"failure": failure}
    last, name = records[-1], score.name
    scored = [each for each in records if each.get(name) is not None]
    reached = next((each for each in scored if score.reaches(each[name], target)), {})
    ages = [record["staleness_mean"] for record in records[1:]]
    return {
        name: None if failure else last.get(name),
        "best": score.best(records),
        "steps": reached.get("version"),
        "client_updates": reached.get("client_updates"),
        "time": reached.get("time"),
        "staleness": sum(ages) / len(ages) if ages else 0.0,
        "worst": max(record["staleness_max"] for record in records),
        "wasted": last["dropped"] + last["lost"],
        "failure": failure,
    }


def _print_axis(records: dict[str, list[dict[str, Any]]], axis: str, title: str, metric: str) -> None:
    """Print a metric at the same points of an axis, up to the last one that every method reached."""
    end = min((each[-1][axis] for each in records.values()), default=0)
    marks = [mark * end for mark in _MARKS]
    rows = [
        [name, *[_value_at(each, axis, mark, metric) for mark in marks]] for name, each in records.items()
    ]
    size, unit = terminal.byte_unit(end) if axis == "bytes" else (1.0, "")
    places = 1 if size == 1 or end >= 10 * size else 2
    heads = [terminal.format_number(round(mark / size, places)) for mark in marks]
    terminal.print_table(f"{metric} by {title.format(unit=unit)}", ["", *heads], rows)


def _value_at(records: list[dict[str, Any]], axis: str, mark: float, metric: str) -> float | None:
    """The last value of a metric recorded up to a point of an axis."""
    before = [record.get(metric) for record in records if record[axis] <= mark * (1 + 1e-9)]
    return before[-1] if before else None


def _print_summary(rows: dict[str, dict[str, Any]], target: float, metric: str) -> None:
    columns = (metric, *_COLUMNS)
    table = [[name, *[row[column] for column in columns]] for name, row in rows.items()]
    terminal.print_table(
        f"at the end; steps, client updates and time until {metric} {target:.3f}",
        ["", *(column.replace("_", " ") for column in columns)],
        table,
    )
    for name, row in rows.items():
        if row["failure"]:
            print(f"{name} did not finish: {row['failure']}")
