"""CA2FL (Wang et al., ICLR 2024): each client's last update calibrates the buffer's mean.

v = h + mean of (update - the client's last update), where h is the mean of all last updates and
clients that have not taken part yet count as zero. The paper keeps the table of last updates at
the server; since only differences enter the sums, each client keeps its own here. Reconstructed from
the literature and not confirmed against the paper's own listing; no code of its authors was found.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

from offbeat.algorithms.fedopt import Message
from offbeat.algorithms.registry import Cost, Method, check_ranges, constructor, no_warmup, zero_vector
from offbeat.core import Batches, Cohort, Gradient, Vector, Visit, sgd, zeros_like


class State(NamedTuple):
    """Server state."""

    x: Vector
    h: Vector  # mean of the clients' last updates


class Upload(NamedTuple):
    """Client to server."""

    shift: Vector  # the update minus the last one


@dataclass(frozen=True)
class CA2FL:
    """Cached update calibration."""

    local_lr: float
    server_lr: float = 1.0

    memory = zero_vector
    warmup = no_warmup

    def __post_init__(self) -> None:
        check_ranges(self)

    @classmethod
    def tuned(cls, cohort: int, steps: int, smoothness: float, worst: int) -> Self:
        """The largest rates of its theory, from S, K, the smoothness L and the worst staleness.

        The theory assumes a staleness of at least 1, so a worst staleness of 0 counts as 1.
        """
        worst = max(worst, 1)
        local = 1 / (36 * steps * smoothness * math.sqrt(worst))
        return cls(local, cohort / (36 * steps * smoothness**2 * worst**2) / local)

    def init(self, x: Vector) -> State:
        return State(x, zeros_like(x))

    def broadcast(self, state: State, version: int) -> Message:
        return Message(state.x)

    def local(
        self, message: Message, last: Vector, batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, Vector]:
        delta = message.x - sgd(message.x, batches, grad, self.local_lr)
        return Upload(delta - last), delta

    def step(self, state: State, mean: Upload, cohort: Cohort) -> State:
        x, h = state
        return State(x - self.server_lr * (h + mean.shift), h + cohort.share * mean.shift)


METHODS = {
    "ca2fl": Method(
        constructor(CA2FL, local_lr=0.1),
        "each client's last update calibrates the mean",
        "ICLR 2024",
        "asynchronous",
        Cost(client=1, server=2),
        theory="CA2FL.tuned: local <= 1/(36 K L sqrt(tau)), local x server <= S/(36 K L^2 tau^2)",
    ),
}
