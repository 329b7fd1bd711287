"""Where the examples of several tasks are, as arrays that can be computed together.

The local work of several tasks, and the plain way to do it: one by one.

One task's local work as a function of tensors alone, which can be mapped over clients or captured.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat import draws, trees
from offbeat.core import AnyAlgorithm, Batch, Batches, Task, Visit, traits_of
from offbeat.data.population import Indices, Population
from offbeat.errors import InputError
from offbeat.nn.problem import GradientFn, Problem, Statistics, TaskGradient
from offbeat.trees import Tree


class PaddedIndices(NamedTuple):
    """Indices of examples, padded with each task's own first, and which are real."""

    places: NDArray[np.int64]  # (tasks, steps, examples)
    mask: NDArray[np.bool_]  # of the same shape

    @property
    def full(self) -> bool:
        """Whether nothing is padding."""
        return bool(self.mask.all())

    @property
    def partial(self) -> bool:
        """Whether some minibatch holds both real examples and padding."""
        return bool((self.mask.any(-1) & ~self.mask.all(-1)).any())


def pad_indices(tasks: list[list[Indices]]) -> PaddedIndices:
    """Tasks of different lengths as one; lengths go up to the next rung, so that few shapes occur."""
    steps = _padded_length([len(task) for task in tasks])
    examples = _padded_length([max(map(len, task)) for task in tasks])
    places = np.empty((len(tasks), steps, examples), dtype=np.int64)
    mask = np.zeros(places.shape, dtype=bool)
    for row, task in enumerate(tasks):
        if len(task) == steps and all(len(batch) == examples for batch in task):
            places[row], mask[row] = task, True
            continue
        places[row] = task[0][0]
        for step, batch in enumerate(task):
            places[row, step, : len(batch)] = batch
            mask[row, step, : len(batch)] = True
    return PaddedIndices(places, mask)


def group_by_length(tasks: list[list[Indices]]) -> list[list[int]]:
    """Rows of tasks so like in length that computing them together wastes little."""
    groups: dict[tuple[int, int], list[int]] = {}
    for row, task in enumerate(tasks):
        groups.setdefault((_round_up(len(task)), _round_up(max(map(len, task)))), []).append(row)
    return list(groups.values())


def _padded_length(lengths: list[int]) -> int:
    return lengths[0] if len(set(lengths)) == 1 else _round_up(max(lengths))


