"""Runs each variant of grid.json on Fashion-MNIST under several concurrencies, into exploration.jsonl.

A cell that has a record is left out, so a run that was cut short goes on.
"""

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from variants import Variant

from offbeat import (
    Asynchronous,
    DivergedError,
    FedOpt,
    Population,
    Problem,
    Steps,
    Vectorised,
    load,
    models,
    train,
)
from offbeat.engines.how import HOWS
from offbeat.evaluate import accuracy, evaluate
from offbeat.population.partition import parse_partition
from offbeat.schedule.delays import parse_delay

HERE = Path(__file__).parent
RECORDS, GRID = HERE / "exploration.jsonl", HERE / "grid.json"
SETTINGS = ((0.5, 20), (0.5, 60), (0.5, 90), (0.1, 20), (0.1, 60))  # Dirichlet, concurrency
CLIENTS, BUFFER, STEPS, BATCH, ROUNDS, SEED = 100, 10, 10, 50, 500, 0
AVERAGES = (0.9, 0.98)


def losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of each example."""
    return cross_entropy(outputs, targets, reduction="none")


def run(cell: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """One cell: the accuracy of the last model and of its moving averages."""
    begun = time.monotonic()
    source = load("fashion-mnist", given.data_dir)
    parts = parse_partition(f"dirichlet:{cell['dirichlet']}").split(
        source.labels, CLIENTS, SEED, source.groups
    )
    population = Population(source.train, parts, Steps(STEPS, BATCH)).to(given.device)
    module = models.build("cnn", tuple(source.train.inputs.shape[1:]), source.classes, SEED).to(given.device)
    problem, test = Problem(module, losses), source.test.to(given.device)
    sizes = tuple(parameter.numel() for parameter in module.parameters())
    kind, words = cell["method"], cell["words"]
    method = Variant(sizes, ROUNDS, **words) if kind == "unit" else FedOpt(**words)
    engine = Vectorised(problem, population, parse_delay("tiers:mild"), how=HOWS[given.how])
    dispatch = Asynchronous(cell["concurrency"], eager=False)
    averages: dict[float, Tensor] = {}
    record: dict[str, Any] = {"device": given.device, "failure": None}
    try:
        for shot in train(method, engine, dispatch=dispatch, buffer=BUFFER, rounds=ROUNDS, seed=SEED):
            x = shot.x
            for decay in AVERAGES:
                averages[decay] = decay * averages.get(decay, x) + (1 - decay) * x
        models_ = {"last": x} | {f"average {decay}": vector for decay, vector in averages.items()}
        record |= {
            name: round(evaluate(problem, vector, test, {"accuracy": accuracy})["accuracy"], 4)
            for name, vector in models_.items()
        }
    except DivergedError as error:
        record["failure"] = str(error)
    return cell | record | {"seconds": round(time.monotonic() - begun, 1)}


def work(cells: Any, lock: Any, given: argparse.Namespace, until: float) -> None:
    """Cells from the queue until it is empty or time is up."""
    torch.set_num_threads(1)
    while time.time() < until and not cells.empty():
        cell = cells.get()
        record = run(cell, given)
        with lock, RECORDS.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(record, flush=True)


def main() -> None:
    """As many at a time as was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--how", default="auto")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=600)
    given = parser.parse_args()
    done = [json.loads(line) for line in RECORDS.read_text().splitlines()] if RECORDS.exists() else []
    known = {_name(record) for record in done}
    grid = [
        {"method": kind, "words": words, "dirichlet": dirichlet, "concurrency": concurrency}
        for kind, words in json.loads(GRID.read_text())
        for dirichlet, concurrency in SETTINGS
    ]
    context = multiprocessing.get_context("spawn")
    manager = context.Manager()
    cells, lock = manager.Queue(), manager.Lock()
    for cell in grid:
        if _name(cell) not in known:
            cells.put(cell)
    until = time.time() + 60 * given.minutes
    crew = [context.Process(target=work, args=(cells, lock, given, until)) for _ in range(given.processes)]
    for process in crew:
        process.start()
    for process in crew:
        process.join()


def _name(cell: dict[str, Any]) -> str:
    return json.dumps([cell[key] for key in ("method", "words", "dirichlet", "concurrency")], sort_keys=True)


if __name__ == "__main__":
    main()
