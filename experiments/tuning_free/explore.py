"""Runs each variant of grid.json on its settings, by default Fashion-MNIST under several concurrencies.

A cell that has a record in exploration.jsonl is left out, so a run that was cut short goes on. An entry of
the grid is a method, its words and, where they are not the default ones, its settings. `a` and `b` in the
words of a variant stand for the rates a / (K sqrt(T)) and b (SK)^(1/4) / T^(3/4), `reach` and
`walk` for K and sqrt(K) times the local rate, `leap` for the cap by K times the local rate, and `noise` for
the server's rate by sqrt(SK / T).
"""

import argparse
import json
import multiprocessing
import queue
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, cross_entropy
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
from offbeat.population.sources import Source
from offbeat.schedule.delays import parse_delay

HERE = Path(__file__).parent
RECORDS, GRID = HERE / "exploration.jsonl", HERE / "grid.json"
DEFAULT = {
    "data": "fashion-mnist",
    "pool": 1,  # pixels a side that are averaged
    "model": "cnn",
    "clients": 100,
    "partition": None,  # Dirichlet
    "buffer": 10,
    "steps": 10,
    "batch": 50,
    "rounds": 500,
    "seed": 0,
    "delays": "tiers:mild",
}
SETTINGS: list[dict[str, Any]] = [
    {"dirichlet": dirichlet, "concurrency": concurrency}
    for dirichlet, concurrency in ((0.5, 20), (0.5, 60), (0.5, 90), (0.1, 20), (0.1, 60))
]
AVERAGES = (0.9, 0.98)


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


def method(kind: str, words: dict[str, Any], sizes: tuple[int, ...], at: dict[str, Any]) -> Any:
    """A variant, or FedBuff."""
    words, cohort, steps, rounds = dict(words), at["buffer"], at["steps"], at["rounds"]
    if kind != "unit":
        falls = words.pop("falls", False)
        return Falling(FedOpt(**words), rounds) if falls else FedOpt(**words)
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


def pooled(source: Source, side: int) -> Source:
    """Smaller images."""
    if side == 1:
        return source
    train, test = (
        part._replace(inputs=avg_pool2d(part.inputs, side).contiguous())
        for part in (source.train, source.test)
    )
    return source._replace(train=train, test=test)


def run(cell: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """One cell: the accuracy of the last model and of its moving averages."""
    begun = time.monotonic()
    at = DEFAULT | cell
    folder = None if given.data_dir is None else given.data_dir / at["data"]
    source = pooled(load(at["data"], folder), at["pool"])
    split = parse_partition(at["partition"] or f"dirichlet:{at['dirichlet']}")
    parts = split.split(source.labels, at["clients"], at["seed"], source.groups)
    population = Population(source.train, parts, Steps(at["steps"], at["batch"])).to(given.device)
    shape = tuple(source.train.inputs.shape[1:])
    module = models.build(at["model"], shape, source.classes, at["seed"]).to(given.device)
    problem, test = Problem(module, losses), source.test.to(given.device)
    sizes = tuple(parameter.numel() for parameter in module.parameters())
    way = method(cell["method"], cell["words"], sizes, at)
    engine = Vectorised(problem, population, parse_delay(at["delays"]), how=HOWS[given.how])
    dispatch = Asynchronous(at["concurrency"], eager=False)
    averages: dict[float, Tensor] = {}
    record: dict[str, Any] = {"device": given.device, "failure": None}
    try:
        for shot in train(
            way, engine, dispatch=dispatch, buffer=at["buffer"], rounds=at["rounds"], seed=at["seed"]
        ):
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
    while time.time() < until:
        try:
            cell = cells.get_nowait()
        except queue.Empty:
            return
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
        {"method": kind, "words": words} | setting
        for kind, words, *settings in json.loads(GRID.read_text())
        for setting in (settings[0] if settings else SETTINGS)
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
    known = {"method", "words", "dirichlet", "concurrency", *DEFAULT}
    return json.dumps({key: value for key, value in cell.items() if key in known}, sort_keys=True)


if __name__ == "__main__":
    main()
