"""DuDe-ASGD (Wang, Sun, Wai, Zhang 2024, arXiv 2405.16966): the mean of all clients' latest gradients.

The server steps along the mean of all clients' latest gradients, of which an arrival replaces
one. One pass over all clients fills them. The paper has one gradient per task, a buffer of 1 and
all clients always busy (`--local-steps 1` and `--concurrency` equal to `--clients`); with K local
steps a client's gradient is the mean along its local path, (start - end) / (lr K). The paper
keeps the table at the server; here each client keeps its own gradient and sends the change.
Reconstructed from the literature, not confirmed against the paper's own listing.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from offbeat.algorithms.fedopt import Message
from offbeat.algorithms.registry import Cost, Method, check_ranges, constructor, zero_vector
from offbeat.core import Batch, Batches, Cohort, Gradient, Vector, Visit, descend, scan, zeros_like


class State(NamedTuple):
    """Server state."""

    x: Vector
    g: Vector  # mean of the clients' latest gradients


class Upload(NamedTuple):
    """Client to server."""

    shift: Vector  # the gradient minus the last one


@dataclass(frozen=True)
class DuDe:
    """Asynchronous SGD along the mean of all latest gradients.

    In the paper a task is one local step, each arrival is a server step, and all clients are always at work.
    """

    local_lr: float
    server_lr: float
    lazy: bool = False  # skip the first pass over all clients: a client's first task fills its gradient

    memory = zero_vector

    def __post_init__(self) -> None:
        check_ranges(self)

    def warmup(self) -> Self | None:
        return None if self.lazy else replace(self, local_lr=0.0, server_lr=0.0)

    def init(self, x: Vector) -> State:
        return State(x, zeros_like(x))

    def broadcast(self, state: State, version: int) -> Message:
        return Message(state.x)

    def local(
        self, message: Message, last: Vector, batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, Vector]:
        def step(total: Vector, batch: Batch) -> Vector:
            return total + grad(descend(message.x, total, self.local_lr), batch)

        g = scan(step, zeros_like(last), batches) / batches.steps
        return Upload(g - last), g

    def step(self, state: State, mean: Upload, cohort: Cohort) -> State:
        g = state.g + cohort.share * mean.shift
        return State(state.x - self.server_lr * g, g)


METHODS = {
    "dude": Method(
        constructor(DuDe, local_lr=0.05, server_lr=0.1),
        "steps along the mean of all clients' latest gradients",
        "arXiv 2405.16966",
        "round-refill",
        Cost(client=1, server=2),
        buffer=1,
    ),
}
