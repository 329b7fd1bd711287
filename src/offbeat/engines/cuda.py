"""CUDA graphs and streams: recorded functions, clients side by side, local work beside the server's.

Also notes of what torch's compiler made before.
"""

import getpass
import hashlib
import logging
import os
import re
import tempfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from offbeat import trees
from offbeat.algorithms.rates import unwrapped
from offbeat.core import AnyAlgorithm, Batch, Batches, Rate, Task, Vector, descend
from offbeat.data.population import Examples, Indices, Population, Steps
from offbeat.engines.local import (
    DRAWS_NUMBERS,
    NOT_COMPILED,
    LocalFn,
    SequentialExecutor,
    TaskDraws,
    TaskInputs,
    TaskResults,
    TaskStart,
    make_local_fn,
    run_local,
    sample_batch,
    separate_inputs,
    to_device,
)
from offbeat.errors import InputError, first_sentence, setting_name
from offbeat.nn.problem import GradientFn, Objective, Problem, Statistics
from offbeat.trees import Tree

log = logging.getLogger(__name__)

_GRAPHS_PER_STREAM = 16  # recorded shapes of tasks that each stream keeps
_GRADIENTS_PER_STREAM = 4  # recorded sizes of minibatches, each of gradients and of steps of two kinds
_FREQUENT = 0.1  # share of all minibatches from which on a size is recorded
_IDLE_FACTOR = 4  # a graph is unused after this many times as many other requests as the cache holds graphs
_WARMUP_RUNS = 2  # before recording, so that libraries choose kernels and allocate their workspace

Key = TypeVar("Key", bound=Hashable)


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of this device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class SideStream:
    """A stream of its own on a GPU, so that local work goes on while the server steps and evaluates."""

    def __init__(self, device: torch.device) -> None:
        self._stream = new_stream(device)

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
    """An event on a side stream."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def take(self, results: Tree) -> None:
        caller = torch.cuda.current_stream(self._device)
        caller.wait_event(self._event)
        for leaf in trees.leaves(results):
            leaf.record_stream(caller)


class CapturedGraph:
    """One function at one shape, recorded; the next launch overwrites the outputs of the last."""

    def __init__(
        self, function: Callable[[Any], Tree], example: Tree, stream: torch.cuda.Stream, pool: Any = None
    ) -> None:
        self._function = function  # kept alive, since cache keys hold the id of the algorithm in it
        caller = torch.cuda.current_stream(stream.device)
        self._inputs = trees.map(torch.clone, example)
        # Warm up on the stream of the recording: a library's workspace belongs to a stream, and one that
        # was first allocated while recording would be freed with this graph.
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            for _ in range(_WARMUP_RUNS):
                function(self._inputs)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool, stream, capture_error_mode="thread_local"):
            self._outputs = function(self._inputs)
        caller.wait_stream(stream)

    def __call__(self, inputs: Tree) -> Tree:
        """Launch on the current stream."""
        copy_together(trees.leaves(self._inputs), trees.leaves(inputs))
        self._graph.replay()
        return self._outputs


def copy_together(own: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Copy tensors of one device in a few launches, however many they are."""
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for one, other in zip(own, given, strict=True):
        ours, theirs = kinds.setdefault(one.dtype, ([], []))
        ours.append(one)
        theirs.append(other)
    for ours, theirs in kinds.values():
        torch._foreach_copy_(ours, theirs, non_blocking=True)


