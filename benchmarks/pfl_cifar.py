"""pfl-research's own CIFAR-10 benchmark, in offbeat and in its peers: time per server step, and accuracy.

    python benchmarks/pfl_cifar.py [--data-dir DIR] [--device cuda] [--offbeat-engine NAME]
        [--execution NAME] [--peers eager pfl flower] [--pfl-python PATH] [--pfl-processes 1 2]
        [--flower-python PATH] [--precision tf32]

All train the same module from the same weights on the same clients (peers/workload.py), FedAvg with
a cohort of 50. Each peer runs in a Python of its own, which has `pfl` (0.6) or `flwr[simulation]`
(1.41) installed; `eager` is a plain PyTorch loop without a framework, in this process. Offbeat and
one peer at a time take turns of a few steps, so that what else the machine does falls on both; a
ratio is that of the fastest turns, and beside it stands that of processor time, all processes
together, which a busy machine bends less. Nobody evaluates while it is timed, and on a GPU all round
products alike. Offbeat's run is declared to have 1,500 server steps, as pfl's benchmark has, by which it
decides whether to compile. Without CIFAR-10 in DIR, images are patterns with noise, ten kinds of them:
time does not depend on what they show.

FLSim was not compared: version 0.1.0 installs beside a current torch, but importing its asynchronous
trainer fails on Python 3.11 (dataclasses with mutable defaults).
"""

import argparse
import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from offbeat import Epochs, Examples, Population, Problem, Sequential, Synchronous, Vectorised, load, train
from offbeat.algorithms import Setting, build
from offbeat.engines.engine import Engine
from offbeat.engines.execution import EXECUTIONS
from offbeat.engines.process_pool import Workers
from offbeat.nn.problem import Precision

PROGRAMS = Path(__file__).parent / "peers"
sys.path.insert(0, str(PROGRAMS))

import workload  # noqa: E402
from eager import Eager  # noqa: E402
from peer import Peer  # noqa: E402
from processor import spent  # noqa: E402

COLUMNS = ("ms", "offbeat_ms", "ratio", "processor_ratio", "accuracy")
PEERS = ("eager", "pfl", "flower")
ROUNDS = 1500  # of pfl's own benchmark
ENGINES = ("sequential", "vectorised", "workers")


class Rival(Protocol):
    """Somebody who does server steps."""

    def turn(self, steps: int) -> float:
        """Do so many; the seconds it took."""
        ...

    def accuracy(self) -> float:
        """Of the model after the steps that were agreed on."""
        ...

    @property
    def processes(self) -> list[int]:
        """That do the work, or whose descendants do."""
        ...


