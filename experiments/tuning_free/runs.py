"""One run of the exploration or the bench as a record, and many of them over processes."""

import argparse
import json
import multiprocessing
import queue
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from experiments.reproduce.writers import by_writer
from experiments.tuning_free.bouncing import Bouncing
from experiments.tuning_free.steady import Steady
from experiments.tuning_free.variants import Variant
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

from offbeat import (
    Asynchronous,
    DivergedError,
    Population,
    Precision,
    Problem,
    Sequential,
    Steps,
    Vectorised,
    load,
    train,
)
from offbeat.algorithms import Setting, build, find
from offbeat.data.datasets import Source
from offbeat.data.partition import parse_partition
from offbeat.engines.engine import Engine
from offbeat.engines.execution import EXECUTIONS
from offbeat.nn import models
from offbeat.schedule.delays import parse_delay
from offbeat.schedule.staleness import parse_weights
from offbeat.training.evaluate import accuracy, evaluate

DEFAULT: dict[str, Any] = {
    "data": "fashion-mnist",
    "pool": 1,  # pixels a side that are averaged
    "model": "cnn",
    "clients": 100,
    "partition": None,  # Dirichlet
    "writers": False,  # MNIST's clients are those who wrote its digits
    "buffer": 10,
    "steps": 10,
    "batch": 50,
    "rounds": 500,
    "seed": 0,
    "delays": "tiers:mild",
    "weights": "constant",
    "falls": False,  # the server's steps, linearly to nothing
    "precision": "torch",
}
AVERAGES = (0.9, 0.98)
FORMS = {"steady": Steady, "bouncing": Bouncing}  # that are no methods of the catalogue
NAMES = {"method", "words", "form", "task", "dirichlet", "concurrency", *DEFAULT}


