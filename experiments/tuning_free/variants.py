"""Ways to make unit steps know the model's scale, the time left and the delay: one class, many switches."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, zeros_like

from offbeat.core import Batch, Batches, Cohort, Gradient, Vector, Visit, scan


class State(NamedTuple):
    """The server's; what a variant has no use for is one number long."""

    x: Vector
    fast: Vector  # the sequence behind an average, for the schedule without an end
    g: Vector  # momentum
    c: Vector  # mean of the clients' control variates
    scales: Tensor  # of the initial model, by tensor
    age: Tensor  # mean staleness, lately


class Message(NamedTuple):
    """Down."""

    x: Vector
    anchor: Vector
    scales: Tensor
    rate: Tensor
    trust: Tensor


class Upload(NamedTuple):
    """Up."""

    descent: Vector
    shift: Vector


@dataclass(frozen=True)
class Variant:
    """Unit steps in units of the initial norm."""

    sizes: tuple[int, ...]  # of the model's tensors
    rounds: int
    local_rate: float  # a local step
    server_rate: float  # a server step along the mean unit step
    schedule: str = "linear"  # of the server's rate: linear, cosine, constant, or free (of an end)
    local_decay: bool = False  # the local rate follows it
    trust: float = 0.0  # in control variates; -1: 1 / (1 + age)
    beta: float = 1.0  # weight of the gradient against momentum in local steps
    heavy: float = 0.0  # momentum of the server's steps
    live: bool = False  # norms of the current model in place of the initial one
    whole: bool = False  # one norm for the whole vector

    def warmup(self) -> None:
        return None

    def init(self, x: Vector) -> State:
        zero = zeros_like(x)
        used = zero if self._remembers or self.heavy else zero[:1]
        fast = x.clone() if self.schedule == "free" else zero[:1]
        return State(x, fast, used, used, self._scales(x), zero[:1])

    def memory(self, x: Vector) -> Vector:
        return zeros_like(x) if self.trust else zeros_like(x[:1])

    def broadcast(self, state: State, version: int) -> Message:
        x = 0.1 * state.fast + 0.9 * state.x if self.schedule == "free" else state.x
        scales = self._scales(x) if self.live else state.scales
        rate = self.local_rate * (max(self._left(version), 0.02) if self.local_decay else 1.0)
        trust = 1 / (1 + state.age) if self.trust < 0 else torch.full_like(state.age, self.trust)
        anchor = self.beta * trust * state.c + (1 - self.beta) * state.g if self._remembers else state.c
        return Message(x, anchor, scales, torch.full_like(state.age, rate), trust)

    def local(
        self, message: Message, c_i: Vector, batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, Vector]:
        rest = message.anchor - self.beta * message.trust * c_i if self._remembers else None

        def step(carry: tuple[Vector, Vector], batch: Batch) -> tuple[Vector, Vector]:
            descent, total = carry
            g = grad(message.x - message.rate * descent, batch)
            u = g if rest is None else self.beta * g + rest
            return descent + self._unit(u, message.scales), total + g if self._remembers else total

        zero = zeros_like(message.x)
        descent, total = scan(step, (zero, zero if self._remembers else zero[:1]), batches)
        mean = total / batches.steps
        shift = mean - c_i if self.trust else mean
        return Upload(descent / batches.steps, shift), mean if self.trust else c_i

    def step(self, state: State, mean: Upload, cohort: Cohort) -> State:
        version, descent, g, c = cohort.version, mean.descent, state.g, state.c
        seen = sum(cohort.staleness) / len(cohort.staleness)
        age = state.age + (seen - state.age) * (0.1 if version else 1.0)
        if self.trust:
            g = self.beta * (mean.shift + c) + (1 - self.beta) * g
            c = c + cohort.share * mean.shift
        elif self.beta != 1:
            g = self.beta * mean.shift + (1 - self.beta) * g
        if self.heavy:
            descent = g = self.heavy * g + (1 - self.heavy) * descent
        rate = self.server_rate * self._left(version)
        if self.schedule != "free":
            return State(state.x - rate * descent, state.fast, g, c, state.scales, age)
        fast, weight = state.fast - rate * descent, 1 / (version + 2)
        return State((1 - weight) * state.x + weight * fast, fast, g, c, state.scales, age)

    @property
    def _remembers(self) -> bool:
        return bool(self.trust) or self.beta != 1

    def _left(self, version: int) -> float:
        part = version / self.rounds
        if self.schedule == "linear":
            return 1 - part
        return 0.5 * (1 + math.cos(math.pi * part)) if self.schedule == "cosine" else 1.0

    def _parts(self, x: Vector) -> tuple[int, ...]:
        return self.sizes if x.numel() == sum(self.sizes) and not self.whole else (x.numel(),)

    def _scales(self, x: Vector) -> Tensor:
        """Norms; a tensor that begins near zero gets half of what its size would have of the whole."""
        least = 0.5 * x.norm() / math.sqrt(x.numel())
        return torch.stack(
            [torch.maximum(part.norm(), least * math.sqrt(part.numel())) for part in x.split(self._parts(x))]
        )

    def _unit(self, u: Vector, scales: Tensor) -> Vector:
        parts = u.split(self._parts(u))
        return torch.cat([part * (scales[n] / part.norm().clamp_min(1e-12)) for n, part in enumerate(parts)])