class StepSpace:
    """Where the recorded steps of a stream move a model and its running statistics.

    A stream computes one task after another, so all of them use the same space.
    """

    def __init__(self) -> None:
        self.lr: float | None = None  # the first rate, which recorded steps contain
        self.other: Tensor | None = None  # another rate, which steps recorded for those read
        self.x: Vector | None = None
        self.leaves: dict[str, Tensor] = {}  # views of x
        self.statistics: Statistics = {}

    def put(self, problem: Problem, x: Vector, statistics: Statistics) -> None:
        """Begin at this model and these statistics."""
        if self.x is None:
            held = x.clone()
            leaves, own = problem.leaves(held), {name: each.clone() for name, each in statistics.items()}
            self.x, self.leaves, self.statistics = held, leaves, own
            return
        self.x.copy_(x)
        self.put_statistics(statistics)

    def put_rate(self, lr: Rate) -> Rate:
        """The rate of the next step as a recorded step contains or reads it."""
        if self.lr is None and not isinstance(lr, Tensor):
            self.lr = lr
        if not isinstance(lr, Tensor) and lr == self.lr:
            return lr
        assert self.x is not None
        self.other = self.x.new_empty(()) if self.other is None else self.other
        return self.other.fill_(lr)

    def put_statistics(self, statistics: Statistics) -> None:
        """Go on with these statistics, unless they are the ones in here."""
        if statistics is self.statistics:
            return
        with torch.no_grad():
            copy_together(list(self.statistics.values()), [statistics[name] for name in self.statistics])

    def copied(self, results: TaskResults) -> TaskResults:
        """The results of a task without anything that is in here, which the next task overwrites."""
        assert self.x is not None
        places = {leaf.untyped_storage().data_ptr() for leaf in (self.x, *self.statistics.values())}
        within = [leaf for leaf in trees.leaves(results) if leaf.untyped_storage().data_ptr() in places]
        copies = [torch.empty_like(leaf) for leaf in within]
        copy_together(copies, within)
        made = {id(leaf): copy for leaf, copy in zip(within, copies, strict=True)}
        free: TaskResults = trees.map(lambda leaf: made.get(id(leaf), leaf), results)
        return free

    def clear(self) -> None:
        """Free its memory; no graph of a step may be left."""
        self.x, self.other, self.leaves, self.statistics = None, None, {}, {}


class RecordedGradient:
    """The gradient of a minibatch, and a step by it, as a graph for each of a few sizes; for one task.

    Only the first size is compiled; minibatches of other sizes than these are not recorded. Steps are taken
    in the stream's space, so that neither the model nor its gradient is copied: one to begin with, and then
    those from where the last one ended. Steps from elsewhere copy both.
    """

    def __init__(
        self, slot: "StreamSlot", problem: Problem, differentiate: GradientFn, sizes: Sequence[int]
    ) -> None:
        self._slot = slot
        self._problem = problem
        self._differentiate = differentiate
        self._sizes = sizes  # in examples
        self._in_space = False  # whether the task's model is in the stream's space

    def __call__(self, x: Vector, statistics: Statistics, batch: Batch) -> tuple[Vector, Tensor, Statistics]:
        """As `Problem.differentiate`; nothing of it is overwritten by the next."""
        size, inputs = len(trees.leaves(batch.data)[0]), (x, statistics, batch.data)
        if size not in self._sizes:
            return self._problem.differentiate_by_autograd(x, statistics, batch)
        first = size == self._sizes[0]
        function = self._differentiate if first else self._problem.differentiate_by_autograd
        graph = self._slot.gradients.find(
            (function, size),
            lambda: CapturedGraph(
                lambda given: function(given[0], given[1], Batch(given[2])),
                inputs,
                self._slot.stream,
                self._slot.pool,
            ),
        )
        if graph is None:
            return function(x, statistics, batch)
        outputs = graph(inputs)
        made = trees.map(torch.empty_like, outputs)
        copy_together(trees.leaves(made), trees.leaves(outputs))
        gradient: tuple[Vector, Tensor, Statistics] = made
        return gradient

    def descend(self, x: Vector, statistics: Statistics, batch: Batch, lr: Rate) -> tuple[Vector, Statistics]:
        """X minus lr times its gradient, and the new statistics; both may be overwritten by the next step."""
        space = self._slot.space
        if self._problem.moving or (self._in_space and x is not space.x):  # which a step must not change
            grad, _, after = self(x, statistics, batch)
            return descend(x, grad, lr), after
        if self._in_space:
            space.put_statistics(statistics)
        else:
            space.put(self._problem, x, statistics)
            self._in_space = True
        size, rate = len(trees.leaves(batch.data)[0]), space.put_rate(lr)
        compiled = getattr(self._differentiate, "objective", None) if size in self._sizes[:1] else None
        graph = None
        if size in self._sizes:
            key = ("step", id(compiled), size, isinstance(rate, Tensor))
            graph = self._slot.gradients.find(key, lambda: self._record_step(batch, rate, compiled))
        if graph is None:
            self._step(batch, rate, compiled)
        else:
            graph(batch.data)
        assert space.x is not None
        return space.x, space.statistics

    def free(self, results: TaskResults) -> TaskResults:
        """The results of the task, which the next task of this stream does not overwrite."""
        return self._slot.space.copied(results) if self._in_space else results

    def _record_step(self, batch: Batch, rate: Rate, compiled: Objective | None) -> CapturedGraph:
        """A graph of a step; the space is as before, though the step has been tried in it."""
        space = self._slot.space
        own = trees.leaves((space.x, space.statistics))
        before = [leaf.clone() for leaf in own]
        graph = CapturedGraph(
            lambda data: self._step(Batch(data), rate, compiled),
            batch.data,
            self._slot.stream,
            self._slot.pool,
        )
        copy_together(own, before)
        return graph

    def _step(self, batch: Batch, rate: Rate, compiled: Objective | None) -> tuple[()]:
        space = self._slot.space
        after = self._problem.sgd_step(space.leaves, space.statistics, batch, rate, compiled)
        space.put_statistics(after)
        return ()


