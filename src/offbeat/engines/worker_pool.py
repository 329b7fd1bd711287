"""The tasks of a buffer on a pool of workers, and what each worker runs, here or on a cluster.

Every task is done, whichever worker dies: a task's result depends only on its inputs, so the tasks of a lost
worker are given to its successor.
A message is sent to the workers once, however many tasks start from it.
"""

import io
import logging
import pickle
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import cloudpickle
import torch
from torch import Tensor

from offbeat import trees
from offbeat.core import AnyAlgorithm, Task, Visit
from offbeat.data.population import Population
from offbeat.engines.execution import Execution
from offbeat.engines.local import Executor, SequentialExecutor, TaskResults, TaskStart
from offbeat.errors import InputError, setting_name
from offbeat.nn.problem import Problem
from offbeat.trees import Tree

log = logging.getLogger(__name__)

_MAX_DEATHS = 8  # of workers with the same order, before the order itself is blamed
_KEPT_CALLS = 2  # calls after which a message that no task uses is removed


class WorkOrder(NamedTuple):
    """Some tasks of one buffer, as a worker gets them."""

    number: int
    algorithm: AnyAlgorithm
    seed: int
    tasks: Sequence[Task]
    visits: Sequence[Sequence[int | None]]  # each `Visit`, its numbers in order; None where it has none
    messages: Sequence[Any]  # each once, as the pool has placed it
    which: Sequence[int]  # of the messages, for each task
    memories: Sequence[Tree]
    steps: Sequence[int | tuple[()]]  # of tasks that end early
    first: int = 0  # the place of its first task in the buffer


@dataclass(frozen=True)
class WorkDone:
    """The results of an order, and the warnings that were logged."""

    number: int
    results: Tree  # `TaskResults`; () where the pool has them
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorkFailed:
    """An error that would have stopped the run in this process, too."""

    number: int
    error: Exception


@dataclass(frozen=True)
class WorkerLost:
    """A worker is gone, and why, as far as is known."""

    worker: int
    reason: str


class WorkerPool(Protocol):
    """Some workers, by number, and how to communicate with them."""

    @property
    def workers(self) -> int: ...

    def expect(self, tasks: int) -> None:
        """The next orders are of so many tasks."""
        ...

    def place(self, tree: Tree) -> Any:
        """Put a tree where every worker can read it."""
        ...

    def remove(self, placed: Any) -> None:
        """No order will refer to it again."""
        ...

    def give(self, worker: int, order: WorkOrder) -> None:
        """Give an idle worker an order; that the worker is gone may be noticed later."""
        ...

    def wait(self) -> Sequence[tuple[int, WorkDone | WorkFailed] | WorkerLost]:
        """What has happened since, by worker; at least one event."""
        ...

    def replace(self, worker: int) -> None:
        """Start another worker in the place of a lost one."""
        ...

    @property
    def in_place(self) -> bool:
        """Whether `join` copies nothing, so that it may be called while other orders are in work."""
        ...

    def join(self, done: Sequence[WorkDone]) -> Tree:
        """The results of these orders, which are the first of a buffer, stacked over their tasks."""
        ...

    def close(self) -> None: ...


class PlacedMessage(NamedTuple):
    """A message and statistics that workers can read."""

    tree: Tree  # held, so that no other object gets the same id
    placed: Any
    last_call: int  # that used it


