"""`offbeat tune`: search over the learning rates of a method, and compare with a method without tuning."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from offbeat.api import run_study
from offbeat.cli import terminal
from offbeat.cli.options import experiment_options, parse_parameters
from offbeat.cli.run import task_defaults
from offbeat.errors import InputError
from offbeat.training.task import named_task
from offbeat.tuning import StudyResult
from offbeat.tuning_plan import SearchRange, StudyPlan, new_plan, resumed_plan

_SHOWN = 10  # best trials


def tune_command(given: argparse.Namespace) -> int:
    """Run the remaining trials, and show the results and their cost."""
    settings = experiment_options(given)
    names = ("sampler", "pruner", "baseline")
    options = {name: getattr(given, name) for name in names if hasattr(given, name)}
    algorithm = settings.get("algorithm")
    if given.resume:
        if given.out is None:
            raise InputError("--resume needs --out, the folder of the study to resume.")
        known = StudyPlan.read(Path(given.out)).experiment
        if known.task is not None and ":" not in known.task:
            raise InputError(
                f"the study in {given.out} was started from Python with the task '{known.task}': "
                "resume it with offbeat.tune(task, ..., resume=True)."
            )
        task = None if known.task is None else named_task(known)  # which may register the method
        algorithm = algorithm or known.algorithm
        own = dict(parse_parameters(algorithm, given.set)) if given.set else None
        ranges = parse_search(algorithm, given.search) if given.search else None
        plan = resumed_plan(Path(given.out), settings, own, ranges, options)
    else:
        if algorithm is None:
            raise InputError("tune needs the name of a method: see 'offbeat algorithms'.")
        task, defaults = task_defaults(settings, algorithm)
        own = dict(parse_parameters(algorithm, given.set))
        ranges = parse_search(algorithm, given.search)
        plan = new_plan(defaults | settings, own, ranges, options, given.trials)
    result = run_study(
        plan,
        task or named_task(plan.experiment),
        given.out,
        resume=given.resume,
        trials=given.trials,
        jobs=given.jobs,
        notify=terminal.notify,
    )
    if given.json:
        print(json.dumps(result.as_dict()))
    else:
        _print_result(result)
    if result.stopped is not None:
        wanted = given.trials or plan.trials
        terminal.notify(
            f"stopped; resume with:\noffbeat tune --out {result.folder} --resume --trials {wanted}"
        )
        return result.stopped
    return 0 if result.best else 1


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
    shown = sorted({round(index * (len(marks) - 1) / 7) for index in range(8)}) if marks else []
    terminal.print_table(
        "the cost of tuning: the best so far",
        ["trials", "client updates", metric],
        [marks[index] for index in shown],
    )
    print(cost_sentence(result))
    print(f"written to {result.folder}")


def cost_sentence(result: StudyResult) -> str:
    """The best trial, the cost of the study, and the result of the method without tuning."""
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
