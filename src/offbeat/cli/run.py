"""The options of trackers, and how a run finds its own.

`offbeat run`: one method, one folder.
"""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from offbeat.aggregate.mean import PrivacyCost
from offbeat.cli import terminal
from offbeat.cli.options import (
    experiment_options,
    parse_parameters,
    warn_of_exhausted_clients,
    warn_of_unused_concurrency,
)
from offbeat.cli.terminal import limit_threads, stop_signals
from offbeat.errors import DivergedError, InputError
from offbeat.trackers.backends import check_trackers, open_trackers
from offbeat.trackers.tracker import (
    TrackedRuns,
    Tracker,
    TrackerGroup,
    TrackerOptions,
    load_tracked_runs,
    save_tracked_runs,
)
from offbeat.training import settings_file
from offbeat.training.build import RunSpec, build_run, check_extension, resolved_settings, with_computed_noise
from offbeat.training.experiment import Experiment
from offbeat.training.folder import RunFolder, check_free, claim_folder, read_jsonl
from offbeat.training.runner import RunOutcome, run_experiment, saved_outcome

_SQLITE = "sqlite:///"


def tracker_options(given: argparse.Namespace) -> TrackerOptions:
    """What was asked for, and can be had here."""
    asked = TrackerOptions(
        given.tensorboard, given.wandb, None if given.mlflow is None else _absolute_uri(given.mlflow)
    )
    check_trackers(asked)
    return asked


def start_trackers(
    asked: TrackerOptions, out: Path, settings: Mapping[str, Any]
) -> tuple[TrackerGroup, TrackedRuns]:
    """Those of a new run."""
    return open_trackers(asked, out.absolute().name, settings)


def resume_trackers(asked: TrackerOptions, folder: RunFolder, settings: Mapping[str, Any]) -> TrackerGroup:
    """Those of a resumed run, told of what they do not know yet."""
    held = load_tracked_runs(folder.path)
    tracker, placed = open_trackers(asked, folder.path.absolute().name, settings, held, folder.version)
    save_tracked_runs(folder.path, placed)
    for record in named(read_jsonl(folder.path, "records"), bool(settings.get("simulate_amplification"))):
        tracker.record(record)
    return tracker


def named(records: Iterable[dict[str, Any]], simulated: bool) -> Iterator[dict[str, Any]]:
    """Records of before with a name for a simulated epsilon that says what it is."""
    for record in records:
        if simulated and "epsilon" in record:
            yield {"simulated_epsilon" if name == "epsilon" else name: record[name] for name in record}
        else:
            yield record


def _absolute_uri(uri: str) -> str:
    """A file by its full path: a run may be resumed from elsewhere."""
    if not uri.startswith(_SQLITE) or uri.startswith(f"{_SQLITE}/") or uri == _SQLITE:
        return uri
    return f"{_SQLITE}{Path(uri.removeprefix(_SQLITE)).absolute()}"


_MOST_GAPS, _LEAST_GAPS = 12, 5  # between the rows of the table at the end


def run_command(given: argparse.Namespace) -> int:
    """Train, show, and say where it is written."""
    if given.save_every is not None and given.save_every < 1:
        raise InputError(f"--save-every must be at least 1, not {given.save_every}.")
    asked_for = tracker_options(given)
    if given.resume:
        return _resume(given, asked_for)
    options = experiment_options(given)
    algorithm = options.get("algorithm", Experiment.algorithm)
    own = parse_parameters(algorithm, given.set)
    experiment = Experiment.of(**options | {"parameters": own})
    taken = ", ".join(f"{name}={value}" for name, value in experiment.parameters if name not in dict(own))
    if given.out is not None:
        check_free(Path(given.out))
    trial = build_run(experiment, folder=Path(given.out or "runs"))
    if taken:
        print(f"offbeat: {algorithm} takes {taken} since this run is private.", file=sys.stderr)
    if experiment.epsilon is not None and experiment.noise is None:
        experiment = with_computed_noise(experiment, trial)
        simulated = (
            ", as a simulation and not a privacy guarantee" if experiment.simulate_amplification else ""
        )
        print(
            f"offbeat: noise of multiplier {experiment.noise:g} keeps {experiment.rounds} server steps "
            f"below epsilon {experiment.epsilon:g}{simulated}.",
            file=sys.stderr,
        )
    out = (
        claim_folder(Path("runs"), f"{algorithm}-{experiment.data}") if given.out is None else Path(given.out)
    )
    warn_of_unused_concurrency(given, [experiment])
    warn_of_exhausted_clients(experiment)
    asked = experiment.settings() | {"resolved": resolved_settings(experiment, trial)}
    try:
        tracker, placed = start_trackers(asked_for, out, asked)
    except InputError:
        if given.out is None:
            out.rmdir()  # nothing of this run is left
        raise
    with RunFolder.begin(out, asked) as folder:
        save_tracked_runs(out, placed)
        return _train(given, experiment, trial, folder, tracker)


