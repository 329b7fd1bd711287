"""FedExP (Jhunjhunwala et al., ICLR 2023, arXiv 2301.09604): a server rate from how updates disagree.

Local SGD; the server goes along the mean D of the updates D_i with the rate

    max(1, mean of |D_i|^2 / (2 (|D|^2 + eps))),

which is above 1 if the updates disagree and their mean is therefore short. The iterates oscillate, so the
model is the mean of the last two, while clients are sent the last one, as in the paper.

A client uploads the square of its update's norm beside the update. The paper has synchronous rounds; here a
cohort is whatever fills the buffer, and weights of stale updates are in both means.
"""

from dataclasses import dataclass
from typing import NamedTuple

from offbeat.algorithms.fedasync import Model
from offbeat.algorithms.registry import Cost, Method, check_ranges, constructor, empty, no_warmup
from offbeat.core import Batches, Cohort, Gradient, Tensor, Vector, Visit, sgd


class State(NamedTuple):
    """Server state."""

    x: Vector  # mean of the last two iterates
    path: Vector  # the last iterate, which clients are sent


class Upload(NamedTuple):
    """Client to server."""

    delta: Vector  # start minus end
    square: Tensor  # () of its norm


@dataclass(frozen=True)
class FedExP:
    """Local SGD and a server rate that grows as updates disagree."""

    local_lr: float
    eps: float = 1e-3

    memory = empty
    warmup = no_warmup

    def __post_init__(self) -> None:
        check_ranges(self)

    def init(self, x: Vector) -> State:
        return State(x, x)

    def broadcast(self, state: State, version: int) -> Model:
        return Model(state.path)

    def local(
        self, message: Model, memory: tuple[()], batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, tuple[()]]:
        delta = message.x - sgd(message.x, batches, grad, self.local_lr)
        return Upload(delta, delta @ delta), memory

    def step(self, state: State, mean: Upload, cohort: Cohort) -> State:
        rate = (mean.square / (2 * (mean.delta @ mean.delta + self.eps))).clamp_min(1.0)
        path = state.path - rate * mean.delta
        return State((state.path + path) / 2, path)


METHODS = {
    "fedexp": Method(
        constructor(FedExP, local_lr=0.1),
        "a server rate from how much the updates disagree",
        "ICLR 2023, arXiv 2301.09604",
        "synchronous",
        Cost(server=2, extra_up=1),
    ),
}