@dataclass(frozen=True)
class Falling:
    """Any method, its server steps falling linearly to nothing."""

    inner: Any
    rounds: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, state: Any, mean: Any, cohort: Any) -> Any:
        after = self.inner.step(state, mean, cohort)
        left = 1 - cohort.version / self.rounds
        return after._replace(x=state.x + left * (after.x - state.x))


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of each example."""
    return cross_entropy(outputs, targets, reduction="none")


def variant(words: dict[str, Any], sizes: tuple[int, ...], at: dict[str, Any]) -> Variant:
    """One of the exploration, its rates from the system."""
    words, cohort, steps, rounds = dict(words), at["buffer"], at["steps"], at["rounds"]
    if "walk" in words:  # how far a local random walk gets
        words["local_rate"] = words.pop("walk") / steps**0.5
    if "reach" in words:
        words["local_rate"] = words.pop("reach") / steps
    if "leap" in words:
        words["cap"] = words.pop("leap") * words["local_rate"] * steps
    if "noise" in words:
        words["server_rate"] = words.pop("noise") * (cohort * steps / rounds) ** 0.5
    if "a" in words:
        words["local_rate"] = words.pop("a") / (steps * rounds**0.5)
    if "b" in words:
        words["server_rate"] = words.pop("b") * (cohort * steps) ** 0.25 / rounds**0.75
    return Variant(sizes, rounds, share=cohort / at["clients"], **words)


def method(kind: str, words: dict[str, Any], sizes: tuple[int, ...], at: dict[str, Any]) -> Any:
    """A variant, a form of the twelfth exploration, or a method of the catalogue."""
    if kind == "unit":
        return variant(words, sizes, at)
    if kind in FORMS:
        return replace(FORMS[kind].tuned(at["steps"]), **words)
    words = dict(words)
    falls = words.pop("falls", False) or at["falls"]
    made = build(kind, Setting(at["buffer"], at["steps"], at["rounds"]), words)
    return Falling(made, at["rounds"]) if falls else made


@lru_cache(maxsize=2)
def _source(data: str, folder: Path | None, side: int, writers: bool) -> Source:
    source = load(data, None if folder is None or data == "digits" else folder / data)
    if writers:
        assert folder is not None, "MNIST by writer needs --data-dir"
        source = by_writer(source, folder / "mnist-writers")
    if side == 1:
        return source
    train, test = (
        part._replace(inputs=avg_pool2d(part.inputs, side).contiguous())
        for part in (source.train, source.test)
    )
    return source._replace(train=train, test=test)


def _module(name: str, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    if name != "linear":
        return models.build(name, shape, classes, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes))


def run(cell: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """One cell: the accuracy of the last model and of its moving averages."""
    begun = time.monotonic()
    at = DEFAULT | cell
    source = _source(at["data"], given.data_dir, at["pool"], at["writers"])
    split = parse_partition(at["partition"] or f"dirichlet:{at['dirichlet']}")
    parts = split.split(source.labels, at["clients"], at["seed"], source.groups)
    population = Population(source.train, parts, Steps(at["steps"], at["batch"])).to(given.device)
    shape = tuple(source.train.inputs.shape[1:])
    module = _module(at["model"], shape, source.classes, at["seed"]).to(given.device)
    precision = Precision[at["precision"].upper().replace("TORCH", "AUTO")]  # as records have it
    problem, test = Problem(module, losses, precision=precision), source.test.to(given.device)
    sizes = tuple(parameter.numel() for parameter in module.parameters())
    delays = parse_delay(at["delays"])
    small = at["model"] in ("mlp", "linear")
    if given.device == "cpu" and not small:  # of others a CPU computes one client after another
        engine: Engine = Sequential(problem, population, delays)
    else:
        how = "compiled" if at["model"] == "resnet18" else given.execution
        engine = Vectorised(problem, population, delays, execution=EXECUTIONS[how])
    limit = None if at["method"] in ("unit", *FORMS) else find(at["method"]).max_staleness
    averages: dict[float, Tensor] = {}
    record: dict[str, Any] = {"device": given.device, "failure": None}
    try:
        for shot in train(
            method(at["method"], at["words"], sizes, at),
            engine,
            dispatch=Asynchronous(at["concurrency"], eager=False),
            buffer=at["buffer"],
            rounds=at["rounds"],
            weights=parse_weights(at["weights"]),
            max_staleness=float("inf") if limit is None else limit,
            seed=at["seed"],
        ):
            x = shot.x
            for decay in AVERAGES:
                averages[decay] = decay * averages.get(decay, x) + (1 - decay) * x
        if at["method"] in ("cadence", *FORMS):  # of length, at the end, by the first model's norm
            state, first = shot.state, problem.initial()[0].norm().clamp_min(1)
            unit = state.units[0] if at["method"] == "steady" else state.unit
            record["unit"] = round(float(unit / first), 4)
        made = {"last": x} | {f"average {decay}": vector for decay, vector in averages.items()}
        record |= {
            name: round(evaluate(problem, vector, test, {"accuracy": accuracy})["accuracy"], 4)
            for name, vector in made.items()
        }
    except DivergedError as error:
        record["failure"] = str(error)
    return cell | record | {"seconds": round(time.monotonic() - begun, 1)}


def named(cell: dict[str, Any]) -> str:
    """The same for the same run."""
    return json.dumps({key: value for key, value in cell.items() if key in NAMES}, sort_keys=True)


def recorded(path: Path) -> list[dict[str, Any]]:
    """The records of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def work(cells: Any, lock: Any, path: Path, given: argparse.Namespace, until: float) -> None:
    """Cells from the queue until it is empty or time is up."""
    torch.set_num_threads(1)
    while time.time() < until:
        try:
            cell = cells.get_nowait()
        except queue.Empty:
            return
        record = run(cell, given)
        with lock, path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(record, flush=True)


def spread(wanted: Iterable[dict[str, Any]], path: Path, given: argparse.Namespace) -> None:
    """Run what has no record yet, several at a time."""
    known = {named(record) for record in recorded(path)}
    context = multiprocessing.get_context("spawn")
    manager = context.Manager()
    cells, lock = manager.Queue(), manager.Lock()
    for cell in wanted:
        if named(cell) not in known:
            cells.put(cell)
    until = time.time() + 60 * given.minutes
    crew = [
        context.Process(target=work, args=(cells, lock, path, given, until)) for _ in range(given.processes)
    ]
    for process in crew:
        process.start()
    for process in crew:
        process.join()


def options(text: str | None) -> argparse.ArgumentParser:
    """What says where and how long."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--data-dir", type=Path, help="with a folder for each data set")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--execution", default="auto")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=600)
    return parser
