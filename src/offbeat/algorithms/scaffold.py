"""SCAFFOLD (Karimireddy et al. 2020): control variates for local SGD.

Local steps go along gradient - c_i + c. Afterwards c_i becomes the gradient of all the client's
examples at the model it was given (`Scaffold(whole=True)`, option I), or the mean of its local
gradients (option II, the default). c is the mean of all c_i; all start at zero.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

from offbeat.algorithms.registry import (
    Cost,
    Method,
    check_ranges,
    constructor,
    no_warmup,
    send_state,
    zero_vector,
)
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
    c: Vector  # mean of the clients' control variates


class Upload(NamedTuple):
    """Client to server."""

    delta: Vector  # start minus end
    shift: Vector  # change of the control variate


@dataclass(frozen=True)
class Scaffold:
    """Local SGD with control variates."""

    local_lr: float
    server_lr: float = 1.0
    whole: bool = False  # option I

    memory = zero_vector
    broadcast = send_state
    warmup = no_warmup

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def traits(self) -> Traits:
        return Traits(full_pass=self.whole)

    @classmethod
    def tuned(cls, cohort: int, steps: int, population: int, smoothness: float) -> Self:
        """The largest rates of its theory, from S, K, N and the smoothness L of the loss."""
        server = math.sqrt(cohort)
        return cls((cohort / population) ** (2 / 3) / (24 * server * steps * smoothness), server)

    def init(self, x: Vector) -> State:
        return State(x, zeros_like(x))

    def local(
        self, message: State, c_i: Vector, batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, Vector]:
        rest = message.c - c_i

        def step(carry: tuple[Vector, Vector], batch: Batch) -> tuple[Vector, Vector]:
            x, total = carry
            g = grad(x, batch)
            return descend(x, g + rest, self.local_lr), total + g

        x, total = scan(step, (message.x, zeros_like(c_i)), batches)
        c_new = full_gradient(message.x, batches, grad) if self.whole else total / batches.steps
        return Upload(message.x - x, c_new - c_i), c_new

    def step(self, state: State, mean: Upload, cohort: Cohort) -> State:
        return State(state.x - self.server_lr * mean.delta, state.c + cohort.share * mean.shift)


METHODS = {
    "scaffold": Method(
        constructor(Scaffold, local_lr=0.1),
        "control variates for local SGD",
        "ICML 2020, arXiv 1910.06378",
        "synchronous",
        Cost(down=2, up=2, client=1, server=2),
        theory="Scaffold.tuned: server sqrt(S), local <= (S/N)^(2/3) / (24 K L server)",
    ),
}
