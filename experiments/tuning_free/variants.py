"""Ways to make unit steps know the model's scale, the time left and the delay: one class, many switches."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, zeros_like

from offbeat.core import Batch, Batches, Cohort, Gradient, Vector, Visit, scan

_POWER = 8  # of the polynomial by which averages forget


class State(NamedTuple):
    """The server's; what a variant has no use for is one number long."""

    x: Vector
    fast: Vector  # the sequence behind an average, for schedules without an end
    g: Vector  # momentum
    c: Vector  # mean of the clients' control variates
    scales: Tensor  # of the initial model, by tensor
    age: Tensor  # mean staleness, lately
    length: Tensor  # of the mean unit steps, lately, in units of the model's norm


class Message(NamedTuple):
    """Down."""

    x: Vector
    anchor: Vector
    scales: Tensor
    rate: Tensor
    trust: Tensor
    beta: Tensor


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
    schedule: str = "linear"  # of the server's rate: linear, cosine, constant, free (of an end) or inverse
    local_decay: bool = False  # the local rate follows it
    trust: float = 0.0  # in control variates; -1: 1 / (1 + age)
    beta: float = 1.0  # weight of the gradient against momentum in local steps
    fade: float = 0.0  # momentum's weight is divided by (1 + age) to this power
    share: float = 0.1  # of the clients, in a buffer
    lazily: bool = False  # a client's control variate counts as far as clients have been seen
    modest: float = 0.0  # a correction is at most so many times as long as what it corrects; 0: no limit
    unitary: bool = False  # control variates and momentum of unit gradients, so that uploads are bounded
    cap: float = 0.0  # the server's rate times (1 + age) is at most that; 0: no limit
    stride: float = 0.0  # the server's rate times the lengths times sqrt(rounds) is at most that; 0: no limit
    older: float = 0.0  # the local rate grows with (1 + age) to this power
    heavy: float = 0.0  # momentum of the server's steps
    live: bool = False  # norms of the current model in place of the initial one
    whole: bool = False  # one norm for the whole vector

    def warmup(self) -> None:
        return None

    def init(self, x: Vector) -> State:
        zero = zeros_like(x)
        used = zero if self._remembers or self.heavy else zero[:1]
        fast = x.clone() if self._averages else zero[:1]
        return State(x, fast, used, used, self._scales(x), zero[:1], zero[:1])

    def memory(self, x: Vector) -> Vector:
        return zeros_like(x) if self.trust else zeros_like(x[:1])

    def broadcast(self, state: State, version: int) -> Message:
        x = state.fast if self._averages else state.x
        x = 0.1 * state.fast + 0.9 * state.x if self.schedule == "free" else x
        scales = self._scales(x) if self.live else state.scales
        rate = self.local_rate * (max(self._left(version), 0.02) if self.local_decay else 1.0)
        trust = (1 + state.age) ** self.trust if self.trust < 0 else torch.full_like(state.age, self.trust)
        beta = self._beta(state.age)
        anchor = beta * trust * state.c + (1 - beta) * state.g if self._remembers else state.c
        if self.lazily:
            trust = trust * (1 - (1 - self.share) ** version)
        return Message(x, anchor, scales, rate * (1 + state.age) ** self.older, trust, beta)

    def local(
        self, message: Message, c_i: Vector, batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, Vector]:
        beta = message.beta
        rest = message.anchor - beta * message.trust * c_i if self._remembers else None

        def step(carry: tuple[Vector, Vector], batch: Batch) -> tuple[Vector, Vector]:
            descent, total = carry
            g = grad(message.x - message.rate * descent, batch)
            g = g / g.norm().clamp_min(1e-12) if self.unitary else g
            if rest is None:
                u = g
            elif self.modest:
                u = g + rest * (self.modest * g.norm() / rest.norm().clamp_min(1e-12)).clamp_max(1.0)
            else:
                u = beta * g + rest
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
        scale = (self._scales(state.x) if self.live else state.scales).norm()
        length = state.length + (descent.norm() / scale - state.length) * (0.1 if version else 1.0)
        beta = self._beta(age)
        if self.trust:
            g = beta * (mean.shift + c) + (1 - beta) * g
            c = c + cohort.share * mean.shift
        elif self.beta != 1:
            g = beta * mean.shift + (1 - beta) * g
        if self.heavy:
            descent = g = self.heavy * g + (1 - self.heavy) * descent
        rate = self.server_rate * self._left(version) * torch.ones_like(age)
        if self.cap:
            rate = torch.minimum(rate, self.cap * min(self._left(version), 1.0) / (1 + age))
        if self.stride:
            rate = torch.minimum(rate, self.stride * self._left(version) / (self.rounds**0.5 * length))
        if not self._averages:
            return State(state.x - rate * descent, state.fast, g, c, state.scales, age, length)
        fast, power = state.fast - rate * descent, 0 if self.schedule == "free" else _POWER
        weight = (power + 1) / (version + power + 2)
        return State((1 - weight) * state.x + weight * fast, fast, g, c, state.scales, age, length)

    @property
    def _averages(self) -> bool:
        return self.schedule in ("free", "inverse")

    def _beta(self, age: Tensor) -> Tensor:
        return 1 - (1 - self.beta) * (1 + age) ** -self.fade

    @property
    def _remembers(self) -> bool:
        return bool(self.trust) or self.beta != 1

    def _left(self, version: int) -> float:
        part = version / self.rounds
        if (
            self.schedule == "inverse"
        ):  # it knows no end: `rounds` is only where it has the rate that is given
            return float(min(((version + 1) / self.rounds) ** -0.5, 4.0))
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