def _round_up(length: int) -> int:
    """The length rounded up to four leading bits: at most an eighth is padding."""
    step = 1 << max(0, length.bit_length() - 4)
    return -(-length // step) * step


class TaskStart(NamedTuple):
    """What one task starts from."""

    message: Tree
    statistics: Statistics
    memory: Tree
    visit: Visit  # on the CPU


class TaskResults(NamedTuple):
    """What tasks leave; every leaf is stacked over tasks."""

    uploads: Tree
    memories: Tree
    statistics: Statistics


class Executor(Protocol):
    """A way to do the local work of tasks of distinct clients."""

    def __call__(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> TaskResults: ...

    def close(self) -> None:
        """Nothing more will be asked."""
        ...


@runtime_checkable
class PrefersLargeGroups(Protocol):
    """A way to compute that may want few large groups of tasks."""

    @property
    def large(self) -> bool: ...


class SequentialExecutor:
    """The plain reference: each client alone, its minibatches as they are."""

    def __init__(self, problem: Problem, population: Population) -> None:
        self._problem = problem
        self._population = population

    def __call__(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> TaskResults:
        """The tasks' results, in order."""
        with self._problem.precision_context():
            each = [
                self._one(algorithm, task, start, seed) for task, start in zip(tasks, starts, strict=True)
            ]
        stacked: TaskResults = trees.stack(each)
        return stacked

    def close(self) -> None:
        pass

    def _one(self, algorithm: AnyAlgorithm, task: Task, start: TaskStart, seed: int) -> TaskResults:
        indices = self._population.indices(task.client, task.visit, seed)
        whole = self._population.everything(task.client) if traits_of(algorithm).full_pass else []
        batches = Batches(self._load(indices), self._load(whole))
        problem = self._problem
        own = draws.torch_seed(seed, "module", task.client, task.visit)
        key = torch.tensor(dropout_key(own), device=problem.device)
        grad = TaskGradient(
            problem, problem.differentiate_by_autograd, problem.with_dropout_key(start.statistics, key)
        )
        visit = trees.map(lambda leaf: leaf.to(self._problem.device), start.visit)
        with _seeded_rng(problem.device, own):
            upload, memory = algorithm.local(start.message, start.memory, batches, visit, grad)
        return TaskResults(upload, memory, problem.without_dropout_keys(grad.statistics))

    def _load(self, indices: list[np.ndarray]) -> tuple[Batch, ...]:
        return tuple(
            Batch(load_examples(self._population, torch.from_numpy(places), self._problem))
            for places in indices
        )


def dropout_key(seed: int) -> int:
    """A key for layers that draw, with room to count on."""
    return seed >> 2


def load_examples(population: Population, places: Tensor, problem: Problem) -> Tree:
    """The examples at places, where the problem lives."""
    return trees.map(lambda leaf: leaf[places.to(leaf.device)].to(problem.device), tuple(population.data))


def check_module(algorithm: AnyAlgorithm, problem: Problem, population: Population, seed: int) -> None:
    """Refuse a module that cannot do what the algorithm needs."""
    if traits_of(algorithm).repeats_batches:
        places = torch.from_numpy(population.indices(0, 0, seed)[0])
        if not problem.is_deterministic(Batch(load_examples(population, places, problem))):
            name = type(algorithm).__name__
            raise InputError(
                f"{name} takes two gradients of each minibatch, and this module gives two different ones: "
                "use one without dropout, or another method."
            )


@contextmanager
def _seeded_rng(device: torch.device, seed: int) -> Iterator[None]:
    """Torch's own generator at a given seed, put back afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach for every device
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield


log = logging.getLogger(__name__)

LocalFn: TypeAlias = Callable[["TaskInputs"], TaskResults]


class TaskInputs(NamedTuple):
    """All that tasks depend on; every leaf of both is stacked over tasks, or of one task."""

    start: TaskStart
    key: Tensor  # for layers that draw
    places: dict[str, tuple[Tensor, ...]]  # field of Batches -> places, and a mask if any is padding


class TaskDraws(NamedTuple):
    """What is drawn for tasks: keys, the examples of minibatches, and all of them where that is wanted."""

    keys: list[int]
    items: list[list[Indices]]
    whole: list[list[Indices]]

    @classmethod
    def of(
        cls, algorithm: AnyAlgorithm, tasks: Sequence[Task], population: Population, seed: int
    ) -> "TaskDraws":
        """What these tasks train on."""
        whole = traits_of(algorithm).full_pass
        return cls(
            [dropout_key(draws.torch_seed(seed, "module", task.client, task.visit)) for task in tasks],
            [population.indices(task.client, task.visit, seed) for task in tasks],
            [population.everything(task.client) for task in tasks] if whole else [],
        )

    def pick(self, rows: Sequence[int]) -> dict[str, PaddedIndices]:
        """Those of some rows, padded."""
        parts = {"items": self.items, "whole": self.whole}
        return {name: pad_indices([part[row] for row in rows]) for name, part in parts.items() if part}


def stacked_inputs(
    starts: Sequence[TaskStart], keys: Sequence[int], places: dict[str, PaddedIndices], device: torch.device
) -> TaskInputs:
    """Stacked over tasks, on the device; what is not there yet is sent without waiting."""
    visits = trees.map(lambda leaf: to_device(leaf, device), trees.stack([start.visit for start in starts]))
    message, statistics, memory = trees.stack([start[:3] for start in starts])
    key = to_device(torch.tensor(keys), device)
    return TaskInputs(TaskStart(message, statistics, memory, visits), key, _indices_to_device(places, device))


def separate_inputs(
    starts: Sequence[TaskStart], keys: Sequence[int], places: dict[str, PaddedIndices], device: torch.device
) -> list[TaskInputs]:
    """The same task by task, with nothing copied that is on the device already."""
    visits = trees.map(lambda leaf: to_device(leaf, device), trees.stack([start.visit for start in starts]))
    moved, key = _indices_to_device(places, device), to_device(torch.tensor(keys), device)

    def row(tree: Tree, number: int) -> Tree:
        return trees.map(lambda leaf: leaf[number], tree)

    return [
        TaskInputs(start._replace(visit=row(visits, number)), key[number], row(moved, number))
        for number, start in enumerate(starts)
    ]


def _indices_to_device(
    places: dict[str, PaddedIndices], device: torch.device
) -> dict[str, tuple[Tensor, ...]]:
    return {
        name: tuple(
            to_device(torch.from_numpy(part), device)
            for part in ((each.places,) if each.full else (each.places, each.mask))
        )
        for name, each in places.items()
    }


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device; from pinned memory, since a copy from any other would wait for all that is queued."""
    if device.type != "cuda" or tensor.device.type == "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def make_local_fn(
    algorithm: AnyAlgorithm, problem: Problem, population: Population, differentiate: GradientFn
) -> LocalFn:
    """The work of one task."""

    def one(given: TaskInputs) -> TaskResults:
        start = given.start
        batches = Batches(
            **{name: _minibatches(population, problem, *part) for name, part in given.places.items()}
        )
        grad = TaskGradient(problem, differentiate, problem.with_dropout_key(start.statistics, given.key))
        upload, memory = algorithm.local(start.message, start.memory, batches, start.visit, grad)
        return TaskResults(upload, memory, problem.without_dropout_keys(grad.statistics))

    return one


def _minibatches(
    population: Population, problem: Problem, places: Tensor, mask: Tensor | None = None
) -> tuple[Batch, ...]:
    """(steps, examples) places to one minibatch per step."""
    data = load_examples(population, places, problem)
    return tuple(
        Batch(trees.map(lambda leaf, k=k: leaf[k], data), None if mask is None else mask[k])
        for k in range(len(places))
    )


class PaddingCheck:
    """Whether minibatches of this problem may be padded; tried once, when it first matters."""

    def __init__(self, problem: Problem, population: Population) -> None:
        self._problem = problem
        self._population = population
        self._fine: bool | None = None

    def allows(self, places: dict[str, PaddedIndices]) -> bool:
        """Whether these can be computed as they are padded."""
        if not any(part.partial for part in places.values()):
            return True
        if self._fine is None:
            first = torch.arange(min(5, self._population.data.total))
            self._fine = self._problem.is_paddable(
                Batch(load_examples(self._population, first, self._problem))
            )
        return self._fine


def join_results(groups: Sequence[Sequence[int]], parts: Sequence[TaskResults]) -> TaskResults:
    """Results of groups of rows, in the order of the rows."""
    if len(parts) == 1:
        return parts[0]
    places = [place for group in groups for place in group]
    order = sorted(range(len(places)), key=places.__getitem__)

    def reorder(*leaves: Any) -> Tree:
        whole = torch.cat(leaves)
        return whole[to_device(torch.tensor(order), whole.device)]

    joined: TaskResults = trees.map(reorder, *parts)
    return joined
