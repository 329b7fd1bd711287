"""`offbeat tune`: search over a method's learning rates, beside one run of a method that has none."""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.algorithms import find
from offbeat.cli import terminal
from offbeat.cli.options import experiment_options, parse_parameters
from offbeat.cli.run import task_defaults
from offbeat.errors import InputError
from offbeat.files import replace_file
from offbeat.report.chart import COUNT, Axis, Figure, Series, figure_csv
from offbeat.report.svg import draw, standalone
from offbeat.training.experiment import Experiment
from offbeat.training.folder import claim_folder
from offbeat.training.progress import stop_signals
from offbeat.training.task import LearningTask, named_task
from offbeat.tuning import (
    SearchRange,
    Study,
    StudyPlan,
    StudyResult,
    check_same_study,
    check_trials,
    load_optuna,
    search_space,
)

_SHOWN = 10  # best trials
_STOPPING = b"\noffbeat: saving the trials that are running; interrupt again to stop at once.\n"


def tune_command(given: argparse.Namespace) -> int:
    """Run the trials that are missing, and show what they found and cost."""
    for name in ("trials", "jobs"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise InputError(f"--{name} must be at least 1, not {value}.")
    plan, task = _resumed(given) if given.resume else _plan(given, experiment_options(given))
    load_optuna()
    task = task or named_task(plan.experiment)
    check_trials(plan, task, Path(given.out or "runs"))
    name = f"tune-{plan.experiment.algorithm}-{plan.experiment.subject}"
    out = claim_folder(Path("runs"), name) if given.out is None else Path(given.out)
    if plan.experiment.clip is not None:
        logging.getLogger("offbeat").warning(
            "every trial releases models of the same clients: the epsilon of this study is that of all its "
            "trials together, and each run states its own alone."
        )
    study = Study.open(out, plan, task, resume=given.resume)
    wanted = given.trials or plan.trials
    with stop_signals(_STOPPING) as stop:
        study.run(wanted, given.jobs, stop, _notify)
        if not stop():
            study.run_baseline(stop, _notify)
        result = study.result(stop.code if stop() else None)
    _write_figure(result)
    if given.json:
        print(json.dumps(result.as_dict()))
    else:
        _print_result(result)
    if result.stopped is not None:
        _notify(f"stopped; resume with:\noffbeat tune --out {out} --resume --trials {wanted}")
        return result.stopped
    return 0 if result.best else 1


def _plan(given: argparse.Namespace, settings: dict[str, Any]) -> tuple[StudyPlan, LearningTask | None]:
    algorithm = settings.get("algorithm")
    if algorithm is None:
        raise InputError("tune needs the name of a method: see 'offbeat algorithms'.")
    task, defaults = task_defaults(settings, algorithm)
    own = parse_parameters(algorithm, given.set)
    experiment = Experiment.of(**defaults | settings | {"parameters": own})
    space = search_space(algorithm, parse_search(algorithm, given.search), dict(own))
    plan = StudyPlan(experiment, space, **_study_options(given))
    if plan.baseline is not None:
        find(plan.baseline)
    usual = len(plan.grid) if plan.sampler == "grid" else plan.trials
    return replace(plan, trials=given.trials or usual), task


def _study_options(given: argparse.Namespace) -> dict[str, Any]:
    names = ("sampler", "pruner", "baseline")
    options = {name: getattr(given, name) for name in names if hasattr(given, name)}
    if options.get("baseline") == "none":
        options["baseline"] = None
    return options


def _resumed(given: argparse.Namespace) -> tuple[StudyPlan, LearningTask | None]:
    """The study in a folder; what is given beside it must be the same."""
    if given.out is None:
        raise InputError("--resume needs --out, the folder of the study to resume.")
    out = Path(given.out)
    known = StudyPlan.read(out)
    settings = experiment_options(given)
    asked = settings.get("algorithm", known.experiment.algorithm)
    parameters = dict(parse_parameters(asked, given.set)) if given.set else dict(known.experiment.parameters)
    if asked != known.experiment.algorithm:
        raise InputError(
            f"the study in {out} is of {known.experiment.algorithm}, not of {asked}: name another --out."
        )
    values = known.experiment.settings() | settings | {"parameters": tuple(sorted(parameters.items()))}
    space = known.space
    if given.search:
        space = search_space(asked, parse_search(asked, given.search), parameters)
    rest = {"sampler": known.sampler, "pruner": known.pruner, "baseline": known.baseline}
    check_same_study(out, known, StudyPlan(Experiment.of(**values), space, **rest | _study_options(given)))
    task, _ = task_defaults({"task": known.experiment.task} if known.experiment.task else {}, asked)
    return known, task


def parse_search(algorithm: str, texts: Sequence[str]) -> list[SearchRange]:
    """Ranges such as `local_lr=0.01:1`, and values such as `beta=0,0.5,0.9`."""
    found = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise InputError(f"--search takes NAME=LOW:HIGH or NAME=A,B,C, not '{text}'.")
        ends = value.split(":")
        words = ends if len(ends) > 1 else value.split(",")
        typed = [parse_parameters(algorithm, [f"{name}={word.strip()}"])[0][1] for word in words]
        if len(ends) == 1:
            found.append(SearchRange(name, values=tuple(dict.fromkeys(typed))))
            continue
        if len(ends) != 2 or any(isinstance(each, bool | str) for each in typed):
            raise InputError(f"--search takes NAME=LOW:HIGH or NAME=A,B,C, not '{text}'.")
        low, high = typed
        found.append(SearchRange(name, low, high, whole=isinstance(low, int) and isinstance(high, int)))
    return found


def _notify(sentence: str) -> None:
    print(f"offbeat: {sentence}", file=sys.stderr)


def _print_result(result: StudyResult) -> None:
    plan, metric = result.plan, result.metric
    names = [each.name for each in plan.space]
    done = [each for each in result.trials if each.state == "complete" and each.value is not None]
    done.sort(key=lambda each: each.value or 0.0, reverse=result.higher_is_better)
    rows = [
        [each.number, *(each.parameters[name] for name in names), each.value, each.client_updates]
        for each in done[:_SHOWN]
    ]
    what = f"{plan.experiment.algorithm} on {plan.experiment.subject}"
    title = f"{what}: the best of {len(result.trials)} trials"
    terminal.print_table(title, ["trial", *names, metric, "client updates"], rows)
    marks = [each for each in result.curve() if each[2] is not None]
    gaps = {round(place * (len(marks) - 1) / 7) for place in range(8)} if marks else set()
    terminal.print_table(
        "the cost of tuning: the best so far",
        ["trials", "client updates", metric],
        [marks[place] for place in sorted(gaps)],
    )
    print(cost_sentence(result))
    print(f"written to {result.folder}")


def cost_sentence(result: StudyResult) -> str:
    """What was found, what it cost, and what a method without tuning has."""
    best, metric = result.best, result.metric
    if best is None:
        return "No trial has taken all its server steps."
    found = ", ".join(f"{name}={terminal.format_number(value)}" for name, value in best.parameters.items())
    early = sum(each.state in ("pruned", "diverged") for each in result.trials)
    saved = 1 - result.client_updates / max(1, result.full_client_updates)
    text = (
        f"Trial {best.number} has {metric} {best.value:.4f} with {found}, after {len(result.trials)} trials "
        f"and {result.client_updates:,} client updates in {result.seconds:.0f} s; {early} trials ended "
        f"early, which saved {saved:.0%} of the client updates"
    )
    if result.baseline is not None and result.baseline.value is not None:
        text += (
            f"; {result.plan.baseline}, untuned, has {result.baseline.value:.4f} after one run of "
            f"{result.baseline.client_updates:,}"
        )
    return f"{text}."


def _write_figure(result: StudyResult) -> None:
    """The best value over client updates spent, with the method that needs no tuning as a line."""
    points = [(spent, best) for _, spent, best in result.curve() if best is not None]
    if not points:
        return
    end = max(points[-1][0], result.baseline.client_updates if result.baseline else 0)
    if end > points[-1][0]:
        points.append((end, points[-1][1]))
    name = result.plan.experiment.algorithm
    lines = [Series(0, f"{name}, tuned", *_columns(points))]
    if result.baseline is not None and result.baseline.value is not None:
        value = result.baseline.value
        lines.append(
            Series(
                1,
                f"{result.plan.baseline}, one run",
                *_columns([(result.baseline.client_updates, value), (end, value)]),
            )
        )
    figure = Figure(
        "cost",
        f"The cost of tuning: {result.metric} of the best trial so far",
        Axis("client updates spent", COUNT, zero=True),
        Axis(result.metric),
        tuple(lines),
    )
    replace_file(result.folder / "cost.svg", standalone(draw(figure), dark=True).encode())
    replace_file(result.folder / "cost.csv", figure_csv(figure).encode())


def _columns(points: Sequence[tuple[float, float]]) -> tuple[Any, Any]:
    xs, ys = zip(*points, strict=True)
    return np.array(xs, dtype=float), np.array(ys, dtype=float)
