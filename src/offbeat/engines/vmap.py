"""All clients at once by `vmap`."""

import logging
from collections.abc import Sequence

import torch
from torch.func import vmap

from offbeat import trees
from offbeat.core import AnyAlgorithm, Task
from offbeat.data.population import Population
from offbeat.engines.cuda import CapturedGraph, GraphCache, tree_signature
from offbeat.engines.local import (
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
    stacked_inputs,
)
from offbeat.errors import InputError
from offbeat.nn.problem import Problem

log = logging.getLogger(__name__)

_MAX_GRAPHS = 8  # recorded shapes that are kept; each holds the memory of a whole launch
_MIN_RECORDED = 8  # tasks of the smallest recorded shape


class VmapExecutor:
    """Clients of like length in one `vmap`, at most `chunk` at a time.

    What cannot be mapped runs one by one, and a chunk that does not fit into memory is halved;
    both are said once. On a GPU a shape that comes again is recorded as a graph, unless `graphs` is off.
    """

    def __init__(
        self,
        problem: Problem,
        population: Population,
        chunk: int | None = None,
        graphs: bool = True,
        columns: bool = False,
    ) -> None:
        if chunk is not None and chunk < 1:
            raise InputError(f"a chunk of {chunk} clients cannot be computed: give at least 1.")
        self._problem = problem
        self._population = population
        self._chunk = chunk
        self._alone = SequentialExecutor(problem, population)
        self._padding = PaddingCheck(problem, population)
        self._mappable = True
        self._shrunk = False
        self._full = False  # whether the last attempt ran out of memory
        self._steady = False  # whether the call before computed as many
        self._last = 0  # how many the last call computed
        self._differentiate = problem.differentiate_by_im2col if columns else problem.differentiate
        self._graphs: GraphCache[tuple[object, ...]] | None = None
        if graphs and problem.device.type == "cuda":
            self._graphs = GraphCache(_MAX_GRAPHS)
            self._stream = torch.cuda.Stream(problem.device)  # type: ignore[no-untyped-call]

    @property
    def large(self) -> bool:
        """Whether one large group is computed faster than two small ones."""
        return self._graphs is not None and self._mappable

    def __call__(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> TaskResults:
        """The tasks' results, in order."""
        if not self._mappable:
            return self._alone(algorithm, tasks, starts, seed)
        self._steady, self._last = self._last == len(tasks), len(tasks)
        drawn = TaskDraws.of(algorithm, tasks, self._population, seed)
        groups, parts = group_by_length(drawn.items), []
        for rows in groups:
            mine = [starts[row] for row in rows]
            result = self._group(algorithm, mine, drawn, rows)
            if result is None:
                result = self._alone(algorithm, [tasks[row] for row in rows], mine, seed)
            parts.append(result)
        return join_results(groups, parts)

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()

    def _group(
        self, algorithm: AnyAlgorithm, starts: list[TaskStart], drawn: TaskDraws, rows: list[int]
    ) -> TaskResults | None:
        """Tasks of like length, chunk by chunk; nothing if they cannot be mapped."""
        parts: list[TaskResults] = []
        done = 0
        while done < len(rows) and self._mappable:
            size = self._portion(len(rows) - done)
            places = drawn.pick(rows[done : done + size])
            if not self._padding.allows(places):
                return None
            keys = [drawn.keys[row] for row in rows[done : done + size]]
            part = self._attempt(algorithm, starts[done : done + size], keys, places)
            if part is None:
                self._shrink(size)
            else:
                parts.append(part)
                done += size
        if not self._mappable:
            return None
        whole: TaskResults = parts[0] if len(parts) == 1 else trees.map(lambda *p: torch.cat(p), *parts)
        return whole

    def _attempt(
        self,
        algorithm: AnyAlgorithm,
        starts: list[TaskStart],
        keys: list[int],
        places: dict[str, PaddedIndices],
    ) -> TaskResults | None:
        """A chunk; nothing where it does not fit into memory, or cannot be mapped or recorded after all."""
        try:
            return self._map(
                algorithm, stacked_inputs(starts, keys, places, self._problem.device), len(starts)
            )
        except torch.OutOfMemoryError:
            self._full = True
        except RuntimeError as error:
            if self._graphs is not None and "captur" in str(error):
                self._graphs = None
                log.warning("this module cannot be recorded as a graph: %s", str(error).splitlines()[0])
            elif _is_vmap_error(error):
                self._give_up(str(error).splitlines()[0])
            else:
                raise
        return None  # outside of the handler, for what failed holds memory while it is handled

    def _map(self, algorithm: AnyAlgorithm, given: TaskInputs, count: int) -> TaskResults:
        one = make_local_fn(algorithm, self._problem, self._population, self._differentiate)
        mapped = vmap(one, randomness="error")
        with self._problem.precision_context():
            if self._graphs is None:
                return TaskResults(*mapped(given))
            if not (self._steady and count == self._last):
                shape = max(count, min(_padded_count(count), self._chunk or _padded_count(count)))
                given = trees.map(lambda leaf: _repeat_last(leaf, shape), given)
            key = (id(algorithm), *tree_signature(given))
            graph = self._graphs.find(key, lambda: CapturedGraph(mapped, given, self._stream))
            results = mapped(given) if graph is None else graph(given)
            fresh: TaskResults = trees.map(lambda leaf: leaf[:count].clone(), TaskResults(*results))
            return fresh

    def _portion(self, left: int) -> int:
        """How many to compute next: where shapes are recorded, powers of two, or what comes every time."""
        size = min(self._chunk or left, left)
        if self._graphs is None or size <= _MIN_RECORDED or (self._steady and size == self._last):
            return size
        return 1 << (size.bit_length() - 1)

    def _shrink(self, size: int) -> None:
        """Make room: first by what was recorded, then by computing fewer at once."""
        if not self._full:
            return
        self._full = False
        held = self._graphs is not None and len(self._graphs) > 0
        if self._graphs is not None:
            self._graphs.clear()
        torch.cuda.empty_cache()
        if held:
            return
        if size == 1:
            raise InputError(
                "the local work of a single client does not fit into the device's memory: "
                "use smaller minibatches, fewer local steps or a smaller model."
            ) from None
        self._chunk = size // 2
        if not self._shrunk:
            self._shrunk = True
            log.warning(
                "%d clients at once do not fit into memory, so they are computed in smaller groups.", size
            )

    def _give_up(self, reason: str) -> None:
        self._mappable = False
        if "random operation" in reason:  # torch goes on to advise flags that are not the user's
            log.warning("this module draws random numbers, so its clients are computed one by one.")
        else:
            log.warning(
                "this module cannot be computed for many clients at once, so it runs one by one: %s", reason
            )


def _padded_count(count: int) -> int:
    """The shape to compute so many in."""
    return max(_MIN_RECORDED, 1 << (count - 1).bit_length())


def _repeat_last(leaf: torch.Tensor, count: int) -> torch.Tensor:
    """As many rows as one of few shapes has, for each shape is a recording of its own."""
    if len(leaf) == count:
        return leaf
    return torch.cat([leaf, leaf[-1:].expand(count - len(leaf), *leaf.shape[1:])])


def _is_vmap_error(error: RuntimeError) -> bool:
    """Whether `vmap` itself refused: random numbers, in-place writes, control flow on data."""
    text = str(error)
    return "vmap" in text or "functorch" in text or "Batching rule" in text
