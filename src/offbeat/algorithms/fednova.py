"""FedNova (Wang et al., NeurIPS 2020, arXiv 2007.07481): normalised averaging of unequal local work.

Clients that take more local steps move further, and the plain mean of updates then follows another objective.
A client's update is divided by |a_i|_1, where a_i says how much each of its gradients counts in the update:
tau_i for tau_i steps of SGD, and (tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho) with local momentum
rho, which starts at zero in each task. The server steps along the mean of the normalised updates times the
mean of |a_i|_1 over the cohort, the effective number of steps. With equal numbers of steps this is FedAvg.

Clients count equally, as elsewhere in this package; the paper weighs them by their numbers of examples.
Weights of stale updates are in both means, and cancel in the effective number of steps. The paper's proximal
local steps are left out.
"""

from dataclasses import dataclass
from typing import NamedTuple

from offbeat.algorithms.fedasync import Model
from offbeat.algorithms.registry import Cost, Method, check_ranges, constructor, empty, no_warmup, send_state
from offbeat.core import Batch, Batches, Cohort, Gradient, Tensor, Vector, Visit, descend, scan, zeros_like


class Upload(NamedTuple):
    """Client to server."""

    direction: Vector  # start minus end, divided by the weight
    weight: Tensor  # () |a_i|_1


@dataclass(frozen=True)
class FedNova:
    """Local SGD, with or without momentum, whose updates are normalised by the local work behind them."""

    local_lr: float
    server_lr: float = 1.0
    momentum: float = 0.0  # of local steps

    init = Model
    memory = empty
    broadcast = send_state
    warmup = no_warmup

    def __post_init__(self) -> None:
        check_ranges(self, momentum="[0, 1)")

    def local(
        self, message: Model, memory: tuple[()], batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, tuple[()]]:
        rho = self.momentum

        def step(carry: tuple[Vector, Vector], batch: Batch) -> tuple[Vector, Vector]:
            x, v = carry
            v = grad(x, batch).add(v, alpha=rho)
            return descend(x, v, self.local_lr), v

        x, _ = scan(step, (message.x, zeros_like(message.x)), batches)
        steps = message.x.new_ones(()) * batches.steps
        weight = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        return Upload((message.x - x) / weight, weight), memory

    def step(self, state: Model, mean: Upload, cohort: Cohort) -> Model:
        effective = mean.weight / cohort.mean_weight
        return Model(state.x - self.server_lr * effective * mean.direction)


METHODS = {
    "fednova": Method(
        constructor(FedNova, local_lr=0.1),
        "updates normalised by the local steps behind them",
        "NeurIPS 2020, arXiv 2007.07481",
        "synchronous",
        Cost(extra_up=1),
    ),
}
