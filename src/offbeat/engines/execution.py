"""How a vectorised engine computes: by `vmap` or on CUDA streams, compiled or not, as trials find faster."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from offbeat import trees
from offbeat.core import AnyAlgorithm, Task
from offbeat.data.population import Population
from offbeat.engines import cuda, vmap
from offbeat.engines.cuda import CompilerCache, StreamExecutor, gradient_facts
from offbeat.engines.local import (
    DRAWS_NUMBERS,
    Executor,
    FallsBack,
    PlansAhead,
    PrefersLargeGroups,
    SequentialExecutor,
    TaskResults,
    TaskStart,
    sample_batch,
)
from offbeat.engines.vmap import VmapExecutor
from offbeat.errors import first_sentence
from offbeat.nn.problem import Precision, Problem

log = logging.getLogger(__name__)

_COMPILED = "-compiled"
_WARMUP_GROUPS, _TIMED_GROUPS = 3, 2  # the first of a trial warms up, the next two may record graphs
_USUAL_GROUPS = 200  # of a run whose length is not known
_COMPILER_SECONDS = 15.0  # until a compiled model is ready, where that was not measured
_FILLED_CACHE = 1 / 3  # of that, where the compiler finds in its cache what it made before
_COMPILER_GAIN = 0.25  # the share of the time that compiling is expected to save
_OCCUPIES = 2e9  # operations of one gradient from which on a GPU may compute clients faster one by one


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
    """By `vmap`, at most `chunk` clients at once; recorded as graphs on a GPU, and compiled on request."""

    chunk: int | None = None
    compiled: bool = False

    def executor(self, problem: Problem, population: Population) -> Executor:
        return VmapExecutor(problem, population, self.chunk, self.compiled)


@dataclass(frozen=True)
class CudaStreams:
    """Each client's work by itself, by recorded graphs on several streams of a GPU.

    Models that torch compiles first are faster still, once the compiler is done.
    """

    streams: int = 8
    compiled: bool = False

    def executor(self, problem: Problem, population: Population) -> Executor:
        return StreamExecutor(problem, population, self.streams, self.compiled)


@dataclass(frozen=True)
class Autotune:
    """On a GPU what finishes the run first, by trials; on a CPU `vmap`.

    Where nothing may be rounded, convolutions are not mapped without the compiler: cuDNN rounds the weight
    gradients of grouped convolutions, which `vmap` makes, even then.
    """

    chunk: int | None = None

    def executor(self, problem: Problem, population: Population) -> Executor:
        if problem.device.type != "cuda":
            return Vmap(self.chunk).executor(problem, population)
        if problem.draws_random_numbers(sample_batch(population, problem)):
            log.warning(DRAWS_NUMBERS)  # once, and not by each that would be tried
            return SequentialExecutor(problem, population)
        candidates: dict[str, Execution] = {
            "mapped": Vmap(self.chunk),
            "streamed": CudaStreams(),
            "mapped-compiled": Vmap(self.chunk, compiled=True),
            "streamed-compiled": CudaStreams(compiled=True),
        }
        if problem.precision is Precision.FLOAT32 and problem.has_convolutions:
            del candidates["mapped"]
        spare: tuple[str, ...] = ()
        if "mapped" in candidates and _gradient_flops(problem, population) < _OCCUPIES:
            spare = ("streamed", "streamed-compiled")
        return AutotuneExecutor(candidates, problem, population, spare)


def _gradient_flops(problem: Problem, population: Population) -> float:
    """The operations of one minibatch's gradient."""
    sample = sample_batch(population, problem)
    return problem.flops(sample) * population.work.size / len(trees.leaves(sample.data)[0])


EXECUTIONS: Mapping[str, Execution] = MappingProxyType(
    {
        "auto": Autotune(),
        "mapped": Vmap(),
        "mapped-compiled": Vmap(compiled=True),
        "streamed": CudaStreams(),
        "streamed-compiled": CudaStreams(compiled=True),
    }
)


class Figures(NamedTuple):
    """What one execution costs, in seconds."""

    start: float  # until its first group is done: the compiler's time above all
    group: float  # for each group of tasks from then on

    def total(self, groups: int) -> float:
        """For a whole run."""
        return self.start + groups * self.group


def choose_execution(
    measured: Mapping[str, Figures], names: Iterable[str], groups: int, filled: Collection[str] = ()
) -> str:
    """What finishes that many more groups first, whether it is measured yet or only expected to.

    Executions without the compiler are measured in any case; with it, they are expected to save
    `_COMPILER_GAIN` of the time, and to start sooner if they are among the `filled`.
    """
    plain = [name for name in names if not name.endswith(_COMPILED)]
    for name in plain:
        if name not in measured:
            return name

    def total(name: str) -> float:
        if name in measured:
            return measured[name].total(groups)
        own = measured.get(name.removesuffix(_COMPILED))
        without = own.group if own else min((figures.group for figures in measured.values()), default=0.0)
        start = _compiled_start(_COMPILER_SECONDS, name in filled)
        return Figures(start, (1 - _COMPILER_GAIN) * without).total(groups)

    return min(names, key=total)


