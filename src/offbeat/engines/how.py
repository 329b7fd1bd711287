"""How a vectorised engine computes: what a user may say in place of letting it find out."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from offbeat.engines.fastest import Fastest
from offbeat.engines.streams import Streams
from offbeat.engines.together import Together
from offbeat.engines.work import Work
from offbeat.population.population import Population
from offbeat.problem import Problem


class How(Protocol):
    """A way to compute the local work of many clients."""

    def work(self, problem: Problem, population: Population) -> Work: ...


@dataclass(frozen=True)
class Mapped:
    """By `vmap`, at most `chunk` clients at once; recorded as graphs on a GPU."""

    chunk: int | None = None
    graphs: bool = True
    columns: bool = False  # convolutions as products of matrices

    def work(self, problem: Problem, population: Population) -> Work:
        return Together(problem, population, self.chunk, self.graphs, self.columns)


@dataclass(frozen=True)
class Streamed:
    """Each client's work as a graph of its own, on `slots` streams of a GPU.

    Compiled by torch first, large models are faster still, after a minute or so of waiting.
    """

    slots: int = 8
    compiled: bool = False

    def work(self, problem: Problem, population: Population) -> Work:
        return Streams(problem, population, self.slots, self.compiled)


@dataclass(frozen=True)
class Measured:
    """The fastest of these on a GPU, by a trial, but for compiling, which takes long; `vmap` on a CPU."""

    chunk: int | None = None

    def work(self, problem: Problem, population: Population) -> Work:
        mapped = Mapped(self.chunk)
        if problem.device.type != "cuda":
            return mapped.work(problem, population)
        ways = {
            "mapped": lambda: mapped.work(problem, population),
            "columns": lambda: Mapped(self.chunk, columns=True).work(problem, population),
            "streamed": lambda: Streamed().work(problem, population),
        }
        return Fastest(ways, problem, population)


HOWS: Mapping[str, How] = MappingProxyType(
    {
        "auto": Measured(),
        "mapped": Mapped(),
        "columns": Mapped(columns=True),
        "eager": Mapped(graphs=False),
        "streamed": Streamed(),
        "compiled": Streamed(compiled=True),
    }
)