class GraphCache(Generic[Key]):
    """The most recently used graphs; a shape is recorded when it occurs a second time."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._seen: set[Key] = set()
        self._requests = 0
        self._used: dict[Key, int] = {}  # the last request of each graph
        self._graphs: OrderedDict[Key, CapturedGraph] = OrderedDict()

    def find(self, key: Key, make: Callable[[], CapturedGraph]) -> CapturedGraph | None:
        """The graph of this shape, or None if the shape is new."""
        if key not in self._graphs and key not in self._seen:
            self._seen.add(key)
            return None
        return self.make(key, make)

    def make(self, key: Key, make: Callable[[], CapturedGraph]) -> CapturedGraph:
        """The graph of this shape, recorded if need be."""
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key]
        while len(self._graphs) >= self._size:
            self._graphs.popitem(last=False)
        self._graphs[key] = make()
        return self._graphs[key]

    def accepts(self, key: Key) -> bool:
        """Whether the graph is there, or may be recorded without evicting one that is in use.

        Recording costs several runs, so cycling through more shapes than the cache holds would be slower
        with graphs than without.
        """
        self._requests += 1
        if key in self._graphs or len(self._graphs) < self._size:
            self._used[key] = self._requests
            return True
        oldest = next(iter(self._graphs))
        if self._requests - self._used.get(oldest, 0) <= _IDLE_FACTOR * self._size:
            return False
        self._used = {each: self._used.get(each, 0) for each in self._graphs if each != oldest}
        self._used[key] = self._requests
        return True

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Free the graphs' memory."""
        self._graphs.clear()
        self._used.clear()


def tree_signature(tree: Tree) -> tuple[Any, ...]:
    """What a graph depends on besides its function: structure, shapes and dtypes."""
    return (trees.structure(tree), *[(tuple(leaf.shape), leaf.dtype) for leaf in trees.leaves(tree)])


