"""Ringmaster LMO (Sadiev, Maranjyan, Ilin and Richtárik 2026): steps of a given length along a momentum.

A task is one stochastic gradient g at the model that the client was sent; with K local steps it is the mean
over K minibatches, all at that model. The server computes

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

from offbeat.algorithms.fedasync import Model
from offbeat.algorithms.registry import Cost, Method, check_ranges, constructor, empty, no_warmup
from offbeat.core import Batches, Cohort, Gradient, Vector, Visit, scan, zeros_like

_TINY = 1e-12  # avoids a division by zero where the momentum is zero


class State(NamedTuple):
    """Server state."""

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
