"""FedCM (Xu et al. 2021), also called FedAvg-M (Cheng et al., ICLR 2024): momentum inside local steps.

Local steps go along u = beta gradient + (1 - beta) g, in the VR form along
u = gradient(y) + (1 - beta) (g - gradient(x_before)) with both gradients on the same minibatch. g is the
mean of all local directions, starts at zero, and the server steps along it. This is not FedAvgM, whose
momentum is at the server. `beta` weighs the *new* gradient. The VR form was reconstructed from
the papers that build on it, not confirmed against its own listing.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from offbeat.algorithms.registry import Cost, Method, check_ranges, constructor, empty, no_warmup, send_state
from offbeat.core import Batch, Batches, Cohort, Gradient, Traits, Vector, Visit, descend, scan, zeros_like


class State(NamedTuple):
    """Server state, and the message of the plain form."""

    x: Vector
    g: Vector  # momentum


class Upload(NamedTuple):
    """Client to server."""

    direction: Vector  # mean of the local steps' directions


@dataclass(frozen=True)
class FedCM:
    """Client-side momentum."""

    local_lr: float
    server_lr: float
    beta: float

    memory = empty
    broadcast = send_state
    warmup = no_warmup

    def __post_init__(self) -> None:
        check_ranges(self)

    def init(self, x: Vector) -> State:
        return State(x, zeros_like(x))

    def local(
        self, message: State, memory: tuple[()], batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, tuple[()]]:
        rest = (1 - self.beta) * message.g

        def step(direction: Vector, batch: Batch) -> Vector:
            g = grad(descend(message.x, direction, self.local_lr), batch)
            return direction + rest.add(g, alpha=self.beta)

        return Upload(scan(step, zeros_like(message.x), batches) / batches.steps), memory

    def step(self, state: State, mean: Upload, cohort: Cohort) -> State:
        return State(state.x - self.server_lr * mean.direction, mean.direction)


class ReducedState(NamedTuple):
    """Server state and message of the VR form."""

    x: Vector
    before: Vector  # the model one version earlier
    g: Vector


@dataclass(frozen=True)
class FedCMVR:
    """Client-side momentum with variance reduction."""

    local_lr: float
    server_lr: float
    beta: float
    traits: ClassVar[Traits] = Traits(repeats_batches=True)

    memory = empty
    broadcast = send_state
    warmup = no_warmup

    def __post_init__(self) -> None:
        check_ranges(self)

    def init(self, x: Vector) -> ReducedState:
        return ReducedState(x, x, zeros_like(x))

    def local(
        self, message: ReducedState, memory: tuple[()], batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, tuple[()]]:
        def step(direction: Vector, batch: Batch) -> Vector:
            g = grad(descend(message.x, direction, self.local_lr), batch)
            return direction + g.add(message.g - grad(message.before, batch), alpha=1 - self.beta)

        return Upload(scan(step, zeros_like(message.x), batches) / batches.steps), memory

    def step(self, state: ReducedState, mean: Upload, cohort: Cohort) -> ReducedState:
        return ReducedState(state.x - self.server_lr * mean.direction, state.x, mean.direction)


METHODS = {
    "fedcm": Method(
        constructor(FedCM, local_lr=0.1, server_lr=1.0, beta=0.1),
        "momentum inside local steps (FedAvg-M)",
        "ICLR 2024; arXiv 2106.10874",
        "synchronous",
        Cost(down=2, server=2),
        former_name="fedavg-m",
    ),
    "fedcm-vr": Method(
        constructor(FedCMVR, local_lr=0.1, server_lr=1.0, beta=0.1),
        "the same with variance reduction",
        "ICLR 2024",
        "synchronous",
        Cost(down=3, server=3),
        former_name="fedavg-m-vr",
    ),
}
