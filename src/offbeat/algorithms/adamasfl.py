"""AdaMasFL (ICML 2025, PMLR 267:70410): momentum, control variates and unit steps under delay.

The local step is u / |u| with u = beta (gradient - c_i) + beta c + (1 - beta) g: c_i is the mean raw
gradient of the client's last task, c the mean of all c_i, g the momentum. The norm is of the
whole vector. Here `beta` weighs the *new* gradient. One pass over all clients at the initial
model fills c_i, c and g. With `Synchronous` dispatch this is PAdaMFed (ICLR 2025).

The paper uploads the displacement divided by (lr K), which is the mean unit step. Here the unit
steps are summed and the local model is the start minus lr times the sum, so that the rate can be
0 in the first pass. A client uploads the change of its control variate, so the server needs no
table. beta = sqrt(SK/T) is capped at 1. `lazy` skips the first pass, which the paper does not: c
is still the mean of all c_i, with zeros for clients that have not taken part yet.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

from offbeat.algorithms.registry import Cost, Method, cap_beta, check_ranges, tuned_constructor, zero_vector
from offbeat.core import Batch, Batches, Cohort, Gradient, Traits, Vector, Visit, descend, scan, zeros_like


class State(NamedTuple):
    """Server state."""

    x: Vector
    g: Vector  # momentum
    c: Vector  # mean of the clients' control variates


class Message(NamedTuple):
    """Server to client."""

    x: Vector
    anchor: Vector  # beta c + (1 - beta) g


class Upload(NamedTuple):
    """Client to server."""

    descent: Vector  # mean unit step, norm at most 1
    shift: Vector  # change of the control variate


@dataclass(frozen=True)
class AdaMasFL:
    """Unit steps along momentum with control variates.

    Attributes:
        local_lr: The local learning rate.
        server_lr: The learning rate of the server.
        beta: The weight of the newest gradient in the momentum, from 0 to 1.
        lazy: Whether to skip the first pass over all clients; a client's first task then fills its c_i.
    """

    local_lr: float
    server_lr: float
    beta: float
    lazy: bool = False
    traits: ClassVar[Traits] = Traits(bounds={"descent": 1.0})

    memory = zero_vector

    def __post_init__(self) -> None:
        check_ranges(self)

    @classmethod
    def tuned(cls, cohort: int, steps: int, rounds: int, beta: float | None = None) -> Self:
        """Theorem 2: every rate follows from S, K and T; beta may be given instead."""
        work = cohort * steps
        return cls(
            local_lr=1 / (steps * rounds**0.5),
            server_lr=work**0.25 / rounds**0.75,
            beta=cap_beta("AdaMasFL", (work / rounds) ** 0.5) if beta is None else beta,
        )

    def warmup(self) -> Self | None:
        return None if self.lazy else replace(self, local_lr=0.0, server_lr=0.0, beta=1.0)

    def init(self, x: Vector) -> State:
        return State(x, zeros_like(x), zeros_like(x))

    def broadcast(self, state: State, version: int) -> Message:
        return Message(state.x, self.beta * state.c + (1 - self.beta) * state.g)

    def local(
        self, message: Message, c_i: Vector, batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, Vector]:
        rest = message.anchor - self.beta * c_i

        def step(carry: tuple[Vector, Vector], batch: Batch) -> tuple[Vector, Vector]:
            descent, total = carry
            g = grad(descend(message.x, descent, self.local_lr), batch)
            return add_unit(descent, rest.add(g, alpha=self.beta)), total + g

        zero = zeros_like(c_i)
        descent, total = scan(step, (zero, zero), batches)
        c_new = total / batches.steps
        return Upload(descent / batches.steps, c_new - c_i), c_new

    def step(self, state: State, mean: Upload, cohort: Cohort) -> State:
        x, g, c = state
        return State(
            x=x - self.server_lr * mean.descent,
            g=self.beta * (mean.shift + c) + (1 - self.beta) * g,
            c=c + cohort.share * mean.shift,
        )


def add_unit(total: Vector, u: Vector) -> Vector:
    """`total + u / |u|`, or `total` if u is zero, in one pass over the vectors."""
    return total.addcmul(u, 1 / u.norm().clamp_min(1e-12))


METHODS = {
    "adamasfl": Method(
        tuned_constructor(AdaMasFL.tuned),
        "momentum, control variates and unit steps; rates from S, K, T",
        "ICML 2025, PMLR 267:70410",
        "asynchronous",
        Cost(down=2, up=2, client=1, server=3),
        theory="local 1/(K sqrt T), server (SK)^(1/4) / T^(3/4), beta sqrt(SK/T), at most 1",
    ),
    "padamfed": Method(
        tuned_constructor(AdaMasFL.tuned),
        "AdaMasFL in synchronous rounds",
        "ICLR 2025",
        "synchronous",
        Cost(down=2, up=2, client=1, server=3),
        theory="as adamasfl",
    ),
}
