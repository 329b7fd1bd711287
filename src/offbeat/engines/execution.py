"""How a vectorised engine computes: by `vmap`, on CUDA streams, or as a short trial finds faster."""

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch

from offbeat.core import AnyAlgorithm, Task
from offbeat.data.population import Population
from offbeat.engines.cuda import StreamExecutor
from offbeat.engines.local import Executor, PrefersLargeGroups, SequentialExecutor, TaskResults, TaskStart
from offbeat.engines.vmap import VmapExecutor
from offbeat.errors import unknown_name
from offbeat.nn.problem import Precision, Problem

_TRIALS = 4  # the first warms up, the next two may record graphs, the last is timed


class Execution(Protocol):
    """A way to compute the local work of many clients."""

    def executor(self, problem: Problem, population: Population) -> Executor: ...


@dataclass(frozen=True)
class Serial:
    """One client after another."""

    def executor(self, problem: Problem, population: Population) -> Executor:
        return SequentialExecutor(problem, population)


@dataclass(frozen=True)
class Vmap:
    """By `vmap`, at most `chunk` clients at once; recorded as graphs on a GPU."""

    chunk: int | None = None
    graphs: bool = True
    im2col: bool = False  # convolutions as matrix products

    def executor(self, problem: Problem, population: Population) -> Executor:
        return VmapExecutor(problem, population, self.chunk, self.graphs, self.im2col)


@dataclass(frozen=True)
class CudaStreams:
    """Each client's work as a graph of its own, on several streams of a GPU.

    Models that torch compiles first are faster still, once the compiler is done.
    """

    streams: int = 8
    compiled: bool = False

    def executor(self, problem: Problem, population: Population) -> Executor:
        return StreamExecutor(problem, population, self.streams, self.compiled)


@dataclass(frozen=True)
class Autotune:
    """On a GPU the fastest of `vmap`, `vmap` with im2col, and streams, by a trial; on a CPU `vmap`.

    Compiling takes long and is not tried. Where nothing may be rounded, streams are used: cuDNN rounds the
    weight gradients of grouped convolutions, which `vmap` makes, even then.
    """

    chunk: int | None = None

    def executor(self, problem: Problem, population: Population) -> Executor:
        if problem.device.type != "cuda":
            return Vmap(self.chunk).executor(problem, population)
        if problem.precision is Precision.FLOAT32:
            return CudaStreams().executor(problem, population)
        candidates: dict[str, Execution] = {
            "mapped": Vmap(self.chunk),
            "columns": Vmap(self.chunk, im2col=True),
            "streamed": CudaStreams(),
        }
        return AutotuneExecutor(candidates, problem, population)


EXECUTIONS: Mapping[str, Execution] = MappingProxyType(
    {
        "auto": Autotune(),
        "mapped": Vmap(),
        "columns": Vmap(im2col=True),
        "eager": Vmap(graphs=False),
        "streamed": CudaStreams(),
        "compiled": CudaStreams(compiled=True),
    }
)


class AutotuneExecutor:
    """Each candidate computes the first tasks; the fastest goes on, and is remembered for later runs.

    The choice is part of a run's checkpoint, since executions differ in rounding.
    """

    def __init__(self, candidates: Mapping[str, Execution], problem: Problem, population: Population) -> None:
        self._candidates = candidates
        self._problem = problem
        self._population = population
        self._executor: Executor | None = None
        self.chosen: str | None = None

    @property
    def large(self) -> bool:
        """As the chosen executor."""
        executor: object = self._executor
        return isinstance(executor, PrefersLargeGroups) and executor.large

    def __call__(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> TaskResults:
        if self._executor is not None:
            return self._executor(algorithm, tasks, starts, seed)
        batches = self._population.indices(tasks[0].client, tasks[0].visit, seed)
        shape = (len(tasks).bit_length(), len(batches), len(batches[0]))
        key = cache_key(algorithm, self._problem, shape)
        cached = cached_choice(key)
        if cached is not None and cached in self._candidates:
            self.choose(cached)
            return self(algorithm, tasks, starts, seed)
        results = self._try_all(algorithm, tasks, starts, seed)
        assert self.chosen is not None
        store_choice(key, self.chosen)
        return results

    def choose(self, name: str) -> None:
        """Compute in this way from now on."""
        if name not in self._candidates:
            raise unknown_name("execution", name, self._candidates)
        self.chosen, self._executor = name, self._make(name)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()

    def _make(self, name: str) -> Executor:
        return self._candidates[name].executor(self._problem, self._population)

    def _try_all(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> TaskResults:
        best: tuple[float, str, Executor, TaskResults] | None = None
        for name in self._candidates:
            executor = self._make(name)
            for _ in range(_TRIALS):
                began = self._now()
                results = executor(algorithm, tasks, starts, seed)
                seconds = self._now() - began
            if best is None or seconds < best[0]:
                if best is not None:
                    best[2].close()
                best = seconds, name, executor, results
            else:
                executor.close()
        assert best is not None
        _, self.chosen, self._executor, results = best
        return results

    def _now(self) -> float:
        if self._problem.device.type == "cuda":
            torch.cuda.synchronize(self._problem.device)
        return time.perf_counter()


def cache_path() -> Path | None:
    """The file of earlier choices, in $OFFBEAT_CACHE or the user's cache; None if OFFBEAT_CACHE is empty."""
    own = os.environ.get("OFFBEAT_CACHE")
    if own is not None:
        return Path(own) / "choices.json" if own else None
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home directory
        return None
    return caches / "offbeat" / "choices.json"


def cache_key(algorithm: AnyAlgorithm, problem: Problem, shape: tuple[int, ...]) -> str:
    """A key for all that the choice depends on."""
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
    """The choice of an earlier trial, if there was one."""
    choice = _read_cache(cache_path()).get(key)
    return choice if isinstance(choice, str) else None


def store_choice(key: str, choice: str) -> None:
    """Remember a choice; a cache that cannot be written is ignored."""
    path = cache_path()
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(_read_cache(path) | {key: choice}, indent=1))
        part.replace(path)
    except OSError:
        pass


def _read_cache(path: Path | None) -> dict[str, object]:
    try:
        known = json.loads(path.read_text()) if path else {}
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
