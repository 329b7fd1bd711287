"""The commands that inspect methods, schedules and runs: `algorithms`, `check`, `schedule` and `report`."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from offbeat.algorithms import CATALOGUE, find
from offbeat.algorithms.registry import check_interval
from offbeat.cli import terminal
from offbeat.cli.options import add_settings, experiment_options, number, warn_of_unused_concurrency
from offbeat.schedule.availability import Dropout, parse_availability
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import parse_delay
from offbeat.schedule.scheduler import Buffer
from offbeat.schedule.statistics import iterate_buffers, summarise
from offbeat.schedule.timed import make_scheduler
from offbeat.training.experiment import Experiment, build_dispatch, build_limits

_NO_THEORY = "none usable"


def add_algorithms_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `offbeat algorithms`."""
    command.add_argument("name", nargs="?", metavar="NAME", help="of a method to show")


def algorithms_command(given: argparse.Namespace) -> int:
    """List the methods, or show one."""
    names = [given.name] if given.name else sorted(CATALOGUE)
    described = {name: _describe(name) for name in names}
    if given.json:
        print(json.dumps(described[given.name] if given.name else described))
    elif given.name:
        _print_one(given.name, described[given.name])
    else:
        rows = [
            [name, each["protocol"], *each["vectors"].values(), each["summary"]]
            for name, each in described.items()
        ]
        columns = ["method", "protocol", *next(iter(described.values()))["vectors"], "what it does"]
        terminal.print_table(
            "methods; what is sent down and up and what is kept is in model sizes", columns, rows
        )
        print("'offbeat algorithms NAME' shows a method's parameters.")
    return 0


def add_check_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `offbeat check`."""
    command.add_argument("name", metavar="METHOD", help="a method of the catalogue")
    command.add_argument(
        "--module", metavar="PACKAGE.MODULE", help="a module that registers the method; imported first"
    )


def check_command(given: argparse.Namespace) -> int:
    """Run the checks of a method; the exit code is 1 if one fails."""
    from offbeat.training.method_check import check_method  # loads PyTorch
    from offbeat.training.task import import_module

    if given.module is not None:
        import_module(given.module, "--module")
    findings = []
    for finding in check_method(given.name):
        findings.append(finding)
        if not given.json:
            print(f"{'ok    ' if finding.problem is None else 'FAILED'}  {finding.check}", flush=True)
            if finding.problem is not None:
                print(f"        {finding.problem}", flush=True)
    failed = [finding for finding in findings if finding.problem is not None]
    if given.json:
        print(json.dumps({"method": given.name, "checks": [finding._asdict() for finding in findings]}))
    return 1 if failed else 0


def _describe(name: str) -> dict[str, Any]:
    entry = find(name)
    return {
        "summary": entry.summary,
        "paper": entry.paper,
        "protocol": entry.dispatch,
        "weights of stale updates": entry.weights,
        "staleness limit": entry.max_staleness,
        "buffer": entry.buffer,
        "rates in theory": entry.theory or _NO_THEORY,
        "vectors": entry.cost.vectors(),
        "parameters": {key: each.default for key, each in entry.parameters().items()},
        "parameters of private runs": dict(entry.private_defaults),
        "parameters of private runs without a clip": dict(entry.unclipped_defaults),
    }


def _print_one(name: str, described: dict[str, Any]) -> None:
    vectors, parameters = described.pop("vectors"), described.pop("parameters")
    private, buffer = described.pop("parameters of private runs"), described.pop("buffer")
    bare = described.pop("parameters of private runs without a clip")
    described["buffer"] = "any" if buffer is None else buffer
    tuned = described["rates in theory"] != _NO_THEORY
    words = {
        "down": "sent down",
        "up": "sent up",
        "client": "kept by a client",
        "server": "kept by the server",
    }
    sends = {f"{words[key]} (model sizes)": value for key, value in vectors.items()}
    terminal.print_pairs(name, described | sends)
    open_ = "from S, K and T" if tuned else "none"
    shown = {key: open_ if value is None else value for key, value in parameters.items()}
    terminal.print_pairs("parameters (--set NAME=VALUE) and their defaults", shown)
    for taken, unless in ((private, "that"), (bare, "that or --clip")):
        if taken:
            values = ", ".join(f"{key}={terminal.format_number(value)}" for key, value in taken.items())
            print(f"Private runs use {values}, unless {unless} is given.")
    if tuned:
        print("S: updates per server step; K: local steps of a task; T: server steps.")


def add_schedule_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `offbeat schedule`."""
    add_settings(command, "schedule", methods_own=False)
    command.add_argument(
        "--momentum",
        type=number,
        metavar="BETA",
        help="also show how far momentum BETA is from momentum without delay, approximated or not",
    )


