"""Beside what the caller does, or in line with it: where an engine's work is queued.

Functions of tensors as CUDA graphs: recorded once per shape, then launched as one.

Clients side by side on one GPU: each one's work a graph of its own, several streams of them.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from offbeat import trees
from offbeat.core import AnyAlgorithm, Batch, Task
from offbeat.data.population import Population
from offbeat.engines.local import (
    LocalFn,
    PaddingCheck,
    SequentialExecutor,
    TaskDraws,
    TaskInputs,
    TaskResults,
    TaskStart,
    group_by_length,
    join_results,
    load_examples,
    make_local_fn,
    separate_inputs,
)
from offbeat.errors import InputError, setting_name
from offbeat.nn.problem import Problem
from offbeat.trees import Tree


class Completion(Protocol):
    """The end of what was queued so far."""

    def take(self, results: Tree) -> None:
        """Make the caller's next work wait for it, and the results the caller's."""
        ...


class ComputeStream(Protocol):
    """An order of work."""

    @contextmanager
    def running(self, used: Tree) -> Iterator[None]:
        """Queue here what is computed inside, after all that the caller has queued so far."""
        ...

    def mark(self) -> Completion: ...


class CurrentStream:
    """Nothing is queued: a CPU computes at once."""

    @contextmanager
    def running(self, used: Tree) -> Iterator[None]:
        yield

    def mark(self) -> "CurrentStream":
        return self

    def take(self, results: Tree) -> None:
        pass


class SideStream:
    """A stream of its own on a GPU, so that local work goes on while the server steps and evaluates."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def running(self, used: Tree) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        for leaf in trees.leaves(used):
            if leaf.is_cuda:
                leaf.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> "RecordedEvent":
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return RecordedEvent(event, self._stream.device)