class Offbeat:
    """A run of offbeat, from the beginning."""

    processes: ClassVar = [os.getpid()]

    def __init__(
        self,
        task: workload.Workload,
        engine: str,
        device: str,
        workers: int,
        most: int,
        precision: str,
        execution: str = "auto",
    ) -> None:
        shape = task.shape
        data = Examples(torch.from_numpy(task.inputs), torch.from_numpy(task.targets)).to(device)
        every = np.arange(shape.clients * shape.images).reshape(shape.clients, shape.images)
        population = Population(data, list(every), Epochs(1, workload.BATCH))
        exact = precision == "float32"
        self._problem = Problem(
            task.module().to(device), _losses, precision=Precision.FLOAT32 if exact else Precision.AUTO
        )
        setting = Setting(shape.cohort, shape.images // workload.BATCH, most)
        method = build("fedavg", setting, {"local_lr": workload.LOCAL_LR, "server_lr": workload.SERVER_LR})
        place = make_engine(engine, self._problem, population, workers, execution)
        self._task = task
        self._shots = train(
            method, place, dispatch=Synchronous(shape.cohort), buffer=shape.cohort, rounds=most
        )
        self._shot = next(self._shots)

    def turn(self, steps: int) -> float:
        begun = time.perf_counter()
        for _ in range(steps):
            self._shot = next(self._shots)
        if self._problem.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    def accuracy(self) -> float:
        return self._task.accuracy(self._problem.module(self._shot.x))

    def execution(self) -> dict[str, Any] | None:
        """What it chose, where it had a choice."""
        return self._shot.execution()

    def close(self) -> None:
        """Let go of workers."""
        self._shots.close()  # type: ignore[attr-defined]


def make_engine(name: str, problem: Problem, population: Population, workers: int, execution: str) -> Engine:
    """By its name."""
    match name:
        case "sequential":
            return Sequential(problem, population)
        case "vectorised":
            return Vectorised(problem, population, execution=EXECUTIONS[execution])
        case _:
            return Workers(problem, population, workers=workers)


def pfl(given: argparse.Namespace, processes: int, folder: Path) -> Peer:
    """Pfl with so many processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    shared = {
        "OMP_NUM_THREADS": str(max(1, given.cores // processes)),
        "PFL_PYTORCH_DEVICE": given.device,
        "PRECISION": given.precision,
        "PROCESSES": str(processes),
    }
    environments = [shared]
    if processes > 1:
        shared["PFL_WORKER_ADDRESSES"] = ",".join([address] * processes)
        if sys.platform == "linux":
            shared["GLOO_SOCKET_IFNAME"] = "lo"  # else Gloo looks up this machine's name
        environments = [shared | {"PFL_WORKER_RANK": str(rank)} for rank in range(processes)]
    program = [given.pfl_python, str(PROGRAMS / "run_pfl.py"), str(folder), str(given.steps), given.device]
    return Peer(program, environments, folder / f"pfl-{processes}.log")


def flower(given: argparse.Namespace, folder: Path) -> Peer:
    """Flower's simulation with actors of one core each."""
    environment = {
        "FLWR_HOME": str(folder),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(PROGRAMS),  # for the actors
    }
    arguments = [str(folder), str(given.steps), str(given.cores)]
    program = [given.flower_python, str(PROGRAMS / "run_flower.py"), *arguments]
    return Peer(program, [environment], folder / "flower.log")


def make_workload(given: argparse.Namespace) -> tuple[workload.Workload, str]:
    """Data, initial weights, and where the data come from."""
    shape = workload.Shape(dropout=given.dropout)
    if given.quick:
        shape = workload.Shape(clients=10, images=10, cohort=2, dropout=given.dropout)
    torch.manual_seed(0)
    weights = [weight.detach().numpy() for weight in workload.build(shape.dropout).parameters()]
    count = shape.clients * shape.images
    rng = np.random.default_rng(0)
    if given.data_dir:
        source = load("cifar10", given.data_dir)
        order = rng.permutation(source.train.total)[:count]
        arrays = [source.train.inputs[order], source.train.targets[order], *source.test]
        flat = [array.movedim(1, -1).contiguous() if array.ndim > 1 else array for array in arrays]
        return workload.Workload(shape, *(array.numpy() for array in flat), weights), "CIFAR-10"
    kinds = np.kron(rng.standard_normal((10, 8, 8, 3)), np.ones((1, 4, 4, 1)))
    arrays = []
    for total in (count, min(count, 10_000)):
        targets = rng.integers(0, 10, total)
        noise = rng.standard_normal((total, 32, 32, 3), np.float32)
        arrays += [(0.25 * kinds[targets]).astype(np.float32) + noise, targets]
    return workload.Workload(shape, *arrays, weights), "patterns with noise"


class Cost(NamedTuple):
    """Of one server step."""

    seconds: float
    processor: float  # seconds, of all processes together; NaN where the system does not tell


def turn(who: Rival, steps: int, other: Rival) -> Cost:
    """One turn, while the other waits."""
    before = spent(who.processes, other.processes)
    seconds = who.turn(steps)
    return Cost(seconds / steps, (spent(who.processes, other.processes) - before) / steps)


def compare(offbeat: Offbeat, rival: Rival, given: argparse.Namespace, scored: bool) -> dict[str, float]:
    """Turn by turn; offbeat is scored in the first comparison, after as many steps as the rival."""
    mine, theirs = [], []
    for _ in range(given.steps // given.turn):
        mine.append(turn(offbeat, given.turn, rival))
        theirs.append(turn(rival, given.turn, offbeat))
    own, other = (Cost(*map(min, zip(*costs, strict=True))) for costs in (mine, theirs))
    facts = {
        "ms": 1000 * other.seconds,
        "offbeat_ms": 1000 * own.seconds,
        "ratio": other.seconds / own.seconds,
        "processor_ratio": other.processor / max(own.processor, 0.01),  # 0.01: what the system counts in
        "accuracy": rival.accuracy(),
    }
    return facts | ({"offbeat_accuracy": offbeat.accuracy()} if scored else {})


def rivals(given: argparse.Namespace, task: workload.Workload, folder: Path) -> Iterator[tuple[str, Rival]]:
    """One after another; each ends before the next begins."""
    if "eager" in given.peers:
        yield "eager", Eager(task, given.device, given.precision)
    for count in given.pfl_processes if "pfl" in given.peers else ():
        with contextlib.closing(pfl(given, count, folder)) as peer:
            yield f"pfl {count}", peer
    if "flower" in given.peers:
        with contextlib.closing(flower(given, folder)) as peer:
            yield "flower", peer


def _losses(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="none")


def parse() -> argparse.Namespace:
    """What the caller wants."""
    parser = argparse.ArgumentParser(description="The CIFAR-10 benchmark of pfl-research.")
    parser.add_argument("--data-dir", type=Path, help="a folder with CIFAR-10")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=20, help="server steps of each peer")
    parser.add_argument("--turn", type=int, default=2, help="of them in a row")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="threads or processes to use")
    parser.add_argument("--offbeat-engine", choices=ENGINES, default="sequential")
    parser.add_argument("--execution", choices=EXECUTIONS, default="auto", help="of the vectorised engine")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["eager"])
    parser.add_argument("--pfl-python", default=sys.executable)
    parser.add_argument("--pfl-processes", type=int, nargs="+", default=[1])
    parser.add_argument("--flower-python", default=sys.executable)
    parser.add_argument("--precision", choices=("tf32", "float32"), default="tf32", help="on a GPU")
    parser.add_argument("--no-dropout", dest="dropout", action="store_false", help="leave the module's out")
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it runs")
    given = parser.parse_args()
    if given.quick:
        given.steps, given.turn = 2, 1
    if given.steps % given.turn:
        parser.error("--steps is not a multiple of --turn")
    return given


