"""`offbeat compare`: several methods on the same clients, delays and batches, side by side."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from offbeat.algorithms import find
from offbeat.cli import terminal
from offbeat.cli.options import experiment_options, parse_parameters, warn_of_unused_concurrency
from offbeat.cli.terminal import StopRequest, limit_threads, stop_signals
from offbeat.errors import DivergedError, InputError
from offbeat.training.build import RunSpec, build_run, resolved_settings, with_computed_noise
from offbeat.training.experiment import Experiment, clip_of
from offbeat.training.folder import RunFolder, check_free, claim_folder, read_jsonl
from offbeat.training.runner import RunOutcome, run_experiment

_AXES = {
    "version": "server steps",
    "client_updates": "client updates",
    "time": "virtual time",
    "bytes": "bytes sent, down and up",
}
_COLUMNS = ("accuracy", "best", "steps", "client_updates", "time", "staleness", "worst", "wasted")
_MARKS = (0.1, 0.25, 0.5, 1.0)


def compare_command(given: argparse.Namespace) -> int:
    """Train each, then print one table an axis and one summary."""
    names: list[str] = given.algorithms
    if len(names) < 2 or len(set(names)) < len(names):
        raise InputError(
            "compare takes two or more different methods: name them, as in 'compare fedavg fedadam'."
        )
    if given.target is not None and not 0 < given.target <= 1:
        raise InputError(f"--target must be above 0 and at most 1, not {given.target}.")
    experiments = {name: _experiment(given, name) for name in names}
    if given.out is not None:
        for place in ("", *names):
            check_free(Path(given.out) / place)
    source = None
    trials: dict[str, RunSpec] = {}
    for name, experiment in experiments.items():
        trials[name] = build_run(experiment, source, Path(given.out or "runs"))
        source = trials[name].source
    experiments = {name: with_computed_noise(each, trials[name]) for name, each in experiments.items()}
    out = claim_folder(Path("runs"), "compare") if given.out is None else Path(given.out)
    warn_of_unused_concurrency(given, experiments.values())
    failures: dict[str, str] = {}
    outcomes: dict[str, RunOutcome] = {}
    with stop_signals() as stop:
        for name, experiment in experiments.items():
            failure, outcomes[name] = _train(experiment, trials[name], out / name, stop)
            if failure:
                failures[name] = failure
            if stop():
                break
    records = {name: list(read_jsonl(out / name, "records")) for name in names if (out / name).exists()}
    _print_report(given, records, failures, outcomes, out)
    if stop():
        print(f"offbeat: stopped; what was done is in {out}.", file=sys.stderr)
        return stop.code
    return 1 if len(failures) == len(names) else 0


def _train(
    experiment: Experiment, trial: RunSpec, out: Path, stop: StopRequest
) -> tuple[str | None, RunOutcome]:
    """Run one; why it did not finish, if it did not."""
    limit_threads(experiment, trial)
    outcome = RunOutcome(None, None)
    with RunFolder.begin(
        out, experiment.settings() | {"resolved": resolved_settings(experiment, trial)}
    ) as folder:
        try:
            with terminal.bar(experiment.algorithm, experiment.rounds) as bar:
                for step in run_experiment(experiment, trial, folder, stop=stop, observe_start=bar.start):
                    bar.step(step)
                    outcome = step.outcome or outcome
        except DivergedError as error:
            return str(error), outcome
        if folder.version == experiment.rounds or outcome.ended:
            return None, outcome
        return f"it was stopped at version {folder.version}.", outcome


def _print_report(
    given: argparse.Namespace,
    records: dict[str, list[dict[str, Any]]],
    failures: dict[str, str],
    outcomes: dict[str, RunOutcome],
    out: Path,
) -> None:
    best = max((record["accuracy"] for each in records.values() for record in each), default=0.0)
    target = 0.95 * best if given.target is None else given.target
    rows = {
        name: _summary(each, target, failures.get(name)) | {"ended": outcomes[name].ended}
        for name, each in records.items()
    }
    if given.json:
        print(json.dumps({"target": target, "methods": rows, "records": records, "out": str(out)}))
        return
    shown = {name: each for name, each in records.items() if each}
    for axis, title in _AXES.items():
        _print_axis(shown, axis, title)
    _print_summary(rows, target)
    for name, outcome in outcomes.items():
        if outcome.ended:
            print(f"{name} ended early: {outcome.ended}")
        if outcome.spent:
            print(f"{name}: {terminal.privacy_sentence(outcome.spent)}")
    print(f"written to {out}")


def _experiment(given: argparse.Namespace, name: str) -> Experiment:
    """The same settings for all; a method that steps on each arrival gets as many client updates."""
    options = experiment_options(given)
    own = parse_parameters(name, given.set, given.algorithms)
    if "=" not in options.get("clip", "=") and clip_of(name, own) is not None:
        del options["clip"]  # one number is for what a method does not bound itself
    experiment = Experiment.of(**options | {"algorithm": name, "parameters": own})
    fixed = find(name).buffer
    if fixed is None:
        return experiment
    scale = max(1, options.get("buffer", Experiment.buffer) // fixed)
    return dataclasses.replace(
        experiment, buffer=fixed, rounds=experiment.rounds * scale, eval_every=experiment.eval_every * scale
    )


def _summary(records: list[dict[str, Any]], target: float, failure: str | None) -> dict[str, Any]:
    if not records:
        return dict.fromkeys(_COLUMNS) | {"failure": failure}
    last = records[-1]
    reached = next((record for record in records if record["accuracy"] >= target), {})
    ages = [record["staleness_mean"] for record in records[1:]]
    return {
        "accuracy": None if failure else last["accuracy"],
        "best": max(record["accuracy"] for record in records),
        "steps": reached.get("version"),
        "client_updates": reached.get("client_updates"),
        "time": reached.get("time"),
        "staleness": sum(ages) / len(ages) if ages else 0.0,
        "worst": max(record["staleness_max"] for record in records),
        "wasted": last["dropped"] + last["lost"],
        "failure": failure,
    }


def _print_axis(records: dict[str, list[dict[str, Any]]], axis: str, title: str) -> None:
    """Accuracy at the same places along an axis, as far as every method went."""
    end = min((each[-1][axis] for each in records.values()), default=0)
    marks = [mark * end for mark in _MARKS]
    rows = [[name, *[_accuracy_at(each, axis, mark) for mark in marks]] for name, each in records.items()]
    terminal.print_table(
        f"accuracy by {title}", ["", *[terminal.format_number(round(mark, 1)) for mark in marks]], rows
    )


def _accuracy_at(records: list[dict[str, Any]], axis: str, mark: float) -> float | None:
    """The last accuracy recorded up to there."""
    before = [record["accuracy"] for record in records if record[axis] <= mark * (1 + 1e-9)]
    return before[-1] if before else None


def _print_summary(rows: dict[str, dict[str, Any]], target: float) -> None:
    table = [[name, *[row[column] for column in _COLUMNS]] for name, row in rows.items()]
    terminal.print_table(
        f"at the end; steps, client updates and time until accuracy {target:.3f}",
        ["", *(column.replace("_", " ") for column in _COLUMNS)],
        table,
    )
    for name, row in rows.items():
        if row["failure"]:
            print(f"{name} did not finish: {row['failure']}")