def schedule_command(given: argparse.Namespace) -> int:
    """Simulate, and show staleness and waiting."""
    experiment = Experiment(**experiment_options(given))
    dispatch = build_dispatch(experiment)
    source = dispatch.source(experiment.seed)
    delays = parse_delay(experiment.delays).bind(source, experiment.clients)
    clock = Clock(
        delays,
        source,
        Dropout(experiment.dropout),
        build_limits(experiment),
        lambda client: experiment.local_steps,
    )
    limit = float("inf") if experiment.max_staleness is None else experiment.max_staleness
    availability = parse_availability(experiment.availability)
    scheduler = make_scheduler(
        clock, dispatch, source, experiment.clients, experiment.buffer, limit, availability
    )
    if given.momentum is not None:
        check_interval("momentum BETA", given.momentum, "(-1, 1)")
    warn_of_unused_concurrency(given, [experiment])
    steps = iterate_buffers(scheduler, experiment.rounds)
    staleness: list[tuple[int, ...]] = []
    wanted = given.momentum is not None
    result = summarise(_with_staleness(steps, staleness) if wanted else steps, scheduler).as_dict()
    errors = _momentum(given.momentum, staleness) if wanted else {}
    if given.json:
        print(json.dumps(result | ({"momentum": errors} if errors else {})))
    else:
        histogram = result.pop("staleness_counts")
        terminal.print_pairs(
            f"{experiment.dispatch} dispatch, {experiment.delays}, {experiment.rounds:,} server steps", result
        )
        if errors:
            terminal.print_pairs(
                "|AW - M|^2 / |M|^2, how far momentum is from momentum without delay", errors
            )
        _print_histogram(histogram)
    return 0


def _with_staleness(steps: Iterable[Buffer], staleness: list[tuple[int, ...]]) -> Iterator[Buffer]:
    """Pass buffers on, and append the staleness of their updates to a list."""
    for step in steps:
        staleness.append(step.staleness)
        yield step


def _momentum(beta: float, staleness: Sequence[tuple[int, ...]]) -> dict[str, float]:
    from offbeat.algorithms.momentum_approximation import relative_errors  # loads PyTorch

    span = 1 + max(map(max, staleness))
    return {"beta": beta} | relative_errors(staleness, beta, span)._asdict()


def _print_histogram(histogram: Any) -> None:
    """Staleness of the consumed updates, as bars."""
    if not histogram:
        return
    counts = {int(age): count for age, count in dict(histogram).items()}
    width = max(1, -(-(max(counts) + 1) // 12))
    bins: dict[int, int] = {}
    for age, count in counts.items():
        bins[age // width] = bins.get(age // width, 0) + count
    total, most = sum(bins.values()), max(bins.values())
    print("staleness of the updates used")
    for index in range(max(bins) + 1):
        count = bins.get(index, 0)
        name = str(index) if width == 1 else f"{index * width}-{index * width + width - 1}"
        print(f"{name:>9}  {terminal.bar(count / most, 40):<40} {100 * count / total:5.1f} %")


def add_report_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `offbeat report`."""
    command.add_argument("runs", nargs="+", metavar="RUN", help="the folder of a run; several are compared")
    command.add_argument(
        "-o",
        "--out",
        default="report.html",
        metavar="PAGE",
        help="the page; its figures go to a folder beside it [report.html]",
    )
    command.add_argument(
        "--anyway", action="store_true", help="also where data, model or clients of the runs differ"
    )
    command.add_argument(
        "--fairness",
        action="store_true",
        help="also how well the last model serves each client; loads the runs' data",
    )


def report_command(given: argparse.Namespace) -> int:
    """Write the report."""
    from offbeat.report.build import make_report  # loads PyTorch

    made = make_report(
        [Path(run) for run in given.runs], Path(given.out), anyway=given.anyway, with_fairness=given.fairness
    )
    if made.without_png:
        print(f"offbeat: {made.without_png}", file=sys.stderr)
    if made.secret:
        print(
            f"offbeat: the epsilon of {', '.join(made.secret)} depends on a secret sample, which "
            "this page shows: keep it as secret as the run's folder.",
            file=sys.stderr,
        )
    if given.json:
        found = made._asdict() | {"page": str(made.page), "folder": str(made.folder)}
        print(json.dumps(found))
    else:
        print(f"written to {made.page}; figures and their numbers are in {made.folder}")
    return 0
