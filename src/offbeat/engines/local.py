"""The local work of tasks: one by one, or as a function of tensors that can be mapped or recorded.

`SequentialExecutor` computes each task alone. `make_local_fn` gives the same work as a function of
tensors alone, which `vmap` maps over clients and which a CUDA graph can record. For that, the indices
of examples of tasks of similar length are padded to one shape.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat import draws, trees
from offbeat.algorithms.rates import unwrapped
from offbeat.core import (
    AnyAlgorithm,
    Batch,
    Batches,
    Rate,
    Task,
    Vector,
    Visit,
    descend,
    traits_of,
    where,
)
from offbeat.data.population import Examples, Indices, Population
from offbeat.errors import InputError
from offbeat.nn.problem import GradientFn, Problem, Statistics
from offbeat.trees import Tree

SMALL_MODEL = 50_000  # parameters up to which a CPU gains from computing clients together

DRAWS_NUMBERS = "this module draws random numbers, so its clients are computed one by one."
NOT_COMPILED = "this module cannot be compiled, so it runs without the compiler: %s"

LocalFn: TypeAlias = Callable[["TaskInputs"], "TaskResults"]


class ClientMemory(NamedTuple):
    """What a client keeps between its visits."""

    method: Tree  # what the method has it keep
    personal: Statistics  # its personal layers

    @classmethod
    def initial(cls, algorithm: AnyAlgorithm, problem: Problem) -> "ClientMemory":
        """Before the first visit."""
        return cls(algorithm.memory(problem.initial()[0]), problem.personal)


class TaskStart(NamedTuple):
    """What one task starts from."""

    message: Tree
    statistics: Statistics
    memory: ClientMemory
    visit: Visit  # on the CPU
    steps: int | tuple[()] = ()  # minibatches of a task that ends early; (): all


class TaskResults(NamedTuple):
    """The results of tasks; every leaf is stacked over tasks."""

    uploads: Tree
    memories: Tree  # of `ClientMemory`
    statistics: Statistics


@contextmanager
def threads_for(problem: Problem) -> Iterator[None]:
    """One thread while clients of a small model are computed together on a CPU.

    The operations are so short that more threads wait for each other, and for other programs.
    """
    before = torch.get_num_threads()
    if before == 1 or problem.device.type != "cpu" or problem.size > SMALL_MODEL:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Executor(Protocol):
    """Computes the local work of tasks; of distinct clients where clients keep memory."""

    def __call__(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> TaskResults:
        """The tasks' results, in order."""
        ...

    def close(self) -> None:
        """Release workers and device memory."""
        ...


@runtime_checkable
class PrefersLargeGroups(Protocol):
    """An executor that may be faster with a few large groups of tasks."""

    @property
    def large(self) -> bool: ...


