"""FedSPS (Mukherjee, Loizou, Stich): local SGD with stochastic Polyak step sizes.

The rate of a local step is min((loss - lower) / (c |gradient|^2), bound), from the minibatch's own
loss and gradient; the server averages. The defaults are those of the literature, not confirmed against
the paper's own listing. Its theory assumes that all clients take part.
"""

from dataclasses import dataclass
from typing import Self

from offbeat.algorithms.fedasync import Model
from offbeat.algorithms.fedopt import Upload
from offbeat.algorithms.registry import Method, check_ranges, constructor, empty, no_warmup, send_state
from offbeat.core import Batch, Batches, Cohort, Gradient, Vector, Visit, scan


@dataclass(frozen=True)
class FedSPS:
    """Local SGD with stochastic Polyak steps; `lower` is a lower bound of the loss."""

    c: float = 0.5
    lower: float = 0.0
    bound: float = 1.0
    server_lr: float = 1.0

    init = Model
    memory = empty
    broadcast = send_state
    warmup = no_warmup

    def __post_init__(self) -> None:
        check_ranges(self)

    @classmethod
    def tuned(cls, steps: int, smoothness: float, c: float = 0.5) -> Self:
        """The largest bound of its theory, from K and the smoothness L."""
        return cls(c, bound=min(1 / (2 * c * smoothness), 1 / (25 * steps * smoothness)))

    def local(
        self, message: Model, memory: tuple[()], batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, tuple[()]]:
        import torch

        tiny = torch.finfo(message.x.dtype).tiny

        def step(x: Vector, batch: Batch) -> Vector:
            g, loss = grad.with_loss(x, batch)
            square = (g @ g).clamp_min(tiny)  # where the gradient is zero, so is the step
            lr = ((loss - self.lower) / (self.c * square)).clamp(max=self.bound)
            return x - lr * g

        return Upload(message.x - scan(step, message.x, batches)), memory

    def step(self, state: Model, mean: Upload, cohort: Cohort) -> Model:
        return Model(state.x - self.server_lr * mean.delta)


METHODS = {
    "fedsps": Method(
        constructor(FedSPS),
        "local SGD with stochastic Polyak step sizes",
        "arXiv 2307.06306",
        "synchronous",
        theory="FedSPS.tuned: bound <= min(1/(2 c L), 1/(25 K L))",
    ),
}
