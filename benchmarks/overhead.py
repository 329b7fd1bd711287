"""How much of a run is not client gradients: the CNN with 215,370 weights on 28 x 28 images, on the CPU.

The limit is a plain PyTorch loop, module(inputs), loss.backward(), over minibatches of the same
shape, as many as a server step has. Runs and limit take turns, so that what else the machine does
falls on both; the share is 1 - limit / run, from the fastest turn of each.

    python benchmarks/overhead.py [--data-dir DIR] [--turns 12]

Without Fashion-MNIST in DIR, images are drawn at random: time does not depend on what they show.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from offbeat import (
    Asynchronous,
    Dirichlet,
    Examples,
    InputError,
    Population,
    Problem,
    Sequential,
    Setting,
    Snapshot,
    Steps,
    build,
    evaluate,
    load,
    train,
)
from offbeat.nn import models

CLIENTS, BUFFER, CONCURRENCY, STEPS, SIZE = 100, 10, 20, 10, 50
METHODS = ("cadence", "fedbuff", "fadas-da", "adamasfl")


def images(folder: Path | None) -> tuple[Examples, Examples, np.ndarray, str]:
    """Training and test examples, labels, and where they come from."""
    if folder:
        try:
            source = load("fashion-mnist", folder)
        except InputError as error:
            raise SystemExit(f"overhead: {error}") from None
        return source.train, source.test, source.labels, "Fashion-MNIST"
    torch.manual_seed(0)
    train_set = Examples(torch.randn(60_000, 1, 28, 28), torch.randint(0, 10, (60_000,)))
    test = Examples(torch.randn(10_000, 1, 28, 28), torch.randint(0, 10, (10_000,)))
    return train_set, test, train_set.targets.numpy(), "random images"


def seconds(work: Callable[[], object]) -> float:
    """How long it takes, in processor time: with one thread that is what an idle machine would need."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def main() -> None:
    """Measure and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--turns", type=int, default=12)
    given = parser.parse_args()
    torch.set_num_threads(1)
    data, test, labels, origin = images(given.data_dir)
    module = models.build("cnn", (1, 28, 28), 10, seed=0)
    problem = Problem(module, cross_entropy)
    population = Population(data, Dirichlet(0.5).split(labels, CLIENTS, seed=0), Steps(STEPS, SIZE))
    batches = [(data.inputs[rows], data.targets[rows]) for rows in population.indices(0, 0, 0)]

    def limit() -> None:
        """As many gradients as a server step has."""
        for _ in range(BUFFER):
            for inputs, targets in batches:
                module.zero_grad()
                cross_entropy(module(inputs), targets).backward()

    def begin(name: str) -> Iterator[Snapshot]:
        """A run after its start, so that each turn is one server step."""
        algorithm = build(name, Setting(BUFFER, STEPS, 500), {})
        engine = Sequential(problem, population)
        shots = train(
            algorithm, engine, dispatch=Asynchronous(CONCURRENCY), buffer=BUFFER, rounds=given.turns
        )
        next(shots)
        return shots

    runs = {name: begin(name) for name in METHODS}
    limit()
    floor = []
    steps: dict[str, list[float]] = {name: [] for name in METHODS}
    for _ in range(given.turns):
        floor.append(seconds(limit))
        for name, shots in runs.items():
            steps[name].append(seconds(lambda shots=shots: next(shots)))
    scoring = [seconds(lambda: evaluate(problem, problem.initial()[0], test)) for _ in range(3)]
    count = BUFFER * STEPS
    least = min(floor)
    shares = {name: 1 - least / min(times) for name, times in steps.items()}
    print(f"{origin}, {problem.size:,} weights, {count} gradients of {SIZE} images a server step, one thread")
    print(f"{'plain PyTorch loop':<22}{1000 * least / count:8.2f} ms a gradient")
    for name, times in steps.items():
        each = f"{name:<22}{1000 * min(times) / count:8.2f} ms a gradient"
        print(f"{each}, {100 * shares[name]:5.1f} % is not gradients")
    relative = min(scoring) / least
    print(f"{'one evaluation':<22}{1000 * min(scoring):8.0f} ms, {relative:.2f} of a server step")
    print(json.dumps({"share_not_gradients": shares, "evaluation_in_server_steps": relative}))


if __name__ == "__main__":
    main()
