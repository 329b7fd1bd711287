"""Entry point, and the commands that need no training."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from offbeat.algorithms import CATALOGUE, find
from offbeat.cli import show
from offbeat.cli.compare import compare
from offbeat.cli.options import experiment_options, parser
from offbeat.cli.run import run
from offbeat.errors import DivergedError, InputError
from offbeat.experiment import Experiment, timing
from offbeat.schedule.availability import Dropout, parse_availability
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import parse_delay
from offbeat.schedule.flow import Flow
from offbeat.schedule.statistics import simulate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    logging.basicConfig(format="offbeat: %(message)s", level=logging.WARNING)
    try:
        given = parser().parse_args(arguments)
        commands = {"run": run, "compare": compare, "schedule": schedule, "algorithms": algorithms}
        return commands[given.command](given)
    except InputError as error:
        return _say(error, 2)
    except DivergedError as error:
        return _say(error, 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _say(
            f"{error.filename or 'a file'} could not be read or written: {error.strerror or error}.", 2
        )
    except KeyboardInterrupt:
        return _say("interrupted.", 130)


def _say(what: object, code: int) -> int:
    print(f"offbeat: {what}", file=sys.stderr)
    return code


def schedule(given: argparse.Namespace) -> int:
    """Time alone."""
    experiment = Experiment.of(**experiment_options(given) | {"algorithm": "fedbuff"})
    dispatch = timing(experiment)
    source = dispatch.source(experiment.seed)
    delays = parse_delay(experiment.delays).bind(source, experiment.clients)
    clock = Clock(delays, source, Dropout(experiment.dropout))
    limit = float("inf") if experiment.limit is None else experiment.limit
    availability = parse_availability(experiment.availability)
    flow = Flow(clock, dispatch, source, experiment.clients, experiment.buffer, limit, availability)
    result = simulate(flow, experiment.rounds).as_dict()
    if "json" in given:
        print(json.dumps(result))
    else:
        histogram = result.pop("staleness_counts")
        show.pairs(
            f"{experiment.dispatch} dispatch, {experiment.delays}, {experiment.rounds:,} server steps", result
        )
        _draw(histogram)
    return 0


def _draw(histogram: Any) -> None:
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
    for place in range(max(bins) + 1):
        count = bins.get(place, 0)
        name = str(place) if width == 1 else f"{place * width}-{place * width + width - 1}"
        print(f"{name:>9}  {'█' * round(40 * count / most):<40} {100 * count / total:5.1f} %")


def algorithms(given: argparse.Namespace) -> int:
    """The catalogue, or one entry of it."""
    names = [given.name] if given.name else list(CATALOGUE)
    described = {name: _describe(name) for name in names}
    if given.json:
        print(json.dumps(described[given.name] if given.name else described))
    elif given.name:
        _show_one(given.name, described[given.name])
    else:
        rows = [
            [name, each["protocol"], *each["vectors"].values(), each["summary"]]
            for name, each in described.items()
        ]
        columns = ["method", "protocol", *next(iter(described.values()))["vectors"], "what it does"]
        show.table("methods; what is sent down and up and what is kept is in model sizes", columns, rows)
        print("'offbeat algorithms NAME' shows a method's parameters.")
    return 0


def _describe(name: str) -> dict[str, Any]:
    entry = find(name)
    return {
        "summary": entry.summary,
        "paper": entry.paper,
        "protocol": "asynchronous" if entry.asynchronous else "synchronous",
        "weights of stale updates": entry.weights,
        "buffer": entry.buffer,
        "vectors": entry.vectors(),
        "parameters": {key: each.default for key, each in entry.parameters().items()},
    }


def _show_one(name: str, described: dict[str, Any]) -> None:
    vectors, values = described.pop("vectors"), described.pop("parameters")
    buffer = described.pop("buffer")
    described["buffer"] = "any" if buffer is None else buffer
    words = {
        "down": "sent down",
        "up": "sent up",
        "client": "kept by a client",
        "server": "kept by the server",
    }
    sends = {f"{words[key]} (model sizes)": value for key, value in vectors.items()}
    show.pairs(name, described | sends)
    shown = {key: "from S, K and T" if value is None else value for key, value in values.items()}
    show.pairs("parameters (--set NAME=VALUE) and their defaults", shown)
