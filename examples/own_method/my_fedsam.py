"""FedSAM (Qu et al., ICML 2022, arXiv 2206.02618) in a package of one's own.

pip install .
offbeat check my-fedsam
offbeat compare fedavg my-fedsam --set my-fedsam.rho=0.1
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from offbeat import Batch, Batches, Cohort, Gradient, Traits, Vector, Visit, sgd


class State(NamedTuple):
    """The server's state: the model."""

    x: Vector


@dataclass(frozen=True)
class FedSAM:
    """Local steps along the gradient a distance rho uphill, which lead to flat minima."""

    local_lr: float = 0.1
    rho: float = 0.05
    traits: ClassVar[Traits] = Traits(repeats_batches=True)  # two gradients of each minibatch

    def init(self, x: Vector) -> State:
        return State(x)

    def memory(self, x: Vector) -> tuple[()]:
        return ()

    def broadcast(self, state: State, version: int) -> Vector:
        return state.x

    def local(
        self, x: Vector, memory: tuple[()], batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Vector, tuple[()]]:
        def sharp(y: Vector, batch: Batch) -> Vector:
            g = grad(y, batch)
            return grad(y + self.rho * g / g.norm().clamp_min(1e-12), batch)

        return x - sgd(x, batches, sharp, self.local_lr), ()

    def step(self, state: State, mean: Vector, cohort: Cohort) -> State:
        return State(state.x - mean)

    def warmup(self) -> None:
        return None
