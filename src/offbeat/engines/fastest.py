"""The fastest of several ways to compute, found by a short trial on the first tasks."""

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from offbeat.core import AnyAlgorithm, Task
from offbeat.engines import choice
from offbeat.engines.work import Large, Results, Start, Work
from offbeat.errors import unknown
from offbeat.population.population import Population
from offbeat.problem import Problem

_TRIES = 4  # the first settles, the next two may record, the last is timed


class Fastest:
    """Each way computes the first tasks; the fastest goes on, and is remembered for later runs.

    What a run computes with is part of its checkpoint, since ways differ in rounding.
    """

    def __init__(
        self, ways: Mapping[str, Callable[[], Work]], problem: Problem, population: Population
    ) -> None:
        self._ways = ways
        self._problem = problem
        self._population = population
        self._work: Work | None = None
        self.chosen: str | None = None

    @property
    def large(self) -> bool:
        """As the one that was chosen."""
        work: object = self._work
        return isinstance(work, Large) and work.large

    def __call__(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[Start], seed: int
    ) -> Results:
        """The tasks' results, in order."""
        if self._work is not None:
            return self._work(algorithm, tasks, starts, seed)
        batches = self._population.indices(tasks[0].client, tasks[0].visit, seed)
        shape = (len(tasks).bit_length(), len(batches), len(batches[0]))
        key = choice.describe(algorithm, self._problem, shape)
        known = choice.recall(key)
        if known is not None and known in self._ways:
            self.choose(known)
            return self(algorithm, tasks, starts, seed)
        results = self._try(algorithm, tasks, starts, seed)
        assert self.chosen is not None
        choice.remember(key, self.chosen)
        return results

    def choose(self, name: str) -> None:
        """Compute in this way from now on."""
        if name not in self._ways:
            raise unknown("way to compute", name, self._ways)
        self.chosen, self._work = name, self._ways[name]()

    def close(self) -> None:
        if self._work is not None:
            self._work.close()

    def _try(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[Start], seed: int
    ) -> Results:
        best: tuple[float, str, Work, Results] | None = None
        for name, make in self._ways.items():
            work = make()
            for _ in range(_TRIES):
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