def _compiled_start(seconds: float, filled: bool) -> float:
    """What is left of a start with an empty cache of the compiler."""
    return seconds * (_FILLED_CACHE if filled else 1)


def announce_compiler(executor: Executor, algorithm: AnyAlgorithm, group: int) -> None:
    """Say that an executor compiles, before a run with groups of so many tasks, if it does."""
    if not isinstance(executor, VmapExecutor | StreamExecutor):
        return
    if executor.asked_to_compile and not executor.fell_back:
        filled = executor.compiler.filled(algorithm, group)
        log.info("compiling the model: about %.0f s.", _compiled_start(_COMPILER_SECONDS, filled))


class AutotuneExecutor:
    """Computes the first tasks by several candidates, and the others by what finishes the run first.

    Those that are `spare` are tried only where the others cannot compute this module. Figures are kept for
    later runs. The choice is part of a run's checkpoint, since executions differ in rounding.
    """

    def __init__(
        self,
        candidates: Mapping[str, Execution],
        problem: Problem,
        population: Population,
        spare: Collection[str] = (),
    ) -> None:
        self._candidates = candidates
        self._spare = spare
        self._problem = problem
        self._population = population
        self._executor: Executor | None = None
        self._group, self._groups = 0, _USUAL_GROUPS
        self._figures: dict[str, Figures] = {}
        self._fell_back: dict[str, str] = {}  # why executions that were tried do not compute as they should
        self.chosen: str | None = None

    @property
    def large(self) -> bool:
        """As the chosen executor."""
        executor: object = self._executor
        return executor is None or (isinstance(executor, PrefersLargeGroups) and executor.large)

    def expect(self, group: int, groups: int) -> None:
        self._group, self._groups = group, groups

    def report(self) -> dict[str, Any] | None:
        if self.chosen is None:
            return None
        seconds = {name: figures._asdict() for name, figures in self._figures.items()}
        precision = self._problem.effective_precision
        facts = {"tasks": self._group, "groups": self._groups, "seconds": seconds}
        reasons = {"fell_back": self._fell_back} if self._fell_back else {}
        return {"chosen": self.chosen, "precision": precision, **facts, **reasons}

    def __call__(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> TaskResults:
        if self._executor is None:
            self._group = self._group or len(tasks)
            self._tune(algorithm, tasks[: self._group], starts[: self._group], seed)
        assert self._executor is not None
        return self._executor(algorithm, tasks, starts, seed)

    def choose(self, name: str, algorithm: AnyAlgorithm) -> None:
        """Compute in this way from now on; a name of an earlier version is ignored."""
        if name in self._candidates:
            self.chosen, self._executor = name, self._make(name)
            announce_compiler(self._executor, algorithm, self._group)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()

    def _make(self, name: str) -> Executor:
        executor = self._candidates[name].executor(self._problem, self._population)
        if isinstance(executor, PlansAhead):
            executor.expect(self._group, self._groups)
        return executor

    def _tune(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> None:
        """Measure until what is expected to finish first has been measured."""
        batches = self._population.indices(tasks[0].client, tasks[0].visit, seed)
        shape = (len(tasks), len(batches), len(batches[0]))
        key = cache_key(algorithm, self._problem, self._population, shape)
        stored = cached_figures(key)  # with the starts of an empty cache of the compiler
        caches = {
            name: CompilerCache(name, self._problem, self._population)
            for name in self._candidates
            if name.endswith(_COMPILED)
        }
        filled = {name for name, cache in caches.items() if cache.filled(algorithm, self._group)}
        self._figures = {
            name: figures._replace(start=_compiled_start(figures.start, name in filled))
            for name, figures in stored.items()
            if name in self._candidates
        }
        known = set(self._figures)
        names = [name for name in self._candidates if name not in self._spare]
        spare = [name for name in self._candidates if name in self._spare]
        while self._executor is None:
            name = choose_execution(self._figures, names, self._groups, filled)
            if name in known:
                self.choose(name, algorithm)
                continue
            if name.endswith(_COMPILED):
                log.info(
                    "compiling the model: about %.0f s, which are expected to pay in %d server steps.",
                    _compiled_start(_COMPILER_SECONDS, name in filled),
                    self._groups,
                )
            executor = self._make(name)
            try:
                with held_warnings() as said:
                    figures = self._measure(executor, algorithm, tasks, starts, seed)
            except RuntimeError as error:
                if len(names) == 1 and not spare:
                    raise
                log.warning("%s execution is not used: %s", name, first_sentence(error))
                names.remove(name)
                names, spare = _with_spare(names, spare)
            else:
                if isinstance(executor, FallsBack) and executor.fell_back:
                    # neither it nor what would be compiled of it is tried again, unless nothing else is left
                    left = [each for each in names if name not in (each, each.removesuffix(_COMPILED))]
                    left, spare = _with_spare(left, spare)
                    self._fell_back[name] = "; ".join(said) or "the examples of clients are not in memory"
                    if left:
                        names = left
                        executor.close()
                        log.info("%s execution is not used: %s", name, self._fell_back[name])
                    else:
                        self._figures[name] = figures
                        self._take(name, executor, said)
                    continue
                self._figures[name] = stored[name] = figures
                if name in filled:
                    # this process may hold the compiler, or even the model, in memory: little is known by
                    # that of a start with an empty cache
                    least = max(figures.start / _FILLED_CACHE, _COMPILER_SECONDS)
                    stored[name] = figures._replace(start=least)
                store_figures(key, stored)
                # what is started by now costs no start any more
                ready = self._figures | {name: figures._replace(start=0.0)}
                if choose_execution(ready, names, self._groups, filled) == name:
                    self._take(name, executor, said)
                    continue
                known.add(name)
            executor.close()
        log.info("%s", self._sentence())

    def _take(self, name: str, executor: Executor, said: Sequence[str]) -> None:
        """Choose an executor that was tried, with what it had to say."""
        self.chosen, self._executor = name, executor
        for sentence in said:
            log.warning("%s", sentence)

    def _sentence(self) -> str:
        """The choice and its reasons, for people."""
        each = (
            f"{name} {1000 * figures.group:.3g} ms after {figures.start:.1f} s"
            for name, figures in self._figures.items()
        )
        return f"local work runs {self.chosen} ({', '.join(each)}; for {self._group} tasks)."

    def _measure(
        self,
        executor: Executor,
        algorithm: AnyAlgorithm,
        tasks: Sequence[Task],
        starts: Sequence[TaskStart],
        seed: int,
    ) -> Figures:
        began = self._now()
        for _ in range(_WARMUP_GROUPS):
            executor(algorithm, tasks, starts, seed)
        ready = self._now()
        for _ in range(_TIMED_GROUPS):
            executor(algorithm, tasks, starts, seed)
        return Figures(ready - began, (self._now() - ready) / _TIMED_GROUPS)

    def _now(self) -> float:
        if self._problem.device.type == "cuda":
            torch.cuda.synchronize(self._problem.device)
        return time.perf_counter()


def _with_spare(names: list[str], spare: list[str]) -> tuple[list[str], list[str]]:
    """The candidates, with the spare ones where all others need the compiler; and what is still spare."""
    return (names, spare) if any(not name.endswith(_COMPILED) for name in names) else ([*names, *spare], [])


class _Held(logging.Filter):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        self.said.append(record.getMessage())
        return False


@contextmanager
def held_warnings() -> Iterator[list[str]]:
    """What executors warn of in a trial, which matters only if they are chosen."""
    held = _Held()
    loggers = [logging.getLogger(module.__name__) for module in (cuda, vmap)]
    for logger in loggers:
        logger.addFilter(held)
    try:
        yield held.said
    finally:
        for logger in loggers:
            logger.removeFilter(held)


def cache_path() -> Path | None:
    """The file of earlier figures, in $OFFBEAT_CACHE or the user's cache; None if OFFBEAT_CACHE is empty."""
    own = os.environ.get("OFFBEAT_CACHE")
    if own is not None:
        return Path(own) / "executions.json" if own else None
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home directory
        return None
    return caches / "offbeat" / "executions.json"


def cache_key(
    algorithm: AnyAlgorithm, problem: Problem, population: Population, shape: tuple[int, ...]
) -> str:
    """A key for all that the choice depends on."""
    facts = [type(algorithm).__name__, *map(str, shape), *gradient_facts(problem, population)]
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=12).hexdigest()


def cached_figures(key: str) -> dict[str, Figures]:
    """What earlier runs measured."""
    found = _read_cache(cache_path()).get(key)
    try:
        return {name: Figures(*map(float, figures)) for name, figures in dict(found or {}).items()}  # type: ignore[call-overload]
    except (TypeError, ValueError):  # of another version
        return {}


def store_figures(key: str, figures: Mapping[str, Figures]) -> None:
    """Keep figures for later runs; a cache that cannot be written is ignored."""
    path = cache_path()
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(_read_cache(path) | {key: figures}, indent=1))
        part.replace(path)
    except OSError:
        pass


def _read_cache(path: Path | None) -> dict[str, object]:
    try:
        known = json.loads(path.read_text()) if path else {}
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
