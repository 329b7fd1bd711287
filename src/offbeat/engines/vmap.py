"""Many clients at once by `vmap`, with gradients that torch compiles on request."""

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import pad

from offbeat import trees
from offbeat.core import AnyAlgorithm, Batch, Rate, Task, Vector
from offbeat.data.population import Examples, Population
from offbeat.engines.cuda import (
    CapturedGraph,
    CompilerCache,
    GraphCache,
    new_stream,
    tree_signature,
)
from offbeat.engines.local import (
    DRAWS_NUMBERS,
    NOT_COMPILED,
    PaddedIndices,
    PaddingCheck,
    SequentialExecutor,
    TaskDraws,
    TaskInputs,
    TaskResults,
    TaskStart,
    group_by_length,
    join_results,
    make_local_fn,
    read_padded,
    stacked_inputs,
)
from offbeat.errors import InputError, first_sentence
from offbeat.nn.problem import Problem, Statistics
from offbeat.trees import Structure, Tree

_ALIGNMENT = 128  # bytes
_LONG_ROW = 1 << 14  # numbers from which on alignment matters


class CompiledGradient:
    """The gradient of a problem and the step that uses it, compiled; to be called within `vmap`.

    Models that steps lead to begin at multiples of `_ALIGNMENT` bytes in their matrix, since slices of others
    are read by slower kernels.
    """

    def __init__(self, problem: Problem, backend: str = "inductor") -> None:
        unit = _ALIGNMENT // problem.initial()[0].element_size()
        missing = -problem.size % unit if problem.size >= _LONG_ROW else 0
        take_step = problem.step_by_products()

        def descend(x: Vector, statistics: Statistics, batch: Batch, lr: Tensor) -> tuple[Vector, Statistics]:
            pieces, new_statistics = take_step(x, statistics, batch, lr)
            return torch.cat([*pieces, x.new_zeros(missing)] if missing else pieces), new_statistics

        self._gradient = CompiledMap(problem.by_products(), backend)
        self._step = CompiledMap(descend, backend, problem.size if missing else None, missing)

    def __call__(self, x: Vector, statistics: Statistics, batch: Batch) -> tuple[Vector, Tensor, Statistics]:
        gradient: tuple[Vector, Tensor, Statistics] = self._gradient(x, statistics, batch)
        return gradient

    def descend(self, x: Vector, statistics: Statistics, batch: Batch, lr: Rate) -> tuple[Vector, Statistics]:
        """X minus lr times its gradient, and new statistics; another rate needs no other compilation."""
        rate = lr if isinstance(lr, Tensor) else torch.full((), lr, dtype=x.dtype, device=x.device)
        stepped: tuple[Vector, Statistics] = self._step(x, statistics, batch, rate)
        return stepped


