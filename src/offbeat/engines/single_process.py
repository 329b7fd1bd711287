"""Engines under a virtual clock, in one process: the sequential reference and the vectorised one."""

from dataclasses import dataclass

import torch

from offbeat.core import AnyAlgorithm, Vector
from offbeat.data.client_store import Anywhere, MemoryBackend
from offbeat.data.population import Population
from offbeat.engines.execution import Autotune, Execution
from offbeat.engines.local import SequentialExecutor, check_module
from offbeat.engines.simulation import Simulation
from offbeat.errors import InputError
from offbeat.nn.problem import Problem, Statistics
from offbeat.schedule.availability import Always, Availability, Dropout
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import Delay, Tiers
from offbeat.schedule.rng import Rng

_TASKS_ON_GPU = 64  # tasks that fill a GPU
_MEMORY_SHARE = 0.1  # of its memory that what was computed ahead may take


@dataclass(frozen=True)
class Sequential:
    """One client after another: the plain reference."""

    problem: Problem
    population: Population
    delays: Delay = Tiers("mild")
    availability: Availability = Always()
    dropout: Dropout = Dropout()
    memory: MemoryBackend = Anywhere()

    @property
    def clients(self) -> int:
        return len(self.population)

    def initial(self) -> tuple[Vector, Statistics]:
        return self.problem.initial()

    def open(self, algorithm: AnyAlgorithm, seed: int, source: Rng) -> Simulation:
        clock = Clock(self.delays.bind(source, self.clients), source, self.dropout)
        check_module(algorithm, self.problem, self.population, seed)
        work = SequentialExecutor(self.problem, self.population)
        return Simulation(algorithm, self.problem, clock, work, seed, self.memory, self.clients)


@dataclass(frozen=True)
class Vectorised:
    """Many clients at once, at most `chunk` of them; on a GPU also ahead of their buffer."""

    problem: Problem
    population: Population
    delays: Delay = Tiers("mild")
    availability: Availability = Always()
    dropout: Dropout = Dropout()
    chunk: int | None = None
    memory: MemoryBackend = Anywhere()
    how: Execution | None = None  # None: by trial
    ahead: int | None = None  # tasks computed at once, some ahead of their buffer; None: 64 on a GPU

    def __post_init__(self) -> None:
        if self.chunk is not None and self.how is not None:
            raise InputError(
                "a way to compute has a chunk of its own: give chunk there, such as Mapped(chunk)."
            )

    @property
    def clients(self) -> int:
        return len(self.population)

    def initial(self) -> tuple[Vector, Statistics]:
        return self.problem.initial()

    def open(self, algorithm: AnyAlgorithm, seed: int, source: Rng) -> Simulation:
        clock = Clock(self.delays.bind(source, self.clients), source, self.dropout)
        check_module(algorithm, self.problem, self.population, seed)
        how = self.how or Autotune(self.chunk)
        work = how.work(self.problem, self.population)
        ahead = tasks_at_once(self.problem) if self.ahead is None else self.ahead
        return Simulation(algorithm, self.problem, clock, work, seed, self.memory, self.clients, ahead)


def tasks_at_once(problem: Problem) -> int:
    """How many tasks to compute at once: on a CPU, those of the buffer."""
    if problem.device.type != "cuda":
        return 0
    total = torch.cuda.get_device_properties(problem.device).total_memory
    return max(1, min(_TASKS_ON_GPU, int(_MEMORY_SHARE * total / (8 * problem.size))))
