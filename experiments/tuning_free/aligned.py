"""The form of Cadence that the fourteenth exploration arrived at; it is not the default.

Everything is as in Cadence but for the unit U, and for a way back from a model that has died. A client
uploads two numbers more, of its new control variate c_i and of the c / (1 + age) that it was sent:

    a_i = <c_i, c> / (|c_i| |c|),   e_i = the part of the coordinates of c_i that are not zero.

With a and e their means lately (a buffer of S tasks has the weight S / (S + 3)), G the unit that Cadence
would go on with, and U_sent the geometric mean of the units that these clients were sent, the server computes

    log U' = log U + S / (S + 3) (log U_sent + w - log U),   w = 3 a if a > 0, and 2 (a + 0.4) if a < -0.4,
    U <- min(U, U')     if a < -0.4,
    U <- max(G, U, U')  if a > 0,
    U <- G              otherwise,

U being at most 2 n. Where e falls below a quarter of the largest e so far, the server goes back to the first
model, and from then on U is at most a quarter of the U_sent of that buffer. Clients that were sent a
model from before that say nothing about e.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from offbeat.algorithms import cadence
from offbeat.algorithms.cadence import _DEGREE, Cadence, Message
from offbeat.core import Batches, Cohort, Gradient, Tensor, Traits, Vector, Visit

_FEW = 3  # tasks of which a buffer counts for a half
_RISE, _FALL = 3.0, 2.0  # of the unit's logarithm, by the cosine
_OPPOSED = -0.4  # cosine below which the unit shrinks
_CHANGE = math.log(4)  # most change of the unit, in logarithms, from what was sent
_DEAD = 4.0  # the largest part of coordinates alive so far, by that of a dead model
_KEPT = 64  # versions whose units are kept; clients that are staler count as if they were sent the last one
_TINY = 1e-12


class State(NamedTuple):
    """Server state."""

    x: Vector  # running mean of the path
    inner: cadence.State  # of Cadence
    first: Vector  # model
    units: Tensor  # (_KEPT,) of length, of the last versions, the newest first
    ceiling: Tensor  # () of the unit
    along: Tensor  # () cosine of gradients and control variates, lately
    alive: Tensor  # () part of the coordinates, lately
    liveliest: Tensor  # () the largest of these
    returned: Tensor  # () version that began at the first model again


class Upload(NamedTuple):
    """Client to server."""

    descent: Vector  # mean unit step, norm at most 1
    shift: Vector  # change of the control variate
    along: Tensor  # () cosine of the new control variate and of the mean that was sent
    alive: Tensor  # () part of the new control variate's coordinates that are not zero


@dataclass(frozen=True)
class Aligned:
    """Cadence with a unit that can shrink, and a way back from a dead model."""

    cadence: Cadence

    @classmethod
    def tuned(cls, steps: int) -> Self:
        """Every rate from K."""
        return cls(Cadence.tuned(steps))

    @property
    def traits(self) -> Traits:
        return Traits(bounds=self.cadence.traits.bounds | {"along": 1.0, "alive": 1.0})

    def warmup(self) -> None:
        return None

    def init(self, x: Vector) -> State:
        inner, zero = self.cadence.init(x), x.new_zeros(())
        units = inner.unit * x.new_ones(_KEPT)
        return State(x, inner, x, units, zero + math.inf, zero, zero, zero, zero)

    def memory(self, x: Vector) -> Vector | tuple[()]:
        return self.cadence.memory(x)

    def broadcast(self, state: State, version: int) -> Message:
        return self.cadence.broadcast(state.inner, version)

    def local(
        self,
        message: Message,
        c_i: Vector | tuple[()],
        batches: Batches,
        visit: Visit,
        grad: Gradient,
    ) -> tuple[Upload, Vector]:
        made, c_new = self.cadence.local(message, c_i, batches, visit, grad)
        assert isinstance(made, cadence.Upload)
        assert not isinstance(c_new, tuple)
        assert not isinstance(message.anchor, tuple)
        lengths = (c_new.norm() * message.anchor.norm()).clamp_min(_TINY)
        along = (c_new * message.anchor).sum() / lengths
        return Upload(made.descent, made.shift, along, (c_new != 0).to(c_new.dtype).mean()), c_new

    def step(self, state: State, mean: Upload, cohort: Cohort) -> State:
        before = state.inner
        inner = self.cadence.step(before, cadence.Upload(mean.descent, mean.shift), cohort)
        count, weight = len(cohort.staleness), cohort.mean_weight
        pace = count / (count + _FEW)
        along = state.along + pace * (mean.along / weight - state.along)
        wanted = (_FALL * (along - _OPPOSED)).where(along < _OPPOSED, _RISE * along.clamp_min(0))
        sent = sum(state.units[min(stale, _KEPT - 1)].log() for stale in cohort.staleness) / count
        move = pace * (sent + wanted.clamp(-_CHANGE, _CHANGE) - before.unit.log())
        lower, higher = before.unit * move.clamp_max(0).exp(), before.unit * move.clamp_min(0).exp()
        unit = inner.unit.maximum(higher).where(along > 0, inner.unit)
        unit = lower.where(along < _OPPOSED, unit).minimum(2 * before.size).minimum(state.ceiling)

        news = state.returned <= cohort.version - max(cohort.staleness)
        fresh = state.alive + (pace if cohort.version else 1.0) * (mean.alive / weight - state.alive)
        alive = fresh.where(news, state.alive)
        liveliest = state.liveliest.maximum(alive)
        dead = news & (_DEAD * alive < liveliest)
        ceiling = (sent.exp() / 4).where(dead, state.ceiling)
        unit, path = unit.minimum(ceiling), state.first.where(dead, inner.path)
        part = (_DEGREE + 1) / (cohort.version + _DEGREE + 2)
        x = before.x + part * (path - before.x)
        return State(
            x=x,
            inner=inner._replace(x=x, path=path, unit=unit),
            first=state.first,
            units=torch.cat([unit.reshape(1), state.units[:-1]]),
            ceiling=ceiling,
            along=along,
            alive=liveliest.where(dead, alive),
            liveliest=liveliest,
            returned=(state.returned * 0 + cohort.version + 1).where(dead, state.returned),
        )