class PoolExecutor:
    """An executor that gives its tasks to a pool of workers."""

    def __init__(
        self, pool: WorkerPool, device: torch.device, split: Callable[[int, int], list[slice]]
    ) -> None:
        self._pool = pool
        self._device = device
        self._split = split
        self._messages: dict[tuple[int, int], PlacedMessage] = {}
        self._calls = 0
        self._orders = 0
        self._warned: set[str] = set()

    def __call__(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> TaskResults:
        *_, done = self._run(algorithm, tasks, starts, seed)
        return self._join(done)

    @property
    def grows(self) -> bool:
        return self._pool.in_place

    def growing(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> Iterator[TaskResults]:
        for done in self._run(algorithm, tasks, starts, seed):
            yield self._join(done)

    def close(self) -> None:
        self._messages = {}
        self._pool.close()

    def _run(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> Iterator[list[WorkDone]]:
        """Have all tasks done; yields the first orders, more each time, and at last all."""
        self._calls += 1
        chunks = self._split(len(tasks), self._pool.workers)
        orders = [self._order(algorithm, tasks, starts, seed, chunk) for chunk in chunks]
        self._pool.expect(len(tasks))
        done: list[WorkDone] = []
        for done in run_orders(self._pool, orders):
            yield done
        for warning in (warning for each in done for warning in each.warnings):
            if warning not in self._warned:
                self._warned.add(warning)
                log.warning("%s", warning)
        self._remove_unused()

    def _join(self, done: Sequence[WorkDone]) -> TaskResults:
        results: TaskResults = trees.map(lambda leaf: leaf.to(self._device), self._pool.join(done))
        return results

    def _order(
        self,
        algorithm: AnyAlgorithm,
        tasks: Sequence[Task],
        starts: Sequence[TaskStart],
        seed: int,
        chunk: slice,
    ) -> WorkOrder:
        tasks, starts = tasks[chunk], starts[chunk]
        messages = {_message_id(start): self._place(start) for start in starts}
        positions = {key: position for position, key in enumerate(messages)}
        self._orders += 1
        return WorkOrder(
            self._orders,
            algorithm,
            seed,
            tasks,
            [
                [None if isinstance(number, tuple) else int(number) for number in start.visit]
                for start in starts
            ],
            list(messages.values()),
            [positions[_message_id(start)] for start in starts],
            [start.memory for start in starts],
            [start.steps for start in starts],
            chunk.start,
        )

    def _place(self, start: TaskStart) -> Any:
        key, tree = _message_id(start), (start.message, start.statistics)
        known = self._messages.get(key)
        placed = known.placed if known else self._pool.place(tree)
        self._messages[key] = PlacedMessage(tree, placed, self._calls)
        return placed

    def _remove_unused(self) -> None:
        """Remove unused messages: to place a straggler's again costs a copy, to keep all costs memory."""
        for key, message in list(self._messages.items()):
            if message.last_call <= self._calls - _KEPT_CALLS:
                self._pool.remove(message.placed)
                del self._messages[key]


def join_orders(done: Sequence[WorkDone]) -> Tree:
    """Results that came with the answers, stacked over all tasks."""
    return trees.map(lambda *leaves: torch.cat(leaves), *(each.results for each in done))


def _message_id(start: TaskStart) -> tuple[int, int]:
    """The same for all tasks of a version, which share these objects."""
    return id(start.message), id(start.statistics)


def run_orders(pool: WorkerPool, orders: Sequence[WorkOrder]) -> Iterator[list[WorkDone]]:
    """Have all orders done; yields those before the first that is not done, each time that there are more.

    The first failure is raised once no worker is busy.
    """
    waiting = deque(orders)
    held: dict[int, WorkOrder] = {}
    deaths: Counter[int] = Counter()
    done: dict[int, WorkDone] = {}
    failed: dict[int, Exception] = {}
    leading: list[WorkDone] = []

    def feed(worker: int) -> None:
        if waiting and not failed:
            held[worker] = waiting.popleft()
            pool.give(worker, held[worker])

    for worker in range(pool.workers):
        feed(worker)
    while held:
        for event in pool.wait():
            if isinstance(event, WorkerLost):
                order = held.get(event.worker)
                if order is not None:
                    deaths[order.number] += 1
                    _check_deaths(deaths[order.number], order, event.reason)
                pool.replace(event.worker)
                if order is not None:
                    pool.give(event.worker, order)
                continue
            worker, answer = event
            del held[worker]
            if isinstance(answer, WorkFailed):
                failed[answer.number] = answer.error
            else:
                done[answer.number] = answer
            feed(worker)
        before = len(leading)
        while len(leading) < len(orders) and orders[len(leading)].number in done:
            leading.append(done[orders[len(leading)].number])
        if len(leading) > before and not failed:
            yield list(leading)
    if failed:
        raise failed[min(failed)]


def _check_deaths(deaths: int, order: WorkOrder, reason: str) -> None:
    if deaths >= _MAX_DEATHS:
        clients = ", ".join(str(task.client) for task in order.tasks)
        raise InputError(
            f"{deaths} workers died in turn at the tasks of client {clients} ({reason}): "
            f"use fewer {setting_name('workers')} if memory is short, or the sequential engine to see why."
        )


def even_chunks(tasks: int, workers: int) -> list[slice]:
    """One chunk for each worker: for workers that compute many tasks at once."""
    size = -(-tasks // workers)
    return [slice(start, start + size) for start in range(0, tasks, size)]


def guided_chunks(tasks: int, workers: int) -> list[slice]:
    """Chunks that get smaller towards the end, so that workers finish together with few orders."""
    chunks, start = [], 0
    while start < tasks:
        size = max(1, (tasks - start) // (2 * workers))
        chunks.append(slice(start, start + size))
        start += size
    return chunks


def pack_worker(problem: Problem, population: Population, execution: Execution) -> Tree:
    """All that a worker needs, as tensors: the examples, and the rest as bytes."""
    others = {field.name: getattr(population, field.name) for field in fields(population)}
    data = tuple(others.pop("data")) if population.in_memory else ()
    file = io.BytesIO()
    try:
        # torch's format, so that tensors can be loaded to another device
        torch.save((problem, others, execution), file, pickle_module=cloudpickle, pickle_protocol=5)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"the module, the loss or the clients cannot be sent to another process ({reason}): "
            "leave out what cannot be pickled, or use the sequential engine."
        ) from None
    return data, torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


class WorkerRuntime:
    """Computes orders; made from what `pack_worker` gave."""

    def __init__(self, packed: Tree, device: torch.device) -> None:
        data, rest = packed
        self._device = device
        problem, others, execution = torch.load(
            io.BytesIO(rest.numpy().tobytes()), map_location=device, weights_only=False
        )
        population = Population(**({"data": trees.map(self._move, data)} if data else {}), **others)
        self._executor: Executor = execution.executor(problem, population)
        self._warnings = _WarningCollector()
        logger = logging.getLogger("offbeat")
        logger.addHandler(self._warnings)
        logger.propagate = False

    def run(self, order: WorkOrder, messages: Sequence[Tree]) -> WorkDone:
        """The results of an order, from its messages (with statistics), in their order."""
        starts = self._starts(order, messages)
        results = self._executor(order.algorithm, order.tasks, starts, order.seed)
        return WorkDone(order.number, results, self._warnings.take())

    def run_into(
        self, order: WorkOrder, messages: Sequence[Tree], write: Callable[[int, Tree], None]
    ) -> WorkDone:
        """As `run`, but `write` is given results and their first row, task by task where they are made so."""
        starts = self._starts(order, messages)
        if isinstance(self._executor, SequentialExecutor):
            each = self._executor.each(order.algorithm, order.tasks, starts, order.seed)
            for row, results in enumerate(each):
                write(row, trees.map(lambda leaf: leaf.unsqueeze(0), results))
        else:
            write(0, self._executor(order.algorithm, order.tasks, starts, order.seed))
        return WorkDone(order.number, (), self._warnings.take())

    def _starts(self, order: WorkOrder, messages: Sequence[Tree]) -> list[TaskStart]:
        """What the tasks of an order start from."""
        moved = [trees.map(self._move, message) for message in messages]
        starts = []
        rows = zip(order.visits, order.which, order.memories, order.steps, strict=True)
        for numbers, which, memory, steps in rows:
            parts: list[Any] = [() if number is None else torch.tensor(number) for number in numbers]
            visit = Visit(*parts)
            message, statistics = moved[which]
            starts.append(TaskStart(message, statistics, trees.map(self._move, memory), visit, steps))
        return starts

    def _move(self, leaf: Tensor) -> Tensor:
        return leaf.to(self._device)


class _WarningCollector(logging.Handler):
    """Collects warnings, for the process that gave the order to log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())

    def take(self) -> tuple[str, ...]:
        messages, self._messages = tuple(self._messages), []
        return messages


def attempt(number: int, action: Callable[[], Any]) -> Any:
    """What the action returns, or its error in a form that can be sent."""
    try:
        return action()
    except Exception as error:
        return WorkFailed(number, _portable_error(error))


def _portable_error(error: Exception) -> Exception:
    text = "".join(traceback.format_exception(error))
    try:
        same: Exception = pickle.loads(cloudpickle.dumps(error))
        if str(same) != str(error):
            raise TypeError
    except Exception:
        same = RuntimeError(f"{type(error).__name__}: {error}")
    same.__cause__ = same.__context__ = None
    same.add_note(f"In a worker:\n{text}")
    return same
