"""How fast FedBuff runs on one GPU: against a plain eager loop, and against the limit of the device.

    python benchmarks/gpu_speed.py [--quick] [--device cuda] [--precision torch|tf32|bfloat16] [--json FILE]

For a CNN of 215,370 parameters on 28 x 28 pixels and for ResNet-18 with GroupNorm on 32 x 32, batch 50:

- *eager*: a plain PyTorch loop, client after client, one optimiser each;
- *limit*: one shared-weights batch as large as all clients' together, same precision, which no
  federated run can reach since its clients have weights of their own;
- *offbeat*: asynchronous FedBuff through `train`, everything included, by each way to compute;
- *overhead*: the share of the time of `train` that is not client gradients: 1 - (the same local work
  through the engine's work alone) / (the run).

Ratios are taken within one run, and the data are random: only speed is measured here.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from offbeat import Asynchronous, Examples, Exponential, FedOpt, Population, Problem, Steps, train
from offbeat.core import Task, Visit
from offbeat.engines.execution import EXECUTIONS, Execution
from offbeat.engines.local import TaskStart
from offbeat.engines.simulation import Vectorised
from offbeat.nn import models
from offbeat.nn.problem import Precision

LR = 0.01


def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """One number per example."""
    return cross_entropy(outputs, targets, reduction="none")


class Case:
    """One model at one size."""

    def __init__(
        self, name: str, device: torch.device, precision: Precision, given: argparse.Namespace
    ) -> None:
        self.name, self.device, self.precision = name, device, precision
        self.shape = (1, 28, 28) if name == "cnn" else (3, 32, 32)
        self.concurrency, self.buffer = (64, 32) if name == "cnn" else (32, 16)
        self.steps = 10 if name == "cnn" else 5
        self.batch = 50
        self.rounds = 40 if name == "cnn" else 6
        if given.quick:
            self.concurrency, self.buffer, self.steps, self.batch, self.rounds = 4, 2, 2, 4, 2
        generator = torch.Generator().manual_seed(0)
        examples = 200 if given.quick else 5000
        data = Examples(
            torch.randn(examples, *self.shape, generator=generator),
            torch.randint(0, 10, (examples,), generator=generator),
        )
        clients = 2 * self.concurrency
        parts = np.array_split(np.arange(examples), clients)
        self.population = Population(data, parts, Steps(self.steps, self.batch)).to(device)

    def module(self) -> nn.Module:
        """With the same weights each time."""
        name = "cnn" if self.name == "cnn" else "resnet18"
        return models.build(name, self.shape, 10, seed=0).to(self.device)

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
                optimiser = torch.optim.SGD(module.parameters(), LR)
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
        optimiser = torch.optim.SGD(module.parameters(), LR)

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
        if self.precision is not Precision.TORCH:
            matmul.allow_tf32 = cudnn.allow_tf32 = rounded
        # the library's best, repeatable or not
        with cudnn.flags(enabled=True, benchmark=True, allow_tf32=cudnn.allow_tf32):
            for _ in range(tries + 1):
                began = self.now()
                work()
                seconds.append(self.now() - began)
        matmul.allow_tf32, cudnn.allow_tf32 = before
        return min(seconds[1:])

    def offbeat(self, how: Execution) -> tuple[float, float, str]:
        """Local steps per second of a whole run, of its local work alone, and what computed it."""
        problem = self.problem()
        engine = Vectorised(problem, self.population, Exponential(1.0), execution=how)
        algorithm = FedOpt(LR, 1.0)
        shots = train(
            algorithm,
            engine,
            dispatch=Asynchronous(self.concurrency),
            buffer=self.buffer,
            rounds=2 * self.rounds,
        )
        for shot in shots:
            if shot.version == self.rounds:
                began = self.now()
        run = self.rounds * self.buffer * self.steps / (self.now() - began)
        work = how.executor(problem, self.population)
        x, statistics = problem.initial()
        count = self.concurrency
        starts = [
            TaskStart(
                algorithm.broadcast(algorithm.init(x), 0),
                statistics,
                (),
                Visit(torch.tensor(0), torch.tensor(0)),
            )
            for _ in range(count)
        ]
        tasks = [Task(client, 0, 0) for client in range(count)]
        for _ in range(3):
            work(algorithm, tasks, starts, 0)

        def gradients() -> None:
            work(algorithm, tasks, starts, 0)

        alone = count * self.steps / self.best(gradients)
        chosen = getattr(work, "chosen", None) or type(how).__name__.lower()
        work.close()
        return run, alone, chosen

    def now(self) -> float:
        """Seconds, when all that was queued is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def measure(case: Case, hows: list[str]) -> dict[str, object]:
    """One model, all ways."""
    eager, limit = case.eager(), case.limit()
    found: dict[str, object] = {
        "model": case.name,
        "precision": case.precision.name.lower(),
        "clients at once": case.concurrency,
        "buffer": case.buffer,
        "eager": eager,
        "limit": limit,
    }
    print(
        f"\n{case.name}, batch {case.batch}, {case.steps} local steps, buffer {case.buffer}, "
        f"concurrency {case.concurrency}, {case.precision.name.lower()}"
    )
    print(f"{'':28}{'steps/s':>10}{'of eager':>10}{'of limit':>10}{'overhead':>10}")
    print(f"{'eager loop':28}{eager:10.0f}{1:10.2f}{eager / limit:10.2f}")
    print(f"{'limit':28}{limit:10.0f}{limit / eager:10.2f}{1:10.2f}")
    for name in hows:
        run, alone, chosen = case.offbeat(EXECUTIONS[name])
        overhead = 1 - run / alone
        found[name] = {
            "steps/s": run,
            "local work alone": alone,
            "of eager": run / eager,
            "of limit": run / limit,
            "work of limit": alone / limit,
            "overhead": overhead,
            "chosen": chosen,
        }
        label = f"offbeat, {name}" + (f" ({chosen})" if name == "auto" else "")
        print(
            f"{label:28}{run:10.0f}{run / eager:10.2f}{run / limit:10.2f}{overhead:10.1%}"
            f"   local work alone {alone:.0f} ({alone / limit:.0%} of the limit)",
            flush=True,
        )
    return found


def main() -> None:
    """Print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default="cnn,resnet")
    parser.add_argument("--precision", default="torch")
    parser.add_argument("--how", default="mapped,streamed,compiled,auto")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it runs")
    parser.add_argument("--json", default=None, help="a file for the figures")
    given = parser.parse_args()
    device = torch.device(given.device)
    hows = [how for how in given.how.split(",") if device.type == "cuda" or how in ("mapped", "auto")]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found = [
        measure(Case(model, device, Precision[given.precision.upper()], given), hows)
        for model in given.models.split(",")
    ]
    report = {"device": name, "torch": torch.__version__, "cases": found}
    if given.json:
        Path(given.json).write_text(json.dumps(report, indent=1))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
