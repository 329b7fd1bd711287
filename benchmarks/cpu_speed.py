"""How fast FedBuff runs on a CPU: by each engine, by the one that `auto` chooses, and against the limit.

    python benchmarks/cpu_speed.py [--models mlp,cnn,charformer,resnet18] [--turns 5] [--rounds 2000]

For each model, asynchronous FedBuff through `train` with exponential delays, everything included:

- *sequential*: one client after another, with as many threads as there are cores;
- *vectorised*: many clients at once by `vmap`;
- *workers*: one process with one thread for each core; *workers, mapped*: with `vmap` in each of them;
- *auto*: the engine that a run of `--rounds` server steps is given where the user names none.

*Limit* is one batch with shared weights that is as large as those of all clients together. All are begun
first and then take turns, so that what else the machine does falls on all; figures are of the fastest
turns. *First* is the time from the start to the first server step, with the start of workers. The data are
random: only speed is measured here.
"""

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from offbeat import (
    Asynchronous,
    Examples,
    Exponential,
    FedOpt,
    Population,
    Problem,
    Sequential,
    Snapshot,
    Steps,
    Vectorised,
    train,
)
from offbeat.engines.engine import Engine
from offbeat.engines.execution import Vmap
from offbeat.engines.process_pool import Workers, available_cores
from offbeat.nn import models
from offbeat.nn.problem import cross_entropies
from offbeat.training.build import choose_engine

LR = 0.01
SYMBOLS = 64  # of models that read tokens


class Size(NamedTuple):
    """A workload."""

    shape: tuple[int, ...]  # of one example; of a model that reads tokens, its length
    clients: int  # at work at once; twice as many as a buffer holds
    steps: int  # local
    batch: int


SIZES = {
    "logistic": Size((1, 28, 28), 40, 10, 20),
    "mlp": Size((1, 28, 28), 40, 10, 20),
    "cnn": Size((1, 28, 28), 20, 10, 20),
    "charformer": Size((80,), 20, 5, 10),
    "resnet18": Size((3, 32, 32), 4, 1, 10),
}


class Case:
    """One model at one size."""

    def __init__(self, name: str, quick: bool, rounds: int) -> None:
        size = SIZES[name]
        self.size = size._replace(clients=4, steps=2, batch=4) if quick else size
        self.buffer = self.size.clients // 2
        self.rounds = rounds
        generator = torch.Generator().manual_seed(0)
        classes = SYMBOLS if name == "charformer" else 10
        shape = (40 * self.size.clients, *self.size.shape)
        inputs = torch.randn(shape, generator=generator)
        if len(self.size.shape) == 1:
            inputs = torch.randint(0, SYMBOLS, shape, generator=generator)
        self.data = Examples(inputs, torch.randint(0, classes, shape[:1], generator=generator))
        parts = np.array_split(np.arange(shape[0]), 2 * self.size.clients)
        self.population = Population(self.data, parts, Steps(self.size.steps, self.size.batch))
        self.module = models.build(name, self.size.shape, classes, seed=0)
        self.problem = Problem(self.module, cross_entropies)

    def engines(self) -> dict[str, Callable[[], Engine]]:
        """By name; `auto` is one of them."""
        delays = Exponential(1.0)
        return {
            "sequential": lambda: Sequential(self.problem, self.population, delays),
            "vectorised": lambda: Vectorised(self.problem, self.population, delays),
            "workers": lambda: Workers(self.problem, self.population, delays),
            "workers, mapped": lambda: Workers(self.problem, self.population, delays, execution=Vmap()),
        }

    def auto(self) -> str:
        """What a run is given that names no engine."""
        gradients = self.rounds * self.buffer * self.size.steps
        return choose_engine(self.problem, self.population, gradients, available_cores()).name

    def begin(self, engine: Engine) -> tuple[Iterator[Snapshot], float]:
        """A run that has taken its first server step, and the seconds until then."""
        begun = time.perf_counter()
        shots = train(
            FedOpt(LR, 1.0),
            engine,
            dispatch=Asynchronous(self.size.clients),
            buffer=self.buffer,
            rounds=self.rounds,
        )
        next(shots)
        next(shots)
        return shots, time.perf_counter() - begun

    def limit(self) -> None:
        """As many local steps as a server step has, if all clients shared one model."""
        inputs, targets = self.data
        rows = torch.arange(self.buffer * self.size.batch) % len(targets)
        optimiser = torch.optim.SGD(self.module.parameters(), LR)
        for _ in range(self.size.steps):
            optimiser.zero_grad()
            cross_entropy(self.module(inputs[rows]), targets[rows]).backward()
            optimiser.step()


def measure(name: str, given: argparse.Namespace) -> dict[str, object]:
    """One model by every engine, turn by turn."""
    torch.set_num_threads(available_cores())
    case = Case(name, given.quick, given.rounds)
    nn.Module.train(case.module)
    first: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        runs = {}
        for engine, make in case.engines().items():
            shots, first[engine] = case.begin(make())
            stack.callback(shots.close)  # type: ignore[attr-defined]
            runs[engine] = shots
        turns: dict[str, Callable[[], object]] = {
            engine: lambda shots=shots: next(shots) for engine, shots in runs.items()
        }
        turns["limit"] = case.limit
        seconds: dict[str, list[float]] = {way: [] for way in turns}
        for _ in range(given.turns):
            for way, turn in turns.items():
                begun = time.perf_counter()
                turn()
                seconds[way].append(time.perf_counter() - begun)
    work = case.buffer * case.size.steps
    rates = {way: work / min(each) for way, each in seconds.items()}
    limit, chosen = rates.pop("limit"), case.auto()
    best = max(rates, key=rates.__getitem__)
    print(f"\n{name}, {case.problem.size:,} weights, {case.size}, {available_cores()} cores")
    print(f"{'':24}{'steps/s':>10}{'of best':>10}{'of limit':>10}{'first s':>10}")
    for way, rate in rates.items():
        mark = " *" if way == chosen else ""
        print(
            f"{way + mark:24}{rate:10.0f}{rate / rates[best]:10.2f}{rate / limit:10.2f}{first[way]:10.2f}",
            flush=True,
        )
    return {
        "model": name,
        "weights": case.problem.size,
        "rates": rates,
        "limit": limit,
        "first": first,
        "auto": chosen,
        "auto of best": rates[chosen] / rates[best],
    }


def main() -> None:
    """Print tables, with a star at what `auto` chooses, and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default="mlp,cnn,charformer,resnet18")
    parser.add_argument("--turns", type=int, default=5, help="server steps of each way that are timed")
    parser.add_argument("--rounds", type=int, default=2000, help="server steps that a run is said to have")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it runs")
    given = parser.parse_args()
    print(json.dumps([measure(name, given) for name in given.models.split(",")]))


if __name__ == "__main__":
    main()