def main() -> None:
    """Print a table and, on the last line, the same as JSON."""
    given = parse()
    task, origin = make_workload(given)
    torch.set_num_threads(1 if given.offbeat_engine == "workers" else given.cores)
    print(f"{origin}, {given.device}, {given.cores} cores, dropout {given.dropout}, {task.shape}")
    heads = ("ms a step", "offbeat ms", "ratio", "processor", "accuracy")
    print(" " * 10 + "".join(f"{head:>12}" for head in heads), flush=True)
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="offbeat-") as name:
        folder = Path(name)
        task.save(folder)
        most = max(ROUNDS, given.steps * (len(given.pfl_processes) + len(PEERS)))
        offbeat = Offbeat(
            task,
            given.offbeat_engine,
            given.device,
            given.cores,
            most,
            given.precision,
            given.execution,
        )
        with contextlib.closing(offbeat):
            for rival, peer in rivals(given, task, folder):
                facts = found[rival] = compare(offbeat, peer, given, scored=not found)
                print(f"{rival:<10}" + "".join(f"{facts[name]:>12.4g}" for name in COLUMNS), flush=True)
    accuracy = next((facts["offbeat_accuracy"] for facts in found.values()), float("nan"))
    print(f"offbeat ({given.offbeat_engine}) after as many steps: accuracy {accuracy:.4f}")
    own = [facts["ratio"] for rival, facts in found.items() if rival.startswith("pfl")]
    summary = {
        "data": origin,
        "device": given.device,
        "cores": given.cores,
        "engine": given.offbeat_engine,
        "dropout": given.dropout,
        "steps": given.steps,
        "accuracy": accuracy,
        "precision": given.precision,
        "asked": given.execution,
        "execution": offbeat.execution(),
        "peers": found,
        "ratio_pfl_best": min(own, default=None),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
