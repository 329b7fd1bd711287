"""PAdaMFed-VR (ICLR 2025): PAdaMFed with variance reduction, two gradients per minibatch.

The local step is u / |u| with u = gradient(y) + beta (c - c_i) + (1 - beta) (g - gradient(x_before)), both
gradients on the same minibatch, x_before being the server's model one version earlier. The
paper's own listing (appendix B) was not available: the server's momentum is derived from the
remark that g is the mean of the local directions before they are normalised. A client therefore
uploads a third vector, its mean direction minus the part that the server knows.

The start is that of PAdaMFed, with x_before = x at version 0. Rates follow from S, K and T (theorem 2);
beta is capped at 1.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

from offbeat.algorithms.adamasfl import add_unit
from offbeat.algorithms.registry import Cost, Method, cap_beta, check_ranges, tuned_constructor, zero_vector
from offbeat.core import Batch, Batches, Cohort, Gradient, Traits, Vector, Visit, descend, scan, zeros_like


class State(NamedTuple):
    """Server state."""

    x: Vector
    before: Vector  # the model one version earlier
    g: Vector  # momentum
    c: Vector  # mean of the clients' control variates


class Message(NamedTuple):
    """Server to client."""

    x: Vector
    before: Vector
    anchor: Vector  # beta c + (1 - beta) g


class Upload(NamedTuple):
    """Client to server."""

    descent: Vector  # mean unit step, norm at most 1
    news: Vector  # mean of the steps before they are normalised, minus beta c + (1 - beta) g
    shift: Vector  # change of the control variate


@dataclass(frozen=True)
class PAdaMFedVR:
    """Unit steps along a recursive momentum with control variates."""

    local_lr: float
    server_lr: float
    beta: float
    lazy: bool = False  # skip the first pass over all clients: a client's first task fills its c_i
    traits: ClassVar[Traits] = Traits(repeats_batches=True, bounds={"descent": 1.0})

    memory = zero_vector

    def __post_init__(self) -> None:
        check_ranges(self)

    @classmethod
    def tuned(cls, cohort: int, steps: int, rounds: int, beta: float | None = None) -> Self:
        """Theorem 2: every rate follows from S, K and T; beta may be given instead."""
        rate = (cohort * steps) ** (1 / 3) / rounds ** (2 / 3)
        return cls(
            local_lr=1 / (steps * rounds),
            server_lr=rate,
            beta=cap_beta("PAdaMFed-VR", rate) if beta is None else beta,
        )

    def warmup(self) -> Self | None:
        return None if self.lazy else replace(self, local_lr=0.0, server_lr=0.0, beta=1.0)

    def init(self, x: Vector) -> State:
        return State(x, x, zeros_like(x), zeros_like(x))

    def broadcast(self, state: State, version: int) -> Message:
        return Message(state.x, state.before, self.beta * state.c + (1 - self.beta) * state.g)

    def local(
        self, message: Message, c_i: Vector, batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, Vector]:
        known = self.beta * c_i

        def step(carry: tuple[Vector, Vector, Vector], batch: Batch) -> tuple[Vector, Vector, Vector]:
            descent, news, total = carry
            g = grad(descend(message.x, descent, self.local_lr), batch)
            new = g - known.add(grad(message.before, batch), alpha=1 - self.beta)
            return add_unit(descent, new + message.anchor), news + new, total + g

        zero = zeros_like(c_i)
        descent, news, total = scan(step, (zero, zero, zero), batches)
        c_new = total / batches.steps
        return Upload(descent / batches.steps, news / batches.steps, c_new - c_i), c_new

    def step(self, state: State, mean: Upload, cohort: Cohort) -> State:
        return State(
            x=state.x - self.server_lr * mean.descent,
            before=state.x,
            g=mean.news + self.beta * state.c + (1 - self.beta) * state.g,
            c=state.c + cohort.share * mean.shift,
        )


METHODS = {
    "padamfed-vr": Method(
        tuned_constructor(PAdaMFedVR.tuned),
        "PAdaMFed with variance reduction; rates from S, K, T",
        "ICLR 2025",
        "synchronous",
        Cost(down=3, up=3, client=1, server=4),
        theory="local 1/(K T), server and beta (SK)^(1/3) / T^(2/3), beta at most 1",
    ),
}
