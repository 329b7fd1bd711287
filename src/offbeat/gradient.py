"""The gradient function that one task's local work is given."""

import torch
from torch import Tensor

from offbeat.core import Batch, Vector, where
from offbeat.problem import Differentiate, Problem, Statistics


class TaskGradient:
    """The slopes of one task's minibatches; running statistics pass through it from step to step."""

    def __init__(self, problem: Problem, differentiate: Differentiate, statistics: Statistics) -> None:
        self._problem = problem
        self._differentiate = differentiate
        # memory is the limit of a CPU: there a step is written without putting its gradient together
        self._in_pieces = differentiate == problem.differentiate_alone and problem.device.type == "cpu"
        self.statistics = statistics

    def __call__(self, x: Vector, batch: Batch, /) -> Vector:
        """The gradient of one minibatch at x."""
        slope, _, left = self._differentiate(x, self.statistics, batch)
        self._pass_on(left, batch)
        return slope

    def with_loss(self, x: Vector, batch: Batch, /) -> tuple[Vector, Tensor]:
        """The same with the loss, weight decay included."""
        slope, loss, left = self._differentiate(x, self.statistics, batch)
        self._pass_on(left, batch)
        return slope, loss + 0.5 * self._problem.weight_decay * (x @ x)

    def descend(self, x: Vector, batch: Batch, lr: float, /) -> Vector:
        """X less lr times its gradient."""
        if not self._in_pieces:
            return torch.sub(x, self(x, batch), alpha=lr)
        lower, left = self._problem.descend_alone(x, self.statistics, batch, lr)
        self._pass_on(left, batch)
        return lower

    def _pass_on(self, left: Statistics, batch: Batch) -> None:
        active = batch.active
        self.statistics = left if active is None else where(active, left, self.statistics)
