"""FAFED (Wu et al., AAAI 2023): local recursive momentum under a shared adaptive scale.

Reconstructed from a summary, not confirmed against the paper, whose schedules (rates that fall
with the number of local steps) are left out: rates are constant here. All clients take part in
every round. The server sends x, m, v and the scale h = sqrt(v) + eps, which is fixed during a round. A
local step first moves, y' = y - lr m / h, and then sets m <- gradient(y') + (1 - alpha) (m - gradient(y)) on
one minibatch and v <- rho v + (1 - rho) gradient(y')^2. The server replaces x, m and v by their means.
One pass over all clients at the initial model gives m its mean gradient and v its mean square.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

from offbeat.algorithms.registry import Cost, Method, check_ranges, constructor, empty, send_state
from offbeat.core import Batch, Batches, Cohort, Gradient, Traits, Vector, Visit, scan, zeros_like


class Triple(NamedTuple):
    """Server state, message and upload."""

    x: Vector
    m: Vector  # momentum
    v: Vector  # mean square


@dataclass(frozen=True)
class FAFED:
    """Adaptive local steps along recursive momentum."""

    local_lr: float
    alpha: float
    rho: float = 0.9
    eps: float = 1e-3
    starting: bool = False
    traits: ClassVar[Traits] = Traits(repeats_batches=True)

    memory = empty
    broadcast = send_state

    def __post_init__(self) -> None:
        check_ranges(self)

    def warmup(self) -> Self:
        return replace(self, starting=True)

    def init(self, x: Vector) -> Triple:
        return Triple(x, zeros_like(x), zeros_like(x))

    def local(
        self, message: Triple, memory: tuple[()], batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Triple, tuple[()]]:
        if self.starting:
            total = scan(lambda t, batch: t + grad(message.x, batch), zeros_like(message.x), batches)
            g = total / batches.steps
            return Triple(message.x, g, g**2), memory
        h = message.v.sqrt() + self.eps

        def step(carry: Triple, batch: Batch) -> Triple:
            x, m, v = carry
            y = x - self.local_lr * m / h
            g = grad(y, batch)
            m = g.add(m - grad(x, batch), alpha=1 - self.alpha)
            return Triple(y, m, self.rho * v + (1 - self.rho) * g**2)

        return scan(step, message, batches), memory

    def step(self, state: Triple, mean: Triple, cohort: Cohort) -> Triple:
        return Triple(*(leaf / cohort.mean_weight for leaf in mean))


METHODS = {
    "fafed": Method(
        constructor(FAFED, ("starting",), local_lr=0.01, alpha=0.1),
        "adaptive local steps along recursive momentum",
        "AAAI 2023",
        "synchronous",
        Cost(down=3, up=3, server=3),
        theory="local falls as N^(2/3) / (L t^(1/3)), alpha as its square",
    ),
}