def _resume(given: argparse.Namespace, asked_for: TrackerOptions) -> int:
    """Go on with the run in a folder, as it was started but for a later end."""
    if given.out is None:
        raise InputError("--resume needs --out, the folder of the run to go on with.")
    out = Path(given.out)
    known = Experiment.from_settings(settings_file.read(out))
    options = known.settings() | experiment_options(given)
    own = options["parameters"] | dict(parse_parameters(options["algorithm"], given.set))
    experiment = Experiment.of(**options | {"parameters": tuple(sorted(own.items()))})
    if experiment.rounds > known.rounds:
        check_extension(known, experiment.rounds)
    asked = experiment.settings() | {"rounds": min(known.rounds, experiment.rounds)}
    with RunFolder.resume(out, asked) as folder:
        outcome = saved_outcome(folder.resumed)
        if folder.version == experiment.rounds:
            print(f"offbeat: the run in {out} had finished already.", file=sys.stderr)
            return _finish(given, experiment, folder, 0, outcome)
        if outcome.ended:
            return _finish(given, experiment, folder, 0, outcome)
        trial = build_run(experiment, folder=out)
        if experiment.rounds > known.rounds:
            settings_file.lengthen(out, experiment.rounds)
            warn_of_exhausted_clients(experiment)
            print(
                f"offbeat: the run in {out} goes on to {experiment.rounds} server steps in place of "
                f"{known.rounds}, evaluated every {experiment.eval_every} as before.",
                file=sys.stderr,
            )
        return _train(
            given, experiment, trial, folder, resume_trackers(asked_for, folder, settings_file.read(out))
        )


def _train(
    given: argparse.Namespace, experiment: Experiment, trial: RunSpec, folder: RunFolder, tracker: Tracker
) -> int:
    limit_threads(experiment, trial)
    outcome = RunOutcome(None, None)
    with stop_signals() as stop:
        try:
            with terminal.bar(experiment.algorithm, experiment.rounds, folder.version or 0) as bar:
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
            return _finish(given, experiment, folder, 1, outcome, str(error), tracker)
        except KeyboardInterrupt:
            pass
        done = folder.version == experiment.rounds or outcome.ended
        return _finish(given, experiment, folder, 0 if done else stop.code, outcome, tracker=tracker)


def _finish(
    given: argparse.Namespace,
    experiment: Experiment,
    folder: RunFolder,
    code: int,
    outcome: RunOutcome,
    failure: str | None = None,
    tracker: Tracker = TrackerGroup(),
) -> int:
    """Show what is written, and say what to do next where that is not the end."""
    folder.flush()
    records = list(named(read_jsonl(folder.path, "records"), experiment.simulate_amplification))
    again = None if code == 0 or failure else f"offbeat run --out {shlex.quote(str(folder.path))} --resume"
    if not given.json:
        _print_records(experiment, records, outcome.spent, folder.path)
    if failure:
        failure = f"{failure.rstrip('.')}; {_saved_version(folder)} in {folder.path}."
        print(f"offbeat: {failure}", file=sys.stderr)
    elif again:
        print(f"offbeat: stopped; {_saved_version(folder)}; go on with:\n{again}", file=sys.stderr)
    elif outcome.ended:
        print(
            f"offbeat: {outcome.ended.rstrip('.')}; {_saved_version(folder)} in {folder.path}.",
            file=sys.stderr,
        )
    summary = _summary(experiment, records, folder, outcome) | {"error": failure, "resume": again}
    tracker.close(summary)
    if given.json:
        print(json.dumps(summary))
    return code


def _saved_version(folder: RunFolder) -> str:
    return "no version was saved yet" if folder.version is None else f"version {folder.version} is saved"


def _summary(
    experiment: Experiment, records: list[dict[str, Any]], folder: RunFolder, outcome: RunOutcome
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


def _print_records(
    experiment: Experiment, records: list[dict[str, Any]], spent: PrivacyCost | None, out: Path
) -> None:
    columns = {
        "version": "version",
        "time": "time",
        "client_updates": "updates",
        "loss": "loss",
        "accuracy": "accuracy",
        "staleness_mean": "staleness",
        "staleness_max": "at most",
    }
    rest = {name: name.replace("_", " ") for name in ("dropped", "lost", "epsilon", "simulated_epsilon")}
    columns |= {name: word for name, word in rest.items() if any(record.get(name) for record in records)}
    rows = [[record[key] for key in columns] for record in _spaced_records(records)]
    title = (
        f"{experiment.algorithm} on {experiment.data}: {experiment.clients} clients, {experiment.dispatch}, "
        f"{experiment.delays}"
    )
    terminal.print_table(title, list(columns.values()), rows)
    if spent:
        kind = "simulated" if spent.simulated else "private"
        first = " at first" if experiment.adaptive_clip is not None else ""
        print(
            f"{kind}: {terminal.privacy_sentence(spent)} Its noise has a multiplier of {experiment.noise:g}, "
            f"and uploads are clipped to {experiment.clip}{first}."
        )
    print(f"written to {out}")


def _spaced_records(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first, the last, and some at equal gaps; only the last gap is shorter where it must be."""
    gaps = len(records) - 1
    least = max(1, math.ceil(gaps / _MOST_GAPS))
    strides = range(least, gaps // _LEAST_GAPS + 1)
    stride = next((each for each in strides if gaps % each == 0), least)
    return records[:-1:stride] + records[-1:]
