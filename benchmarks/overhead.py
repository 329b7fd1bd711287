"""How much of a run is not client gradients: the CNN with 215,370 weights on 28 x 28 images, on the CPU.

The limit is a plain PyTorch loop, module(inputs), loss.backward(), over minibatches of the same
shape, as many as the clients of the run computed. Run and limit take turns, so that what else the
machine does falls on both; the share is 1 - limit / run, from the fastest turn of each.

    python benchmarks/overhead.py [--data-dir DIR] [--turns 5]

Without Fashion-MNIST in DIR, images are drawn at random: time does not depend on what they show.
"""

import argparse
import json
import time
from collections.abc import Callable
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
    Steps,
    build,
    evaluate,
    load,
    models,
    train,
)

CLIENTS, BUFFER, CONCURRENCY, STEPS, SIZE, ROUNDS = 100, 10, 20, 10, 50, 3
METHODS = ("fedbuff", "fadas-da", "adamasfl")


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
    """How long it takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> None:
    """Measure and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    data, test, labels, origin = images(given.data_dir)
    module = models.build("cnn", (1, 28, 28), 10, seed=0)
    problem = Problem(module, cross_entropy)
    parts = Dirichlet(0.5).split(labels, CLIENTS, seed=0)
    population = Population(data, parts, Steps(STEPS, SIZE))
    gradients = ROUNDS * BUFFER * STEPS
    engine = Sequential(problem, population)
    batches = [(data.inputs[rows], data.targets[rows]) for rows in population.indices(0, 0, 0)]

    def limit() -> None:
        for count in range(gradients):
            inputs, targets = batches[count % STEPS]
            module.zero_grad()
            cross_entropy(module(inputs), targets).backward()

    def run(name: str) -> float:
        """Server steps alone: the full-participation start is gradients too, but more of them."""
        algorithm = build(name, Setting(BUFFER, STEPS, ROUNDS), {})
        shots = train(algorithm, engine, dispatch=Asynchronous(CONCURRENCY), buffer=BUFFER, rounds=ROUNDS)
        next(shots)
        return seconds(lambda: list(shots))

    limit()
    turns = [(seconds(limit), *(run(name) for name in METHODS)) for _ in range(given.turns)]
    floor, *best = (min(column) for column in zip(*turns, strict=True))
    scoring = seconds(lambda: evaluate(problem, problem.initial()[0], test))
    print(f"{origin}, {problem.size:,} weights, {gradients} gradients of {SIZE} images, one thread")
    print(f"{'plain PyTorch loop':<22}{1000 * floor / gradients:8.2f} ms a gradient")
    shares = {}
    for name, took in zip(METHODS, best, strict=True):
        shares[name] = 1 - floor / took
        print(
            f"{name:<22}{1000 * took / gradients:8.2f} ms a gradient, {100 * shares[name]:5.1f} % is not gradients"
        )
    print(
        f"{'one evaluation':<22}{1000 * scoring:8.0f} ms, {scoring / (floor / ROUNDS):.2f} of a server step"
    )
    print(
        json.dumps({"share_not_gradients": shares, "evaluation_in_server_steps": scoring / (floor / ROUNDS)})
    )


if __name__ == "__main__":
    main()
