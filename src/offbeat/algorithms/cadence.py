"""Cadence, this project's own: unit steps in a unit of length that is found on the way; nobody sets a rate.

In a task of K steps from x_0, with minibatches B_k, a client computes

    g_k = grad f(x_k; B_k),   v_k = g_k / max_{j <= k} |g_j|,   u_k = v_k + (c - seen c_i) / (1 + age),
    x_{k+1} = x_k - 0.12 U / sqrt(K) s_k u_k / |u_k|,   s_k = clip(4 |u_k|, min(1, 10 / K), 1)

and uploads d, the mean of s_k u_k / |u_k|, and the change of its control variate c_i, which becomes the mean
of v_k. With D the mean of d over a buffer, the server computes, from version t,

    p <- p - r U equal(D),   r = min(4 x 0.12 sqrt(K) / (1 + age), 0.75 / (sqrt(t + 1) length), 1),
    x <- x + 9 / (t + 10) (p - x),
    G = U (1 + clip(A / 1.3^2 - 1, 0, 2) b / (b + age)).

p is what clients are sent, and x, a running mean of it, the model. U begins at 0.02 n, where n is the norm of
the first model, or 1 if that norm is less. A is the square of the sum of all d since U was last adapted,
divided by what unrelated steps would give: (1 + 1 / (1 + age)^2) / K for each task. U is adapted when the b
buffers since then hold 20 local steps or more. age is the recent mean staleness, and length the recent norm
of D: each new value has a weight of 0.1, but as long as every buffer has a client of the first model, age is
the staleness of the last buffer. c is the mean of all c_i, and seen the share of the clients that took part
at least once, as if all took part equally often. equal(D) has the length of D, and each coordinate divided by
the root of its recent root mean square (a weight of 0.01 for each new square).

A client also uploads the cosine of its new c_i and the c that it was sent, and by how much the number of its
coordinates that are not zero has changed from the old c_i, by the larger of the two numbers. With a and e
their recent means (S tasks have a weight of w = S / (S + 3), for e of S / (S + 9)), and V the geometric
running mean of U over 1 + age versions, about what the clients were sent, the server goes on with

    U' = U^(1-w) (V e^(3 max(a - 0.05, 0) + 3 min(a + 0.4, 0)))^w,
    U <- max(G, U') if a > 0.05,   U <- min(U, U') if a < -0.4,   U <- G otherwise,   at most M,

where M is 2 n at first. Where e is below -1/2, rectifiers have died: p goes back to the first model, and M
becomes V / 4. Clients that were sent an earlier model say nothing about e then, and one that has no old c_i,
or whose gradients are all zero, repeats the e that it was sent.

With `noisy`, for noise that is added for privacy, U is always n, and clients upload vectors alone. Without
`variates` there is no c, U is G, clients keep nothing, step along v_k as it is, and upload the mean of that
alone. All that is uploaded is bounded: d by 1, the change of c_i by 2, the numbers by 1. docs/cadence.md has
the reasons, and what is proved.
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
_FEW, _MORE = 3, 9  # tasks that count for as much as all before them, for the unit and for a death
_ALONG = 3.0  # change of the unit's logarithm, by the cosine
_ALIGNED, _OPPOSED = 0.05, -0.4  # cosines from which on it grows, and shrinks
_DEAD, _SHORTER = -0.5, 4.0  # change of the coordinates that are not zero; the unit of before, by the next
_DEGREE = 8  # of the weights of the path
_RECENT = 0.1  # weight of a new staleness, or length
_EQUALISED = 0.5  # 0: coordinates as they are, 1: all about as long
_SECOND = 0.01  # weight of a new square
_LEAST = 1e-3  # of the root mean square over all coordinates, added to each one's own


class Watch(NamedTuple):
    """What the server knows of how well its unit fits, where clients report it."""

    first: Vector  # model
    sent: Tensor  # () logarithm of about the unit that those were sent who come back now
    along: Tensor  # () recent cosine of the clients' control variates and their mean
    change: Tensor  # () recent change of how many coordinates of a control variate are not zero
    returned: Tensor  # () version that began at the first model again


class State(NamedTuple):
    """Server state."""

    x: Vector  # running mean of the path
    path: Vector  # what clients are sent
    c: Vector | tuple[()]  # mean of the clients' control variates
    seen: Tensor  # () part of the clients
    age: Tensor  # () recent mean staleness
    early: Tensor  # () 1: every buffer so far had a client of the first model, 0: no longer
    size: Tensor  # () half of the longest unit that is allowed: at first the norm of the first model, or 1
    unit: Tensor  # () of length
    gathered: Vector  # sum of the tasks' mean steps, as weighted, since the unit was last looked at
    tasks: Tensor  # () how many those are, each by the square of its weight
    buffers: Tensor  # () that they came in
    length: Tensor  # () recent length of the clients' mean steps
    second: Vector  # recent mean square of the clients' mean steps, not yet corrected for its start at zero
    watch: Watch | tuple[()]  # nothing without control variates, or with noise


class Message(NamedTuple):
    """Server to client."""

    x: Vector
    anchor: Vector | tuple[()]  # trust times c
    weight: Tensor  # () trust times seen
    stride: Tensor  # () length of a local step
    change: Tensor | tuple[()] = ()  # () what others report of their coordinates


class Upload(NamedTuple):
    """Client to server."""

    descent: Vector  # mean unit step, norm at most 1
    shift: Vector  # change of the control variate
    along: Tensor | tuple[()] = ()  # () cosine of the new control variate and of the mean that was sent
    change: Tensor | tuple[()] = ()  # () of how many of its coordinates are not zero, from -1 to 1


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
        bounds = {"descent": 1.0} | ({"shift": 2.0} if self.variates else {})
        return Traits(bounds=bounds | ({"along": 1.0, "change": 1.0} if self._reports else {}))

    @property
    def _reports(self) -> bool:
        return self.variates and not self.noisy

    def warmup(self) -> None:
        return None

    def init(self, x: Vector) -> State:
        zero, c = x.new_zeros(()), zeros_like(x) if self.variates else ()
        size = x.norm().clamp_min(1.0)
        unit = size if self.noisy else _LEAST_UNIT * size
        return State(
            x=x,
            path=x,
            c=c,
            seen=zero,
            age=zero,
            early=zero + 1,
            size=size,
            unit=unit,
            gathered=zeros_like(x),
            tasks=zero,
            buffers=zero,
            length=zero,
            second=zeros_like(x),
            watch=Watch(x, unit.log(), zero, zero, zero) if self._reports else (),
        )

    def memory(self, x: Vector) -> Vector | tuple[()]:
        return zeros_like(x) if self.variates else ()

    def broadcast(self, state: State, version: int) -> Message:
        trust = 1 / (1 + state.age)
        anchor = () if isinstance(state.c, tuple) else trust * state.c
        change = state.watch.change if isinstance(state.watch, Watch) else ()
        return Message(state.path, anchor, trust * state.seen, self.local_lr * state.unit, change)

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
        upload = Upload(descent / batches.steps, c_new - c_i)
        if not isinstance(message.change, tuple):
            old, new = ((each != 0).to(each.dtype).sum() for each in (c_i, c_new))
            change = ((new - old) / new.maximum(old).clamp_min(1)).where(old * new > 0, message.change)
            upload = upload._replace(along=_cosine(c_new, message.anchor), change=change)
        return upload, c_new

    def step(self, state: State, mean: Upload | Descent, cohort: Cohort) -> State:
        stale = sum(cohort.staleness) / len(cohort.staleness)
        early = state.early * (max(cohort.staleness) == cohort.version)
        age = state.age + (stale - state.age) * (_RECENT + (1 - _RECENT) * early)
        seen = state.seen + cohort.share * (1 - state.seen)
        length = state.length + (mean.descent.norm() - state.length) * (_RECENT if cohort.version else 1.0)
        longest = self.stride / (cohort.version + 1) ** 0.5
        rate = (self.leap / (1 + age)).minimum(longest / length.clamp_min(_TINY)).clamp_max(1.0)
        second = state.second + _SECOND * (mean.descent.square() - state.second)
        equalised = _equalise(mean.descent, second / (1 - (1 - _SECOND) ** (cohort.version + 1)))
        path = state.path - rate * state.unit * equalised
        grown = self._grown(state, mean.descent, cohort, age)
        c = state.c
        if isinstance(mean, Upload) and not isinstance(c, tuple):
            c = c + cohort.share * mean.shift
        after = self._steered(state, grown._replace(path=path, age=age), mean, cohort)
        weight = (_DEGREE + 1) / (cohort.version + _DEGREE + 2)
        return after._replace(
            x=state.x + weight * (after.path - state.x),
            c=c,
            seen=seen,
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
            unit=unit.where(enough, state.unit).minimum(_MOST_UNIT * state.size),
            gathered=kept * gathered,
            tasks=kept * tasks,
            buffers=kept * buffers,
        )

    def _steered(self, state: State, grown: State, mean: Upload | Descent, cohort: Cohort) -> State:
        """With the unit and the path after what clients report."""
        watch = state.watch
        if not (isinstance(mean, Upload) and isinstance(watch, Watch)):
            return grown
        assert not isinstance(mean.along, tuple)
        assert not isinstance(mean.change, tuple)
        count = len(cohort.staleness)
        weight = count / (count + _FEW)
        along = watch.along + weight * (mean.along - watch.along)
        wanted = watch.sent + _ALONG * ((along - _ALIGNED).clamp_min(0) + (along - _OPPOSED).clamp_max(0))
        moved = state.unit * (weight * (wanted - state.unit.log())).exp()
        unit = grown.unit.maximum(moved).where(along > _ALIGNED, grown.unit)
        unit = state.unit.minimum(moved).where(along < _OPPOSED, unit)

        news = watch.returned <= cohort.version - max(cohort.staleness)
        change = watch.change + count / (count + _MORE) * (mean.change - watch.change)
        dead = news & (change < _DEAD)
        size = (watch.sent.exp() / (_MOST_UNIT * _SHORTER)).where(dead, state.size)
        unit = unit.minimum(_MOST_UNIT * size).clamp_min(_TINY)
        return grown._replace(
            path=watch.first.where(dead, grown.path),
            size=size,
            unit=unit,
            watch=Watch(
                first=watch.first,
                sent=watch.sent + (unit.log() - watch.sent) / (1 + grown.age),
                along=along,
                change=change.where(news & ~dead, watch.change * ~dead),
                returned=(0 * change + cohort.version + 1).where(dead, watch.returned),
            ),
        )


def _add_step(total: Vector, u: Vector, least: float) -> Vector:
    """Total + u / |u|, times |u| by `_FITTED` where that is less than 1, though times `least` or more."""
    norm = u.norm().clamp_min(_TINY)
    return total.addcmul(u, (norm / _FITTED).clamp(least, 1) / norm)


def _cosine(one: Vector, other: Vector) -> Tensor:
    lengths: Tensor = one.norm() * other.norm()
    return (one @ other) / lengths.clamp_min(_TINY)


def _equalise(step: Vector, squares: Vector) -> Vector:
    """A step with coordinates of more equal size and of the same length."""
    usual = squares.sqrt() + _LEAST * squares.mean().sqrt() + _TINY
    made = step / usual**_EQUALISED
    equalised: Vector = made * (step.norm() / made.norm().clamp_min(_TINY))
    return equalised


def cadence(setting: Setting, *, variates: bool = True, noisy: bool = False) -> Cadence:
    """Rates from the local steps of a task."""
    return Cadence.tuned(setting.steps, variates, noisy)


METHODS = {
    "cadence": Method(
        cadence,
        "unit steps in a unit found on the way; rates from K and the staleness seen",
        "this project",
        "asynchronous",
        Cost(down=2, up=2, client=1, server=6, extra_down=3, extra_up=2),
        theory="none: local 0.12/sqrt(K), server 0.48 sqrt(K) while a client is at work, both by trying",
        # noise on two vectors drowns both, and hides whether steps agree
        private_defaults=(("noisy", True),),
        unclipped_defaults=(("variates", False),),
    ),
}
