"""Time per server step and resident memory against the number of clients, 10^4 to 10^7.

    python benchmarks/population_scale.py [--steps 20] [--method fedbuff|adamasfl] [--quick]

FedBuff with 10^4 tasks in flight, a buffer of 10^3 and a logistic model; clients are computed when
they are asked for (`Drawn`: 20 to 60 examples of a shared data set each). All populations run in one
process and take turns, so that a busy machine slows them alike; a time is the least of the turns,
in processor seconds of one thread. Memory is measured for each population in a process of its own:
what the whole run adds, at its peak, to a process that already holds torch, the model and the data.
With `adamasfl` clients keep a vector each between visits, which takes room for every client seen.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from offbeat import (
    AdaMasFL,
    Asynchronous,
    Examples,
    Population,
    Problem,
    Setting,
    Snapshot,
    Steps,
    Vectorised,
    build,
    train,
)
from offbeat.core import AnyAlgorithm
from offbeat.data.partition import LazyRandom
from offbeat.nn import models

CONCURRENCY, BUFFER = 10_000, 1_000
EXAMPLES, FEATURES, CLASSES, STEPS, SIZE = 100_000, 20, 10, 2, 10
METHODS = ("fedbuff", "adamasfl")
POPULATIONS = (10_000, 20_000, 100_000, 1_000_000, 10_000_000)


def make_data() -> Examples:
    """Points around ten means."""
    torch.manual_seed(0)
    targets = torch.randint(0, CLASSES, (EXAMPLES,))
    return Examples(torch.randn(CLASSES, FEATURES)[targets] + torch.randn(EXAMPLES, FEATURES), targets)


def begin(given: argparse.Namespace, clients: int, data: Examples) -> Iterator[Snapshot]:
    """A run; its first snapshot comes before the first step."""
    losses = partial(cross_entropy, reduction="none")
    problem = Problem(models.build("logistic", (FEATURES,), CLASSES, seed=0), losses)
    population = Population(data, LazyRandom(clients, 20, 60, EXAMPLES), Steps(STEPS, SIZE))
    method: AnyAlgorithm = build("fedbuff", Setting(given.buffer, STEPS, given.steps + 1), {})
    if given.method == "adamasfl":
        method = AdaMasFL(local_lr=0.01, server_lr=0.1, beta=0.5, lazy=True)
    return train(
        method,
        Vectorised(problem, population),
        dispatch=Asynchronous(given.concurrency),
        buffer=given.buffer,
        rounds=given.steps + 1,
    )


def measure(given: argparse.Namespace) -> dict[int, list[float]]:
    """Processor seconds of every step but the first, which starts all that is to be in flight."""
    data = make_data()
    runs = {clients: begin(given, clients, data) for clients in given.populations}
    for shots in runs.values():
        next(shots)
        next(shots)
    seconds: dict[int, list[float]] = {clients: [] for clients in runs}
    for _ in range(given.steps):
        for clients, shots in runs.items():
            begun = time.process_time()
            next(shots)
            seconds[clients].append(time.process_time() - begun)
    return seconds


def resident(given: argparse.Namespace, clients: int) -> float:
    """MiB that a run adds to a process with torch, the model and the data, at its peak."""
    program = [
        sys.executable,
        __file__,
        f"--alone={clients}",
        f"--steps={given.steps}",
        f"--method={given.method}",
    ]
    program += [f"--concurrency={given.concurrency}", f"--buffer={given.buffer}"]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    return float(done.stdout)


def alone(given: argparse.Namespace) -> float:
    """The same, in this process."""
    data = make_data()
    small = argparse.Namespace(**vars(given) | {"concurrency": 10, "buffer": 10, "steps": 1})
    for _ in begin(small, 10, data):  # what torch itself takes as it first computes
        pass
    before = _peak()
    for _ in begin(given, given.alone, data):
        pass
    return _peak() - before


def _peak() -> float:
    """MiB; where there is /proc, what this program had, and not what its parent had before it."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024
    unit = 1 if sys.platform == "darwin" else 1024  # bytes in one unit of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def parse() -> argparse.Namespace:
    """What the caller wants."""
    parser = argparse.ArgumentParser(description="Time per server step and memory against the population.")
    parser.add_argument("--steps", type=int, default=20, help="server steps that are timed")
    parser.add_argument("--method", choices=METHODS, default="fedbuff")
    parser.add_argument("--quick", action="store_true", help="a few steps of small populations")
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY, help=argparse.SUPPRESS)
    parser.add_argument("--buffer", type=int, default=BUFFER, help=argparse.SUPPRESS)
    parser.add_argument("--alone", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.populations = POPULATIONS
    if given.quick:
        given.steps, given.concurrency, given.buffer, given.populations = 2, 100, 10, (100, 10_000)
    return given


def main() -> None:
    """Print a table and, on the last line, the same as JSON."""
    given = parse()
    torch.set_num_threads(1)
    if given.alone:
        print(alone(given))
        return
    seconds = measure(given)
    least = min(seconds[given.populations[0]])
    rows = []
    print(f"{given.method}, {given.concurrency:,} in flight, buffer {given.buffer:,}, one thread")
    print(f"{'clients':>12}{'ms a step':>12}{'ratio':>8}{'us a task':>12}{'MiB added':>12}", flush=True)
    for clients, times in seconds.items():
        row = {
            "clients": clients,
            "ms": 1000 * min(times),
            "median_ms": 1000 * sorted(times)[len(times) // 2],
            "ratio": min(times) / least,
            "mib": resident(given, clients),
        }
        each = 1000 * row["ms"] / given.buffer
        line = f"{clients:>12,}{row['ms']:>12.1f}{row['ratio']:>8.2f}{each:>12.1f}{row['mib']:>12.0f}"
        print(line, flush=True)
        rows.append(row)
    setting = {"method": given.method, "concurrency": given.concurrency, "buffer": given.buffer}
    print(json.dumps(setting | {"rows": rows, "ratio": rows[-1]["ratio"], "mib": rows[-1]["mib"]}))


if __name__ == "__main__":
    main()
