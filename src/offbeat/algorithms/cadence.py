"""Cadence, this project's own: unit steps in units of the model's norm, at rates that nobody tunes.

The local step is u / |u| with u = g / |g| + trust (c - seen c_i). g is the gradient, c_i the mean of g /
|g| over the client's last task, c the mean of all c_i, seen the part of the clients that came at least
once, as if all came equally often (c_i is zero for the others, so that c / seen is the mean of those that
came), and trust is 1 / (1 + age), age being the mean staleness that the server saw lately. Lengths are in
units of the norm of the model that was sent, or of 1 where that is less, so that a model may begin at
zero; a norm above twice the first model's counts as that, since a model that fits its data grows without
end. The constants are the same for every task:

- a local step is 0.12 / sqrt(K), so that a random walk of K steps gets 0.12 from its start,
- while a client is at work the server goes at most 3 times as far as the client can: its rate times (1 +
  age) is at most 3 x 0.12 sqrt(K),
- and at most sqrt(SK / (4 (t + 1))) at version t, so that the noise of all steps so far moves the model by
  about its own norm, and never more than 1.

Nothing falls to zero, so no end has to be known: the model is a running mean of the server's path that
forgets its first steps (step t has the weight of a polynomial of degree 8), and training may stop at any
time. While clients of the first model come in, age is the staleness of the last buffer alone.

All that is uploaded is bounded: the mean unit step by 1, the change of c_i by 2. So there is no clipping
bound to choose under differential privacy, and no gradient of a bad moment that a client drags along.
Without control variates (`variates` false) clients keep nothing and upload the mean unit step alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor, zeros_like

from offbeat.algorithms.adamasfl import add_unit
from offbeat.algorithms.ranges import check
from offbeat.core import Batch, Batches, Cohort, Gradient, Vector, Visit, scan

_WALK, _LEAP = 0.12, 3.0
_LATER = 4  # the end is thought to be so many times as far as it has come
_GROWN = 2.0  # times the first model's norm, of which a unit has no more
_TINY = 1e-12  # a gradient that is zero has no direction
_DEGREE = 8  # of the weights of the path
_LATELY = 0.1  # weight of a new staleness


class State(NamedTuple):
    """The server's."""

    x: Vector  # running mean of the path
    path: Vector  # what clients are sent
    c: Vector | tuple[()]  # mean of the clients' control variates
    seen: Tensor  # () part of the clients
    age: Tensor  # () mean staleness, lately
    most: Tensor  # () longest unit


class Message(NamedTuple):
    """Down."""

    x: Vector
    anchor: Vector | tuple[()]  # trust times c
    weight: Tensor  # () trust times seen
    stride: Tensor  # () length of a local step


class Upload(NamedTuple):
    """Up."""

    descent: Vector  # mean unit step, norm at most 1
    shift: Vector  # change of the control variate


class Descent(NamedTuple):
    """Up, without control variates."""

    descent: Vector


@dataclass(frozen=True)
class Cadence:
    """Unit steps in units of the model's norm, control variates as far as staleness allows."""

    local_lr: float  # of a local step, by the unit of length
    server_lr: float  # along the mean unit step, by the same; falls with the square root of the version
    leap: float  # the most that the server may go while a client is at work, by the same
    variates: bool = True
    shares: ClassVar[Mapping[str, float]] = MappingProxyType({})

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def tuned(cls, cohort: int, steps: int, variates: bool = True) -> Self:
        """Every rate from S and K."""
        return cls(
            local_lr=_WALK / steps**0.5,
            server_lr=(cohort * steps / _LATER) ** 0.5,
            leap=_LEAP * _WALK * steps**0.5,
            variates=variates,
        )

    @property
    def bounds(self) -> Mapping[str, float]:
        return {"descent": 1.0, "shift": 2.0} if self.variates else {"descent": 1.0}

    def warmup(self) -> None:
        return None

    def init(self, x: Vector) -> State:
        zero, c = x.new_zeros(()), zeros_like(x) if self.variates else ()
        return State(x, x, c, zero, zero, _GROWN * x.norm().clamp_min(1.0))

    def memory(self, x: Vector) -> Vector | tuple[()]:
        return zeros_like(x) if self.variates else ()

    def broadcast(self, state: State, version: int) -> Message:
        trust = 1 / (1 + state.age)
        anchor = trust * state.c if isinstance(state.c, Tensor) else ()
        return Message(state.path, anchor, trust * state.seen, self.local_lr * _unit(state))

    def local(
        self,
        message: Message,
        c_i: Vector | tuple[()],
        batches: Batches,
        visit: Visit,
        grad: Gradient,
    ) -> tuple[Upload | Descent, Vector | tuple[()]]:
        zero = zeros_like(message.x)

        def at(descent: Vector) -> Vector:
            return message.x - message.stride * descent

        if not isinstance(c_i, Tensor) or not isinstance(message.anchor, Tensor):
            descent = scan(lambda d, batch: add_unit(d, grad(at(d), batch)), zero, batches)
            return Descent(descent / batches.steps), ()
        rest = message.anchor - message.weight * c_i

        def step(carry: tuple[Vector, Vector], batch: Batch) -> tuple[Vector, Vector]:
            descent, total = carry
            g = grad(at(descent), batch)
            unit = g / g.norm().clamp_min(_TINY)
            return add_unit(descent, rest + unit), total + unit

        descent, total = scan(step, (zero, zero), batches)
        c_new = total / batches.steps
        return Upload(descent / batches.steps, c_new - c_i), c_new

    def step(self, state: State, mean: Upload | Descent, cohort: Cohort) -> State:
        stale = sum(cohort.staleness) / len(cohort.staleness)
        early = max(cohort.staleness) == cohort.version  # clients of the first model: nothing older is out
        age = state.age + (stale - state.age) * (1.0 if early else _LATELY)
        seen = state.seen + cohort.share * (1 - state.seen)
        noise = min(self.server_lr / (cohort.version + 1) ** 0.5, 1.0)
        rate = (self.leap / (1 + age)).clamp_max(noise)
        path = state.path - rate * _unit(state) * mean.descent
        c = state.c
        if isinstance(mean, Upload) and isinstance(c, Tensor):
            c = c + cohort.share * mean.shift
        weight = (_DEGREE + 1) / (cohort.version + _DEGREE + 2)
        return State(state.x + weight * (path - state.x), path, c, seen, age, state.most)


def _unit(state: State) -> Tensor:
    """Of length."""
    return torch.minimum(state.path.norm().clamp_min(1.0), state.most)
