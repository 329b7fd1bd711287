"""A small federation with known gradients: softmax regression, in torch and, for the oracles, in NumPy."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from offbeat import Epochs, Examples, Population, Problem, Steps
from offbeat.core import AnyAlgorithm
from offbeat.engines.engine import Engine
from offbeat.schedule.dispatch import Dispatch
from offbeat.training.loop import Snapshot, train
from oracles.softmax import Softmax

SEED = 6
FEATURES, CLASSES = 5, 3


class World(NamedTuple):
    problem: Problem
    population: Population
    oracle: Softmax


def each(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets, reduction="none")


def make_world(
    clients: int = 8,
    work: Steps | Epochs = Steps(3, 4),
    seed: int = SEED,
    module: nn.Module | None = None,
    weight_decay: float = 0.0,
) -> World:
    """Clients of 3 to 13 examples each, so that epochs are ragged and last minibatches short."""
    rng = np.random.default_rng(11)
    sizes = rng.integers(3, 14, clients)
    inputs = rng.normal(size=(sizes.sum(), FEATURES))
    labels = rng.integers(0, CLASSES, sizes.sum())
    parts = np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])
    if module is None:
        module = nn.Linear(FEATURES, CLASSES).double()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.from_numpy(0.3 * rng.normal(size=parameter.shape)))
    population = Population(Examples(torch.from_numpy(inputs), torch.from_numpy(labels)), list(parts), work)
    oracle = Softmax(
        [inputs] * clients,
        [labels] * clients,
        lambda client, visit: population.indices(client, visit, seed),
        CLASSES,
        own=list(parts),
    )
    return World(Problem(module, each, weight_decay), population, oracle)


def play(
    algorithm: AnyAlgorithm,
    engine: Engine,
    dispatch: Dispatch,
    *,
    buffer: int = 3,
    rounds: int = 8,
    seed: int = SEED,
    **options: Any,
) -> list[Snapshot]:
    """All snapshots of a short run; further options are those of `train`."""
    return list(
        train(algorithm, engine, dispatch=dispatch, buffer=buffer, rounds=rounds, seed=seed, **options)
    )


def trace(shots: list[Snapshot]) -> list[list[tuple[int, int, int]]]:
    """The tasks behind each server step, as an oracle takes them."""
    return [[tuple(task) for task in shot.filled.tasks] for shot in shots[1:] if shot.filled]
