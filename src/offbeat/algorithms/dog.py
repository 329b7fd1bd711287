"""DoG (Ivgi, Hinder and Carmon, ICML 2023, arXiv 2302.12022) at the server: distance over gradients.

The server goes along the mean update D_t of local SGD, as if it were a gradient, with the rate

    max(r, max_{i <= t} |x_i - x_0|) / sqrt(eps + sum_{i <= t} |D_i|^2),   r = first_move (1 + |x_0|).

The server has no rate to set; the local rate remains. The paper is about SGD: its theorem covers neither
updates of several local steps nor stale ones. The paper evaluates an average of the iterates, for which
`--ema-decay` can be used.
"""

from dataclasses import dataclass
from typing import NamedTuple

from offbeat.algorithms.fedasync import Model
from offbeat.algorithms.fedopt import Upload
from offbeat.algorithms.registry import Cost, Method, check_ranges, constructor, empty, no_warmup
from offbeat.core import Batches, Cohort, Gradient, Tensor, Vector, Visit, sgd


class State(NamedTuple):
    """Server state."""

    x: Vector
    first: Vector  # model
    furthest: Tensor  # () distance from it so far
    total: Tensor  # () of the squares of mean updates


@dataclass(frozen=True)
class DoG:
    """Local SGD, and a server rate of distance over gradients: distance travelled / norm of the updates."""

    local_lr: float
    first_move: float = 1e-6
    eps: float = 1e-8

    memory = empty
    warmup = no_warmup

    def __post_init__(self) -> None:
        check_ranges(self, first_move="(0, inf)")

    def init(self, x: Vector) -> State:
        return State(x, x, self.first_move * (1 + x.norm()), x.new_zeros(()))

    def broadcast(self, state: State, version: int) -> Model:
        return Model(state.x)

    def local(
        self, message: Model, memory: tuple[()], batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, tuple[()]]:
        return Upload(message.x - sgd(message.x, batches, grad, self.local_lr)), memory

    def step(self, state: State, mean: Upload, cohort: Cohort) -> State:
        furthest = state.furthest.maximum((state.x - state.first).norm())
        total = state.total + mean.delta @ mean.delta
        x = state.x - furthest / (total + self.eps).sqrt() * mean.delta
        return State(x, state.first, furthest, total)


METHODS = {
    "dog": Method(
        constructor(DoG, local_lr=0.1),
        "a server rate of the distance travelled divided by the norm of the updates",
        "ICML 2023, arXiv 2302.12022",
        "synchronous",
        Cost(server=2),
    ),
}
