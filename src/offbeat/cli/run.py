"""`offbeat run`: one method, one folder."""

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offbeat.cli import show
from offbeat.cli.options import experiment_options, parameters
from offbeat.errors import DivergedError, InputError
from offbeat.experiment import Experiment, prepare
from offbeat.folder import Folder, next_free, read_lines, read_settings
from offbeat.running import run as run_experiment


def run(given: argparse.Namespace) -> int:
    """Train, show, and say where it is written."""
    resume = getattr(given, "resume", False)
    if resume and "out" not in given:
        raise InputError("--resume needs --out, the folder of the run to go on with.")
    save_every = getattr(given, "save_every", None)
    if save_every is not None and save_every < 1:
        raise InputError(f"--save-every must be at least 1, not {save_every}.")
    options = experiment_options(given)
    if resume:
        out = Path(given.out)
        options = Experiment.from_settings(read_settings(out)).settings() | options
        options["parameters"] = tuple(options["parameters"].items())
    if "set" in given:
        options["parameters"] = parameters(options.get("algorithm", Experiment.algorithm), given.set)
    experiment = Experiment.of(**options)
    trial = prepare(experiment)
    if not resume:
        out = (
            Path(given.out)
            if "out" in given
            else next_free(Path("runs"), f"{experiment.algorithm}-{experiment.data}")
        )
    with Folder(out, experiment.settings(), resume=resume) as folder, _stop_signals() as stop:
        again = f"offbeat run --out {shlex.quote(str(out))} --resume"
        with show.bar(experiment.algorithm, experiment.rounds) as bar:
            version = folder.resumed.facts["version"] if folder.resumed else 0
            try:
                for step in run_experiment(experiment, trial, folder, save_every=save_every, stop=stop):
                    bar(step)
                    version = step.version
            except DivergedError as error:
                raise DivergedError(f"{str(error).rstrip('.')}; what was saved before is in {out}.") from None
        finished = version == experiment.rounds
    records = list(read_lines(out, "records"))
    if "json" in given:
        print(json.dumps(summary(experiment, records, out, finished)))
    else:
        _show(experiment, records, out)
    if not finished:
        print(
            f"offbeat: stopped at version {version} of {experiment.rounds}; go on with: {again}",
            file=sys.stderr,
        )
        return 130
    return 0


def summary(
    experiment: Experiment, records: list[dict[str, Any]], out: Path, finished: bool
) -> dict[str, Any]:
    """A run in one object."""
    return {
        "algorithm": experiment.algorithm,
        "finished": finished,
        "last": records[-1] if records else None,
        "best_accuracy": max((record["accuracy"] for record in records), default=None),
        "out": str(out),
        "settings": experiment.settings(),
    }


def _show(experiment: Experiment, records: list[dict[str, Any]], out: Path) -> None:
    columns = {
        "version": "version",
        "time": "time",
        "trips": "trips",
        "loss": "loss",
        "accuracy": "accuracy",
        "staleness_mean": "staleness",
        "staleness_max": "at most",
    }
    few = _spread(records, 8)
    rows = [[record[key] for key in columns] for record in few]
    title = (
        f"{experiment.algorithm} on {experiment.data}: {experiment.clients} clients, {experiment.dispatch}, "
        f"{experiment.delays}"
    )
    show.table(title, list(columns.values()), rows)
    print(f"written to {out}")


def _spread(records: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Some of the records, evenly, with the first and the last."""
    if len(records) <= count:
        return records
    return [records[round(place * (len(records) - 1) / (count - 1))] for place in range(count)]


@contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Ctrl-C once: finish the step, save, stop; twice: stop now."""
    asked: list[int] = []

    def ask(number: int, frame: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
