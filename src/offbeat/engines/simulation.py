"""Client work under a virtual clock: the sequential reference and the vectorised engine.

Nothing is computed when a task starts or ends; `gather` computes a full buffer at once, each task
from the message of its own version, and then commits memory. A task that was dropped or lost is
never computed. If a client is twice in one buffer, the buffer is computed in waves, so that its
second visit sees what its first left.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from offbeat import trees
from offbeat.core import AnyAlgorithm, Saved, Task, Vector, Visit
from offbeat.engines.engine import Gathered
from offbeat.engines.work import OneByOne, Results, Start, Together, Work, check_module
from offbeat.population.homes import Anywhere, Home, make_memories
from offbeat.population.population import Population
from offbeat.problem import Problem, Statistics, average
from offbeat.schedule.availability import Always, Availability, Dropout
from offbeat.schedule.chance import Draws
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import Delay, Tiers
from offbeat.schedule.timeline import Arrival
from offbeat.trees import Tree


@dataclass(frozen=True)
class Sequential:
    """One client after another: the plain reference."""

    problem: Problem
    population: Population
    delays: Delay = Tiers("mild")
    availability: Availability = Always()
    dropout: Dropout = Dropout()
    memory: Home = Anywhere()

    @property
    def clients(self) -> int:
        return len(self.population)

    def initial(self) -> tuple[Vector, Statistics]:
        return self.problem.initial()

    def open(self, algorithm: AnyAlgorithm, seed: int, source: Draws) -> "Simulation":
        clock = Clock(self.delays.bind(source, self.clients), source, self.dropout)
        check_module(algorithm, self.problem, self.population, seed)
        work = OneByOne(self.problem, self.population)
        return Simulation(algorithm, self.problem, clock, work, seed, self.memory, self.clients)


@dataclass(frozen=True)
class Vectorised:
    """All clients of a buffer at once, by `vmap`; at most `chunk` at a time."""

    problem: Problem
    population: Population
    delays: Delay = Tiers("mild")
    availability: Availability = Always()
    dropout: Dropout = Dropout()
    chunk: int | None = None
    memory: Home = Anywhere()

    @property
    def clients(self) -> int:
        return len(self.population)

    def initial(self) -> tuple[Vector, Statistics]:
        return self.problem.initial()

    def open(self, algorithm: AnyAlgorithm, seed: int, source: Draws) -> "Simulation":
        clock = Clock(self.delays.bind(source, self.clients), source, self.dropout)
        check_module(algorithm, self.problem, self.population, seed)
        work = Together(self.problem, self.population, self.chunk)
        return Simulation(algorithm, self.problem, clock, work, seed, self.memory, self.clients)


class Simulation:
    """One run under a virtual clock."""

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        problem: Problem,
        clock: Clock,
        work: Work,
        seed: int,
        home: Home,
        clients: int,
    ) -> None:
        x, statistics = problem.initial()
        self._algorithm = algorithm
        self._clock = clock
        self._work = work
        self._seed = seed
        self._device = problem.device
        self._initial = (algorithm.init(x), statistics)
        self._make_memories = partial(make_memories, home, algorithm.memory(x), clients, problem.device)
        self._memories = self._make_memories()
        self._messages: dict[int, Tree] = {}
        self._holders: Counter[int] = Counter()  # tasks in flight or waiting, by version
        self._current = 0

    @property
    def now(self) -> float:
        return self._clock.now

    @property
    def busy(self) -> int:
        return self._clock.busy

    def start(self, task: Task, *, sure: bool = False) -> None:
        self._holders[task.version] += 1
        self._clock.start(task, sure=sure)

    def next(self) -> Arrival:
        return self._clock.next()

    def wait(self, until: float) -> None:
        self._clock.wait(until)

    def publish(self, version: int, algorithm: AnyAlgorithm, message: Tree, statistics: Statistics) -> None:
        self._algorithm = algorithm
        self._messages[version] = (message, statistics)
        self._current = version
        self._sweep()

    def gather(self, tasks: Sequence[Task], version: int) -> Gathered:
        waves = _waves(tasks)
        results = [self._compute([tasks[place] for place in wave], version) for wave in waves]
        whole = results[0] if len(waves) == 1 else self._join(waves, results)
        self.forget(tasks)
        return Gathered(whole.uploads, average(whole.statistics))

    def forget(self, tasks: Sequence[Task]) -> None:
        self._holders.subtract(task.version for task in tasks)
        self._sweep()

    def save(self) -> Saved:
        clients, columns = self._memories.save()
        tensors = {f"memory.{leaf}": column for leaf, column in enumerate(columns)}
        for version, message in self._messages.items():
            for leaf, tensor in enumerate(trees.leaves(message)):
                tensors[f"message.{version}.{leaf}"] = tensor
        facts = {
            "clock": self._clock.save(),
            "holders": sorted(self._holders.items()),
            "current": self._current,
            "versions": sorted(self._messages),
            "clients": clients,
            "columns": len(columns),
            "mapped": self._memories.mapped,
        }
        return Saved(facts, tensors)

    def confirm(self) -> None:
        self._memories.confirm()

    def load(self, saved: Saved) -> None:
        facts, tensors = saved
        self._clock.load(facts["clock"])
        self._holders = Counter(dict(facts["holders"]))
        self._current = facts["current"]
        self._memories = self._make_memories(mapped=facts["mapped"])
        self._memories.load(facts["clients"], [tensors[f"memory.{leaf}"] for leaf in range(facts["columns"])])
        self._messages = {version: self._message(version, tensors) for version in facts["versions"]}

    def close(self) -> None:
        self._work.close()

    def _message(self, version: int, tensors: dict[str, Tensor]) -> Tree:
        state, statistics = self._initial
        shape = trees.shape((self._algorithm.broadcast(state, version), statistics))
        names = [f"message.{version}.{leaf}" for leaf in range(shape.num_leaves)]
        return trees.rebuild(shape, [tensors[name].to(self._device) for name in names])

    def _compute(self, tasks: Sequence[Task], version: int) -> Results:
        results = self._work(
            self._algorithm, tasks, [self._begin(task, version) for task in tasks], self._seed
        )
        self._memories.write([task.client for task in tasks], results.memories)
        return results

    def _begin(self, task: Task, version: int) -> Start:
        message, statistics = self._messages[task.version]
        began = torch.tensor(task.version, device=self._device)
        return Start(message, statistics, self._memories.read(task.client), Visit(began, version - began))

    def _join(self, waves: list[list[int]], results: list[Results]) -> Results:
        """Results of waves, in the order of their tasks."""
        order = torch.tensor([place for wave in waves for place in wave], device=self._device).argsort()
        whole: Results = trees.over(lambda *parts: torch.cat(parts)[order], *results)
        return whole

    def _sweep(self) -> None:
        """Let go of messages that nobody in flight started from."""
        for version in [v for v in self._messages if v != self._current and not self._holders[v]]:
            del self._messages[version], self._holders[version]


def _waves(tasks: Sequence[Task]) -> list[list[int]]:
    """Places of tasks such that no client is twice in a wave, earlier visits in earlier waves."""
    waves: list[list[int]] = []
    seen: Counter[int] = Counter()
    for place, task in enumerate(tasks):
        turn = seen[task.client]
        seen[task.client] += 1
        if turn == len(waves):
            waves.append([])
        waves[turn].append(place)
    return waves
