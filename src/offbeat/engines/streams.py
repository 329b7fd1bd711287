"""Clients side by side on one GPU: each one's work a graph of its own, several streams of them."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from offbeat import trees
from offbeat.core import AnyAlgorithm, Batch, Task
from offbeat.engines.capture import Captured, Latest, signature
from offbeat.engines.local import Drawn, Inputs, Local, Padding, join, local_work, rows_of
from offbeat.engines.places import alike
from offbeat.engines.work import OneByOne, Results, Start, take
from offbeat.errors import InputError
from offbeat.population.population import Population
from offbeat.problem import Problem

log = logging.getLogger(__name__)

_GRAPHS = 16  # recorded shapes that each stream keeps


class Slot(NamedTuple):
    """One stream, and what was recorded on it: only there, since graphs of a stream share its workspace."""

    stream: torch.cuda.Stream
    graphs: Latest[tuple[object, ...]]


class Streams:
    """The work of each client recorded as a graph, and launched on one of a few streams.

    Large layers of large models keep a GPU busy by themselves: then this is faster than `vmap`,
    whose grouped kernels are slow. What cannot be recorded runs one by one, which is said once.
    """

    def __init__(
        self, problem: Problem, population: Population, slots: int = 8, compiled: bool = False
    ) -> None:
        if problem.device.type != "cuda":
            raise InputError("streams of graphs need a GPU: use --device cuda, or another way to compute.")
        if slots < 1:
            raise InputError(f"{slots} streams cannot compute anything: give at least 1.")
        self._problem = problem
        self._population = population
        self._alone = OneByOne(problem, population)
        self._padding = Padding(problem, population)
        self._slots = [Slot(_stream(problem.device), Latest(_GRAPHS)) for _ in range(slots)]
        self._recordable: bool | None = None
        self._differentiate = problem.compiled() if compiled else problem.differentiate_alone

    def __call__(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[Start], seed: int
    ) -> Results:
        """The tasks' results, in order."""
        if not self._can_record():
            return self._alone(algorithm, tasks, starts, seed)
        drawn = Drawn.of(algorithm, tasks, self._population, seed)
        groups, parts = alike(drawn.items), []
        for rows in groups:
            mine = [starts[row] for row in rows]
            places = drawn.pick(rows)
            result = None
            if self._padding.allows(places):
                keys = [drawn.keys[row] for row in rows]
                result = self._group(algorithm, rows_of(mine, keys, places, self._problem.device))
            if result is None:
                result = self._alone(algorithm, [tasks[row] for row in rows], mine, seed)
            parts.append(result)
        return join(groups, parts)

    def close(self) -> None:
        for slot in self._slots:
            slot.graphs.clear()

    def _group(self, algorithm: AnyAlgorithm, given: list[Inputs]) -> Results | None:
        """Tasks of one shape; nothing if their work cannot be recorded, or there are too many shapes."""
        cleared = False
        if not self._slots[0].graphs.welcomes(_key(algorithm, given[0])):
            return None
        while self._recordable:
            try:
                return self._spread(algorithm, given)
            except torch.OutOfMemoryError:
                pass  # what failed holds memory until this handler is left
            except RuntimeError as error:
                if "captur" not in str(error):
                    raise
                self._recordable = False
                log.warning(
                    "this module cannot be recorded as a graph, so its clients are computed one by one: %s",
                    str(error).splitlines()[0],
                )
                return None
            self._shrink(fewer=cleared)
            cleared = True
        return None

    def _spread(self, algorithm: AnyAlgorithm, given: list[Inputs]) -> Results:
        one = local_work(algorithm, self._problem, self._population, self._differentiate)
        caller = torch.cuda.current_stream(self._problem.device)
        key = _key(algorithm, given[0])
        results: Results | None = None
        slots = self._slots[: len(given)]
        graphs = [self._graph(slot, key, one, given[0]) for slot in slots]
        for slot in slots:
            slot.stream.wait_stream(caller)
        for row, task in enumerate(given):
            slot, graph = slots[row % len(slots)], graphs[row % len(slots)]
            with torch.cuda.stream(slot.stream):
                left = graph(task)
            if results is None:
                results = trees.over(lambda leaf: leaf.new_empty((len(given), *leaf.shape)), left)
                for other in slots:
                    other.stream.wait_stream(caller)  # the room may have been somebody else's until now
            with torch.cuda.stream(slot.stream):
                trees.over(lambda room, leaf, row=row: room[row].copy_(leaf), results, left)
        for slot in slots:
            caller.wait_stream(slot.stream)
        assert results is not None
        return results

    def _graph(self, slot: Slot, key: tuple[object, ...], one: Local, first: Inputs) -> Captured:
        with self._problem.numerics():
            return slot.graphs.make(key, lambda: Captured(one, first, slot.stream))

    def _shrink(self, fewer: bool) -> None:
        """Make room: first by what was recorded for other shapes, then by fewer streams."""
        torch.cuda.synchronize(self._problem.device)
        self.close()
        torch.cuda.empty_cache()
        if not fewer:
            return
        if len(self._slots) == 1:
            raise InputError(
                "the local work of a single client does not fit into the device's memory: "
                "use smaller minibatches, fewer local steps or a smaller model."
            ) from None
        self._slots = self._slots[: len(self._slots) // 2]
        log.warning("so many streams do not fit into memory, so %d are used.", len(self._slots))

    def _can_record(self) -> bool:
        """A module that draws as it computes is seeded for each task, which a graph would not repeat."""
        if self._recordable is None:
            first = torch.arange(min(5, self._population.data.total))
            self._recordable = not self._problem.draws(Batch(take(self._population, first, self._problem)))
            if not self._recordable:
                log.warning("this module draws random numbers, so its clients are computed one by one.")
        return self._recordable


def _key(algorithm: AnyAlgorithm, task: Inputs) -> tuple[object, ...]:
    return id(algorithm), *signature(task)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