class CompiledMap:
    """A function of trees of tensors, compiled together with the `vmap` that it is called in.

    `vmap` is traced before the compiler sees the function, so that everything that can be mapped can be
    compiled. There is one compiled function for each shape and number of clients.

    Where a `width` is given, matrices with rows of so many numbers are copied into wider ones, unless they
    are slices of such already; the function has to return first a row that is longer by as much as is
    `missing`, which is cut to the width.
    """

    def __init__(
        self,
        function: Callable[..., Tree],
        backend: str = "inductor",
        width: int | None = None,
        missing: int = 0,
    ) -> None:
        self._function = function
        self._backend = backend
        self._width = width
        self._missing = missing
        self._made: Structure = None  # of the last outputs
        self._compiled: dict[tuple[Any, ...], tuple[Callable[..., list[Tensor]], Structure]] = {}

    def __call__(self, *arguments: Tree) -> Any:
        structure = trees.structure(arguments)
        outputs = _Mapped.apply(self, structure, *trees.leaves(arguments))  # type: ignore[no-untyped-call]
        return trees.unflatten(self._made, outputs)

    def stacked(self, structure: Structure, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        """The outputs, stacked over clients as the inputs are."""
        leaves = [self._widened(leaf) for leaf in leaves]
        # what all clients share is repeated, since another layout in memory would be compiled anew
        leaves = [leaf if leaf.stride(0) else leaf.contiguous() for leaf in leaves]
        key = (structure, *[(leaf.shape, leaf.dtype, leaf.stride()) for leaf in leaves])
        if key not in self._compiled:
            self._compiled[key] = self._compile(structure, leaves)
        compiled, self._made = self._compiled[key]
        first, *others = compiled(*leaves)
        return (self._cut(first), *others)

    def _widened(self, leaf: Tensor) -> Tensor:
        if leaf.ndim != 2 or leaf.shape[1] != self._width:
            return leaf
        if leaf.stride() == (self._width + self._missing, 1):
            return leaf
        return pad(leaf, (0, self._missing))[:, : self._width]

    def _cut(self, leaf: Tensor) -> Tensor:
        return leaf if self._width is None else leaf[:, : self._width]

    def _compile(
        self, structure: Structure, leaves: list[Tensor]
    ) -> tuple[Callable[..., list[Tensor]], Structure]:
        made: list[Structure] = []

        def flat(*inputs: Tensor) -> list[Tensor]:
            outputs = self._function(*trees.unflatten(structure, inputs))
            made.append(trees.structure(outputs))
            return trees.leaves(outputs)

        graph = make_fx(vmap(flat))(*leaves)
        return torch.compile(graph, backend=self._backend, dynamic=False), made[0]


class _Mapped(torch.autograd.Function):
    """Reaches the tensors below `vmap`; nothing is differentiated through it."""

    @staticmethod
    def forward(owner: CompiledMap, structure: Structure, *leaves: Tensor) -> Any:
        outputs = owner.stacked(structure, [leaf.unsqueeze(0) for leaf in leaves])
        return tuple(output.squeeze(0) for output in outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, dims: tuple[Any, ...], owner: CompiledMap, structure: Structure, *leaves: Tensor
    ) -> Any:
        stacked = [
            leaf.expand(info.batch_size, *leaf.shape) if dim is None else leaf.movedim(dim, 0)
            for leaf, dim in zip(leaves, dims[2:], strict=True)
        ]
        outputs = owner.stacked(structure, stacked)
        return outputs, tuple(0 for _ in outputs)


log = logging.getLogger(__name__)

_MAX_GRAPHS = 8  # recorded shapes that are kept; each holds the memory of a whole launch
_CACHED_WEIGHTS = 1 << 21  # of all clients of a chunk, beyond which they do not stay in a CPU's caches
_MIN_CHUNK = 8  # clients, of which fewer are not worth mapping


class VmapExecutor:
    """Clients of similar length in one `vmap`, at most `chunk` at a time, and compiled on request.

    Where no chunk is given, a CPU computes as many at a time as its caches hold, and a GPU all of them.
    What cannot be mapped runs one by one, what cannot be compiled runs as it is, and a chunk that does not
    fit into memory is halved; each is logged once. On a GPU, a shape that occurs again is recorded as a
    graph. Few shapes are recorded, and only one is compiled: smaller groups are padded to it.
    """

    def __init__(
        self,
        problem: Problem,
        population: Population,
        chunk: int | None = None,
        compiled: bool = False,
    ) -> None:
        if chunk is not None and chunk < 1:
            raise InputError(f"a chunk of {chunk} clients cannot be computed: give at least 1.")
        # what torch can only compute client by client, it says of each operation, asking users to report it
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        self._problem = problem
        self._population = population
        if chunk is None and problem.device.type == "cpu":
            chunk = max(_MIN_CHUNK, _CACHED_WEIGHTS // problem.size)
        self._chunk = chunk
        self._sequential = SequentialExecutor(problem, population)
        self._padding = PaddingCheck(problem, population)
        self._mappable = True
        self._doubt = ""  # an error that the module may have by itself
        self._refusal = ""  # of the compiler, which is only said if the module can be mapped at all
        self._warned = False  # that the chunk was halved
        self._out_of_memory = False  # in the last attempt
        self._usual = 0  # tasks of most groups; 0: not known
        self._last_count = 0  # tasks of the last call
        self.asked_to_compile = self._compiled = compiled
        self.compiler = CompilerCache("mapped-compiled", problem, population)
        self._differentiate = CompiledGradient(problem) if compiled else problem.differentiate
        self._graphs: GraphCache[tuple[object, ...]] | None = None
        if problem.device.type == "cuda" and population.in_memory:
            self._graphs = GraphCache(_MAX_GRAPHS)
            self._stream = new_stream(problem.device)
            self._pool = torch.cuda.graph_pool_handle()  # for all graphs, since they run one at a time

    @property
    def large(self) -> bool:
        """Whether one large group is computed faster than two small ones."""
        return self._graphs is not None and self._mappable

    @property
    def fell_back(self) -> bool:
        """Whether it does not map, or not compile, as it was asked to."""
        return not self._mappable or self._compiled < self.asked_to_compile

    def expect(self, group: int, groups: int) -> None:
        self._usual = group

    def __call__(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> TaskResults:
        if not self._mappable:
            return self._sequential(algorithm, tasks, starts, seed)
        if not self._usual or (self._last_count == len(tasks) and not self._compiled):
            self._usual = len(tasks)
        self._last_count = len(tasks)
        drawn = TaskDraws.of(algorithm, tasks, starts, self._population, seed)
        groups, parts = group_by_length(drawn.items), []
        for rows in groups:
            group_starts = [starts[row] for row in rows]
            result = self._run_group(algorithm, group_starts, drawn, rows)
            if result is None:
                result = self._sequential(algorithm, [tasks[row] for row in rows], group_starts, seed)
                if self._doubt:  # it was no error of the module itself, which would have been raised now
                    self._give_up(self._doubt)
                    self._doubt = ""
            parts.append(result)
        if self._compiled and self._mappable:
            self.compiler.fill(algorithm, self._usual)
        return join_results(groups, parts)

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()

    def _run_group(
        self, algorithm: AnyAlgorithm, starts: list[TaskStart], drawn: TaskDraws, rows: list[int]
    ) -> TaskResults | None:
        """Compute tasks of similar length chunk by chunk; None if they cannot be mapped."""
        parts: list[TaskResults] = []
        done = 0
        while done < len(rows) and self._mappable:
            size = self._next_chunk(len(rows) - done)
            padded = drawn.padded(rows[done : done + size])
            if not self._padding.allows(padded):
                return None
            keys = [drawn.keys[row] for row in rows[done : done + size]]
            part = self._try_chunk(algorithm, starts[done : done + size], keys, padded)
            if part is None:
                self._free_memory(size)
            else:
                parts.append(part)
                done += size
        if not self._mappable:
            return None
        whole: TaskResults = parts[0] if len(parts) == 1 else trees.map(lambda *p: torch.cat(p), *parts)
        return whole

    def _try_chunk(
        self,
        algorithm: AnyAlgorithm,
        starts: list[TaskStart],
        keys: list[int],
        padded: dict[str, PaddedIndices],
    ) -> TaskResults | None:
        """Compute a chunk; None if it does not fit into memory, or cannot be mapped or recorded after all."""
        try:
            data, padded = read_padded(self._population, padded, self._problem)
            # the compiler stacks a message that all tasks share where it needs to, which saves two copies
            shared = self._compiled and all(start.message is starts[0].message for start in starts)
            message = starts[0].message if shared else ()
            each = [start._replace(message=()) for start in starts] if shared else starts
            inputs = stacked_inputs(each, keys, padded, self._problem.device)
            results = self._map(algorithm, data, message, inputs, len(starts))
            if self._refusal:
                log.warning(NOT_COMPILED, self._refusal)
                self._refusal = ""
            return results
        except torch.OutOfMemoryError:
            self._out_of_memory = True
        except InputError:
            raise
        except Exception as error:
            reason = first_sentence(error)
            if _is_vmap_error(error):
                self._give_up(reason)
            elif self._compiled:
                self._compiled, self._differentiate = False, self._problem.differentiate
                self._refusal = reason
            elif self._graphs is not None and "captur" in str(error):
                self._graphs = None
                log.warning("this module cannot be recorded as a graph: %s", reason)
            else:
                self._mappable, self._doubt = False, reason
        return None  # outside the handler, since a handled error keeps memory alive

    def _map(
        self, algorithm: AnyAlgorithm, data: Examples, message: Tree, inputs: TaskInputs, count: int
    ) -> TaskResults:
        """Compute a chunk of tasks; of a message that all share, or else from those among the inputs."""
        local_fn = make_local_fn(algorithm, self._problem, data, self._differentiate)
        if self._graphs is None and not self._compiled:
            with self._problem.precision_context():
                return TaskResults(*vmap(local_fn, randomness="error")(inputs))

        def mapped(given: tuple[Tree, TaskInputs]) -> TaskResults:
            message, inputs = given

            def one(own: TaskInputs) -> TaskResults:
                start = own.start._replace(message=message) if trees.leaves(message) else own.start
                return local_fn(own._replace(start=start))

            return TaskResults(*vmap(one, randomness="error")(inputs))

        with self._problem.precision_context():
            shape = self._padded_count(count)
            whole = (message, trees.map(lambda leaf: _repeat_last(leaf, shape), inputs))
            graph, key = None, (id(algorithm), *tree_signature(whole))
            if self._graphs is not None and self._graphs.accepts(key):
                graph = self._graphs.find(key, lambda: CapturedGraph(mapped, whole, self._stream, self._pool))
            results = mapped(whole) if graph is None else graph(whole)
            copied: TaskResults = trees.map(lambda leaf: leaf[:count].clone(), TaskResults(*results))
            return copied

    def _next_chunk(self, left: int) -> int:
        """How many to compute next."""
        most = min(self._chunk or left, left)
        return min(most, self._usual) if self._compiled else most

    def _padded_count(self, count: int) -> int:
        """The number of tasks of the recorded shape that holds this many: at most a third is padding."""
        if self._compiled or count == self._usual:
            return self._chunk if self._chunk and self._chunk < self._usual else self._usual
        power = 1 << (count - 1).bit_length()
        size = 3 * power // 4 if count <= 3 * power // 4 else power
        return max(count, min(size, self._chunk or size))

    def _free_memory(self, size: int) -> None:
        """After running out of memory: first drop recorded graphs, then compute fewer at once."""
        if not self._out_of_memory:
            return
        self._out_of_memory = False
        held = self._graphs is not None and len(self._graphs) > 0
        if self._graphs is not None:
            self._graphs.clear()
            self._pool = torch.cuda.graph_pool_handle()  # torch may still be freeing that of the graphs
        torch.cuda.empty_cache()
        if held:
            return
        if size == 1 and self._graphs is not None:
            self._graphs = None  # a recording needs memory of its own
            return
        if size == 1:
            raise InputError(
                "the local work of a single client does not fit into the device's memory: "
                "use smaller minibatches, fewer local steps or a smaller model."
            ) from None
        self._chunk = size // 2
        if not self._warned:
            self._warned = True
            log.warning(
                "%d clients at once do not fit into memory, so they are computed in smaller groups.", size
            )

    def _give_up(self, reason: str) -> None:
        self._mappable = False
        if "random operation" in reason:  # torch goes on to recommend flags that users cannot set here
            log.warning(DRAWS_NUMBERS)
        else:
            log.warning(
                "this module cannot be computed for many clients at once, so it runs one by one: %s", reason
            )


def _repeat_last(leaf: Tensor, count: int) -> Tensor:
    """Pad with copies of the last row, since each shape needs a recording of its own."""
    if len(leaf) == count:
        return leaf
    return torch.cat([leaf, leaf[-1:].expand(count - len(leaf), *leaf.shape[1:])])


def _is_vmap_error(error: Exception) -> bool:
    """Whether `vmap` itself refused: random numbers, in-place writes, control flow on data."""
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "vmap" in text or "functorch" in text or "Batching rule" in text
    )
