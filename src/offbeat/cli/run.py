"""`offbeat run`: one method, one folder."""

import argparse
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

from offbeat import settings
from offbeat.aggregate.aggregation import Spent
from offbeat.cli import show
from offbeat.cli.given import experiment_options, parameters, warn_of_end, warn_of_unused
from offbeat.cli.process import settle_threads, stop_signals
from offbeat.cli.tracking import begin, go_on, named, wanted
from offbeat.errors import DivergedError, InputError
from offbeat.experiment import Experiment
from offbeat.folder import Folder, check_free, claim, read_lines
from offbeat.running import Outcome, outcome_of
from offbeat.running import run as run_experiment
from offbeat.trackers.place import Wanted, remember
from offbeat.trackers.tracker import Several, Tracker
from offbeat.trial import Trial, check_longer, prepare, resolved, settled

_MOST_GAPS, _LEAST_GAPS = 12, 5  # between the rows of the table at the end


def run(given: argparse.Namespace) -> int:
    """Train, show, and say where it is written."""
    if given.save_every is not None and given.save_every < 1:
        raise InputError(f"--save-every must be at least 1, not {given.save_every}.")
    asked_for = wanted(given)
    if given.resume:
        return _resume(given, asked_for)
    options = experiment_options(given)
    algorithm = options.get("algorithm", Experiment.algorithm)
    own = parameters(algorithm, given.set)
    experiment = Experiment.of(**options | {"parameters": own})
    taken = ", ".join(f"{name}={value}" for name, value in experiment.parameters if name not in dict(own))
    if given.out is not None:
        check_free(Path(given.out))
    trial = prepare(experiment, folder=Path(given.out or "runs"))
    if taken:
        print(f"offbeat: {algorithm} takes {taken} since this run is private.", file=sys.stderr)
    if experiment.epsilon is not None and experiment.noise is None:
        experiment = settled(experiment, trial)
        simulated = (
            ", as a simulation and not a privacy guarantee" if experiment.simulate_amplification else ""
        )
        print(
            f"offbeat: noise of multiplier {experiment.noise:g} keeps {experiment.rounds} server steps "
            f"below epsilon {experiment.epsilon:g}{simulated}.",
            file=sys.stderr,
        )
    out = claim(Path("runs"), f"{algorithm}-{experiment.data}") if given.out is None else Path(given.out)
    warn_of_unused(given, [experiment])
    warn_of_end(experiment)
    asked = experiment.settings() | {"resolved": resolved(experiment, trial)}
    try:
        tracker, placed = begin(asked_for, out, asked)
    except InputError:
        if given.out is None:
            out.rmdir()  # nothing of this run is left
        raise
    with Folder.begin(out, asked) as folder:
        remember(out, placed)
        return _train(given, experiment, trial, folder, tracker)


def _resume(given: argparse.Namespace, asked_for: Wanted) -> int:
    """Go on with the run in a folder, as it was started but for a later end."""
    if given.out is None:
        raise InputError("--resume needs --out, the folder of the run to go on with.")
    out = Path(given.out)
    known = Experiment.from_settings(settings.read(out))
    options = known.settings() | experiment_options(given)
    own = options["parameters"] | dict(parameters(options["algorithm"], given.set))
    experiment = Experiment.of(**options | {"parameters": tuple(sorted(own.items()))})
    if experiment.rounds > known.rounds:
        check_longer(known, experiment.rounds)
    asked = experiment.settings() | {"rounds": min(known.rounds, experiment.rounds)}
    with Folder.resume(out, asked) as folder:
        outcome = outcome_of(folder.resumed)
        if folder.version == experiment.rounds:
            print(f"offbeat: the run in {out} had finished already.", file=sys.stderr)
            return _end(given, experiment, folder, 0, outcome)
        if outcome.ended:
            return _end(given, experiment, folder, 0, outcome)
        trial = prepare(experiment, folder=out)
        if experiment.rounds > known.rounds:
            settings.lengthen(out, experiment.rounds)
            warn_of_end(experiment)
            print(
                f"offbeat: the run in {out} goes on to {experiment.rounds} server steps in place of "
                f"{known.rounds}, evaluated every {experiment.every} as before.",
                file=sys.stderr,
            )
        return _train(given, experiment, trial, folder, go_on(asked_for, folder, settings.read(out)))


