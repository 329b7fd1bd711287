"""Methods with a server step for every arrival: FedAsync mixes models, Ringmaster LMO follows a momentum.

**FedAsync** (Xie et al. 2019): x <- (1 - alpha s) x + alpha s x_new on every arrival, where the weight s of a
stale model is an argument of `train`. Clients minimise F(x) + rho/2 |x - x_v|^2 from the model x_v they were
given. With a buffer of M models the same rule mixes their weighted mean. It uploads models, not updates. Two
choices differ from the paper's text: a model trained from the server's current version has staleness 0 (the
paper counts from 1), and rho is 0 unless given (the paper has 0.005).

**Ringmaster LMO** (Sadiev, Maranjyan, Ilin and Richtárik 2026): a task is one stochastic gradient g at the
model that the client was sent; with K local steps it is the mean over K minibatches, all at that model. The
server computes

    m <- (1 - a_t) m + a_t g,   x <- x + e_t lmo(m),   lmo(m) = argmin_{|u| <= 1} <m, u> = -m / |m|

with m zero at first. A gradient that is R or more versions old is discarded, and its client starts again:
`--max-staleness` R - 1 with `--recall-stale`. The first form of the paper has constant rates, e_t = server_lr
and a_t = alpha (`falling` false). Its parameter-agnostic form assumes nothing about the loss or the noise:
e_t = server_lr / (t + 1)^(3/4) and a_t = 1 / sqrt(t), or 1 at t = 0. Its threshold R is sqrt(t); here the
threshold is that of `--max-staleness`.

The ball is Euclidean. Other norms, such as the spectral norm with which this is Muon, need the shapes of
the weights, which a server of flat vectors does not know. The paper has buffers of one update, and workers
with the same data distribution. Taken from the abstract and the authors' published code, and not confirmed
against the paper's listing.
"""

from dataclasses import dataclass
from typing import NamedTuple

from offbeat.algorithms.registry import (
    Cost,
    Method,
    check_ranges,
    constructor,
    empty,
    no_warmup,
    send_state,
)
from offbeat.core import Batch, Batches, Cohort, Gradient, Vector, Visit, scan, sgd, zeros_like

_TINY = 1e-12  # avoids a division by zero where the momentum is zero


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


class State(NamedTuple):
    """Server state of Ringmaster LMO."""

    x: Vector
    m: Vector  # momentum


class Upload(NamedTuple):
    """Client to server."""

    gradient: Vector


@dataclass(frozen=True)
class RingmasterLMO:
    """Steps of a given length along the momentum of stale gradients.

    Attributes:
        server_lr: The length of a server step, or of the first one where they fall.
        alpha: The weight of a new gradient in the momentum, where it is constant.
        falling: Whether both rates fall with the version, as in the parameter-agnostic form.
    """

    server_lr: float
    alpha: float = 0.1
    falling: bool = True

    memory = empty
    warmup = no_warmup

    def __post_init__(self) -> None:
        check_ranges(self)

    def init(self, x: Vector) -> State:
        return State(x, zeros_like(x))

    def broadcast(self, state: State, version: int) -> Model:
        return Model(state.x)

    def local(
        self, message: Model, memory: tuple[()], batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, tuple[()]]:
        total = scan(lambda t, batch: t + grad(message.x, batch), zeros_like(message.x), batches)
        return Upload(total / batches.steps), memory

    def step(self, state: State, mean: Upload, cohort: Cohort) -> State:
        alpha, length = self.alpha, self.server_lr
        if self.falling:
            alpha, length = max(cohort.version, 1) ** -0.5, length * (cohort.version + 1) ** -0.75
        m = state.m + alpha * (mean.gradient - state.m)
        return State(state.x - length * m / m.norm().clamp_min(_TINY), m)


METHODS = {
    "fedasync": Method(
        constructor(FedAsync, local_lr=0.1),
        "mixes each arriving model",
        "arXiv 1903.03934",
        "asynchronous",
        weights="polynomial:0.5",
        buffer=1,
    ),
    "ringmaster-lmo": Method(
        constructor(RingmasterLMO, server_lr=1.0),
        "server steps of a given length along the momentum of stale gradients",
        "arXiv 2605.18174",
        "asynchronous",
        Cost(server=2),
        buffer=1,
        theory="lengths of any size, falling as t^(-3/4), and weights 1 / sqrt(t)",
    ),
}
