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
from offbeat.precision import Precision
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

    Compiled by torch first, models are faster still, once the compiler is done.
    """

    slots: int = 8
    compiled: bool = False

    def work(self, problem: Problem, population: Population) -> Work:
        return Streams(problem, population, self.slots, self.compiled)


@dataclass(frozen=True)
class Measured:
    """The fastest of recorded `vmap`, the same in columns, and streams on a GPU, by a trial; `vmap` on a CPU.

    Compiling takes long, so it is asked for. Where nothing may be rounded, streams alone are taken: cuDNN's
    weight gradients of grouped convolutions, which `vmap` makes, are rounded even then.
    """

    chunk: int | None = None

    def work(self, problem: Problem, population: Population) -> Work:
        if problem.device.type != "cuda":
            return Mapped(self.chunk).work(problem, population)
        if problem.precision is Precision.FLOAT32:
            return Streamed().work(problem, population)
        ways = {
            "mapped": lambda: Mapped(self.chunk).work(problem, population),
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
