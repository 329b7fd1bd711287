"""The form of Cadence that the twelfth exploration arrived at; it did not become the default.

In a task of K steps from x_0, with minibatches B_k and h = 0.12 U / sqrt(K), a client computes

    g_k = grad f(x_k; B_k),   v_k = g_k / max_{j <= k} |g_j|,   u_k = v_k + (c - seen c_i) / (1 + age),
    x_{k+1} = x_k - h u_k / |u_k|

and uploads d, the mean of u_k / |u_k|, the change of its control variate c_i, which becomes the mean of v_k,
its steadiness p = |g_0| / (|g_0| + |grad f(x_K; B_0) - g_0|), and f / (1 + f) for the loss f = f(x_0; B_0).
With D, P and F the means over a buffer of S tasks, the server computes

    x <- x - min(8 S / (S + 1) 0.12 sqrt(K) / (1 + age),  0.75 / (sqrt(t + 1) |D|),  1)  U  even(D)
    w  = log(P / (1 - P)) + max(0, log(A / 4)),   at most 0 while the loss is above 1.2 times its lowest,
    log U <- log U + S / (S + 3) (log U_sent + clip(w, log 4) - log U),   U >= (largest U so far) / 4.

age is the mean staleness lately, c the mean of all c_i, and seen the part of the clients that came at least
once. even(D) has the length of D, with each coordinate divided by its root mean square lately. A compares the
sum of the tasks' mean steps, squared, with what unrelated steps would give, (1 + 1 / (1 + age)^2) / K for a
task; it is updated when 20 local steps are together. The loss is F / (1 - F), smoothed by S / (S + 3). U_sent
is the geometric mean of the units that these clients were sent. U begins at 2 % of the first model's norm, or
of 1 where that is less. The model is the mean of the path, in which step t has the weight of a polynomial of
degree 8. Steps of clients that have fitted their data are shorter, as in Cadence. The thirteenth exploration
also ran it with a unit that shrinks more slowly than it grows (`fall`), and with coordinates that are divided
by a power of their root mean square (`evened`).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from offbeat.algorithms.registry import check_ranges
from offbeat.core import Batch, Batches, Cohort, Gradient, Tensor, Traits, Vector, Visit, scan, zeros_like

_WALK, _LEAP = 0.12, 8.0
_STRIDE = 0.75
_FIRST_UNIT = 0.02  # of the first model's norm
_ACCORD = 4.0  # squared length of a sum, by that of noise, from which on agreement lengthens the unit
_ENOUGH = 20  # local steps of a sum
_FEW = 3  # tasks of which a buffer counts for a half
_CHANGE = math.log(4)  # most change of the unit, in logarithms, from what was sent
_SHRINKAGE = 4.0  # the largest unit so far, by the least
_WORSE = 1.2  # loss, by the lowest so far, above which the unit does not grow
_EDGE = 1e-4  # of the range of the steadiness
_KEPT = 64  # versions whose units are kept; clients that are staler count as if they were sent the last one
_TINY = 1e-12  # a gradient that is zero has no direction
_FITTED = 0.25  # norm below which a client's own direction counts as that of data that it has fitted
_FOLLOWED = 10  # local steps from which on those of fitted clients are shorter
_DEGREE = 8  # of the weights of the path
_LATELY = 0.1  # weight of a new staleness, or length
_SECOND = 0.01  # weight of a new square
_LEAST = 1e-3  # of the root mean square over all coordinates, added to each one's own


class State(NamedTuple):
    """Server state."""

    x: Vector  # running mean of the path
    path: Vector  # what clients are sent
    c: Vector | tuple[()]  # mean of the clients' control variates
    seen: Tensor  # () part of the clients
    age: Tensor  # () mean staleness, lately
    early: Tensor  # () 1: every buffer so far had a client of the first model, 0: no longer
    units: Tensor  # (_KEPT,) of length, of the last versions, the newest first
    largest: Tensor  # () unit so far
    gathered: Vector  # sum of the tasks' mean steps, as weighted, since agreement was last looked at
    tasks: Tensor  # () how many those are, each by the square of its weight
    agreement: Tensor  # () at the last look
    loss: Tensor  # () that clients met lately
    lowest: Tensor  # () of these
    length: Tensor  # () of the clients' mean steps, lately
    second: Vector  # mean square of the clients' mean steps, lately, not yet corrected for its start at zero


class Message(NamedTuple):
    """Server to client."""

    x: Vector
    anchor: Vector | tuple[()]  # trust times c
    weight: Tensor  # () trust times seen
    stride: Tensor  # () length of a local step


class Upload(NamedTuple):
    """Client to server."""

    descent: Vector  # mean unit step, norm at most 1
    shift: Vector  # change of the control variate
    steadiness: Tensor  # () of the gradient, from 0 to 1
    loss: Tensor  # () f / (1 + f)


class Descent(NamedTuple):
    """Client to server, without control variates."""

    descent: Vector
    steadiness: Tensor
    loss: Tensor


AnyUpload = Upload | Descent
_Walk = tuple[Vector, Vector | tuple[()], Tensor]  # sum of unit steps, sum of directions, largest norm


@dataclass(frozen=True)
class Steady:
    """Unit steps in a unit that the steadiness of the clients' gradients finds."""

    steps: int  # K
    local_lr: float  # of a local step, by the unit of length
    stride: float  # the longest server step, by the same; falls with the square root of the version
    leap: float  # the most that the server may go while a client is at work, by the same
    variates: bool = True
    evened: float = 1.0  # power of its root mean square by which each coordinate is divided
    fall: float = 1.0  # how fast the unit shrinks, by how fast it grows

    def __post_init__(self) -> None:
        check_ranges(self)

    @classmethod
    def tuned(cls, steps: int, variates: bool = True) -> Self:
        """Every rate from K."""
        return cls(
            steps=steps,
            local_lr=_WALK / steps**0.5,
            stride=_STRIDE,
            leap=_LEAP * _WALK * steps**0.5,
            variates=variates,
        )

    @property
    def traits(self) -> Traits:
        bounds = {"descent": 1.0} | ({"shift": 2.0} if self.variates else {})
        return Traits(repeats_batches=True, bounds=bounds | {"steadiness": 1.0, "loss": 1.0})

    def warmup(self) -> None:
        return None

    def init(self, x: Vector) -> State:
        zero, zeros = x.new_zeros(()), zeros_like(x)
        unit = _FIRST_UNIT * x.norm().clamp_min(1.0)
        return State(
            x=x,
            path=x,
            c=zeros if self.variates else (),
            seen=zero,
            age=zero,
            early=zero + 1,
            units=unit * x.new_ones(_KEPT),
            largest=unit,
            gathered=zeros,
            tasks=zero,
            agreement=zero,
            loss=zero,
            lowest=zero,
            length=zero,
            second=zeros,
        )

    def memory(self, x: Vector) -> Vector | tuple[()]:
        return zeros_like(x) if self.variates else ()

    def broadcast(self, state: State, version: int) -> Message:
        trust = 1 / (1 + state.age)
        anchor = () if isinstance(state.c, tuple) else trust * state.c
        return Message(state.path, anchor, trust * state.seen, self.local_lr * state.units[0])

    def local(
        self,
        message: Message,
        c_i: Vector | tuple[()],
        batches: Batches,
        visit: Visit,
        grad: Gradient,
    ) -> tuple[AnyUpload, Vector | tuple[()]]:
        zero, least = zeros_like(message.x), min(1.0, _FOLLOWED / self.steps)
        plain = isinstance(c_i, tuple) or isinstance(message.anchor, tuple)
        rest = zero if plain else message.anchor - message.weight * c_i

        def add(walk: _Walk, g: Vector) -> _Walk:
            descent, total, largest = walk
            largest = largest.maximum(g.norm())
            v = g / largest.clamp_min(_TINY)
            if isinstance(total, tuple):
                return descent + v, total, largest
            return _add_step(descent, rest + v, least), total + v, largest

        def step(walk: _Walk, batch: Batch) -> _Walk:
            return add(walk, grad(message.x - message.stride * walk[0], batch))

        first = batches.items[0]
        g, loss = grad.with_loss(message.x, first)
        walk = add((zero, () if plain else zero, message.x.new_zeros(())), g)
        descent, total, _ = scan(step, walk, Batches(batches.items[1:]))
        shift = () if isinstance(total, tuple) or isinstance(c_i, tuple) else total / batches.steps - c_i
        c_new = () if isinstance(shift, tuple) else total / batches.steps
        mean = descent / batches.steps
        change = (grad(message.x - message.stride * descent, first) - g).norm()
        steadiness = (g.norm() + 0.5 * _TINY) / (g.norm() + change + _TINY)
        loss = loss.clamp_min(0)
        met = (loss / (1 + loss)).nan_to_num(nan=1.0)
        if isinstance(shift, tuple):
            return Descent(mean, steadiness, met), c_new
        return Upload(mean, shift, steadiness, met), c_new

    def step(self, state: State, mean: AnyUpload, cohort: Cohort) -> State:
        count = len(cohort.staleness)
        stale = sum(cohort.staleness) / count
        early = state.early * (max(cohort.staleness) == cohort.version)
        age = state.age + (stale - state.age) * (_LATELY + (1 - _LATELY) * early)
        seen = state.seen + cohort.share * (1 - state.seen)
        length = state.length + (mean.descent.norm() - state.length) * (_LATELY if cohort.version else 1.0)
        longest = self.stride / (cohort.version + 1) ** 0.5
        leap = self.leap * count / (count + 1)
        rate = (leap / (1 + age)).minimum(longest / length.clamp_min(_TINY)).clamp_max(1.0)
        second = state.second + _SECOND * (mean.descent.square() - state.second)
        even = _evened(mean.descent, second / (1 - (1 - _SECOND) ** (cohort.version + 1)), self.evened)
        path = state.path - rate * state.units[0] * even
        weight = (_DEGREE + 1) / (cohort.version + _DEGREE + 2)
        state = self._with_next_unit(state, mean, cohort)
        c = state.c
        if isinstance(mean, Upload) and not isinstance(c, tuple):
            c = c + cohort.share * mean.shift
        return state._replace(
            x=state.x + weight * (path - state.x),
            path=path,
            c=c,
            seen=seen,
            age=age,
            early=early,
            length=length,
            second=second,
        )

    def _with_next_unit(self, state: State, mean: AnyUpload, cohort: Cohort) -> State:
        """With the unit after this buffer, and what it was found from."""
        count, weight = len(cohort.staleness), cohort.mean_weight
        gathered = state.gathered + count * mean.descent
        tasks = state.tasks + sum(weight**2 for weight in cohort.weights)
        shared = 1 + (1 + state.age) ** -2 if self.variates else 1.0
        enough = tasks * self.steps >= _ENOUGH
        kept = 1 - enough.to(gathered.dtype)
        agreement = gathered.square().sum() * self.steps / (shared * tasks.clamp_min(_TINY))
        agreement = agreement.where(enough, state.agreement)

        met = (mean.loss / weight).clamp_min(0)
        pace = count / (count + _FEW)
        loss = state.loss + (pace if cohort.version else 1.0) * (
            met / (1 - met).clamp_min(_TINY) - state.loss
        )
        lowest = state.lowest.minimum(loss) if cohort.version else loss

        steady = (mean.steadiness / weight).clamp(_EDGE, 1 - _EDGE)
        wanted = (steady / (1 - steady)).log() + (agreement / _ACCORD).clamp_min(1).log()
        wanted = wanted.clamp_max(0).where(loss > _WORSE * lowest, wanted).clamp(-_CHANGE, _CHANGE)
        sent = sum(state.units[min(stale, _KEPT - 1)].log() for stale in cohort.staleness) / count
        now = state.units[0].log()
        change = pace * (sent + wanted - now)
        unit = (now + change.clamp_min(0) + self.fall * change.clamp_max(0)).exp()
        largest = state.largest.maximum(unit)
        unit = unit.maximum(largest / _SHRINKAGE)
        return state._replace(
            units=torch.cat([unit.reshape(1), state.units[:-1]]),
            largest=largest,
            gathered=kept * gathered,
            tasks=kept * tasks,
            agreement=agreement,
            loss=loss,
            lowest=lowest,
        )


def _add_step(total: Vector, u: Vector, least: float) -> Vector:
    """Total + u / |u|, times |u| by `_FITTED` where that is less than 1, though times `least` or more."""
    norm = u.norm().clamp_min(_TINY)
    return total.addcmul(u, (norm / _FITTED).clamp(least, 1) / norm)


def _evened(step: Vector, squares: Vector, power: float) -> Vector:
    """Its coordinates about equally long if the power is 1, its own length the same."""
    made = step / (squares.sqrt() + _LEAST * squares.mean().sqrt() + _TINY) ** power
    evened: Vector = made * (step.norm() / made.norm().clamp_min(_TINY))
    return evened
