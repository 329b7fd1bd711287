"""FedDyn (Acar et al., ICLR 2021, arXiv 2111.04263): a regulariser that aligns the clients' minima.

From the model x that it was given, client i minimises F_i(y) - <g_i, y> + alpha/2 |y - x|^2 and then sets
g_i <- g_i - alpha (y - x). At a minimum g_i is the gradient of F_i at y, so a client that has reached the
common minimum stays there. The server keeps h, the mean of all clients' g_i, and its next model is the mean
of the clients' models minus h / alpha; `server_lr` is 1 in the paper.

Three choices differ from the paper's text. Clients minimise by a few local steps, as its experiments do.
Under delay an update is measured from the model that its task began with. At alpha = 0 the paper's h / alpha
is 0 / 0; here there is no correction then, and clients keep nothing: this is FedAvg, and FedBuff on a buffer.
"""

from dataclasses import dataclass
from typing import NamedTuple

from offbeat.algorithms.fedasync import Model
from offbeat.algorithms.fedopt import Upload
from offbeat.algorithms.registry import Cost, Method, check_ranges, constructor, no_warmup
from offbeat.core import Batch, Batches, Cohort, Gradient, Vector, Visit, sgd, zeros_like


class State(NamedTuple):
    """Server state."""

    x: Vector
    h: Vector | tuple[()]  # mean of the clients' g_i


@dataclass(frozen=True)
class FedDyn:
    """Local SGD with a dynamic regulariser."""

    local_lr: float
    server_lr: float = 1.0
    alpha: float = 0.01

    warmup = no_warmup

    def __post_init__(self) -> None:
        check_ranges(self, alpha="[0, inf)")

    def init(self, x: Vector) -> State:
        return State(x, self.memory(x))

    def memory(self, x: Vector) -> Vector | tuple[()]:
        return zeros_like(x) if self.alpha else ()

    def broadcast(self, state: State, version: int) -> Model:
        return Model(state.x)

    def local(
        self,
        message: Model,
        g_i: Vector | tuple[()],
        batches: Batches,
        visit: Visit,
        grad: Gradient,
    ) -> tuple[Upload, Vector | tuple[()]]:
        x = message.x
        if isinstance(g_i, tuple):
            return Upload(x - sgd(x, batches, grad, self.local_lr)), g_i

        def regularised(y: Vector, batch: Batch) -> Vector:
            return grad(y, batch) - g_i + self.alpha * (y - x)

        delta = x - sgd(x, batches, regularised, self.local_lr)
        return Upload(delta), g_i + self.alpha * delta

    def step(self, state: State, mean: Upload, cohort: Cohort) -> State:
        if isinstance(state.h, tuple):
            return State(state.x - self.server_lr * mean.delta, state.h)
        h = state.h + self.alpha * cohort.share * mean.delta
        return State(state.x - self.server_lr * (mean.delta + h / self.alpha), h)


METHODS = {
    "feddyn": Method(
        constructor(FedDyn, local_lr=0.1),
        "a dynamic regulariser that aligns the clients' minima",
        "ICLR 2021, arXiv 2111.04263",
        "synchronous",
        Cost(client=1, server=2),
    ),
}