@runtime_checkable
class GrowingExecutor(Protocol):
    """An executor that may hand over results while it computes others."""

    @property
    def grows(self) -> bool: ...

    def growing(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> Iterator[TaskResults]:
        """The results of the first tasks, of more each time, and at last of all; nothing is copied."""
        ...


@runtime_checkable
class PlansAhead(Protocol):
    """An executor that prepares for the groups of tasks that a run has."""

    def expect(self, group: int, groups: int) -> None:
        """A run has so many groups of mostly so many tasks; called before the first."""
        ...


@runtime_checkable
class FallsBack(Protocol):
    """An executor that computes in a simpler way what it cannot compute as it was asked to."""

    @property
    def fell_back(self) -> bool: ...


@runtime_checkable
class ReportsExecution(Protocol):
    """An executor that chooses how to compute."""

    def report(self) -> dict[str, Any] | None:
        """What was chosen, and by which figures; None before the first group."""
        ...


class TaskGradient:
    """The gradient function of one task; running statistics pass through it from step to step.

    Personal layers take one step with each minibatch of the task, by the first gradient that the method
    takes of it; its other gradients of that minibatch see them where they were. A pass over all the client's
    examples (`whole`) does not move them.
    """

    def __init__(
        self,
        problem: Problem,
        differentiate: GradientFn,
        statistics: Statistics,
        whole: Collection[Batch] = (),
    ) -> None:
        self._problem = problem
        self._differentiate = differentiate
        self._step = getattr(differentiate, "descend", None)
        self._objective = getattr(differentiate, "objective", None)
        # for one client at a time, steps are limited by memory bandwidth and taken in place
        self._in_place = self._objective is not None or differentiate == problem.differentiate_by_autograd
        self._own: Vector | None = None  # the vector that steps are taken in, and its leaves
        self._leaves: dict[str, Tensor] = {}
        self._statistics = statistics
        self._personal = problem.moving
        self._moved: Statistics = {}  # personal layers after the current minibatch
        self._batch: Batch | None = None  # the current minibatch, where layers are personal
        self._still = {id(batch) for batch in whole}

    @property
    def statistics(self) -> Statistics:
        """After the last minibatch."""
        return self._statistics | self._moved

    def __call__(self, x: Vector, batch: Batch, /) -> Vector:
        """The gradient of one minibatch at x."""
        grad, _, statistics = self._differentiate(x, self._before(batch), batch)
        self._update_statistics(statistics, batch)
        return grad

    def with_loss(self, x: Vector, batch: Batch, /) -> tuple[Vector, Tensor]:
        """The gradient and the loss, weight decay included."""
        grad, loss, statistics = self._differentiate(x, self._before(batch), batch)
        self._update_statistics(statistics, batch)
        return grad, loss + 0.5 * self._problem.weight_decay * (x @ x)

    def descend(self, x: Vector, batch: Batch, lr: Rate, /) -> Vector:
        """X minus lr times its gradient; an x that came from here may be overwritten."""
        if self._in_place and batch.mask is None:
            if self._own is not x:
                self._own = x = x.clone()
                self._leaves = self._problem.leaves(x)
            before = self._before(batch)
            statistics = self._problem.sgd_step(self._leaves, before, batch, lr, self._objective)
            stepped = x
        elif self._step is not None:
            stepped, statistics = self._step(x, self._before(batch), batch, lr)
        else:
            return descend(x, self(x, batch), lr)
        self._update_statistics(statistics, batch)
        return stepped

    def _before(self, batch: Batch) -> Statistics:
        """What a gradient of this minibatch sees; with a new one, personal layers have moved."""
        if self._personal and batch is not self._batch and id(batch) not in self._still:
            self._statistics, self._moved, self._batch = self.statistics, {}, batch
        return self._statistics

    def _update_statistics(self, statistics: Statistics, batch: Batch) -> None:
        active = batch.active
        new = statistics if active is None else where(active, statistics, self._statistics)
        if self._personal:
            if batch is self._batch and not self._moved:
                self._moved = {name: new[name] for name in self._personal}
            new = new | {name: self._statistics[name] for name in self._personal}
        self._statistics = new


class _ItemsState:
    """The minibatches of a task that may end early."""

    def __init__(self, items: tuple[Batch, ...], stop: Callable[[int], bool]) -> None:
        self.items, self.stop = items, stop
        self.fixed = False  # whether their number is known to the method, and so stays


class InterruptibleItems(Sequence[Batch]):
    """The minibatches of a task that may end early, from the one numbered `first` on.

    Before each but the first of them `stop` is asked, with the number of steps done, and where it returns
    True there are no others. This applies to the first pass only: what a method does afterwards, it
    does with those of the first pass, as if there had never been others. A method that asks for their number
    before the first pass has ended gets the number of all of them, and then computes them all.
    """

    def __init__(self, state: _ItemsState, first: int = 0) -> None:
        self._state, self._first = state, first

    def __iter__(self) -> Iterator[Batch]:
        state, place = self._state, self._first
        while place < len(state.items):
            if place and not state.fixed and state.stop(place):
                state.items, state.fixed = state.items[:place], True
                return
            yield state.items[place]
            place += 1
        state.fixed = True

    def __len__(self) -> int:
        self._state.fixed = True
        return len(self._state.items) - self._first

    def __getitem__(self, index: Any) -> Any:
        if index == 0:
            return self._state.items[self._first]
        if isinstance(index, slice) and (index.stop, index.step) == (None, None) and (index.start or 0) >= 0:
            return InterruptibleItems(self._state, self._first + (index.start or 0))
        self._state.fixed = True
        return self._state.items[self._first :][index]


class SequentialExecutor:
    """The reference: one client after another, without padding."""

    def __init__(self, problem: Problem, population: Population) -> None:
        self._problem = problem
        self._population = population

    def __call__(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> TaskResults:
        stacked: TaskResults = trees.stack(list(self.each(algorithm, tasks, starts, seed)))
        return stacked

    def run_until(
        self,
        algorithm: AnyAlgorithm,
        task: Task,
        start: TaskStart,
        seed: int,
        stop: Callable[[int], bool],
    ) -> tuple[TaskResults, int | None]:
        """One task, which ends before its next step if `stop` of the steps done so far is True.

        Its results, and its steps if it ended early: a task of so many steps has the same results.
        """
        total = len(self._population.indices(task.client, task.visit, seed))
        on_gpu = self._problem.device.type == "cuda"
        done = total

        def ends(steps: int) -> bool:
            nonlocal done
            if on_gpu:  # where all steps may be queued before the first one is computed
                torch.cuda.synchronize()
            if stop(steps):
                done = steps
                return True
            return False

        with self._problem.precision_context():
            results = self._run(algorithm, task, start, seed, ends)
        return results, done if done < total else None

    def each(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> Iterator[TaskResults]:
        """The results of one task after another, which are not stacked."""
        for task, start in zip(tasks, starts, strict=True):
            with self._problem.precision_context():
                results = self._run(algorithm, task, start, seed)
            yield results

    def close(self) -> None:
        pass

    def _run(
        self,
        algorithm: AnyAlgorithm,
        task: Task,
        start: TaskStart,
        seed: int,
        stop: Callable[[int], bool] | None = None,
    ) -> TaskResults:
        problem, population = self._problem, self._population
        indices = population.indices(task.client, task.visit, seed)[: start.steps or None]
        whole = population.everything(task.client) if traits_of(algorithm).full_pass else []
        items = self._load(indices)
        if stop is not None:
            items = cast(tuple[Batch, ...], InterruptibleItems(_ItemsState(items, stop)))
        batches = Batches(items, self._load(whole))
        task_seed = draws.torch_seed(seed, "module", task.client, task.visit)
        key = torch.tensor(dropout_key(task_seed), device=problem.device)
        visit = trees.map(lambda leaf: leaf.to(problem.device), start.visit)
        with _seeded_rng(problem.device, task_seed):
            return run_local(
                algorithm,
                problem,
                start._replace(visit=visit),
                batches,
                key,
                problem.differentiate_by_autograd,
            )

    def _load(self, batches: list[Indices]) -> tuple[Batch, ...]:
        return tuple(Batch(load_examples(self._population, indices, self._problem)) for indices in batches)


def run_local(
    algorithm: AnyAlgorithm,
    problem: Problem,
    start: TaskStart,
    batches: Batches,
    key: Tensor,
    differentiate: GradientFn,
) -> TaskResults:
    """The local work of one task; what is personal joins the statistics for it, and is kept afterwards."""
    kept, personal = start.memory
    statistics = problem.begin_task(start.statistics | personal, key)
    grad = TaskGradient(problem, differentiate, statistics, batches.whole)
    upload, kept = algorithm.local(start.message, kept, batches, start.visit, grad)
    after = problem.end_task(grad.statistics)
    mine = {name: after.pop(name) for name in personal}
    return TaskResults(upload, ClientMemory(kept, mine), after)


def load_examples(population: Population, indices: Indices, problem: Problem) -> Tree:
    """The examples at these indices, on the problem's device."""
    return trees.map(lambda leaf: leaf.to(problem.device), tuple(population.data.gather(indices)))


def sample_batch(population: Population, problem: Problem) -> Batch:
    """A few examples to try a module on."""
    first = np.arange(min(5, population.data.total)) if population.in_memory else population.parts[0][:5]
    return Batch(load_examples(population, first, problem))


def dropout_key(seed: int) -> int:
    """A key for dropout layers, with room to be incremented."""
    return seed >> 2


def task_key(algorithm: AnyAlgorithm, task: Task, seed: int) -> Tensor | tuple[()]:
    """What the random draws of a task are keyed by, where the algorithm asks for it."""
    if not traits_of(algorithm).reads_key:
        return ()
    return torch.tensor(draws.torch_seed(seed, "upload", task.client, task.visit))


def check_module(algorithm: AnyAlgorithm, problem: Problem, population: Population, seed: int) -> None:
    """Refuse a module that cannot do what the algorithm needs."""
    if traits_of(algorithm).repeats_batches:
        indices = population.indices(0, 0, seed)[0]
        if not problem.is_deterministic(Batch(load_examples(population, indices, problem))):
            name = type(unwrapped(algorithm)).__name__
            raise InputError(
                f"{name} takes two gradients of each minibatch, and this module gives two different ones: "
                "use one without dropout, or another method."
            )


@contextmanager
def _seeded_rng(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch's own generator; restore it afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would initialise every device
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield


class PaddedIndices(NamedTuple):
    """Indices of examples, padded with each task's first one, and a mask of those that are real."""

    indices: NDArray[np.int64]  # (tasks, steps, examples)
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
    """Pad tasks of different lengths to one shape; lengths are rounded up, so that few shapes occur."""
    steps = _padded_length([len(task) for task in tasks])
    examples = _padded_length([max(map(len, task)) for task in tasks])
    indices = np.empty((len(tasks), steps, examples), dtype=np.int64)
    mask = np.zeros(indices.shape, dtype=bool)
    for row, task in enumerate(tasks):
        if len(task) == steps and all(len(batch) == examples for batch in task):
            indices[row], mask[row] = task, True
            continue
        indices[row] = task[0][0]
        for step, batch in enumerate(task):
            indices[row, step, : len(batch)] = batch
            mask[row, step, : len(batch)] = True
    return PaddedIndices(indices, mask)


def group_by_length(tasks: list[list[Indices]]) -> list[list[int]]:
    """Rows of tasks whose lengths are so similar that padding them to one shape wastes little."""
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


class TaskDraws(NamedTuple):
    """What is drawn for tasks: dropout keys, minibatches, and all examples where the algorithm asks."""

    keys: list[int]
    items: list[list[Indices]]
    whole: list[list[Indices]]

    @classmethod
    def of(
        cls,
        algorithm: AnyAlgorithm,
        tasks: Sequence[Task],
        starts: Sequence[TaskStart],
        population: Population,
        seed: int,
    ) -> "TaskDraws":
        """The draws of these tasks."""
        return cls(
            [dropout_key(draws.torch_seed(seed, "module", task.client, task.visit)) for task in tasks],
            [
                population.indices(task.client, task.visit, seed)[: start.steps or None]
                for task, start in zip(tasks, starts, strict=True)
            ],
            [population.everything(task.client) for task in tasks] if traits_of(algorithm).full_pass else [],
        )

    def padded(self, rows: Sequence[int]) -> dict[str, PaddedIndices]:
        """The indices of some rows, padded, by field of `Batches`."""
        parts = {"items": self.items, "whole": self.whole}
        return {name: pad_indices([part[row] for row in rows]) for name, part in parts.items() if part}


class TaskInputs(NamedTuple):
    """All that the local work of tasks depends on; leaves are stacked over tasks, or are of one task."""

    start: TaskStart
    key: Tensor  # for dropout layers
    indices: dict[str, tuple[Tensor, ...]]  # field of Batches -> indices, and a mask if any is padding


def stacked_inputs(
    starts: Sequence[TaskStart], keys: Sequence[int], padded: dict[str, PaddedIndices], device: torch.device
) -> TaskInputs:
    """Inputs stacked over tasks, on the device."""
    visits, key, indices = _inputs_to_device(starts, keys, padded, device)
    message, statistics, memory = trees.stack([start[:3] for start in starts])
    return TaskInputs(TaskStart(message, statistics, memory, visits), key, indices)


def separate_inputs(
    starts: Sequence[TaskStart], keys: Sequence[int], padded: dict[str, PaddedIndices], device: torch.device
) -> list[TaskInputs]:
    """Inputs task by task; nothing is copied that is on the device already."""
    visits, key, indices = _inputs_to_device(starts, keys, padded, device)

    def select(tree: Tree, row: int) -> Tree:
        return trees.map(lambda leaf: leaf[row], tree)

    return [
        TaskInputs(start._replace(visit=select(visits, row), steps=()), key[row], select(indices, row))
        for row, start in enumerate(starts)
    ]


def _inputs_to_device(
    starts: Sequence[TaskStart], keys: Sequence[int], padded: dict[str, PaddedIndices], device: torch.device
) -> tuple[Visit, Tensor, dict[str, tuple[Tensor, ...]]]:
    """Visits, keys and indices, stacked over tasks."""
    visits: Visit = trees.map(
        lambda leaf: to_device(leaf, device), trees.stack([start.visit for start in starts])
    )
    indices = {
        name: tuple(to_device(torch.from_numpy(part), device) for part in each[: 1 if each.full else 2])
        for name, each in padded.items()
    }
    return visits, to_device(torch.tensor(keys), device), indices


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move without waiting: a copy to a GPU from memory that is not pinned waits for all queued work."""
    if device.type != "cuda" or tensor.device.type == "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def read_padded(
    population: Population, padded: dict[str, PaddedIndices], problem: Problem
) -> tuple[Examples, dict[str, PaddedIndices]]:
    """The population's examples in memory; of a source only those that occur, with indices into them."""
    if isinstance(population.data, Examples):
        return population.data, padded
    used, places = np.unique(
        np.concatenate([part.indices.reshape(-1) for part in padded.values()]), return_inverse=True
    )
    data = population.data.gather(used).to(problem.device)
    ends = np.cumsum([part.indices.size for part in padded.values()])[:-1]
    return data, {
        name: part._replace(indices=each.reshape(part.indices.shape))
        for (name, part), each in zip(padded.items(), np.split(places, ends), strict=True)
    }


def make_local_fn(
    algorithm: AnyAlgorithm, problem: Problem, data: Examples, differentiate: GradientFn
) -> LocalFn:
    """The local work of one task as a function of tensors."""

    def local_fn(inputs: TaskInputs) -> TaskResults:
        batches = Batches(
            **{name: _minibatches(data, problem, *part) for name, part in inputs.indices.items()}
        )
        return run_local(algorithm, problem, inputs.start, batches, inputs.key, differentiate)

    return local_fn


def _minibatches(
    examples: Examples, problem: Problem, indices: Tensor, mask: Tensor | None = None
) -> tuple[Batch, ...]:
    """(steps, examples) indices to one minibatch per step."""
    data = trees.map(lambda leaf: leaf[indices.to(leaf.device)].to(problem.device), tuple(examples))
    return tuple(
        Batch(trees.map(lambda leaf, k=k: leaf[k], data), None if mask is None else mask[k])
        for k in range(len(indices))
    )


class PaddingCheck:
    """Whether minibatches of this problem may be padded; tried once, when it first matters."""

    def __init__(self, problem: Problem, population: Population) -> None:
        self._problem = problem
        self._population = population
        self._paddable: bool | None = None

    def allows(self, padded: dict[str, PaddedIndices]) -> bool:
        """Whether these can be computed with their padding."""
        if not any(part.partial for part in padded.values()):
            return True
        if self._paddable is None:
            self._paddable = self._problem.is_paddable(sample_batch(self._population, self._problem))
        return self._paddable


def join_results(groups: Sequence[Sequence[int]], parts: Sequence[TaskResults]) -> TaskResults:
    """The results of groups of rows, in the order of the rows."""
    if len(parts) == 1:
        return parts[0]
    rows = [row for group in groups for row in group]
    order = sorted(range(len(rows)), key=rows.__getitem__)

    def reorder(*leaves: Tensor) -> Tensor:
        whole = torch.cat(leaves)
        return whole[to_device(torch.tensor(order), whole.device)]

    joined: TaskResults = trees.map(reorder, *parts)
    return joined
