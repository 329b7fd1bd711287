"""MasFL (ICML 2025, PMLR 267:70410): momentum and control variates under delay.

As AdaMasFL, with plain local steps along u = beta (gradient - c_i) + beta c + (1 - beta) g. The server
steps along its new momentum, so a client uploads only the change of its control variate and not
the end of its local steps. One pass over all clients at the initial model
fills c_i, c and g. `beta` weighs the *new* gradient.

Without delay this is SCAFFOLD-M (Cheng et al., ICLR 2024): its mean local direction is
beta (mean of the shifts + c) + (1 - beta) g, so it too needs one vector up. SCAFFOLD-M was
reconstructed from the papers that build on it, not confirmed against its own listing; its g
starts at zero (`start=0`), where MasFL's starts at c.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from offbeat.algorithms.adamasfl import Message, State
from offbeat.algorithms.registry import (
    Cost,
    Method,
    Setting,
    cap_beta,
    check_ranges,
    constructor,
    zero_vector,
)
from offbeat.core import Batch, Batches, Cohort, Gradient, Vector, Visit, descend, scan, zeros_like
from offbeat.errors import InputError


class Upload(NamedTuple):
    """Client to server."""

    shift: Vector  # change of the control variate


@dataclass(frozen=True)
class MasFL:
    """Steps along momentum with control variates."""

    local_lr: float
    server_lr: float
    beta: float
    start: float = 1.0  # the momentum starts at this multiple of c
    lazy: bool = False  # skip the first pass over all clients: a client's first task fills its c_i

    memory = zero_vector

    def __post_init__(self) -> None:
        check_ranges(self)

    @classmethod
    def tuned(cls, cohort: int, steps: int, rounds: int, smoothness: float, worst: int) -> Self:
        """Theorem 1: rates from S, K, T, the smoothness L of the loss and the worst staleness."""
        work = cohort * steps
        margin = rounds - math.sqrt(work * rounds) - 4 * work * worst**2
        if margin <= 0:
            raise InputError(
                f"MasFL's theorem needs more than {rounds} rounds for a buffer of {cohort}, "
                f"{steps} local steps and staleness up to {worst}: raise the rounds or give rates yourself."
            )
        beta = math.sqrt(work / rounds)
        local = math.sqrt(margin) / (4 * math.sqrt(5) * math.e * steps * smoothness * math.sqrt(rounds))
        return cls(local, beta / (4 * smoothness), beta)

    def warmup(self) -> Self | None:
        return None if self.lazy else replace(self, local_lr=0.0, server_lr=0.0, beta=self.start)

    def init(self, x: Vector) -> State:
        return State(x, zeros_like(x), zeros_like(x))

    def broadcast(self, state: State, version: int) -> Message:
        return Message(state.x, self.beta * state.c + (1 - self.beta) * state.g)

    def local(
        self, message: Message, c_i: Vector, batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, Vector]:
        rest = message.anchor - self.beta * c_i

        def step(carry: tuple[Vector, Vector], batch: Batch) -> tuple[Vector, Vector]:
            x, total = carry
            g = grad(x, batch)
            u = rest.add(g, alpha=self.beta)
            return descend(x, u, self.local_lr), total + g

        _, total = scan(step, (message.x, zeros_like(c_i)), batches)
        c_new = total / batches.steps
        return Upload(c_new - c_i), c_new

    def step(self, state: State, mean: Upload, cohort: Cohort) -> State:
        x, g, c = state
        g = self.beta * (mean.shift + c) + (1 - self.beta) * g
        return State(x - self.server_lr * g, g, c + cohort.share * mean.shift)


def masfl(
    setting: Setting,
    *,
    local_lr: float = 0.05,
    server_lr: float = 0.1,
    beta: float | None = None,
    lazy: bool = False,
) -> MasFL:
    """MasFL, with beta computed from S, K and T unless it is given."""
    if beta is None:
        beta = cap_beta("MasFL", (setting.cohort * setting.steps / setting.rounds) ** 0.5)
    return MasFL(local_lr, server_lr, beta, lazy=lazy)


METHODS = {
    "masfl": Method(
        masfl,
        "momentum and control variates under delay",
        "ICML 2025, PMLR 267:70410",
        "asynchronous",
        Cost(down=2, client=1, server=3),
        theory="MasFL.tuned: beta sqrt(SK/T), server beta/(4 L), local from L and the worst staleness",
    ),
    "scaffold-m": Method(
        constructor(MasFL, local_lr=0.05, server_lr=0.1, beta=0.3, start=0.0),
        "control variates and client-side momentum",
        "ICLR 2024",
        "synchronous",
        Cost(down=2, client=1, server=3),
        theory="server of the order of beta/L",
    ),
}