class RecordedEvent:
    """An event on a stream."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def take(self, results: Tree) -> None:
        caller = torch.cuda.current_stream(self._device)
        caller.wait_event(self._event)
        for leaf in trees.leaves(results):
            leaf.record_stream(caller)


def compute_stream(device: torch.device) -> ComputeStream:
    """The lane that suits a device."""
    return SideStream(device) if device.type == "cuda" else CurrentStream()


_IDLE_FACTOR = (
    4  # times as many other requests as there is room, after which a graph is thought to be done with
)
_WARMUP_RUNS = 2  # runs before recording, in which libraries settle on kernels and take their workspace

Key = TypeVar("Key", bound=Hashable)


class CapturedGraph:
    """One function at one shape; what it gives lies where the next launch will write again."""

    def __init__(self, function: Callable[[Any], Tree], example: Tree, stream: torch.cuda.Stream) -> None:
        self._function = function  # whose identity, and its algorithm's, must not be another's meanwhile
        caller = torch.cuda.current_stream(stream.device)
        self._inputs = trees.map(torch.clone, example)
        # On the very stream of the recording: a library's workspace belongs to a stream, and one that
        # was first taken while recording would go with this graph.
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            for _ in range(_WARMUP_RUNS):
                function(self._inputs)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._outputs = function(self._inputs)
        caller.wait_stream(stream)

    def __call__(self, given: Tree) -> Tree:
        """Launch on the current stream."""
        for mine, theirs in zip(trees.leaves(self._inputs), trees.leaves(given), strict=True):
            mine.copy_(theirs, non_blocking=True)
        self._graph.replay()
        return self._outputs


class GraphCache(Generic[Key]):
    """The graphs used last; a shape is recorded when it comes a second time."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._seen: set[Key] = set()
        self._turn = 0
        self._used: dict[Key, int] = {}
        self._graphs: OrderedDict[Key, CapturedGraph] = OrderedDict()

    def find(self, key: Key, make: Callable[[], CapturedGraph]) -> CapturedGraph | None:
        """The graph of this shape, or nothing if it was never seen before."""
        if key not in self._graphs and key not in self._seen:
            self._seen.add(key)
            return None
        return self.make(key, make)

    def make(self, key: Key, make: Callable[[], CapturedGraph]) -> CapturedGraph:
        """The graph of this shape, recorded if need be."""
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key]
        while len(self._graphs) >= self._room:
            self._graphs.popitem(last=False)
        self._graphs[key] = make()
        return self._graphs[key]

    def welcomes(self, key: Key) -> bool:
        """Whether its graph is there, or may be recorded without the loss of one that is in use.

        Recording costs several runs, so a circle of more shapes than there is room for would be slower with
        graphs than without.
        """
        self._turn += 1
        if key in self._graphs or len(self._graphs) < self._room:
            self._used[key] = self._turn
            return True
        oldest = next(iter(self._graphs))
        if self._turn - self._used.get(oldest, 0) <= _IDLE_FACTOR * self._room:
            return False
        self._used = {each: self._used.get(each, 0) for each in self._graphs if each != oldest}
        self._used[key] = self._turn
        return True

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Give their memory back."""
        self._graphs.clear()
        self._used.clear()


def tree_signature(tree: Tree) -> tuple[Any, ...]:
    """What a graph depends on besides its function."""
    described = [(tuple(leaf.shape), leaf.dtype) for leaf in trees.leaves(tree)]
    return (trees.structure(tree), *described)


log = logging.getLogger(__name__)

_GRAPHS_PER_STREAM = 16  # recorded shapes that each stream keeps


class StreamSlot(NamedTuple):
    """One stream, and what was recorded on it: only there, since graphs of a stream share its workspace."""

    stream: torch.cuda.Stream
    graphs: GraphCache[tuple[object, ...]]


class StreamExecutor:
    """The work of each client recorded as a graph, and launched on one of a few streams.

    Large layers of large models keep a GPU busy by themselves: then this is faster than `vmap`,
    whose grouped kernels are slow. What cannot be recorded runs one by one, which is said once.
    """

    def __init__(
        self, problem: Problem, population: Population, slots: int = 8, compiled: bool = False
    ) -> None:
        if problem.device.type != "cuda":
            raise InputError(
                f"streams of graphs need a GPU: use {setting_name('device')} cuda, or another way to compute."
            )
        if slots < 1:
            raise InputError(f"{slots} streams cannot compute anything: give at least 1.")
        self._problem = problem
        self._population = population
        self._alone = SequentialExecutor(problem, population)
        self._padding = PaddingCheck(problem, population)
        self._slots = [
            StreamSlot(_new_stream(problem.device), GraphCache(_GRAPHS_PER_STREAM)) for _ in range(slots)
        ]
        self._recordable: bool | None = None
        self._differentiate = problem.compiled() if compiled else problem.differentiate_by_autograd

    def __call__(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> TaskResults:
        """The tasks' results, in order."""
        if not self._can_record():
            return self._alone(algorithm, tasks, starts, seed)
        drawn = TaskDraws.of(algorithm, tasks, self._population, seed)
        groups, parts = group_by_length(drawn.items), []
        for rows in groups:
            mine = [starts[row] for row in rows]
            places = drawn.pick(rows)
            result = None
            if self._padding.allows(places):
                keys = [drawn.keys[row] for row in rows]
                result = self._group(algorithm, separate_inputs(mine, keys, places, self._problem.device))
            if result is None:
                result = self._alone(algorithm, [tasks[row] for row in rows], mine, seed)
            parts.append(result)
        return join_results(groups, parts)

    def close(self) -> None:
        for slot in self._slots:
            slot.graphs.clear()

    def _group(self, algorithm: AnyAlgorithm, given: list[TaskInputs]) -> TaskResults | None:
        """Tasks of one shape; nothing if their work cannot be recorded, or there are too many shapes."""
        cleared = False
        if not self._slots[0].graphs.welcomes(_graph_key(algorithm, given[0])):
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

    def _spread(self, algorithm: AnyAlgorithm, given: list[TaskInputs]) -> TaskResults:
        one = make_local_fn(algorithm, self._problem, self._population, self._differentiate)
        caller = torch.cuda.current_stream(self._problem.device)
        key = _graph_key(algorithm, given[0])
        results: TaskResults | None = None
        slots = self._slots[: len(given)]
        graphs = [self._graph(slot, key, one, given[0]) for slot in slots]
        for slot in slots:
            slot.stream.wait_stream(caller)
        for row, task in enumerate(given):
            slot, graph = slots[row % len(slots)], graphs[row % len(slots)]
            with torch.cuda.stream(slot.stream):
                left = graph(task)
            if results is None:
                results = trees.map(lambda leaf: leaf.new_empty((len(given), *leaf.shape)), left)
                for other in slots:
                    other.stream.wait_stream(caller)  # the room may have been somebody else's until now
            with torch.cuda.stream(slot.stream):
                trees.map(lambda room, leaf, row=row: room[row].copy_(leaf), results, left)
        for slot in slots:
            caller.wait_stream(slot.stream)
        assert results is not None
        return results

    def _graph(
        self, slot: StreamSlot, key: tuple[object, ...], one: LocalFn, first: TaskInputs
    ) -> CapturedGraph:
        with self._problem.precision_context():
            return slot.graphs.make(key, lambda: CapturedGraph(one, first, slot.stream))

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
            self._recordable = not self._problem.draws_random_numbers(
                Batch(load_examples(self._population, first, self._problem))
            )
            if not self._recordable:
                log.warning("this module draws random numbers, so its clients are computed one by one.")
        return self._recordable


def _graph_key(algorithm: AnyAlgorithm, task: TaskInputs) -> tuple[object, ...]:
    return id(algorithm), *tree_signature(task)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
