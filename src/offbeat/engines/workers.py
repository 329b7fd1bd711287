"""Client work in processes of this machine, one thread each."""

import os
import socket
from dataclasses import dataclass

from offbeat.core import AnyAlgorithm, Vector
from offbeat.engines.body import Alone, send_off
from offbeat.engines.how import How
from offbeat.engines.processes import Processes
from offbeat.engines.simulation import Simulation
from offbeat.engines.spread import Spread, even, guided
from offbeat.engines.work import check_module
from offbeat.errors import InputError
from offbeat.population.homes import Anywhere, Home
from offbeat.population.population import Population
from offbeat.problem import Problem, Statistics
from offbeat.schedule.availability import Always, Availability, Dropout
from offbeat.schedule.chance import Draws
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import Delay, Tiers


@dataclass(frozen=True)
class Workers:
    """The clients of a buffer on several processes of this machine."""

    problem: Problem
    population: Population
    delays: Delay = Tiers("mild")
    availability: Availability = Always()
    dropout: Dropout = Dropout()
    workers: int | None = None  # None: as many as cores
    memory: Home = Anywhere()
    how: How = Alone()
    ahead: int = 0  # tasks to compute at once, some ahead of a buffer too small to keep all busy

    def __post_init__(self) -> None:
        check_count(self.workers)
        if self.problem.device.type != "cpu":
            raise InputError("worker processes compute on the CPU: use --device cpu, or another engine.")
        if not hasattr(socket, "send_fds"):
            raise InputError("this system cannot share memory with workers: use the sequential engine.")

    @property
    def clients(self) -> int:
        return len(self.population)

    def initial(self) -> tuple[Vector, Statistics]:
        return self.problem.initial()

    def open(self, algorithm: AnyAlgorithm, seed: int, source: Draws) -> Simulation:
        clock = Clock(self.delays.bind(source, self.clients), source, self.dropout)
        check_module(algorithm, self.problem, self.population, seed)
        crew = Processes(send_off(self.problem, self.population, self.how), self.workers or cores())
        work = Spread(crew, self.problem.device, guided if isinstance(self.how, Alone) else even)
        return Simulation(algorithm, self.problem, clock, work, seed, self.memory, self.clients, self.ahead)


def cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_count(workers: int | None) -> None:
    """Refuse a number of workers that cannot be."""
    if workers is not None and workers < 1:
        raise InputError(f"the number of workers is {workers}: give at least 1.")
