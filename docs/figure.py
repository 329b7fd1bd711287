"""The figures of README: accuracy over virtual time, and over the runs that tuning takes.

    python docs/figure.py           # trains (about five minutes on one core), then draws
    python docs/figure.py --draw    # draws the results in figure.json again

All runs have 100 clients with a Dirichlet(0.5) partition of the digits, the delays `tiers:large`, 100 server
steps and otherwise the defaults of `offbeat run`. The left figure has methods with their default
hyperparameters. The right figure has the accuracy that the best of k runs has on average if their learning
rates are drawn at random, without repetition, from a grid of twelve; Cadence has no learning rate to tune.
"""

import json
import math
import sys
from itertools import product
from pathlib import Path

import numpy as np
import torch

from offbeat.errors import DivergedError
from offbeat.report.chart import COUNT, Axis, Figure, Series
from offbeat.report.svg import draw, standalone
from offbeat.training.build import build_run
from offbeat.training.experiment import Experiment
from offbeat.training.runner import run_experiment

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "figure.json"
METHODS = ("cadence", "fedbuff", "fadas", "fedavg")
GRIDS = {
    "fedbuff": {"local_lr": (0.01, 0.1, 0.3, 1.0), "server_lr": (0.3, 1.0, 3.0)},
    "fadas": {"local_lr": (0.01, 0.1, 0.3, 1.0), "server_lr": (0.001, 0.01, 0.1)},
}


def curve(method: str, **parameters: float) -> list[list[float]]:
    """The virtual times and accuracies of a run; a run that diverges keeps what it has."""
    experiment = Experiment.of(
        algorithm=method,
        rounds=100,
        eval_every=5,
        delays="tiers:large",
        parameters=tuple(sorted(parameters.items())),
    )
    points = []
    try:
        for step in run_experiment(experiment, build_run(experiment)):
            if step.record:
                points.append([step.record["time"], step.record["accuracy"]])  # noqa: PERF401
    except DivergedError:
        points.append([points[-1][0], 0.1])
    return points


def best_of(values: list[float]) -> list[float]:
    """The expected best of k different values, for k from 1 to all."""
    ordered, count = sorted(values), len(values)
    return [
        sum(value * math.comb(rank, k - 1) for rank, value in enumerate(ordered)) / math.comb(count, k)
        for k in range(1, count + 1)
    ]


def train() -> dict[str, dict[str, list[list[float]]]]:
    """The curves with default hyperparameters, and the accuracy at each point of the grids."""
    torch.set_num_threads(1)
    found = {method: curve(method) for method in METHODS}
    grids = {}
    for method, grid in GRIDS.items():
        pairs = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
        grids[method] = [[*pair.values(), curve(method, **pair)[-1][1]] for pair in pairs]
    return {"curves": found, "grids": grids}


def drawings(results: dict[str, dict[str, list[list[float]]]]) -> dict[str, str]:
    """The figures by file name."""
    by_time = []
    for style, (method, points) in enumerate(results["curves"].items()):
        xs, ys = np.array(points)[1:].T  # the time of the first model is 0
        by_time.append(Series(style, method, xs, ys))
    runs = len(next(iter(results["grids"].values())))
    constant = np.full(runs, results["curves"]["cadence"][-1][1])
    tuned = [Series(0, "cadence", np.arange(1.0, runs + 1), constant)]
    for style, (method, points) in enumerate(results["grids"].items(), 1):
        values = np.array(best_of([point[-1] for point in points]))
        tuned.append(Series(style, method, np.arange(1.0, runs + 1), values))
    labels = tuple(METHODS)
    figures = (
        Figure(
            "accuracy-over-time",
            "Accuracy over virtual time, default settings",
            Axis("virtual time, s", log=True),
            Axis("accuracy", zoom=True),
            tuple(by_time),
            runs=labels,
        ),
        Figure(
            "accuracy-over-tuning",
            "Accuracy over runs spent on tuning",
            Axis("runs spent on learning rates", COUNT),
            Axis("accuracy of the best run"),
            tuple(tuned),
            runs=labels,
        ),
    )
    return {f"{figure.name}.svg": standalone(draw(figure), dark=True) for figure in figures}


if __name__ == "__main__":
    if sys.argv[1:] != ["--draw"]:
        RESULTS.write_text(json.dumps(train(), indent=1) + "\n")
    for name, text in drawings(json.loads(RESULTS.read_text())).items():
        (FOLDER / name).write_text(text)
