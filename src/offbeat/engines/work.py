"""The local work of several tasks, and the plain way to do it: one by one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from offbeat import draws, trees
from offbeat.core import AnyAlgorithm, Batch, Batches, Repeats, Task, Visit, wants_whole
from offbeat.errors import InputError
from offbeat.gradient import TaskGradient
from offbeat.population.population import Population
from offbeat.problem import Problem, Statistics
from offbeat.trees import Tree


class Start(NamedTuple):
    """What one task starts from."""

    message: Tree
    statistics: Statistics
    memory: Tree
    visit: Visit  # on the CPU


class Results(NamedTuple):
    """What tasks leave; every leaf is stacked over tasks."""

    uploads: Tree
    memories: Tree
    statistics: Statistics


class Work(Protocol):
    """A way to do the local work of tasks of distinct clients."""

    def __call__(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[Start], seed: int
    ) -> Results: ...

    def close(self) -> None:
        """Nothing more will be asked."""
        ...


@runtime_checkable
class Large(Protocol):
    """A way to compute that may want few large groups of tasks."""

    @property
    def large(self) -> bool: ...


class OneByOne:
    """The plain reference: each client alone, its minibatches as they are."""

    def __init__(self, problem: Problem, population: Population) -> None:
        self._problem = problem
        self._population = population

    def __call__(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[Start], seed: int
    ) -> Results:
        """The tasks' results, in order."""
        with self._problem.numerics():
            each = [
                self._one(algorithm, task, start, seed) for task, start in zip(tasks, starts, strict=True)
            ]
        stacked: Results = trees.stack(each)
        return stacked

    def close(self) -> None:
        pass

    def _one(self, algorithm: AnyAlgorithm, task: Task, start: Start, seed: int) -> Results:
        indices = self._population.indices(task.client, task.visit, seed)
        whole = self._population.everything(task.client) if wants_whole(algorithm) else []
        batches = Batches(self._load(indices), self._load(whole))
        problem = self._problem
        own = draws.torch_seed(seed, "module", task.client, task.visit)
        key = torch.tensor(key_of(own), device=problem.device)
        grad = TaskGradient(problem, problem.differentiate_alone, problem.with_keys(start.statistics, key))
        visit = trees.over(lambda leaf: leaf.to(self._problem.device), start.visit)
        with _seeded(problem.device, own):
            upload, memory = algorithm.local(start.message, start.memory, batches, visit, grad)
        return Results(upload, memory, problem.without_keys(grad.statistics))

    def _load(self, indices: list[np.ndarray]) -> tuple[Batch, ...]:
        return tuple(
            Batch(take(self._population, torch.from_numpy(places), self._problem)) for places in indices
        )


def key_of(seed: int) -> int:
    """A key for layers that draw, with room to count on."""
    return seed >> 2


def take(population: Population, places: Tensor, problem: Problem) -> Tree:
    """The examples at places, where the problem lives."""
    return trees.over(lambda leaf: leaf[places.to(leaf.device)].to(problem.device), tuple(population.data))


def check_module(algorithm: AnyAlgorithm, problem: Problem, population: Population, seed: int) -> None:
    """Refuse a module that cannot do what the algorithm needs."""
    if isinstance(algorithm, Repeats) and algorithm.repeats:
        places = torch.from_numpy(population.indices(0, 0, seed)[0])
        if not problem.repeats(Batch(take(population, places, problem))):
            name = type(algorithm).__name__
            raise InputError(
                f"{name} takes two gradients of each minibatch, and this module gives two different ones: "
                "use one without dropout, or another method."
            )


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Torch's own generator at a given seed, put back afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach for every device
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield
