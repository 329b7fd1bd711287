"""MIME and MIMELite (Karimireddy et al. 2020): the server's momentum, frozen, inside local steps.

A round of MIME has two phases with one cohort: first its clients send the gradient of all their
examples at x, whose mean is c; then they take local steps along (1 - beta) u + beta m with
u = gradient(y) - gradient(x) + c on one minibatch, m frozen. A round is therefore two server steps, an
even and an odd version, and needs `phases` dispatch. MIMELite's u is the plain gradient; it needs no c
beforehand, so its round has one phase, in which the gradient for m is uploaded as well. Afterwards
m <- (1 - beta) c + beta m. `beta` weighs the *old* momentum.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from offbeat.algorithms.registry import Cost, Method, check_ranges, constructor, empty, no_warmup, send_state
from offbeat.core import (
    Batch,
    Batches,
    Cohort,
    Gradient,
    Traits,
    Vector,
    Visit,
    descend,
    full_gradient,
    scan,
    zeros_like,
)


class State(NamedTuple):
    """Server state."""

    x: Vector
    c: Vector  # the cohort's gradient at x
    m: Vector  # momentum


class GradientRequest(NamedTuple):
    """Server to client in the first phase."""

    x: Vector


class GradientUpload(NamedTuple):
    """Client to server in the first phase."""

    gradient: Vector


class UpdateUpload(NamedTuple):
    """Client to server in the second phase."""

    delta: Vector  # start minus end


@dataclass(frozen=True)
class Mime:
    """Two phases a round: gradients at x first, then corrected local steps."""

    local_lr: float
    server_lr: float = 1.0
    beta: float = 0.9
    traits: ClassVar[Traits] = Traits(full_pass=True, repeats_batches=True, two_phases=True)

    memory = empty
    warmup = no_warmup

    def __post_init__(self) -> None:
        check_ranges(self)

    def init(self, x: Vector) -> State:
        return State(x, zeros_like(x), zeros_like(x))

    def broadcast(self, state: State, version: int) -> GradientRequest | State:
        return state if version % 2 else GradientRequest(state.x)

    def local(
        self,
        message: GradientRequest | State,
        memory: tuple[()],
        batches: Batches,
        visit: Visit,
        grad: Gradient,
    ) -> tuple[GradientUpload | UpdateUpload, tuple[()]]:
        x = message.x
        if isinstance(message, GradientRequest):
            return GradientUpload(full_gradient(x, batches, grad)), memory
        rest = (1 - self.beta) * message.c + self.beta * message.m

        def step(y: Vector, batch: Batch) -> Vector:
            u = rest.add(grad(y, batch) - grad(x, batch), alpha=1 - self.beta)
            return descend(y, u, self.local_lr)

        return UpdateUpload(x - scan(step, x, batches)), memory

    def step(self, state: State, mean: GradientUpload | UpdateUpload, cohort: Cohort) -> State:
        if isinstance(mean, GradientUpload):
            return state._replace(c=mean.gradient)
        x, c, m = state
        return State(x - self.server_lr * mean.delta, c, (1 - self.beta) * c + self.beta * m)


class LiteState(NamedTuple):
    """Server state and message."""

    x: Vector
    m: Vector


class LiteUpload(NamedTuple):
    """Client to server."""

    delta: Vector
    gradient: Vector  # of all the client's examples at the start


@dataclass(frozen=True)
class MimeLite:
    """Local steps along a mixture of gradient and frozen momentum."""

    local_lr: float
    server_lr: float = 1.0
    beta: float = 0.9
    traits: ClassVar[Traits] = Traits(full_pass=True)

    memory = empty
    broadcast = send_state
    warmup = no_warmup

    def __post_init__(self) -> None:
        check_ranges(self)

    def init(self, x: Vector) -> LiteState:
        return LiteState(x, zeros_like(x))

    def local(
        self, message: LiteState, memory: tuple[()], batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[LiteUpload, tuple[()]]:
        rest = self.beta * message.m

        def step(y: Vector, batch: Batch) -> Vector:
            return descend(y, rest.add(grad(y, batch), alpha=1 - self.beta), self.local_lr)

        delta = message.x - scan(step, message.x, batches)
        return LiteUpload(delta, full_gradient(message.x, batches, grad)), memory

    def step(self, state: LiteState, mean: LiteUpload, cohort: Cohort) -> LiteState:
        m = (1 - self.beta) * mean.gradient + self.beta * state.m
        return LiteState(state.x - self.server_lr * mean.delta, m)


METHODS = {
    "mime": Method(
        constructor(Mime, local_lr=0.1),
        "frozen server momentum and corrected local steps, two phases a round",
        "arXiv 2008.03606",
        "phases",
        Cost(down=4, up=2, server=3),
        theory="local sqrt(S D / (L G T K^2)), G = sigma_h^2 + sigma^2/K",
    ),
    "mimelite": Method(
        constructor(MimeLite, local_lr=0.1),
        "frozen server momentum inside local steps",
        "arXiv 2008.03606",
        "synchronous",
        Cost(down=2, up=2, server=2),
    ),
}