class CompilerCache:
    """Whether torch's compiler has compiled a problem before and still keeps what it made.

    A note for each problem is kept in the folder of the compiler's own cache, and so is lost with it. What is
    mapped is compiled for one number of tasks in a group.
    """

    def __init__(self, execution: str, problem: Problem, population: Population) -> None:
        self._execution, self._problem, self._population = execution, problem, population
        self._noted: tuple[str, int] | None = None  # the last algorithm and group that were noted

    def filled(self, algorithm: AnyAlgorithm, group: int) -> bool:
        """Whether a run with this algorithm, in groups of so many tasks, finds its gradients compiled."""
        with suppress(OSError):
            return self._note(*self._which(algorithm, group)).exists()
        return False

    def fill(self, algorithm: AnyAlgorithm, group: int) -> None:
        """Note that its gradients are compiled; a note that cannot be written is left out."""
        noted = self._which(algorithm, group)
        if noted != self._noted:
            self._noted = noted
            with suppress(OSError):
                note = self._note(*noted)
                note.parent.mkdir(parents=True, exist_ok=True)
                note.touch()

    def _which(self, algorithm: AnyAlgorithm, group: int) -> tuple[str, int]:
        return type(unwrapped(algorithm)).__name__, group if self._execution.startswith("mapped") else 0

    def _note(self, algorithm: str, group: int) -> Path:
        problem, population = self._problem, self._population
        facts = [algorithm, self._execution, str(group), str(population.work), str(problem.weight_decay)]
        facts += gradient_facts(problem, population)
        digest = hashlib.blake2b("\n".join(facts).encode(), digest_size=12).hexdigest()
        return _compiler_folder() / "offbeat" / digest


def gradient_facts(problem: Problem, population: Population) -> list[str]:
    """What the speed of one gradient depends on, but for the size of its minibatch."""
    device = torch.cuda.get_device_name(problem.device) if problem.device.type == "cuda" else "cpu"
    leaves = trees.leaves(sample_batch(population, problem).data)
    examples = [f"{tuple(leaf.shape[1:])} {leaf.dtype}" for leaf in leaves]
    dtype = str(problem.initial()[0].dtype)
    return [device, torch.__version__, problem.precision.name, dtype, *examples, repr(problem)]


def _compiler_folder() -> Path:
    """Where torch's compiler keeps what it made, found as torch finds it, without importing the compiler."""
    own = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if own:
        return Path(own)
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):  # a user without a name
        user = f"uid_{os.getuid()}" if hasattr(os, "getuid") else "unknown_user"
    name = re.sub(r'[\\/:*?"<>|]', "_", user)
    return Path(tempfile.gettempdir()) / f"torchinductor_{name}"


class StreamSlot(NamedTuple):
    """One stream and the graphs recorded on it, which run nowhere else and one at a time.

    They therefore share its workspace and one pool of memory. Their inputs are not in the pool, and their
    outputs are copied before the next one runs.
    """

    stream: torch.cuda.Stream
    graphs: GraphCache[tuple[object, ...]]  # of whole tasks
    gradients: GraphCache[tuple[object, ...]]
    space: StepSpace
    pool: Any

    @classmethod
    def on(cls, stream: torch.cuda.Stream) -> "StreamSlot":
        """Without graphs."""
        graphs: GraphCache[tuple[object, ...]] = GraphCache(_GRAPHS_PER_STREAM)
        gradients: GraphCache[tuple[object, ...]] = GraphCache(3 * _GRADIENTS_PER_STREAM)  # and steps
        return cls(stream, graphs, gradients, StepSpace(), torch.cuda.graph_pool_handle())


