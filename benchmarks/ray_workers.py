"""Local steps a second by number of workers: the CNN with 215,370 weights on 28 x 28 images, on the CPU.

One after another in one process (with as many threads as cores), on local worker processes, and on Ray
actors. All are begun first and then take turns, a server step each, so that what else the machine does
falls on all; rates are of the fastest turn, and ratios are to one process.

    python benchmarks/ray_workers.py [--workers 1 2] [--turns 10] [--no-ray]

Images are drawn at random: time does not depend on what they show.
"""

import argparse
import json
import time
from collections.abc import Iterator

import torch
from torch.nn.functional import cross_entropy

from offbeat import (
    Asynchronous,
    Dirichlet,
    Examples,
    Population,
    Problem,
    Sequential,
    Setting,
    Snapshot,
    Steps,
    build,
    train,
)
from offbeat.engines.engine import Engine
from offbeat.engines.process_pool import Workers, available_cores
from offbeat.engines.ray_cluster import RayCluster, connect
from offbeat.nn import models

CLIENTS, BUFFER, CONCURRENCY, STEPS, SIZE = 100, 10, 20, 10, 20


def begin(engine: Engine, turns: int) -> Iterator[Snapshot]:
    """A run that has taken its first server step, and with it the start of workers."""
    algorithm = build("fedbuff", Setting(BUFFER, STEPS, turns + 1), {"local_lr": 0.01})
    shots = train(
        algorithm, engine, dispatch=Asynchronous(CONCURRENCY), buffer=BUFFER, rounds=turns + 1, seed=0
    )
    next(shots)
    next(shots)
    return shots


def main() -> None:
    """Measure and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--no-ray", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(available_cores())
    torch.manual_seed(0)
    data = Examples(torch.randn(20_000, 1, 28, 28), torch.randint(0, 10, (20_000,)))
    problem = Problem(models.build("cnn", (1, 28, 28), 10, seed=0), cross_entropy)
    parts = Dirichlet(0.5).split(data.targets.numpy(), CLIENTS, seed=0)
    population = Population(data, parts, Steps(STEPS, SIZE))
    engines: dict[str, Engine] = {
        f"one process, {available_cores()} threads": Sequential(problem, population)
    }
    for count in given.workers:
        engines[f"workers, {count}"] = Workers(problem, population, workers=count)
    if not given.no_ray:
        connect(None, sum(given.workers))
        for count in given.workers:
            engines[f"ray, {count}"] = RayCluster(problem, population, workers=count)
    runs = {name: begin(engine, given.turns) for name, engine in engines.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    last: dict[str, torch.Tensor] = {}
    for _ in range(given.turns):
        for name, shots in runs.items():
            begun = time.perf_counter()
            last[name] = next(shots).x
            times[name].append(time.perf_counter() - begun)
    for shots in runs.values():
        shots.close()  # type: ignore[attr-defined]
    rates = {name: BUFFER * STEPS / min(each) for name, each in times.items()}
    base, first = next(iter(rates.values())), next(iter(last.values()))
    print(f"{problem.size:,} weights, {BUFFER} tasks of {STEPS} steps of {SIZE} images a server step")
    for name, rate in rates.items():
        apart = float((last[name] - first).abs().max())
        print(f"{name:<26}{rate:8.1f} local steps/s {rate / base:6.2f}x   models differ by {apart:.1e}")
    ratios = {name: rate / base for name, rate in rates.items()}
    print(json.dumps({"local_steps_per_second": rates, "ratio": ratios}))


if __name__ == "__main__":
    main()
