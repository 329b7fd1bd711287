"""`offbeat run`: train one method, write its folder, and send its records to trackers."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offbeat.api import RunOptions, RunResult, resume_run, start_run
from offbeat.cli import terminal
from offbeat.cli.options import experiment_options, parse_parameters, warn_of_unused_concurrency
from offbeat.errors import InputError
from offbeat.trackers import TrackerOptions
from offbeat.training import settings_file
from offbeat.training.experiment import Experiment
from offbeat.training.task import LearningTask, load_task

_SQLITE = "sqlite:///"
_MAX_GAPS, _MIN_GAPS = 12, 5  # between the rows of the table at the end


def run_command(given: argparse.Namespace) -> int:
    """Train, and print the records."""
    mlflow = None if given.mlflow is None else _absolute_uri(given.mlflow)
    trackers = TrackerOptions(given.tensorboard, given.wandb, mlflow)
    options = RunOptions(given.save_every, trackers, notify=terminal.notify)
    settings = experiment_options(given)
    if given.resume:
        if given.out is None:
            raise InputError("--resume needs --out, the folder of the run to resume.")
        out = Path(given.out)
        algorithm = settings.get("algorithm") or Experiment.from_settings(settings_file.read(out)).algorithm
        parameters = parse_parameters(algorithm, given.set) if given.set else ()
        return _finish(given, resume_run(out, settings | {"parameters": parameters}, options))
    algorithm = settings.get("algorithm", Experiment.algorithm)
    task, defaults = task_defaults(settings, algorithm)
    own = parse_parameters(algorithm, given.set)
    experiment = Experiment.of(**defaults | settings | {"parameters": own})
    taken = ", ".join(f"{name}={value}" for name, value in experiment.parameters if name not in dict(own))
    notices = [f"{algorithm} uses {taken} since this run is private."] if taken else []
    folder = None if given.out is None else Path(given.out)
    result = start_run(experiment, options, folder, task, notices)
    warn_of_unused_concurrency(given, [experiment])
    return _finish(given, result)


def task_defaults(settings: dict[str, Any], algorithm: str) -> tuple[LearningTask | None, dict[str, Any]]:
    """The task that the options name, and the settings that follow from it."""
    if "task" not in settings:
        return None, {}
    task = load_task(settings["task"], settings.get("seed", Experiment.seed))
    return task, {name: value for name, value in task.defaults(algorithm).items() if value is not None}


def _absolute_uri(uri: str) -> str:
    """Make the path of an SQLite file absolute, since a run may be resumed from another folder."""
    if not uri.startswith(_SQLITE) or uri.startswith(f"{_SQLITE}/") or uri == _SQLITE:
        return uri
    return f"{_SQLITE}{Path(uri.removeprefix(_SQLITE)).absolute()}"


def _finish(given: argparse.Namespace, result: RunResult) -> int:
    """Print the records and, if the run is not finished, how to resume it; return the exit code."""
    if not given.json:
        _print_records(result)
    if result.error:
        terminal.notify(result.error)
    elif result.stopped is not None:
        terminal.notify(f"stopped; {result.saved}; resume with:\n{result.resume}")
    elif result.ended:
        terminal.notify(f"{result.ended.rstrip('.')}; {result.saved} in {result.folder}.")
    if given.json:
        print(json.dumps(result.summary()))
    return 1 if result.error else result.stopped or 0


def _print_records(result: RunResult) -> None:
    experiment, records, spent = result.experiment, result.records, result.privacy
    settings = settings_file.read(result.folder)
    goals = settings.get("metrics", {"accuracy": "max"})
    columns = {"version": "version", "time": "time", "client_updates": "updates"}
    columns |= {name: name for name in ("loss", *goals) if any(name in record for record in records)}
    columns |= {"staleness_mean": "staleness", "staleness_max": "at most"}
    rest = {name: name.replace("_", " ") for name in ("dropped", "lost", "epsilon", "simulated_epsilon")}
    columns |= {name: word for name, word in rest.items() if any(record.get(name) for record in records)}
    rows = [[record.get(key) for key in columns] for record in _spaced_records(records)]
    title = (
        f"{experiment.algorithm} on {experiment.subject}: {experiment.clients} clients, "
        f"{experiment.dispatch}, {experiment.delays}"
    )
    terminal.print_table(title, list(columns.values()), rows)
    if spent:
        kind = "simulated" if spent.simulated else "private"
        first = " at first" if experiment.adaptive_clip is not None else ""
        print(
            f"{kind}: {terminal.privacy_sentence(spent)} Its noise has a multiplier of {experiment.noise:g}, "
            f"and uploads are clipped to {experiment.clip}{first}."
        )
    engine, reason = settings.get("resolved", {}).get("engine"), settings.get("engine_reason")
    if engine and reason:  # there is no reason where the engine was named
        print(f"engine {engine}: {reason}")
    print(f"written to {result.folder}")


def _spaced_records(records: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The first, the last, and some at equal gaps; only the last gap may be shorter."""
    gaps = len(records) - 1
    least = max(1, math.ceil(gaps / _MAX_GAPS))
    strides = range(least, gaps // _MIN_GAPS + 1)
    stride = next((each for each in strides if gaps % each == 0), least)
    return [*records[:-1:stride], *records[-1:]]
