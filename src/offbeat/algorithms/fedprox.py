"""FedProx (Li et al., MLSys 2020, arXiv 1812.06127): a proximal term keeps local models near the model sent.

Clients minimise F_i(y) + mu/2 |y - x|^2 from the model x that they were given, here by SGD or by the local
optimiser of the run; the server averages (`server_lr` 1), or takes a step of another size along the mean.
With mu = 0 this is FedAvg, and FedBuff on a buffer.

Clients count equally, as elsewhere in this package; the paper samples them in proportion to their numbers of
examples. The paper also lets clients do part of their work; that is a setting of the run (`partial_work`).
"""

from dataclasses import dataclass

from offbeat.algorithms.fedasync import Model
from offbeat.algorithms.fedopt import Upload
from offbeat.algorithms.registry import Method, check_ranges, constructor, empty, no_warmup, send_state
from offbeat.core import Batch, Batches, Cohort, Gradient, Vector, Visit, sgd


@dataclass(frozen=True)
class FedProx:
    """Local SGD with a proximal term, and the mean of the updates."""

    local_lr: float
    server_lr: float = 1.0
    mu: float = 0.01

    init = Model
    memory = empty
    broadcast = send_state
    warmup = no_warmup

    def __post_init__(self) -> None:
        check_ranges(self, mu="[0, inf)")

    def local(
        self, message: Model, memory: tuple[()], batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, tuple[()]]:
        x = message.x

        def proximal(y: Vector, batch: Batch) -> Vector:
            return grad(y, batch) + self.mu * (y - x)

        return Upload(x - sgd(x, batches, proximal, self.local_lr)), memory

    def step(self, state: Model, mean: Upload, cohort: Cohort) -> Model:
        return Model(state.x - self.server_lr * mean.delta)


METHODS = {
    "fedprox": Method(
        constructor(FedProx, local_lr=0.1),
        "local SGD with a proximal term towards the model sent",
        "MLSys 2020, arXiv 1812.06127",
        "synchronous",
    ),
}
