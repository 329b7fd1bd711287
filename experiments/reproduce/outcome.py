"""One cell, run: what goes into its record."""

import math
import os
import statistics
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import version
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import avg_pool2d

from experiments.reproduce.pause import Course, Pause, PausedError
from experiments.reproduce.study import TAIL, Cell
from experiments.reproduce.weights import check_weights, digest, module_in
from experiments.reproduce.writers import by_writer
from offbeat.core import Vector
from offbeat.data import glue
from offbeat.data.datasets import Source, load, load_glue
from offbeat.data.download import cache_folder
from offbeat.data.population import Examples
from offbeat.errors import DivergedError
from offbeat.nn.language import load_tokenizer
from offbeat.training.build import RunSpec, build_run
from offbeat.training.evaluate import ema
from offbeat.training.experiment import Experiment
from offbeat.training.loop import Snapshot, train
from offbeat.training.task import named_task

_SMALL = ("mlp", "logistic")  # models of which a CPU computes many clients together


@dataclass(frozen=True)
class ComputeOptions:
    """Where cells run."""

    device: str = "cpu"
    execution: str = "auto"
    data_dir: str | None = None  # with a folder for each data set; None: the cache, or a download
    weights: str | None = None  # of a model to fine-tune, with its tokenizer


def placed_experiment(cell: Cell, spot: ComputeOptions) -> Experiment:
    """A cell's experiment at that spot; whole cells run side by side, so none takes several cores."""
    made = cell.experiment
    alone = spot.device == "cpu" and made.model not in _SMALL
    engine = "sequential" if alone else "vectorised"
    execution = "auto" if alone else spot.execution
    return replace(
        made, device=spot.device, execution=execution, engine=engine, data_dir=_folder(made.subject, spot)
    )


def source_of(cell: Cell, spot: ComputeOptions) -> Source:
    """A cell's data, the test set thinned where that is asked for."""
    data = cell.experiment.subject
    return _source(data, _folder(data, spot), cell.tested, _writers(cell, spot), spot.weights, cell.pooled)


def trial_of(cell: Cell, spot: ComputeOptions) -> RunSpec:
    """A cell's run, put together at that spot."""
    made = placed_experiment(cell, spot)
    check_weights(made, spot.weights)
    source = source_of(cell, spot)
    module = module_in(spot.weights, source.classes, made.seed, source.train.inputs)
    return build_run(made, named_task(made, source, module))


def run_cell(cell: Cell, spot: ComputeOptions, pause: Pause = Pause()) -> dict[str, Any]:
    """The record of one cell: accuracy every few versions and in each of the last rounds.

    Raises `PausedError` where the deadline comes first; the same call continues that run.
    """
    made = placed_experiment(cell, spot)
    trial = trial_of(cell, spot)
    begun = time.monotonic()
    course, saved = pause.take_up(cell.key, made.device)
    begun -= course.seconds
    failure = None
    try:
        for shot in train(trial.algorithm, trial.engine, **trial.loop_arguments(made), resume=saved):
            failure = _observe(cell, made, trial, shot, course)
            if failure is not None:
                break
            if shot.version < made.rounds and pause.due():
                course.seconds = time.monotonic() - begun
                pause.keep(cell.key, shot, course)
                raise PausedError
    except DivergedError as error:
        failure = str(error)
    rows = course.rows
    return {
        "key": cell.key,
        "settings": cell.experiment.settings(),
        "seed": made.seed,
        "version": [row[0] for row in rows],
        "time": [row[1] for row in rows],
        "client_updates": [row[2] for row in rows],
        "accuracy": [row[3] for row in rows],
        "loss": [row[4] for row in rows],
        "staleness_of_worst": _staleness_summary(course.worst),
        "dropped": course.dropped,
        "failure": failure,
        "device": _name(made.device),
        "execution": made.execution,
        "seconds": round(time.monotonic() - begun, 1),
        "date": datetime.now(UTC).date().isoformat(),
        "offbeat": version("offbeat"),
        "torch": torch.__version__,
        **({} if made.ema_decay is None else {"last": [row[5] for row in rows]}),
        **({} if spot.weights is None else {"weights": digest(spot.weights)}),
    }


def _observe(cell: Cell, made: Experiment, trial: RunSpec, shot: Snapshot, course: Course) -> str | None:
    """Add a version to the course of its run; what failed."""
    course.dropped = shot.counts.dropped
    if shot.cohort:
        course.worst.append(max(shot.cohort.staleness))
    if made.ema_decay is not None:
        average = course.average
        course.average = shot.x if average is None else ema(average, shot.x, made.ema_decay)
    last_rounds = {made.rounds - cell.scale * number for number in range(TAIL)}
    if shot.version % made.eval_every and shot.version not in last_rounds:
        return None
    _check_parent()
    last = _score(trial, shot, shot.x)
    found = last if course.average is None else _score(trial, shot, course.average)
    if not math.isfinite(found["loss"]):
        return f"the loss became NaN or infinite at server step {shot.version}."
    scores = round(found["accuracy"], 5), round(found["loss"], 5), round(last["accuracy"], 5)
    course.rows.append((shot.version, round(shot.time, 4), shot.counts.client_updates, *scores))
    return None


def _score(trial: RunSpec, shot: Snapshot, x: Vector) -> dict[str, float]:
    assert trial.task is not None
    assert trial.test is not None
    return trial.task.evaluate(trial.problem, x, trial.test, shot.statistics)[0]


def _staleness_summary(worst: list[int]) -> list[float] | None:
    if not worst:
        return None
    return [max(worst), round(sum(worst) / len(worst), 2), float(statistics.median(worst))]


def _folder(data: str, spot: ComputeOptions) -> str | None:
    if data == "digits" or spot.data_dir is None:
        return None
    return str(Path(spot.data_dir) / ("glue" if data in glue.NAMES else data))


def _writers(cell: Cell, spot: ComputeOptions) -> str | None:
    return str(Path(spot.data_dir or ".") / "mnist-writers") if cell.writers else None


@lru_cache(maxsize=2)
def _source(
    data: str, folder: str | None, tested: int | None, writers: str | None, weights: str | None, pooled: int
) -> Source:
    if weights is None:
        source = load(data, folder)
    else:
        source = load_glue(data, Path(folder) if folder else cache_folder(data), load_tokenizer(weights))
    if writers is not None:
        source = by_writer(source, Path(writers))
    if pooled > 1:
        smaller = [Examples(avg_pool2d(x, pooled), y) for x, y in (source.train, source.test)]
        source = source._replace(train=smaller[0], test=smaller[1])
    if tested is None:
        return source
    inputs, targets = source.test
    every = max(1, len(targets) // tested)
    return source._replace(test=Examples(inputs[::every], targets[::every]))


def _name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"


def _check_parent() -> None:
    """Nobody would record what an orphan finds."""
    parent = parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)
