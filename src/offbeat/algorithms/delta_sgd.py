"""Delta-SGD (Kim et al., ICLR 2024, arXiv 2306.11201): clients find their step size from local smoothness.

From the second local step on, with x_k the model before step k,

    eta_k = min(gamma |x_k - x_{k-1}| / (2 |g(x_k) - g(x_{k-1})|), sqrt(1 + delta theta_{k-1}) eta_{k-1}),
    theta_k = eta_k / eta_{k-1},

and each task starts with eta_0 and theta_0. The server averages (`server_lr` 1), or takes a step of another
size along the mean. The defaults are the paper's, which it uses for all tasks.

Both gradients are of the minibatch of step k, so that their difference comes from the models alone; the
paper's equation does not say which minibatch the earlier gradient has. A step therefore costs two gradients.
If they are equal, the first term is no limit.
"""

from dataclasses import dataclass
from typing import ClassVar

from offbeat.algorithms.fedasync import Model
from offbeat.algorithms.fedopt import Upload
from offbeat.algorithms.registry import Method, check_ranges, constructor, empty, no_warmup, send_state
from offbeat.core import Batch, Batches, Cohort, Gradient, Tensor, Traits, Vector, Visit, scan

_Carry = tuple[Vector, Vector, Tensor, Tensor]  # x_k, x_{k-1}, eta_{k-1}, theta_{k-1}


@dataclass(frozen=True)
class DeltaSGD:
    """Local SGD with step sizes from the local smoothness of the client's loss."""

    local_lr: float = 0.2  # of the first step of a task
    gamma: float = 2.0
    delta: float = 0.1
    theta: float = 1.0
    server_lr: float = 1.0

    traits: ClassVar[Traits] = Traits(repeats_batches=True)

    init = Model
    memory = empty
    broadcast = send_state
    warmup = no_warmup

    def __post_init__(self) -> None:
        check_ranges(self, gamma="(0, inf)", delta="[0, inf)", theta="[0, inf)")

    def local(
        self, message: Model, memory: tuple[()], batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, tuple[()]]:
        def step(carry: _Carry, batch: Batch) -> _Carry:
            x, before, eta, theta = carry
            g = grad(x, batch)
            change = (g - grad(before, batch)).norm()
            limit = self.gamma * (x - before).norm() / (2 * change)
            longest = (1 + self.delta * theta).sqrt() * eta
            eta_new = limit.minimum(longest).where(change > 0, longest)
            return x - eta_new * g, x, eta_new, eta_new / eta

        x, one = message.x, message.x.new_ones(())
        first = x - self.local_lr * grad(x, batches.items[0])
        carry = (first, x, self.local_lr * one, self.theta * one)
        end, *_ = scan(step, carry, Batches(batches.items[1:]))
        return Upload(x - end), memory

    def step(self, state: Model, mean: Upload, cohort: Cohort) -> Model:
        return Model(state.x - self.server_lr * mean.delta)


METHODS = {
    "delta-sgd": Method(
        constructor(DeltaSGD),
        "local step sizes from the local smoothness of the loss",
        "ICLR 2024, arXiv 2306.11201",
        "synchronous",
    ),
}
