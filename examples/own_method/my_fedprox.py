"""FedProx (Li et al., MLSys 2020, arXiv 1812.06127) in a package of one's own.

pip install .
offbeat check my-fedprox
offbeat compare fedavg my-fedprox --set my-fedprox.mu=0.5
"""

from dataclasses import dataclass
from typing import NamedTuple

from offbeat import Batches, Cohort, Gradient, Vector, Visit, sgd


class State(NamedTuple):
    """The server's state: the model."""

    x: Vector


@dataclass(frozen=True)
class FedProx:
    """Local SGD on the loss plus mu/2 |y - x|^2, which keeps clients near the model that they received."""

    local_lr: float = 0.1
    mu: float = 0.1

    def init(self, x: Vector) -> State:
        return State(x)

    def memory(self, x: Vector) -> tuple[()]:
        return ()

    def broadcast(self, state: State, version: int) -> Vector:
        return state.x

    def local(
        self, x: Vector, memory: tuple[()], batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Vector, tuple[()]]:
        y = sgd(x, batches, lambda y, batch: grad(y, batch) + self.mu * (y - x), self.local_lr)
        return x - y, ()

    def step(self, state: State, mean: Vector, cohort: Cohort) -> State:
        return State(state.x - mean)

    def warmup(self) -> None:
        return None