class StreamExecutor:
    """Each client's work recorded as a graph and launched on one of a few streams.

    Layers of large models occupy a GPU by themselves: there this is faster than `vmap`, whose grouped
    kernels are slow. Tasks of one shape are recorded whole. Where shapes differ, as with epochs over clients
    of different sizes, the gradient of a minibatch is recorded instead, so that nothing is padded. What
    cannot be recorded runs one by one, which is logged once.
    """

    def __init__(
        self, problem: Problem, population: Population, streams: int = 8, compiled: bool = False
    ) -> None:
        if problem.device.type != "cuda":
            raise InputError(
                f"streams of graphs need a GPU: use {setting_name('device')} cuda, or another execution."
            )
        if streams < 1:
            raise InputError(f"{streams} streams cannot compute anything: give at least 1.")
        self._problem = problem
        self._population = population
        self._sequential = SequentialExecutor(problem, population)
        self._slots = [StreamSlot.on(new_stream(problem.device)) for _ in range(streams)]
        self._recordable: bool | None = None
        self._varied = False  # whether tasks had several shapes
        self._sizes: Counter[int] = Counter()  # minibatches by their examples, where shapes vary
        self.asked_to_compile = self._compiled = compiled
        self.compiler = CompilerCache("streamed-compiled", problem, population)
        self._differentiate: GradientFn = problem.differentiate_by_autograd
        if compiled:
            self._differentiate = problem.compiled()

    @property
    def fell_back(self) -> bool:
        """Whether it does not record, or not compile, as it was asked to."""
        records = self._recordable is not False and self._population.in_memory
        return not records or self._compiled < self.asked_to_compile

    def __call__(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> TaskResults:
        if not self._can_record():
            return self._sequential(algorithm, tasks, starts, seed)
        drawn = TaskDraws.of(algorithm, tasks, starts, self._population, seed)
        results = self._record_tasks(algorithm, starts, drawn)
        if results is None:
            results = self._attempt(lambda: self._launch_steps(algorithm, starts, drawn))
        if results is None:
            return self._sequential(algorithm, tasks, starts, seed)
        if self._compiled:
            self.compiler.fill(algorithm, len(tasks))
        return results

    def close(self) -> None:
        for slot in self._slots:
            slot.graphs.clear()
            slot.gradients.clear()
            slot.space.clear()

    def _record_tasks(
        self, algorithm: AnyAlgorithm, starts: Sequence[TaskStart], drawn: TaskDraws
    ) -> TaskResults | None:
        """Compute tasks of one shape as graphs of whole tasks; None if shapes differ or are too many."""
        if self._varied and not isinstance(self._population.work, Steps):
            return None
        shapes = [{tuple(map(len, task)) for task in each} for each in (drawn.items, drawn.whole)]
        if any(len(each) > 1 or any(len(set(shape)) > 1 for shape in each) for each in shapes):
            self._varied = True
            return None
        padded = drawn.padded(range(len(starts)))
        inputs = separate_inputs(starts, drawn.keys, padded, self._problem.device)
        key = (id(algorithm), *tree_signature(inputs[0]))
        if not self._slots[0].graphs.accepts(key):
            return None
        return self._attempt(lambda: self._launch_tasks(algorithm, key, inputs))

    def _attempt(self, launch: Callable[[], TaskResults]) -> TaskResults | None:
        """Launch, again without the compiler or with fewer streams if need be; None if it cannot record."""
        cleared, refusal = False, ""  # of the compiler, which is only said if the module can be recorded
        while self._recordable:
            try:
                results = launch()
                if refusal:
                    log.warning(NOT_COMPILED, refusal)
                return results
            except torch.OutOfMemoryError:
                pass  # a handled error keeps memory alive until its handler is left
            except InputError:
                raise
            except Exception as error:
                if self._compiled:
                    self._compiled, self._differentiate = False, self._problem.differentiate_by_autograd
                    refusal = first_sentence(error)
                    continue
                if "captur" not in str(error):
                    raise
                self._recordable = False
                log.warning(
                    "this module cannot be recorded as a graph, so its clients are computed one by one: %s",
                    first_sentence(error),
                )
                return None
            self._free_memory(fewer_streams=cleared)
            cleared = True
        return None

    def _launch_steps(
        self, algorithm: AnyAlgorithm, starts: Sequence[TaskStart], drawn: TaskDraws
    ) -> TaskResults:
        """Compute tasks of any shapes by recorded gradients, the longest first."""
        problem, device = self._problem, self._problem.device
        caller = torch.cuda.current_stream(device)
        inputs = separate_inputs(starts, drawn.keys, {}, device)
        self._sizes.update(
            len(batch) for each in (drawn.items, drawn.whole) for task in each for batch in task
        )
        least = _FREQUENT * self._sizes.total()
        most = self._sizes.most_common(_GRADIENTS_PER_STREAM)
        sizes = [size for size, count in most if count >= least]
        steps = [len(task) for task in drawn.items]
        loads = [0] * min(len(self._slots), len(inputs))
        results: dict[int, TaskResults] = {}
        for slot in self._slots[: len(loads)]:
            slot.stream.wait_stream(caller)
        with problem.precision_context():
            for row in sorted(range(len(inputs)), key=lambda row: -steps[row]):
                place = loads.index(min(loads))
                loads[place] += steps[row]
                slot = self._slots[place]
                gradient = RecordedGradient(slot, problem, self._differentiate, sizes)
                with torch.cuda.stream(slot.stream):
                    items = self._load(drawn.items[row])
                    whole = self._load(drawn.whole[row]) if drawn.whole else ()
                    start, key, _ = inputs[row]
                    found = run_local(algorithm, problem, start, Batches(items, whole), key, gradient)
                    results[row] = gradient.free(found)
        for slot in self._slots[: len(loads)]:
            caller.wait_stream(slot.stream)
        stacked: TaskResults = trees.stack([results[row] for row in range(len(inputs))])
        return stacked

    def _load(self, batches: Sequence[Indices]) -> tuple[Batch, ...]:
        """Minibatches, gathered at once."""
        assert isinstance(self._population.data, Examples)
        every = torch.from_numpy(np.concatenate(batches))
        device, ends = self._problem.device, np.cumsum([len(batch) for batch in batches])
        data = trees.map(
            lambda leaf: to_device(leaf[to_device(every, leaf.device)], device), tuple(self._population.data)
        )
        return tuple(
            Batch(trees.map(lambda leaf, end=end, size=len(batch): leaf[end - size : end], data))
            for end, batch in zip(ends.tolist(), batches, strict=True)
        )

    def _launch_tasks(
        self, algorithm: AnyAlgorithm, key: tuple[object, ...], inputs: list[TaskInputs]
    ) -> TaskResults:
        assert isinstance(self._population.data, Examples)
        local_fn = make_local_fn(algorithm, self._problem, self._population.data, self._differentiate)
        caller = torch.cuda.current_stream(self._problem.device)
        results: TaskResults | None = None
        slots = self._slots[: len(inputs)]
        graphs = [self._graph(slot, key, local_fn, inputs[0]) for slot in slots]
        for slot in slots:
            slot.stream.wait_stream(caller)
        for row, task in enumerate(inputs):
            slot, graph = slots[row % len(slots)], graphs[row % len(slots)]
            with torch.cuda.stream(slot.stream):
                outputs = graph(task)
            if results is None:
                results = trees.map(lambda leaf: leaf.new_empty((len(inputs), *leaf.shape)), outputs)
                for other in slots:
                    other.stream.wait_stream(caller)  # until now the memory may have been in use elsewhere
            with torch.cuda.stream(slot.stream):
                trees.map(lambda out, leaf, row=row: out[row].copy_(leaf), results, outputs)
        for slot in slots:
            caller.wait_stream(slot.stream)
        assert results is not None
        return results

    def _graph(
        self, slot: StreamSlot, key: tuple[object, ...], local_fn: LocalFn, first: TaskInputs
    ) -> CapturedGraph:
        with self._problem.precision_context():
            return slot.graphs.make(key, lambda: CapturedGraph(local_fn, first, slot.stream, slot.pool))

    def _free_memory(self, fewer_streams: bool) -> None:
        """After running out of memory: first drop the graphs of other shapes, then use fewer streams."""
        torch.cuda.synchronize(self._problem.device)
        self.close()
        torch.cuda.empty_cache()
        self._slots = [StreamSlot.on(slot.stream) for slot in self._slots]
        if not fewer_streams:
            return
        if len(self._slots) == 1:
            raise InputError(
                "the local work of a single client does not fit into the device's memory: "
                "use smaller minibatches, fewer local steps or a smaller model."
            ) from None
        self._slots = self._slots[: len(self._slots) // 2]
        log.warning("so many streams do not fit into memory, so %d are used.", len(self._slots))

    def _can_record(self) -> bool:
        """A module that draws random numbers is seeded for each task, which a graph would not repeat.

        A graph cannot read examples that are not in memory either.
        """
        if not self._population.in_memory:
            return False
        if self._recordable is None:
            batch = sample_batch(self._population, self._problem)
            self._recordable = not self._problem.draws_random_numbers(batch)
            if not self._recordable:
                log.warning(DRAWS_NUMBERS)
        return self._recordable
