"""Client work on a Ray cluster: several machines, several GPUs."""

from dataclasses import dataclass

from offbeat.core import AnyAlgorithm, Vector
from offbeat.engines.actors import Actors
from offbeat.engines.body import Alone, send_off
from offbeat.engines.how import How, Measured
from offbeat.engines.simulation import Simulation
from offbeat.engines.spread import Spread, even, guided
from offbeat.engines.work import check_module
from offbeat.engines.workers import check_count, cores
from offbeat.errors import InputError
from offbeat.population.homes import Anywhere, Home
from offbeat.population.population import Population
from offbeat.problem import Problem, Statistics
from offbeat.schedule.availability import Always, Availability, Dropout
from offbeat.schedule.chance import Draws
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import Delay, Tiers


@dataclass(frozen=True)
class Cluster:
    """The clients of a buffer on Ray actors; without an address, on a cluster started here for the run.

    Offbeat has to be installed on every machine. A worker has a core, and `gpus` GPUs (or a part of one).
    """

    problem: Problem
    population: Population
    delays: Delay = Tiers("mild")
    availability: Availability = Always()
    dropout: Dropout = Dropout()
    workers: int | None = None  # None: as many as there is room for
    address: str | None = None
    gpus: float = 0.0
    memory: Home = Anywhere()
    how: How | None = None  # None: one by one on a core, by trial on a GPU
    ahead: int = 0  # tasks to compute at once, some ahead of a buffer too small to keep all busy

    def __post_init__(self) -> None:
        check_count(self.workers)
        if not 0 <= self.gpus < float("inf"):
            raise InputError(f"the number of GPUs of a worker is {self.gpus}: give at least 0.")

    @property
    def clients(self) -> int:
        return len(self.population)

    def initial(self) -> tuple[Vector, Statistics]:
        return self.problem.initial()

    def open(self, algorithm: AnyAlgorithm, seed: int, source: Draws) -> Simulation:
        clock = Clock(self.delays.bind(source, self.clients), source, self.dropout)
        check_module(algorithm, self.problem, self.population, seed)
        how = self.how or (Measured() if self.gpus else Alone())
        sent = send_off(self.problem, self.population, how)
        crew = Actors(sent, self.workers, self.address, self.gpus, cores())
        work = Spread(crew, self.problem.device, guided if isinstance(how, Alone) else even)
        return Simulation(algorithm, self.problem, clock, work, seed, self.memory, self.clients, self.ahead)
