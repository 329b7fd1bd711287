"""The form of Cadence of the seventeenth exploration: its unit follows how much the path bounces.

In a task of K steps from p, with minibatches B_k and h = 0.12 U / sqrt(K), a client computes

    g_k = grad f(p_k; B_k),   v_k = g_k / max_{j <= k} |g_j|,   u_k = v_k + (c - seen c_i) / (1 + age),
    p_{k+1} = p_k - h u_k / |u_k|

and uploads d, the mean of u_k / |u_k|, the change of its control variate c_i, which becomes the mean of v_k,
and two numbers: the bounce b = (f(p; B_0) - f(x; B_0)) / (f(p; B_0) + f(x; B_0)), where x is the running mean
of the path, and the change of how many coordinates of c_i are not zero, as in Cadence. With D and b the means
over a buffer of S tasks, the server computes

    p <- p - min(8 S / (S + 1) 0.12 sqrt(K) / (1 + age),  0.75 / (sqrt(t + 1) |D|),  1)  U  even(D),
    x <- x + 9 / (t + 10) (p - x),
    w  =  7 (0.1 - max(b, 0)) where b < 0.1,  5 (0.2 - b) where b > 0.2,  0 otherwise,
    log U <- log U + S / (S + 3) (log V + w - log U),   never down where w > 0, nor up elsewhere.

b is smoothed by S / (S + 3), V is the geometric running mean of U over 1 + age versions, and U is at most 2 n
and begins at 0.06 n, where n is the norm of the first model, or 1 if that is less. even(D) has the length of
D, with each coordinate divided by its root mean square lately. Everything else, with the return from a model
that has died, is as in Cadence.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

from experiments.tuning_free.steady import _add_step, _evened

from offbeat.algorithms.registry import check_ranges
from offbeat.core import Batch, Batches, Cohort, Gradient, Tensor, Traits, Vector, Visit, scan, zeros_like

_WALK, _LEAP = 0.12, 8.0
_STRIDE = 0.75
_FIRST_UNIT, _MOST_UNIT = 0.06, 2.0  # of the first model's norm
_LITTLE = 0.1  # bounce below which the unit grows
_SLACK = 0.1  # by how much more it shrinks
_GROWTH, _SHRINKAGE = 7.0, 5.0  # of its logarithm, by the difference
_FEW, _MORE = 3, 9  # tasks that count for as much as all before them
_DEAD, _SHORTER = -0.5, 4.0
_TINY = 1e-12
_FOLLOWED = 10
_DEGREE = 8
_LATELY = 0.1
_SECOND = 0.01


class State(NamedTuple):
    """Server state."""

    x: Vector  # running mean of the path
    path: Vector  # what clients are sent
    c: Vector  # mean of the clients' control variates
    seen: Tensor  # () part of the clients
    age: Tensor  # () mean staleness, lately
    early: Tensor  # () 1: every buffer so far had a client of the first model, 0: no longer
    unit: Tensor  # () of length
    most: Tensor  # () longest unit that is allowed
    sent: Tensor  # () logarithm of about the unit that those were sent who come back now
    bounce: Tensor  # () lately
    change: Tensor  # () of the coordinates that are not zero, lately
    returned: Tensor  # () version that began at the first model again
    first: Vector  # model
    length: Tensor  # () of the clients' mean steps, lately
    second: Vector  # mean square of the clients' mean steps, lately, not yet corrected for its start at zero


class Message(NamedTuple):
    """Server to client."""

    x: Vector  # the path
    mean: Vector  # of the path
    anchor: Vector  # trust times c
    weight: Tensor  # () trust times seen
    stride: Tensor  # () length of a local step
    change: Tensor  # () what others report of their coordinates


class Upload(NamedTuple):
    """Client to server."""

    descent: Vector  # mean unit step, norm at most 1
    shift: Vector  # change of the control variate
    bounce: Tensor  # () from -1 to 1
    change: Tensor  # () of how many of its coordinates are not zero, from -1 to 1


_Walk = tuple[Vector, Vector, Tensor]  # sum of unit steps, sum of directions, largest norm


@dataclass(frozen=True)
class Bouncing:
    """Unit steps in a unit that the bouncing of the path finds."""

    steps: int  # K
    local_lr: float  # of a local step, by the unit of length
    stride: float  # the longest server step, by the same; falls with the square root of the version
    leap: float  # the most that the server may go while a client is at work, by the same
    evened: float = 1.0  # power of its root mean square by which each coordinate is divided
    growth: float = _GROWTH  # of the unit's logarithm, by how much less than 0.1 the bounce is
    slack: float = _SLACK  # between the bounce below which it grows, and that above which it shrinks

    def __post_init__(self) -> None:
        check_ranges(self)

    @classmethod
    def tuned(cls, steps: int) -> Self:
        """Every rate from K."""
        return cls(steps, _WALK / steps**0.5, _STRIDE, _LEAP * _WALK * steps**0.5)

    @property
    def traits(self) -> Traits:
        bounds = {"descent": 1.0, "shift": 2.0, "bounce": 1.0, "change": 1.0}
        return Traits(repeats_batches=True, bounds=bounds)

    def warmup(self) -> None:
        return None

    def init(self, x: Vector) -> State:
        zero, zeros, size = x.new_zeros(()), zeros_like(x), x.norm().clamp_min(1.0)
        unit = _FIRST_UNIT * size
        return State(
            x=x,
            path=x,
            c=zeros,
            seen=zero,
            age=zero,
            early=zero + 1,
            unit=unit,
            most=_MOST_UNIT * size,
            sent=unit.log(),
            bounce=zero,
            change=zero,
            returned=zero,
            first=x,
            length=zero,
            second=zeros,
        )

    def memory(self, x: Vector) -> Vector:
        return zeros_like(x)

    def broadcast(self, state: State, version: int) -> Message:
        trust = 1 / (1 + state.age)
        stride = self.local_lr * state.unit
        return Message(state.path, state.x, trust * state.c, trust * state.seen, stride, state.change)

    def local(
        self, message: Message, c_i: Vector, batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, Vector]:
        zero, least = zeros_like(message.x), min(1.0, _FOLLOWED / self.steps)
        rest = message.anchor - message.weight * c_i

        def add(walk: _Walk, g: Vector) -> _Walk:
            descent, total, largest = walk
            largest = largest.maximum(g.norm())
            v = g / largest.clamp_min(_TINY)
            return _add_step(descent, rest + v, least), total + v, largest

        def step(walk: _Walk, batch: Batch) -> _Walk:
            return add(walk, grad(message.x - message.stride * walk[0], batch))

        g, loss = grad.with_loss(message.x, batches.items[0])
        _, other = grad.with_loss(message.mean, batches.items[0])
        walk = add((zero, zero, message.x.new_zeros(())), g)
        descent, total, _ = scan(step, walk, Batches(batches.items[1:]))
        c_new = total / batches.steps
        bounce = ((loss - other) / (loss.abs() + other.abs()).clamp_min(_TINY)).nan_to_num(nan=1.0)
        old, new = ((each != 0).to(each.dtype).sum() for each in (c_i, c_new))
        change = ((new - old) / new.maximum(old).clamp_min(1)).where(old * new > 0, message.change)
        return Upload(descent / batches.steps, c_new - c_i, bounce, change), c_new

    def step(self, state: State, mean: Upload, cohort: Cohort) -> State:
        count = len(cohort.staleness)
        stale = sum(cohort.staleness) / count
        early = state.early * (max(cohort.staleness) == cohort.version)
        age = state.age + (stale - state.age) * (_LATELY + (1 - _LATELY) * early)
        length = state.length + (mean.descent.norm() - state.length) * (_LATELY if cohort.version else 1.0)
        longest = self.stride / (cohort.version + 1) ** 0.5
        leap = self.leap * count / (count + 1)
        rate = (leap / (1 + age)).minimum(longest / length.clamp_min(_TINY)).clamp_max(1.0)
        second = state.second + _SECOND * (mean.descent.square() - state.second)
        even = _evened(mean.descent, second / (1 - (1 - _SECOND) ** (cohort.version + 1)), self.evened)
        path = state.path - rate * state.unit * even

        pace = count / (count + _FEW)
        bounce = state.bounce + pace * (mean.bounce - state.bounce)
        up = self.growth * (_LITTLE - bounce.clamp_min(0)).clamp_min(0)
        down = _SHRINKAGE * (_LITTLE + self.slack - bounce).clamp_max(0)
        move = pace * (state.sent + up + down - state.unit.log())
        move = move.clamp_min(0).where(up > 0, move.clamp_max(0))
        news = state.returned <= cohort.version - max(cohort.staleness)
        change = state.change + count / (count + _MORE) * (mean.change - state.change)
        dead = news & (change < _DEAD)
        most = (state.sent.exp() / _SHORTER).where(dead, state.most)
        unit = (state.unit * move.exp()).minimum(most).clamp_min(_TINY)
        path = state.first.where(dead, path)
        weight = (_DEGREE + 1) / (cohort.version + _DEGREE + 2)
        return State(
            x=state.x + weight * (path - state.x),
            path=path,
            c=state.c + cohort.share * mean.shift,
            seen=state.seen + cohort.share * (1 - state.seen),
            age=age,
            early=early,
            unit=unit,
            most=most,
            sent=state.sent + (unit.log() - state.sent) / (1 + age),
            bounce=bounce,
            change=change.where(news & ~dead, state.change * ~dead),
            returned=(0 * change + cohort.version + 1).where(dead, state.returned),
            first=state.first,
            length=length,
            second=second,
        )
