"""Cadence, this project's own: unit steps in units of the model's norm, at rates that nobody tunes.

The local step is u / |u| with u = g / |g| + trust (c - seen c_i). g is the gradient, c_i the mean of g /
|g| over the client's last task, c the mean of all c_i, seen the part of the clients that came at least
once, as if all came equally often (c_i is zero for the others, so that c / seen is the mean of those that
came), and trust is 1 / (1 + age), age being the mean staleness that the server saw lately. Lengths are in
units of |x|, the norm of the model that was sent, or of 1 where that is less, so that a model may begin at
zero. Three constants, the same for every task:

- a local step is 0.14 / sqrt(K), so that a random walk of K steps gets 0.14 from its start,
- while a client is at work the server goes at most 3 times as far as the client can: its rate times (1 +
  age) is at most 3 x 0.14 sqrt(K),
- and at most sqrt(SK / T), so that the noise of all T steps together moves the model by about its own norm.

Both rates fall linearly to zero at T. Where T is not known (`rounds` is None) the local rate stays, 4 (t +
1) stands for T in the last bound, and the model is a running mean of the server's path that forgets its
first steps: step t has the weight of a polynomial of degree 8.

All that is uploaded is bounded: the mean unit step by 1, the change of c_i by 2. So there is no clipping
bound to choose under differential privacy, and no gradient of a bad moment that a client drags along.
Without control variates (`variates` false) clients keep nothing and upload the mean unit step alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple, Self

from torch import Tensor, zeros_like

from offbeat.algorithms.adamasfl import add_unit
from offbeat.algorithms.ranges import check
from offbeat.core import Batch, Batches, Cohort, Gradient, Vector, Visit, scan

_WALK, _LEAP = 0.14, 3.0
_LATER = 4  # without an end, the end is thought to be so many times as far as it has come
_TINY = 1e-12  # a gradient that is zero has no direction
_DEGREE = 8  # of the weights of a path without an end
_LATELY = 0.1  # weight of a new staleness


class State(NamedTuple):
    """The server's."""

    x: Vector
    path: Vector | tuple[()]  # what clients are sent, where x is its running mean
    c: Vector | tuple[()]  # mean of the clients' control variates
    seen: Tensor  # () part of the clients
    age: Tensor  # () mean staleness, lately


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

    local_lr: float  # of a local step, by the model's norm
    server_lr: float  # along the mean unit step, by the same; without `rounds`, that of the first step
    leap: float  # the most that the server may go while a client is at work, by the same
    rounds: int | None = None  # None: no end is known
    variates: bool = True
    shares: ClassVar[Mapping[str, float]] = MappingProxyType({})

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def tuned(cls, cohort: int, steps: int, rounds: int | None, variates: bool = True) -> Self:
        """Every rate from S, K and T; without T, for training until somebody ends it."""
        return cls(
            local_lr=_WALK / steps**0.5,
            server_lr=(cohort * steps / (rounds or _LATER)) ** 0.5,
            leap=_LEAP * _WALK * steps**0.5,
            rounds=rounds,
            variates=variates,
        )

    @property
    def bounds(self) -> Mapping[str, float]:
        return {"descent": 1.0, "shift": 2.0} if self.variates else {"descent": 1.0}

    def warmup(self) -> None:
        return None

    def init(self, x: Vector) -> State:
        path = x if self.rounds is None else ()
        return State(x, path, zeros_like(x) if self.variates else (), x.new_zeros(()), x.new_zeros(()))

    def memory(self, x: Vector) -> Vector | tuple[()]:
        return zeros_like(x) if self.variates else ()

    def broadcast(self, state: State, version: int) -> Message:
        x, trust = _sent(state), 1 / (1 + state.age)
        stride = self.local_lr * self._left(version) * _norm(x)
        anchor = trust * state.c if isinstance(state.c, Tensor) else ()
        return Message(x, anchor, trust * state.seen, stride)

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
        age = state.age + (stale - state.age) * (_LATELY if cohort.version else 1.0)
        seen = state.seen + cohort.share * (1 - state.seen)
        x = _sent(state)
        moved = x - self._rate(age, cohort.version) * _norm(x) * mean.descent
        c = state.c
        if isinstance(mean, Upload) and isinstance(c, Tensor):
            c = c + cohort.share * mean.shift
        if self.rounds is not None:
            return State(moved, (), c, seen, age)
        weight = (_DEGREE + 1) / (cohort.version + _DEGREE + 2)
        return State(state.x + weight * (moved - state.x), moved, c, seen, age)

    def _rate(self, age: Tensor, version: int) -> Tensor:
        """The smaller of the two bounds, with the time that is left."""
        noise = self.server_lr if self.rounds is not None else self.server_lr / (version + 1) ** 0.5
        return (self.leap / (1 + age)).clamp_max(noise) * self._left(version)

    def _left(self, version: int) -> float:
        return 1.0 if self.rounds is None else max(1 - version / self.rounds, 0.0)


def _sent(state: State) -> Vector:
    return state.path if isinstance(state.path, Tensor) else state.x


def _norm(x: Vector) -> Tensor:
    """The unit of length."""
    norm: Tensor = x.norm()
    return norm.clamp_min(1.0)
