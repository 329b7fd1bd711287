"""How fast FedBuff runs on one GPU: against a plain eager loop, and against the limit of the device.

    python benchmarks/gpu_speed.py [--models cnn,resnet18,...] [--precision auto|float32|tf32|bfloat16]
        [--execution auto,mapped,...] [--rounds 2000] [--quick] [--json FILE]

For each model, with the library's autotuner on for the first two:

- *eager*: a plain PyTorch loop, client after client, one optimiser each;
- *limit*: one shared-weights batch as large as all clients' together, same precision, which no
  federated run can be expected to reach since its clients have weights of their own;
- *offbeat*: asynchronous FedBuff through `train` with exponential delays, everything included, by each
  execution. The run is declared to have `--rounds` server steps, by which `auto` decides whether compiling
  pays, and is left once its speed is known; *first* is the time to its first server step in seconds, with
  what the execution measures, records or compiles for it.

Ratios are taken within one run, and the data are random: only speed is measured here.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from offbeat import Asynchronous, Examples, Exponential, FedOpt, Population, Problem, Steps, train
from offbeat.engines.execution import EXECUTIONS, Execution
from offbeat.engines.simulation import Vectorised
from offbeat.nn import models
from offbeat.nn.problem import Precision

LR = 0.01


def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """One number per example."""
    return cross_entropy(outputs, targets, reduction="none")


class Size(NamedTuple):
    """A workload."""

    shape: tuple[int, ...]  # of one example; of a model that reads tokens, its length
    clients: int  # at work at once; twice as many as a buffer holds
    steps: int  # local
    batch: int
    rounds: int  # that are timed


SIZES = {
    "mlp": Size((1, 28, 28), 64, 10, 50, 60),
    "cnn": Size((1, 28, 28), 64, 10, 50, 30),
    "resnet18": Size((3, 32, 32), 32, 5, 50, 6),
    "resnet18-bn": Size((3, 32, 32), 32, 5, 50, 6),
    "charformer": Size((80,), 64, 10, 20, 20),
    "bert-tiny": Size((64,), 64, 10, 20, 20),
    "bert-base": Size((64,), 8, 2, 10, 4),
}
SYMBOLS = 64  # of models that read tokens


class Case:
    """One model at one size."""

    def __init__(
        self, name: str, device: torch.device, precision: Precision, given: argparse.Namespace
    ) -> None:
        self.name, self.device, self.precision = name, device, precision
        size = SIZES[name]
        if given.quick:
            size = size._replace(clients=4, steps=2, batch=4, rounds=2)
        self.shape, self.concurrency, self.steps, self.batch, self.rounds = size
        self.buffer = self.concurrency // 2
        self.declared = given.rounds
        generator = torch.Generator().manual_seed(0)
        examples = 200 if given.quick else 5000
        tokens = len(self.shape) == 1
        self.classes = SYMBOLS if name == "charformer" else 10
        data = Examples(
            torch.randint(0, SYMBOLS, (examples, *self.shape), generator=generator)
            if tokens
            else torch.randn(examples, *self.shape, generator=generator),
            torch.randint(0, self.classes, (examples,), generator=generator),
        )
        parts = np.array_split(np.arange(examples), 2 * self.concurrency)
        self.population = Population(data, parts, Steps(self.steps, self.batch)).to(device)

    def module(self) -> nn.Module:
        """With the same weights each time."""
        return models.build(self.name, self.shape, self.classes, seed=0).to(self.device)

    def problem(self) -> Problem:
        """For offbeat."""
        return Problem(self.module(), losses, precision=self.precision)

    def eager(self) -> float:
        """Local steps per second of a plain loop over clients."""
        module, start = self.module(), self.module().state_dict()
        inputs, targets = self.population.data
        places = torch.randint(0, len(targets), (self.steps, self.batch), device=self.device)
        clients = 4

        def work() -> None:
            for _ in range(clients):
                module.load_state_dict(start)
                optimiser = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], LR)
                for rows in places:
                    optimiser.zero_grad()
                    self.loss(module, inputs[rows], targets[rows]).backward()
                    optimiser.step()

        return clients * self.steps / self.best(work)

    def limit(self) -> float:
        """Local steps per second if all clients shared one model."""
        module = self.module()
        inputs, targets = self.population.data
        size = self.buffer * self.batch
        places = torch.randint(0, len(targets), (self.steps, size), device=self.device)
        optimiser = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], LR)

        def work() -> None:
            for rows in places:
                optimiser.zero_grad()
                self.loss(module, inputs[rows], targets[rows]).backward()
                optimiser.step()

        return self.buffer * self.steps / self.best(work)

    def loss(self, module: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """In the precision that is measured."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision is Precision.BFLOAT16):
            outputs = module(inputs)
        return cross_entropy(outputs, targets)

    def best(self, work: Callable[[], None], tries: int = 3) -> float:
        """The least seconds of several tries, after one to warm up."""
        seconds = []
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        rounded = self.precision is not Precision.FLOAT32
        before = matmul.allow_tf32, cudnn.allow_tf32
        matmul.allow_tf32 = cudnn.allow_tf32 = rounded
        # the library's best, repeatable or not
        with cudnn.flags(enabled=True, benchmark=True, allow_tf32=cudnn.allow_tf32):
            for _ in range(tries + 1):
                began = self.now()
                work()
                seconds.append(self.now() - began)
        matmul.allow_tf32, cudnn.allow_tf32 = before
        return min(seconds[1:])

    def offbeat(self, execution: Execution) -> tuple[float, float, str | None]:
        """Local steps per second of a run, seconds to its first server step, and what `auto` chose."""
        engine = Vectorised(self.problem(), self.population, Exponential(1.0), execution=execution)
        began = self.now()
        shots = train(
            FedOpt(LR, 1.0),
            engine,
            dispatch=Asynchronous(self.concurrency),
            buffer=self.buffer,
            rounds=max(self.declared, 2 * self.rounds + 1),
        )
        warm = 3 + self.rounds // 4
        for shot in shots:
            if shot.version == 1:
                first = self.now() - began
            if shot.version == warm:
                begun = self.now()
            if shot.version == warm + self.rounds:
                break
        run = self.rounds * self.buffer * self.steps / (self.now() - begun)
        report = shot.execution()
        shots.close()  # type: ignore[attr-defined]
        return run, first, report["chosen"] if report else None

    def now(self) -> float:
        """Seconds, when all that was queued is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def measure(case: Case, executions: list[str]) -> dict[str, object]:
    """One model, all executions."""
    eager, limit = case.eager(), case.limit()
    size = sum(p.numel() for p in case.module().parameters() if p.requires_grad)
    print(
        f"\n{case.name}, {size:,} weights, batch {case.batch}, {case.steps} local steps, "
        f"buffer {case.buffer}, concurrency {case.concurrency}, {case.precision.name.lower()}"
    )
    print(f"{'':36}{'steps/s':>10}{'of eager':>10}{'of limit':>10}{'first':>10}")
    print(f"{'eager loop':36}{eager:10.0f}{1:10.2f}{eager / limit:10.2f}")
    print(f"{'limit':36}{limit:10.0f}{limit / eager:10.2f}{1:10.2f}", flush=True)
    found: dict[str, object] = {"model": case.name, "weights": size, "eager": eager, "limit": limit}
    for name in executions:
        run, first, chosen = case.offbeat(EXECUTIONS[name])
        found[name] = {"steps/s": run, "of eager": run / eager, "of limit": run / limit, "first": first}
        found[name] |= {"chosen": chosen} if chosen else {}  # type: ignore[operator]
        label = f"offbeat, {name}" + (f" ({chosen})" if chosen else "")
        print(f"{label:36}{run:10.0f}{run / eager:10.2f}{run / limit:10.2f}{first:10.1f}", flush=True)
    return found


def main() -> None:
    """Print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default="mlp,cnn,resnet18,resnet18-bn,charformer,bert-tiny")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--execution", default=",".join(EXECUTIONS))
    parser.add_argument("--rounds", type=int, default=2000, help="server steps that a run is said to have")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it runs")
    parser.add_argument("--json", default=None, help="a file for the figures")
    given = parser.parse_args()
    device = torch.device(given.device)
    given.execution = given.execution.split(",")
    if device.type == "cpu":
        given.execution = [name for name in given.execution if name in ("auto", "mapped")]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found = [
        measure(Case(model, device, Precision[given.precision.upper()], given), given.execution)
        for model in given.models.split(",")
    ]
    report = {"device": name, "torch": torch.__version__, "precision": given.precision, "cases": found}
    if given.json:
        Path(given.json).write_text(json.dumps(report, indent=1))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