def _train(
    given: argparse.Namespace, experiment: Experiment, trial: Trial, folder: Folder, tracker: Tracker
) -> int:
    settle_threads(experiment, trial)
    outcome = Outcome(None, None)
    with stop_signals() as stop:
        try:
            with show.bar(experiment.algorithm, experiment.rounds, folder.version or 0) as bar:
                steps = run_experiment(
                    experiment,
                    trial,
                    folder,
                    save_every=given.save_every,
                    stop=stop,
                    observe_start=bar.start,
                )
                for step in steps:
                    bar.step(step)
                    if step.record:
                        tracker.record(step.record)
                    outcome = step.outcome or outcome
        except DivergedError as error:
            return _end(given, experiment, folder, 1, outcome, str(error), tracker)
        except KeyboardInterrupt:
            pass
        done = folder.version == experiment.rounds or outcome.ended
        return _end(given, experiment, folder, 0 if done else stop.code, outcome, tracker=tracker)


def _end(
    given: argparse.Namespace,
    experiment: Experiment,
    folder: Folder,
    code: int,
    outcome: Outcome,
    failure: str | None = None,
    tracker: Tracker = Several(),
) -> int:
    """Show what is written, and say what to do next where that is not the end."""
    folder.flush()
    records = list(named(read_lines(folder.path, "records"), experiment.simulate_amplification))
    again = None if code == 0 or failure else f"offbeat run --out {shlex.quote(str(folder.path))} --resume"
    if not given.json:
        _show(experiment, records, outcome.spent, folder.path)
    if failure:
        failure = f"{failure.rstrip('.')}; {_kept(folder)} in {folder.path}."
        print(f"offbeat: {failure}", file=sys.stderr)
    elif again:
        print(f"offbeat: stopped; {_kept(folder)}; go on with:\n{again}", file=sys.stderr)
    elif outcome.ended:
        print(f"offbeat: {outcome.ended.rstrip('.')}; {_kept(folder)} in {folder.path}.", file=sys.stderr)
    summary = _summary(experiment, records, folder, outcome) | {"error": failure, "resume": again}
    tracker.close(summary)
    if given.json:
        print(json.dumps(summary))
    return code


def _kept(folder: Folder) -> str:
    return "no version was saved yet" if folder.version is None else f"version {folder.version} is saved"


def _summary(
    experiment: Experiment, records: list[dict[str, Any]], folder: Folder, outcome: Outcome
) -> dict[str, Any]:
    """A run in one object."""
    spent = outcome.spent
    finite = spent is not None and math.isfinite(spent.epsilon)
    return {
        "algorithm": experiment.algorithm,
        "finished": folder.version == experiment.rounds,
        "ended": outcome.ended,
        "version": folder.version,
        "last": records[-1] if records else None,
        "best_accuracy": max((record["accuracy"] for record in records), default=None),
        "privacy": spent._asdict() | {"epsilon": spent.epsilon if finite else None} if spent else None,
        "out": str(folder.path),
        "settings": experiment.settings(),
    }


def _show(experiment: Experiment, records: list[dict[str, Any]], spent: Spent | None, out: Path) -> None:
    columns = {
        "version": "version",
        "time": "time",
        "trips": "trips",
        "loss": "loss",
        "accuracy": "accuracy",
        "staleness_mean": "staleness",
        "staleness_max": "at most",
    }
    rest = {name: name.replace("_", " ") for name in ("dropped", "lost", "epsilon", "simulated_epsilon")}
    columns |= {name: word for name, word in rest.items() if any(record.get(name) for record in records)}
    rows = [[record[key] for key in columns] for record in _spread(records)]
    title = (
        f"{experiment.algorithm} on {experiment.data}: {experiment.clients} clients, {experiment.dispatch}, "
        f"{experiment.delays}"
    )
    show.table(title, list(columns.values()), rows)
    if spent:
        kind = "simulated" if spent.simulated else "private"
        first = " at first" if experiment.adaptive_clip is not None else ""
        print(
            f"{kind}: {show.privacy(spent)} Its noise has a multiplier of {experiment.noise:g}, "
            f"and uploads are clipped to {experiment.clip}{first}."
        )
    print(f"written to {out}")


def _spread(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first, the last, and some at equal gaps; only the last gap is shorter where it must be."""
    gaps = len(records) - 1
    least = max(1, math.ceil(gaps / _MOST_GAPS))
    strides = range(least, gaps // _LEAST_GAPS + 1)
    stride = next((each for each in strides if gaps % each == 0), least)
    return records[:-1:stride] + records[-1:]
