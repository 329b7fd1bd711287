"""The local work of several tasks, one by one or together.

Both give the same stacked results; only the order of floating-point sums differs.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from offbeat import draws, trees
from offbeat.core import AnyAlgorithm, Batch, Batches, Repeats, Task, Visit, wants_whole
from offbeat.errors import InputError
from offbeat.population.population import Population
from offbeat.problem import Problem, Statistics, TaskGradient
from offbeat.trees import Tree

log = logging.getLogger(__name__)


class Start(NamedTuple):
    """What one task starts from."""

    message: Tree
    statistics: Statistics
    memory: Tree
    visit: Visit


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


class OneByOne:
    """The plain reference: each client alone, its minibatches as they are."""

    def __init__(self, problem: Problem, population: Population) -> None:
        self._problem = problem
        self._population = population

    def __call__(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[Start], seed: int
    ) -> Results:
        """The tasks' results, in order."""
        each = [self._one(algorithm, task, start, seed) for task, start in zip(tasks, starts, strict=True)]
        stacked: Results = trees.stack(each)
        return stacked

    def close(self) -> None:
        pass

    def _one(self, algorithm: AnyAlgorithm, task: Task, start: Start, seed: int) -> Results:
        indices = self._population.indices(task.client, task.visit, seed)
        whole = self._population.everything(task.client) if wants_whole(algorithm) else []
        batches = Batches(self._load(indices), self._load(whole))
        grad = TaskGradient(self._problem, self._problem.differentiate_alone, start.statistics)
        with _seeded(self._problem.device, draws.torch_seed(seed, "module", task.client, task.visit)):
            upload, memory = algorithm.local(start.message, start.memory, batches, start.visit, grad)
        return Results(upload, memory, grad.statistics)

    def _load(self, indices: list[np.ndarray]) -> tuple[Batch, ...]:
        return tuple(Batch(_take(self._population.data, torch.from_numpy(places))) for places in indices)


def check_module(algorithm: AnyAlgorithm, problem: Problem, population: Population, seed: int) -> None:
    """Refuse a module that cannot do what the algorithm needs."""
    if isinstance(algorithm, Repeats) and algorithm.repeats:
        places = torch.from_numpy(population.indices(0, 0, seed)[0])
        if not problem.repeats(Batch(_take(population.data, places))):
            name = type(algorithm).__name__
            raise InputError(
                f"{name} takes two gradients of each minibatch, and this module gives two different ones: "
                "use one without dropout, or another method."
            )


class Together:
    """All clients at once by `vmap`; what it cannot map runs one by one, which is said once."""

    def __init__(self, problem: Problem, population: Population, chunk: int | None = None) -> None:
        self._problem = problem
        self._population = population
        self._chunk = chunk
        self._alone = OneByOne(problem, population)
        self._paddable: bool | None = None
        self._mappable = True

    def __call__(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[Start], seed: int
    ) -> Results:
        """The tasks' results, in order."""
        if not self._mappable:
            return self._alone(algorithm, tasks, starts, seed)
        indices = [self._population.indices(task.client, task.visit, seed) for task in tasks]
        stacks = {"items": _pad(indices)}
        if wants_whole(algorithm):
            stacks["whole"] = _pad([self._population.everything(task.client) for task in tasks])
        if any(stack.partial for stack in stacks.values()) and not self._can_pad():
            return self._alone(algorithm, tasks, starts, seed)
        try:
            return self._map(algorithm, trees.stack(starts), stacks)
        except RuntimeError as error:
            if not _unmappable(error):
                raise
            self._mappable = False
            reason = str(error).splitlines()[0]
            if "random operation" in reason:  # torch goes on to advise flags that are not the user's
                log.warning("this module draws random numbers, so its clients are computed one by one.")
            else:
                log.warning(
                    "this module cannot be computed for many clients at once, so it runs one by one: %s",
                    reason,
                )
            return self._alone(algorithm, tasks, starts, seed)

    def close(self) -> None:
        pass

    def _map(self, algorithm: AnyAlgorithm, starts: Start, stacks: dict[str, "_Places"]) -> Results:
        data = {name: self._load(stack) for name, stack in stacks.items()}

        def one(start: Start, data: dict[str, tuple[Tree, ...]]) -> tuple[Any, Any, Statistics]:
            batches = Batches(**{name: _unstack(*stack) for name, stack in data.items()})
            grad = TaskGradient(self._problem, self._problem.differentiate, start.statistics)
            upload, memory = algorithm.local(start.message, start.memory, batches, start.visit, grad)
            return upload, memory, grad.statistics

        return Results(*vmap(one, randomness="error", chunk_size=self._chunk)(starts, data))

    def _load(self, stack: "_Places") -> tuple[Tree, ...]:
        """The examples at padded places, and the mask if there is one."""
        data = _take(self._population.data, torch.from_numpy(stack.places))
        return (data,) if stack.full else (data, torch.from_numpy(stack.mask).to(self._problem.device))

    def _can_pad(self) -> bool:
        if self._paddable is None:
            first = torch.arange(min(5, self._population.data.total))
            self._paddable = self._problem.paddable(Batch(_take(self._population.data, first)))
        return self._paddable


def _take(data: Tree, places: Tensor) -> Tree:
    return trees.over(lambda leaf: leaf[places.to(leaf.device)], tuple(data))


def _unstack(data: Tree, mask: Tensor | None = None) -> tuple[Batch, ...]:
    """(steps, examples, ...) leaves to one minibatch per step."""
    steps = trees.leaves(data)[0].shape[0]
    return tuple(
        Batch(trees.over(lambda leaf, k=k: leaf[k], data), None if mask is None else mask[k])
        for k in range(steps)
    )


class _Places(NamedTuple):
    """Where the examples of several tasks are, padded with each task's own first, and which are real."""

    places: np.ndarray  # (tasks, steps, examples)
    mask: np.ndarray  # of the same shape

    @property
    def full(self) -> bool:
        """Whether nothing is padding."""
        return bool(self.mask.all())

    @property
    def partial(self) -> bool:
        """Whether some minibatch holds both real examples and padding."""
        return bool((self.mask.any(-1) & ~self.mask.all(-1)).any())


def _pad(indices: list[list[np.ndarray]]) -> _Places:
    steps = max(len(task) for task in indices)
    examples = max(len(batch) for task in indices for batch in task)
    places = np.empty((len(indices), steps, examples), dtype=np.int64)
    mask = np.zeros(places.shape, dtype=bool)
    for row, task in enumerate(indices):
        places[row] = task[0][0]
        for step, batch in enumerate(task):
            places[row, step, : len(batch)] = batch
            mask[row, step, : len(batch)] = True
    return _Places(places, mask)


def _unmappable(error: RuntimeError) -> bool:
    """Whether `vmap` itself refused: random numbers, in-place writes, control flow on data."""
    text = str(error)
    return "vmap" in text or "functorch" in text or "Batching rule" in text


@contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Torch's own generator at a given seed, put back afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach for every device
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield
