"""The tasks of a buffer on a pool of workers: every task is done, whichever worker dies.

A task's result depends only on its inputs, so the tasks of a lost worker are given to its successor.
A message is sent to the workers once, however many tasks start from it.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from offbeat import trees
from offbeat.core import AnyAlgorithm, Task
from offbeat.engines.local import TaskResults, TaskStart
from offbeat.errors import InputError, setting_name
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


@dataclass(frozen=True)
class WorkDone:
    """The results of an order, and the warnings that were logged."""

    number: int
    results: Tree  # `TaskResults`, or where they are
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

    def clear(self) -> None:
        """The results so far have been copied."""
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
        self._calls += 1
        chunks = self._split(len(tasks), self._pool.workers)
        orders = [self._order(algorithm, tasks[chunk], starts[chunk], seed) for chunk in chunks]
        done = run_orders(self._pool, orders)
        for warning in (warning for each in done for warning in each.warnings):
            if warning not in self._warned:
                self._warned.add(warning)
                log.warning("%s", warning)

        def join(*leaves: Tensor) -> Tensor:
            return torch.cat(leaves).to(self._device)

        results: TaskResults = trees.map(join, *(each.results for each in done))
        self._pool.clear()
        self._remove_unused()
        return results

    def close(self) -> None:
        self._messages = {}
        self._pool.close()

    def _order(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> WorkOrder:
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


def _message_id(start: TaskStart) -> tuple[int, int]:
    """The same for all tasks of a version, which share these objects."""
    return id(start.message), id(start.statistics)


def run_orders(pool: WorkerPool, orders: Sequence[WorkOrder]) -> list[WorkDone]:
    """Have all orders done; the first failure is raised once no worker is busy."""
    waiting = deque(orders)
    held: dict[int, WorkOrder] = {}
    deaths: Counter[int] = Counter()
    done: dict[int, WorkDone] = {}
    failed: dict[int, Exception] = {}

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
    if failed:
        raise failed[min(failed)]
    return [done[order.number] for order in orders]


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
