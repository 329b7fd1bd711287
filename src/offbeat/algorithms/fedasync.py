"""FedAsync (Xie et al. 2019): the server mixes arriving models into its own.

x <- (1 - alpha s) x + alpha s x_new on every arrival, where the weight s of a stale model is an argument of
`train`. Clients minimise F(x) + rho/2 |x - x_v|^2 from the model x_v they were given. With a buffer of M
models the same rule mixes their weighted mean. It uploads models, not updates. Two choices differ from the
paper's text: a model trained from the server's current version has staleness 0 (the paper counts from 1), and
rho is 0 unless given (the paper has 0.005).
"""

from dataclasses import dataclass
from typing import NamedTuple

from offbeat.algorithms.registry import Method, check_ranges, constructor, empty, no_warmup, send_state
from offbeat.core import Batch, Batches, Cohort, Gradient, Vector, Visit, sgd


class Model(NamedTuple):
    """Server state, message and upload."""

    x: Vector


@dataclass(frozen=True)
class FedAsync:
    """Mixing of the server's model with arriving models.

    A model that was trained from the server's current version has staleness 0; the paper counts from 1.

    Attributes:
        local_lr: The local learning rate.
        alpha: The weight of a fresh model in the mixture, above 0 and at most 1.
        rho: The strength of the pull towards the model that was sent; the paper has 0.005.
    """

    local_lr: float
    alpha: float = 0.6
    rho: float = 0.0

    init = Model
    memory = empty
    broadcast = send_state
    warmup = no_warmup

    def __post_init__(self) -> None:
        check_ranges(self)

    def local(
        self, message: Model, memory: tuple[()], batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Model, tuple[()]]:
        def proximal(x: Vector, batch: Batch) -> Vector:
            return grad(x, batch) + self.rho * (x - message.x)

        return Model(sgd(message.x, batches, proximal, self.local_lr)), memory

    def step(self, state: Model, mean: Model, cohort: Cohort) -> Model:
        return Model((1 - self.alpha * cohort.mean_weight) * state.x + self.alpha * mean.x)


METHODS = {
    "fedasync": Method(
        constructor(FedAsync, local_lr=0.1),
        "mixes each arriving model",
        "arXiv 1903.03934",
        "asynchronous",
        weights="polynomial:0.5",
        buffer=1,
    ),
}
