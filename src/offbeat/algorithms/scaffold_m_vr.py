"""SCAFFOLD-M-VR (Cheng et al., ICLR 2024): control variates with variance-reduced momentum.

Local steps go along u = gradient(y) + beta (c - c_i) + (1 - beta) (g - gradient(x_before)), both
gradients on the same minibatch, x_before being the server's model one version earlier; g is the
mean of all local directions, and the server steps along it. It is PAdaMFed-VR without
normalisation, reconstructed from the papers that build on it, not confirmed against its own
listing. One pass over all clients at the initial model fills c_i and c; g starts at zero.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

from offbeat.algorithms.padamfed_vr import Message, State
from offbeat.algorithms.registry import Cost, Method, check_ranges, constructor, zero_vector
from offbeat.core import Batch, Batches, Cohort, Gradient, Traits, Vector, Visit, descend, scan, zeros_like


class Upload(NamedTuple):
    """Client to server."""

    direction: Vector  # mean of the local steps' directions
    shift: Vector  # change of the control variate


@dataclass(frozen=True)
class ScaffoldMVR:
    """Steps along a recursive momentum with control variates."""

    local_lr: float
    server_lr: float
    beta: float
    momentum: float = 1.0  # the multiple of the mean direction that becomes g: 0 in the first pass
    lazy: bool = False  # skip the first pass over all clients: a client's first task fills its c_i
    traits: ClassVar[Traits] = Traits(repeats_batches=True)

    memory = zero_vector

    def __post_init__(self) -> None:
        check_ranges(self)

    def warmup(self) -> Self | None:
        return None if self.lazy else replace(self, local_lr=0.0, server_lr=0.0, beta=1.0, momentum=0.0)

    def init(self, x: Vector) -> State:
        return State(x, x, zeros_like(x), zeros_like(x))

    def broadcast(self, state: State, version: int) -> Message:
        return Message(state.x, state.before, self.beta * state.c + (1 - self.beta) * state.g)

    def local(
        self, message: Message, c_i: Vector, batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, Vector]:
        rest = message.anchor - self.beta * c_i

        def step(carry: tuple[Vector, Vector], batch: Batch) -> tuple[Vector, Vector]:
            direction, total = carry
            g = grad(descend(message.x, direction, self.local_lr), batch)
            u = g + rest.sub(grad(message.before, batch), alpha=1 - self.beta)
            return direction + u, total + g

        zero = zeros_like(c_i)
        direction, total = scan(step, (zero, zero), batches)
        c_new = total / batches.steps
        return Upload(direction / batches.steps, c_new - c_i), c_new

    def step(self, state: State, mean: Upload, cohort: Cohort) -> State:
        g = self.momentum * mean.direction
        return State(state.x - self.server_lr * g, state.x, g, state.c + cohort.share * mean.shift)


METHODS = {
    "scaffold-m-vr": Method(
        constructor(ScaffoldMVR, ("momentum",), local_lr=0.05, server_lr=0.1, beta=0.3),
        "SCAFFOLD-M with variance reduction",
        "ICLR 2024",
        "synchronous",
        Cost(down=3, up=2, client=1, server=4),
    ),
}
