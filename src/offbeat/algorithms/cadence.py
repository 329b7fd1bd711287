"""Cadence, this project's own: unit steps in a unit that is found on the way, at rates that nobody tunes.

The local step is u / |u| with u = g / G + trust (c - seen c_i). g is the gradient and G the largest norm of
one that the client has met in this task, so that a client which has fitted its data follows the others. c_i
is the mean of g / G over the client's last task, c the mean of all c_i, seen the part of the clients that
came at least once, as if all came equally often (c_i is zero for the others, so that c / seen is the mean of
those that came), and trust is 1 / (1 + age), age being the mean staleness that the server saw lately. Where u
is shorter than 1/4, as when the client has fitted its data, a task of more than 10 steps would follow the
others too far: a step is then 4 |u| long, though at least 10 / K.

The server moves along the mean of the clients' unit steps, its coordinates evened out as far as `_EVENED`
says: each is divided by that power of its root mean square lately, and the whole keeps its length.
The unit of length is found on the way, from whether directions agree. Were they noise, the steps of m tasks
would add up to sqrt(m (1 + trust^2) / K) by their squares; the second part is c_i, which all steps of a task
share. A sum that is more than 1.3 times as long says that they agree over the lengths that they now have, and
the unit grows: by as many times itself as the square of the sum is above that of the bound, at most by 2, and
by b / (b + age) of that over b buffers, since what has grown is seen only when those come back who were sent
it. It begins at 2 % of the first model's norm, or of 1 where that is less, so that a model may begin at zero,
and is at most twice that norm, since a model that fits its data grows without end. Sums are looked at when
they have 20 local steps, so a buffer that has fewer waits for the next ones. Where noise is added for privacy
(`noisy`), which makes every sum long, the unit is that norm. The constants are the same for every task:

- a local step is 0.12 / sqrt(K), so that a random walk of K steps gets 0.12 from its start,
- while a client is at work the server goes at most 4 times as far as the client can: its rate times (1 +
  age) is at most 4 x 0.12 sqrt(K),
- and a server step of version t is at most 0.75 / sqrt(t + 1) long, by the length of the clients' mean step
  lately, so that all steps so far, were they noise alone, move the model by about a unit or two; noise that
  is added for privacy counts by itself. The rate is never above 1.

Nothing falls to zero, so no end has to be known: the model is a running mean of the server's path that
forgets its first steps (step t has the weight of a polynomial of degree 8), and training may stop at any
time. As long as each buffer has a client of the first model, age is the staleness of the last one alone.

All that is uploaded is bounded: the mean unit step by 1, the change of c_i by 2. So there is no clipping
bound to choose under differential privacy, and no gradient counts for more than one step.
Without control variates (`variates` false) clients keep nothing, step along g / G, and upload the mean of
that alone.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

from offbeat.algorithms.registry import Cost, Method, Setting, check_interval, check_ranges
from offbeat.core import Batch, Batches, Cohort, Gradient, Tensor, Traits, Vector, Visit, scan, zeros_like

_WALK, _LEAP = 0.12, 4.0
_STRIDE = 0.75
_LEAST_UNIT, _MOST_UNIT = 0.02, 2.0  # of the first model's norm
_ACCORD = 1.3  # length of a sum, by that of noise, from which on the unit grows
_FASTEST = 2.0  # times itself that it grows at most
_ENOUGH = 20  # local steps of a sum
_TINY = 1e-12  # a gradient that is zero has no direction
_FITTED, _FOLLOWED = (
    0.25,
    10,
)  # u that is shorter has steps that are, too, if a task has more of them than that
_DEGREE = 8  # of the weights of the path
_LATELY = 0.1  # weight of a new staleness, or length
_EVENED = 0.5  # 0: coordinates as they are, 1: all about as long
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
    size: Tensor  # () norm of the first model, or 1
    unit: Tensor  # () of length
    gathered: Vector  # sum of the tasks' mean steps, as weighted, since the unit was last looked at
    tasks: Tensor  # () how many those are, each by the square of its weight
    buffers: Tensor  # () that they came in
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


class Descent(NamedTuple):
    """Client to server, without control variates."""

    descent: Vector


@dataclass(frozen=True)
class Cadence:
    """Unit steps in a unit that is found on the way, control variates as far as staleness allows.

    Attributes:
        steps: The local steps of a task.
        local_lr: The local learning rate in units.
        stride: The longest server step in units; it falls with the square root of the version.
        leap: The most that the server may go while a client is at work, in units.
        variates: Whether clients keep control variates.
        noisy: Whether updates have privacy noise.
    """

    steps: int  # K
    local_lr: float  # of a local step, by the unit of length
    stride: float  # the longest server step, by the same; falls with the square root of the version
    leap: float  # the most that the server may go while a client is at work, by the same
    variates: bool = True
    noisy: bool = False  # noise is added for privacy

    def __post_init__(self) -> None:
        check_ranges(self)

    @classmethod
    def tuned(cls, steps: int, variates: bool = True, noisy: bool = False) -> Self:
        """Every rate from K."""
        check_interval("steps of Cadence", steps, "[1, inf)")
        return cls(
            steps=steps,
            local_lr=_WALK / steps**0.5,
            stride=_STRIDE,
            leap=_LEAP * _WALK * steps**0.5,
            variates=variates,
            noisy=noisy,
        )

    @property
    def traits(self) -> Traits:
        return Traits(bounds={"descent": 1.0, "shift": 2.0} if self.variates else {"descent": 1.0})

    def warmup(self) -> None:
        return None

    def init(self, x: Vector) -> State:
        zero, c = x.new_zeros(()), zeros_like(x) if self.variates else ()
        size = x.norm().clamp_min(1.0)
        unit = size if self.noisy else _LEAST_UNIT * size
        return State(
            x, x, c, zero, zero, zero + 1, size, unit, zeros_like(x), zero, zero, zero, zeros_like(x)
        )

    def memory(self, x: Vector) -> Vector | tuple[()]:
        return zeros_like(x) if self.variates else ()

    def broadcast(self, state: State, version: int) -> Message:
        trust = 1 / (1 + state.age)
        anchor = () if isinstance(state.c, tuple) else trust * state.c
        return Message(state.path, anchor, trust * state.seen, self.local_lr * state.unit)

    def local(
        self,
        message: Message,
        c_i: Vector | tuple[()],
        batches: Batches,
        visit: Visit,
        grad: Gradient,
    ) -> tuple[Upload | Descent, Vector | tuple[()]]:
        zero, none = zeros_like(message.x), message.x.new_zeros(())

        def towards(descent: Vector, largest: Tensor, batch: Batch) -> tuple[Vector, Tensor]:
            g = grad(message.x - message.stride * descent, batch)
            largest = largest.maximum(g.norm())
            return g / largest.clamp_min(_TINY), largest

        if isinstance(c_i, tuple) or isinstance(message.anchor, tuple):

            def plain(carry: tuple[Vector, Tensor], batch: Batch) -> tuple[Vector, Tensor]:
                v, largest = towards(*carry, batch)
                return carry[0] + v, largest

            descent, _ = scan(plain, (zero, none), batches)
            return Descent(descent / batches.steps), ()
        rest = message.anchor - message.weight * c_i
        least = min(1.0, _FOLLOWED / self.steps)

        def step(carry: tuple[Vector, Vector, Tensor], batch: Batch) -> tuple[Vector, Vector, Tensor]:
            descent, total, largest = carry
            v, largest = towards(descent, largest, batch)
            return _add_step(descent, rest + v, least), total + v, largest

        descent, total, _ = scan(step, (zero, zero, none), batches)
        c_new = total / batches.steps
        return Upload(descent / batches.steps, c_new - c_i), c_new

    def step(self, state: State, mean: Upload | Descent, cohort: Cohort) -> State:
        stale = sum(cohort.staleness) / len(cohort.staleness)
        early = state.early * (max(cohort.staleness) == cohort.version)
        age = state.age + (stale - state.age) * (_LATELY + (1 - _LATELY) * early)
        seen = state.seen + cohort.share * (1 - state.seen)
        length = state.length + (mean.descent.norm() - state.length) * (_LATELY if cohort.version else 1.0)
        longest = self.stride / (cohort.version + 1) ** 0.5
        rate = (self.leap / (1 + age)).minimum(longest / length.clamp_min(_TINY)).clamp_max(1.0)
        second = state.second + _SECOND * (mean.descent.square() - state.second)
        evened = _evened(mean.descent, second / (1 - (1 - _SECOND) ** (cohort.version + 1)))
        path = state.path - rate * state.unit * evened
        grown = self._grown(state, mean.descent, cohort, age)
        c = state.c
        if isinstance(mean, Upload) and not isinstance(c, tuple):
            c = c + cohort.share * mean.shift
        weight = (_DEGREE + 1) / (cohort.version + _DEGREE + 2)
        return grown._replace(
            x=state.x + weight * (path - state.x),
            path=path,
            c=c,
            seen=seen,
            age=age,
            early=early,
            length=length,
            second=second,
        )

    def _grown(self, state: State, step: Vector, cohort: Cohort, age: Tensor) -> State:
        """With the unit after this buffer, and what is gathered for the next look."""
        if self.noisy:
            return state
        gathered = state.gathered + len(cohort.weights) * step
        tasks = state.tasks + sum(weight**2 for weight in cohort.weights)
        buffers = state.buffers + 1
        shared = 1 + (1 + state.age) ** -2 if self.variates else 1.0
        excess = gathered.square().sum() * self.steps / (_ACCORD**2 * shared * tasks.clamp_min(_TINY)) - 1
        unit = state.unit * (1 + excess.clamp(0, _FASTEST) * buffers / (buffers + age))
        enough = tasks * self.steps >= _ENOUGH
        kept = 1 - enough.to(step.dtype)
        return state._replace(
            unit=unit.where(enough, state.unit).clamp_max(_MOST_UNIT * state.size),
            gathered=kept * gathered,
            tasks=kept * tasks,
            buffers=kept * buffers,
        )


def _add_step(total: Vector, u: Vector, least: float) -> Vector:
    """Total + u / |u|, times |u| by `_FITTED` where that is less than 1, though times `least` or more."""
    norm = u.norm().clamp_min(_TINY)
    return total.addcmul(u, (norm / _FITTED).clamp(least, 1) / norm)


def _evened(step: Vector, squares: Vector) -> Vector:
    """Its coordinates nearer to each other, its length the same."""
    usual = squares.sqrt() + _LEAST * squares.mean().sqrt() + _TINY
    made = step / usual**_EVENED
    evened: Vector = made * (step.norm() / made.norm().clamp_min(_TINY))
    return evened


def cadence(setting: Setting, *, variates: bool = True, noisy: bool = False) -> Cadence:
    """Rates from the local steps of a task."""
    return Cadence.tuned(setting.steps, variates, noisy)


METHODS = {
    "cadence": Method(
        cadence,
        "unit steps in a unit found on the way; rates from K and the staleness seen",
        "this project",
        "asynchronous",
        Cost(down=2, up=2, client=1, server=5, extra_down=2),
        theory="none: local 0.12/sqrt(K), server 0.48 sqrt(K) while a client is at work, both by trying",
        # noise on two vectors drowns both, and hides whether steps agree
        private_defaults=(("noisy", True),),
        unclipped_defaults=(("variates", False),),
    ),
}
