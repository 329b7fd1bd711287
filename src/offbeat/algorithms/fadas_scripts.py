"""What the FADAS authors' scripts upload (Wang et al., ICML 2024), which is not what their paper says.

The M replacements of a round t >= 1 are trained together once x_t is there. Only the last of their list
starts from x_t; the others start from x_{t-1}, as if they had been sent off before the server's step. But
all updates are measured from x_t, so those of the others hold the server's last step as well, reversed:
x_t - end = (x_t - x_{t-1}) + (x_{t-1} - end). And all count as started from version t, so the staleness of
the others is one less than it was. In the paper's Algorithm 1 an update is measured from where it began.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from offbeat.algorithms import fedopt
from offbeat.algorithms.fedopt import FedOpt, Upload
from offbeat.core import Batches, Cohort, Gradient, Vector, Visit, sgd
from offbeat.errors import InputError


class State(NamedTuple):
    """The server's."""

    x: Vector
    before: Vector  # x of the version before; at version 0, x
    inner: fedopt.State


class Message(NamedTuple):
    """Down."""

    x: Vector
    before: Vector


@dataclass(frozen=True)
class Trailing:
    """FADAS whose tasks start one version behind, but for the last of `buffer`; needs refill by rounds.

    The scripts lose nobody. Where tasks are lost and more than `buffer` are sent off at once, those after
    the last one also start from the current version.
    """

    inner: FedOpt
    buffer: int
    reads_rank: ClassVar[bool] = True

    def warmup(self) -> None:
        return None

    def init(self, x: Vector) -> State:
        return State(x, x, self.inner.init(x))

    def memory(self, x: Vector) -> tuple[()]:
        return ()

    def broadcast(self, state: State, version: int) -> Message:
        return Message(state.x, state.before)

    def local(
        self, message: Message, memory: tuple[()], batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, tuple[()]]:
        if not isinstance(visit.rank, Tensor):
            raise InputError("this engine does not tell in which order tasks start: use a simulated one.")
        start = torch.where(visit.rank < self.buffer - 1, message.before, message.x)
        return Upload(message.x - sgd(start, batches, grad, self.inner.local_lr)), memory

    def step(self, state: State, mean: Upload, cohort: Cohort) -> State:
        inner = self.inner.step(state.inner, mean, cohort)
        return State(inner.x, state.x, inner)
