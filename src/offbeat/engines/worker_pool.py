"""What a worker elsewhere is asked to do, and what it answers.

The tasks of a buffer spread over workers elsewhere: each is done, whoever dies on the way.

A task's result depends on nothing but what it is given, so one that a lost worker had is simply
done again by the next. A message goes to the workers once, however many tasks start from it.
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


class WorkOrder(NamedTuple):
    """Some tasks of one buffer."""

    number: int
    algorithm: AnyAlgorithm
    seed: int
    tasks: Sequence[Task]
    visits: Sequence[Sequence[int]]  # each `Visit`, its numbers in order
    messages: Sequence[Any]  # each once, as the crew has placed it
    which: Sequence[int]  # of the messages, for each task
    memories: Sequence[Tree]


@dataclass(frozen=True)
class WorkDone:
    """The results of an order, and what was logged on the way."""

    number: int
    results: Tree  # `Results`, or where they lie
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorkFailed:
    """An error that would have stopped the run here, too."""

    number: int
    error: Exception


@dataclass(frozen=True)
class WorkerLost:
    """A worker is gone, and why, as far as that can be told."""

    worker: int
    reason: str


log = logging.getLogger(__name__)

_MAX_DEATHS = 8  # of workers that had one order, until it is thought to be the order's fault
_KEPT_CALLS = 2  # calls for which a message that nobody asks for stays placed


class WorkerPool(Protocol):
    """Some workers, by number, and what passes between them and here."""

    @property
    def workers(self) -> int: ...

    def place(self, tree: Tree) -> Any:
        """Put a tree where every worker can read it."""
        ...

    def remove(self, placed: Any) -> None:
        """No order will refer to it again."""
        ...

    def give(self, worker: int, order: WorkOrder) -> None:
        """Give an idle worker an order; that it is gone may be noticed later."""
        ...

    def wait(self) -> Sequence[tuple[int, WorkDone | WorkFailed] | WorkerLost]:
        """What has happened since, by worker; at least one thing."""
        ...

    def replace(self, worker: int) -> None:
        """Have another in the place of one that is lost."""
        ...

    def clear(self) -> None:
        """The results so far have been copied."""
        ...

    def close(self) -> None: ...


class PlacedMessage(NamedTuple):
    """A message and statistics that workers can read."""

    both: Tree  # held, so that no other object gets their identity
    placed: Any
    used: int  # the last call that asked for it


class PoolExecutor:
    """A `Work` that is done by a crew."""

    def __init__(
        self, crew: WorkerPool, device: torch.device, parts: Callable[[int, int], list[slice]]
    ) -> None:
        self._crew = crew
        self._device = device
        self._parts = parts
        self._known: dict[tuple[int, int], PlacedMessage] = {}
        self._calls = 0
        self._orders = 0
        self._said: set[str] = set()

    def __call__(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> TaskResults:
        """The tasks' results, in order."""
        self._calls += 1
        parts = self._parts(len(tasks), self._crew.workers)
        orders = [self._order(algorithm, tasks[part], starts[part], seed) for part in parts]
        done = run_orders(self._crew, orders)
        for remark in (remark for each in done for remark in each.remarks):
            if remark not in self._said:
                self._said.add(remark)
                log.warning("%s", remark)

        def join(*leaves: Tensor) -> Tensor:
            return torch.cat(leaves).to(self._device)

        results: TaskResults = trees.map(join, *(each.results for each in done))
        self._crew.clear()
        self._forget()
        return results

    def close(self) -> None:
        self._known = {}
        self._crew.close()

    def _order(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> WorkOrder:
        messages = {_identity(start): self._placed(start) for start in starts}
        places = {key: place for place, key in enumerate(messages)}
        self._orders += 1
        return WorkOrder(
            self._orders,
            algorithm,
            seed,
            tasks,
            [[int(number) for number in trees.leaves(start.visit)] for start in starts],
            list(messages.values()),
            [places[_identity(start)] for start in starts],
            [start.memory for start in starts],
        )

    def _placed(self, start: TaskStart) -> Any:
        key, both = _identity(start), (start.message, start.statistics)
        known = self._known.get(key)
        placed = known.placed if known else self._crew.place(both)
        self._known[key] = PlacedMessage(both, placed, self._calls)
        return placed

    def _forget(self) -> None:
        """A straggler's message may be placed again: that costs a copy, and keeping all costs room."""
        for key, known in list(self._known.items()):
            if known.used <= self._calls - _KEPT_CALLS:
                self._crew.remove(known.placed)
                del self._known[key]


def _identity(start: TaskStart) -> tuple[int, int]:
    """The same for all tasks of a version, which share these objects."""
    return id(start.message), id(start.statistics)


def run_orders(crew: WorkerPool, orders: Sequence[WorkOrder]) -> list[WorkDone]:
    """Have all orders done; the first that fails is raised when nobody is at work any more."""
    waiting = deque(orders)
    held: dict[int, WorkOrder] = {}
    deaths: Counter[int] = Counter()
    done: dict[int, WorkDone] = {}
    failed: dict[int, Exception] = {}

    def feed(worker: int) -> None:
        if waiting and not failed:
            held[worker] = waiting.popleft()
            crew.give(worker, held[worker])

    for worker in range(crew.workers):
        feed(worker)
    while held:
        for event in crew.wait():
            if isinstance(event, WorkerLost):
                order = held.get(event.worker)
                if order is not None:
                    deaths[order.number] += 1
                    _check_deaths(deaths[order.number], order, event.reason)
                crew.replace(event.worker)
                if order is not None:
                    crew.give(event.worker, order)
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
    """One run of tasks for each worker: for those that compute many at once."""
    size = -(-tasks // workers)
    return [slice(start, start + size) for start in range(0, tasks, size)]


def guided_chunks(tasks: int, workers: int) -> list[slice]:
    """Runs of tasks, shorter towards the end, so that workers end together and are asked rarely."""
    parts, start = [], 0
    while start < tasks:
        size = max(1, (tasks - start) // (2 * workers))
        parts.append(slice(start, start + size))
        start += size
    return parts
