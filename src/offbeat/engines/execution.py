"""Which way of computing was the fastest before, on this device, for this model: a small file.

The fastest of several ways to compute, found by a short trial on the first tasks.

How a vectorised engine computes: what a user may say in place of letting it find out.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch

from offbeat.core import AnyAlgorithm, Task
from offbeat.data.population import Population
from offbeat.engines.cuda import StreamExecutor
from offbeat.engines.local import Executor, PrefersLargeGroups, TaskResults, TaskStart
from offbeat.engines.vmap import VmapExecutor
from offbeat.errors import unknown_name
from offbeat.nn.problem import Precision, Problem


def cache_path() -> Path | None:
    """The file, by OFFBEAT_CACHE or among the user's caches; None where OFFBEAT_CACHE is empty."""
    own = os.environ.get("OFFBEAT_CACHE")
    if own is not None:
        return Path(own) / "choices.json" if own else None
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home
        return None
    return caches / "offbeat" / "choices.json"


def cache_key(algorithm: AnyAlgorithm, problem: Problem, shape: tuple[int, ...]) -> str:
    """What the answer depends on, as a key."""
    device = torch.cuda.get_device_name(problem.device) if problem.device.type == "cuda" else "cpu"
    facts = [
        device,
        torch.__version__,
        type(algorithm).__name__,
        problem.precision.name,
        *map(str, shape),
        repr(problem),
    ]
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=12).hexdigest()


def cached_choice(key: str) -> str | None:
    """The answer of an earlier trial, if there was one."""
    known = _read_cache(cache_path())
    answer = known.get(key)
    return answer if isinstance(answer, str) else None


def store_choice(key: str, answer: str) -> None:
    """Keep an answer; a cache that cannot be written is no reason to stop."""
    path = cache_path()
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(_read_cache(path) | {key: answer}, indent=1))
        part.replace(path)
    except OSError:
        pass


def _read_cache(path: Path | None) -> dict[str, object]:
    try:
        known = json.loads(path.read_text()) if path else {}
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


_TRIALS = 4  # the first settles, the next two may record, the last is timed


class AutotuneExecutor:
    """Each way computes the first tasks; the fastest goes on, and is remembered for later runs.

    What a run computes with is part of its checkpoint, since ways differ in rounding.
    """

    def __init__(
        self, ways: Mapping[str, Callable[[], Executor]], problem: Problem, population: Population
    ) -> None:
        self._ways = ways
        self._problem = problem
        self._population = population
        self._work: Executor | None = None
        self.chosen: str | None = None

    @property
    def large(self) -> bool:
        """As the one that was chosen."""
        work: object = self._work
        return isinstance(work, PrefersLargeGroups) and work.large

    def __call__(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> TaskResults:
        """The tasks' results, in order."""
        if self._work is not None:
            return self._work(algorithm, tasks, starts, seed)
        batches = self._population.indices(tasks[0].client, tasks[0].visit, seed)
        shape = (len(tasks).bit_length(), len(batches), len(batches[0]))
        key = cache_key(algorithm, self._problem, shape)
        known = cached_choice(key)
        if known is not None and known in self._ways:
            self.choose(known)
            return self(algorithm, tasks, starts, seed)
        results = self._try(algorithm, tasks, starts, seed)
        assert self.chosen is not None
        store_choice(key, self.chosen)
        return results

    def choose(self, name: str) -> None:
        """Compute in this way from now on."""
        if name not in self._ways:
            raise unknown_name("way to compute", name, self._ways)
        self.chosen, self._work = name, self._ways[name]()

    def close(self) -> None:
        if self._work is not None:
            self._work.close()

    def _try(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> TaskResults:
        best: tuple[float, str, Executor, TaskResults] | None = None
        for name, make in self._ways.items():
            work = make()
            for _ in range(_TRIALS):
                began = self._now()
                results = work(algorithm, tasks, starts, seed)
                seconds = self._now() - began
            if best is None or seconds < best[0]:
                if best is not None:
                    best[2].close()
                best = seconds, name, work, results
            else:
                work.close()
        assert best is not None
        _, self.chosen, self._work, results = best
        return results

    def _now(self) -> float:
        if self._problem.device.type == "cuda":
            torch.cuda.synchronize(self._problem.device)
        return time.perf_counter()


class Execution(Protocol):
    """A way to compute the local work of many clients."""

    def work(self, problem: Problem, population: Population) -> Executor: ...


@dataclass(frozen=True)
class Vmap:
    """By `vmap`, at most `chunk` clients at once; recorded as graphs on a GPU."""

    chunk: int | None = None
    graphs: bool = True
    columns: bool = False  # convolutions as products of matrices

    def work(self, problem: Problem, population: Population) -> Executor:
        return VmapExecutor(problem, population, self.chunk, self.graphs, self.columns)


@dataclass(frozen=True)
class CudaStreams:
    """Each client's work as a graph of its own, on `slots` streams of a GPU.

    Compiled by torch first, models are faster still, once the compiler is done.
    """

    slots: int = 8
    compiled: bool = False

    def work(self, problem: Problem, population: Population) -> Executor:
        return StreamExecutor(problem, population, self.slots, self.compiled)


@dataclass(frozen=True)
class Autotune:
    """The fastest of recorded `vmap`, the same in columns, and streams on a GPU, by a trial; `vmap` on a CPU.

    Compiling takes long, so it is asked for. Where nothing may be rounded, streams alone are taken: cuDNN's
    weight gradients of grouped convolutions, which `vmap` makes, are rounded even then.
    """

    chunk: int | None = None

    def work(self, problem: Problem, population: Population) -> Executor:
        if problem.device.type != "cuda":
            return Vmap(self.chunk).work(problem, population)
        if problem.precision is Precision.FLOAT32:
            return CudaStreams().work(problem, population)
        ways = {
            "mapped": lambda: Vmap(self.chunk).work(problem, population),
            "columns": lambda: Vmap(self.chunk, columns=True).work(problem, population),
            "streamed": lambda: CudaStreams().work(problem, population),
        }
        return AutotuneExecutor(ways, problem, population)


EXECUTIONS: Mapping[str, Execution] = MappingProxyType(
    {
        "auto": Autotune(),
        "mapped": Vmap(),
        "columns": Vmap(columns=True),
        "eager": Vmap(graphs=False),
        "streamed": CudaStreams(),
        "compiled": CudaStreams(compiled=True),
    }
)
