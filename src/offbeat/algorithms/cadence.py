"""Cadence, this project's own: unit steps in a unit that losses and gradients give; nobody sets a rate.

In a task of K steps from x_0, with minibatches B_k and the losses f, a client computes

    g_k = grad f(x_k; B_k),   v_k = g_k / max_{j <= k} |g_j|,   u_k = v_k + (c - seen c_i) / (1 + age),
    x_{k+1} = x_k - 0.12 U / sqrt(K) u_k / |u_k|

and uploads d, the mean of u_k / |u_k|, the change of its control variate c_i, which becomes the mean of v_k,
and the number b = f / (f + R |g|) with the loss f and the gradient g of its first minibatch. With D the mean
of d over a buffer, the server computes, from version t,

    q <- q + S / (S + 10) (log V + logit(b) - q),   R = min(first^(2/3) exp(q / 3), |p|),   U = 6 R,
    p <- p - r U equal(D),   r = min(8 x 0.12 sqrt(K) / (1 + age), 0.75 / (sqrt(t + 1) length), 0.12 / |D|),
    x <- x + 9 / (t + 10) (p - x).

p is what clients are sent, and x, a running mean of it, the model. f / |g| is how far one would have to go
along the gradient, if it stayed the same, until the loss is zero. exp(q) is its recent value, V about the R
that the clients of the buffer were sent, the geometric running mean of R over 1 + age versions, and b the
mean over its S tasks. Version 0 is sent without a unit: its clients take one of their own, 6 f / |g| or
6 R if that is less, and report b with the norm of the first model, or 1 if that is less, as R; later |p|
counts as this much at least. From what they report follow `first`, by the mean of b over all buffers that
have such clients alone, and the first q; a buffer in which they are mixed with others changes neither. b is
at most 0.99, and counts as 0.01 at least after version 0. A client that has no loss above zero, or no
gradient but zero, reports 1/2, or 1/21 in version 0, and a buffer whose mean is not above zero counts as
that, too; a gradient of exactly zero does not count as a first one.

age is the recent mean staleness, and length the recent norm of D: each new value has a weight of 0.1, but as
long as every buffer has a client of the first model, age is the staleness of the last buffer. c is the mean
of all c_i, and seen the share of the clients that took part at least once, as if all took part equally often.
equal(D) has the length of D, and each coordinate divided by its recent root mean square (a weight of 0.01 for
each new square).

With `noisy`, for noise that is added for privacy, clients upload d / |d| in place of d, and no b, U is the
norm of the first model, or 1, and r has no bound 0.12 / |D|. Without `variates` there is no c, clients keep
nothing, and step along v_k as it is, of which d is the mean. All that is uploaded is bounded: d by 1, the
change of c_i by 2, b by 1. docs/cadence.md has the reasons, and what is proved.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

from offbeat.algorithms.registry import Cost, Method, Setting, check_interval, check_ranges
from offbeat.core import Batch, Batches, Cohort, Gradient, Tensor, Traits, Vector, Visit, scan, zeros_like

_WALK = 0.12  # the way of a task whose steps have unrelated directions, and the longest server step; in units
_LEAP = 8.0  # the server's longest way while a client is at work, by that of the client
_STRIDE = 0.75
_UNIT = 6.0  # by the loss over the norm of its gradient
_POWER = 1 / 3  # power of what that ratio is by what it was at first
_FEW = 10  # tasks that count for as much as all before them
_LARGEST = 0.99  # of the number that a client reports, which is near 1 where the gradient almost vanishes
_SILENT, _UNKNOWN = 0.5, 1 / 21  # where a client cannot tell that number, and nobody could before
_TINY = 1e-12  # a gradient that is zero has no direction
_DEGREE = 8  # of the weights of the path
_RECENT = 0.1  # weight of a new staleness, or length
_SECOND = 0.01  # weight of a new square
_LEAST = 1e-3  # of the root mean square over all coordinates, added to each one's own


class Ratios(NamedTuple):
    """What the server knows of the loss over the norm of its gradient; logarithms but for the first two."""

    tasks: Tensor  # () of the first model that are counted in `part`
    part: Tensor  # () mean of what they reported
    size: Tensor  # () of the norm of the first model, which is what they compared with
    recent: Tensor  # () of the ratio
    sent: Tensor  # () of about what those were sent who come back now


class State(NamedTuple):
    """Server state."""

    x: Vector  # running mean of the path
    path: Vector  # what clients are sent
    c: Vector | tuple[()]  # mean of the clients' control variates
    seen: Tensor  # () part of the clients
    age: Tensor  # () recent mean staleness
    early: Tensor  # () 1: every buffer so far had a client of the first model, 0: no longer
    unit: Tensor  # () of length, or 0: not known yet
    length: Tensor  # () recent length of the clients' mean steps
    second: Vector  # recent mean square of the clients' mean steps, not yet corrected for its start at zero
    ratios: Ratios | tuple[()]  # nothing with noise


class Message(NamedTuple):
    """Server to client."""

    x: Vector
    anchor: Vector | tuple[()]  # trust times c
    weight: Tensor  # () trust times seen
    stride: Tensor  # () length of a local step, or 0: the client finds its own
    reach: Tensor | tuple[()] = ()  # () with which it compares the loss over the norm of its gradient


class Upload(NamedTuple):
    """Client to server."""

    descent: Vector  # mean unit step, or under noise its direction; norm at most 1
    shift: Vector  # change of the control variate
    ratio: Tensor | tuple[()] = ()  # () loss, by itself and the norm of the gradient times the reach


class Descent(NamedTuple):
    """Client to server, without control variates."""

    descent: Vector
    ratio: Tensor | tuple[()] = ()


class _Walk(NamedTuple):
    """A client's work so far."""

    descent: Vector  # sum of the steps
    total: Vector | tuple[()]  # sum of the directions
    largest: Tensor  # () norm of a gradient
    ratio: Tensor  # ()
    stride: Tensor  # () length of a step


@dataclass(frozen=True)
class Cadence:
    """Unit steps in a unit that losses and gradients give, control variates as far as staleness allows.

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
        return Traits(bounds=bounds | ({} if self.noisy else {"ratio": 1.0}))

    def warmup(self) -> None:
        return None

    def init(self, x: Vector) -> State:
        zero, c = x.new_zeros(()), zeros_like(x) if self.variates else ()
        size = x.norm().clamp_min(1.0)
        return State(
            x=x,
            path=x,
            c=c,
            seen=zero,
            age=zero,
            early=zero + 1,
            unit=size if self.noisy else zero,
            length=zero,
            second=zeros_like(x),
            ratios=() if self.noisy else Ratios(zero, zero, size.log(), size.log(), size.log()),
        )

    def memory(self, x: Vector) -> Vector | tuple[()]:
        return zeros_like(x) if self.variates else ()

    def broadcast(self, state: State, version: int) -> Message:
        trust = 1 / (1 + state.age)
        anchor = () if isinstance(state.c, tuple) else trust * state.c
        reach: Tensor | tuple[()] = ()
        if isinstance(state.ratios, Ratios):
            reach = state.unit / _UNIT if version else state.ratios.size.exp()
        return Message(state.path, anchor, trust * state.seen, self.local_lr * state.unit, reach)

    def local(
        self,
        message: Message,
        c_i: Vector | tuple[()],
        batches: Batches,
        visit: Visit,
        grad: Gradient,
    ) -> tuple[Upload | Descent, Vector | tuple[()]]:
        zero, none = zeros_like(message.x), message.x.new_zeros(())
        kept = not isinstance(c_i, tuple) and not isinstance(message.anchor, tuple)
        rest = message.anchor - message.weight * c_i if kept else ()  # type: ignore[operator]
        reach = message.reach
        unknown = message.stride == 0
        silent = (none + _SILENT).where(~unknown, none + _UNKNOWN)

        def step(walk: _Walk, batch: Batch) -> _Walk:
            g, loss = grad.with_loss(message.x - walk.stride * walk.descent, batch)
            norm = g.norm()
            ratio, stride = walk.ratio, walk.stride
            if not isinstance(reach, tuple):
                first = walk.largest == 0
                part = (loss / (loss + reach * norm)).clamp_max(_LARGEST)
                ratio = part.where((loss > 0) & (norm > 0) & part.isfinite(), silent).where(first, ratio)
                own = self.local_lr * _UNIT * reach * (ratio / (1 - ratio)).clamp_max(1.0)
                stride = own.where(unknown & first, stride)
            largest = walk.largest.maximum(norm)
            v = g / largest.clamp_min(_TINY)
            if isinstance(rest, tuple) or isinstance(walk.total, tuple):
                return _Walk(walk.descent + v, (), largest, ratio, stride)
            u = rest + v
            descent = walk.descent + u / u.norm().clamp_min(_TINY)
            return _Walk(descent, walk.total + v, largest, ratio, stride)

        begun = _Walk(zero, zero if kept else (), none, silent, message.stride)
        walk = scan(step, begun, batches)
        # noise is as large as the bound of 1 asks for, however short the mean step is
        descent = walk.descent / (walk.descent.norm().clamp_min(_TINY) if self.noisy else batches.steps)
        ratio = () if isinstance(reach, tuple) else walk.ratio
        if isinstance(walk.total, tuple) or isinstance(c_i, tuple):
            return Descent(descent, ratio), ()
        c_new = walk.total / batches.steps
        return Upload(descent, c_new - c_i, ratio), c_new

    def step(self, state: State, mean: Upload | Descent, cohort: Cohort) -> State:
        stale = sum(cohort.staleness) / len(cohort.staleness)
        early = state.early * (max(cohort.staleness) == cohort.version)
        age = state.age + (stale - state.age) * (_RECENT + (1 - _RECENT) * early)
        seen = state.seen + cohort.share * (1 - state.seen)
        norm = mean.descent.norm()
        length = state.length + (norm - state.length) * (_RECENT if cohort.version else 1.0)
        unit, ratios = self._measure(state, mean, cohort, age)
        longest = self.stride / (cohort.version + 1) ** 0.5
        rate = (self.leap / (1 + age)).minimum(longest / length.clamp_min(_TINY))
        if not self.noisy:
            rate = rate.minimum(_WALK / norm.clamp_min(_TINY))
        second = state.second + _SECOND * (mean.descent.square() - state.second)
        squares = second / (1 - (1 - _SECOND) ** (cohort.version + 1))
        equalised = _equalise(mean.descent, squares)
        path = state.path - rate * unit * equalised
        c = state.c
        if isinstance(mean, Upload) and not isinstance(c, tuple):
            c = c + cohort.share * mean.shift
        return State(
            x=state.x + (_DEGREE + 1) / (cohort.version + _DEGREE + 2) * (path - state.x),
            path=path,
            c=c,
            seen=seen,
            age=age,
            early=early,
            unit=unit,
            length=length,
            second=second,
            ratios=ratios,
        )

    def _measure(
        self, state: State, mean: Upload | Descent, cohort: Cohort, age: Tensor
    ) -> tuple[Tensor, Ratios | tuple[()]]:
        """The unit, and what is known of the loss over the norm of its gradient, after this buffer."""
        ratios = state.ratios
        if not isinstance(ratios, Ratios):
            return state.unit, ()
        assert not isinstance(mean.ratio, tuple)
        count = len(cohort.staleness)
        alone = min(cohort.staleness) == cohort.version  # clients of the first model
        # noise, or a robust mean, may leave the range of what clients report; a timed release may have none
        told = mean.ratio / cohort.mean_weight
        least = 0.0 if alone else 1 - _LARGEST  # later, clients compare with about what they find
        ratio = told.clamp(least, _LARGEST).where(told > 0, _UNKNOWN if alone else _SILENT)
        pace = count / (count + _FEW)
        tasks, part, recent, sent = ratios.tasks, ratios.part, ratios.recent, ratios.sent
        if alone:
            tasks = tasks + count
            part = part + (ratio - part) * count / tasks
            recent = recent + (pace if cohort.version else 1.0) * (ratios.size + _logit(ratio) - recent)
        elif max(cohort.staleness) < cohort.version:
            recent = recent + pace * (sent + _logit(ratio) - recent)
        now = (1 - _POWER) * (ratios.size + _logit(part)) + _POWER * recent
        now = now.minimum(state.path.norm().log().maximum(ratios.size))
        sent = now if cohort.version == 0 else sent + (now - sent) / (1 + age)
        return _UNIT * now.exp(), Ratios(tasks, part, ratios.size, recent, sent)


def _logit(part: Tensor) -> Tensor:
    """The logarithm of a part by the rest."""
    return part.clamp_min(_TINY).log() - (1 - part).log()


def _equalise(step: Vector, squares: Vector) -> Vector:
    """A step with coordinates of more equal size and of the same length."""
    usual = squares.sqrt() + _LEAST * squares.mean().sqrt() + _TINY
    made = step / usual
    equalised: Vector = made * (step.norm() / made.norm().clamp_min(_TINY))
    return equalised


def cadence(setting: Setting, *, variates: bool = True, noisy: bool = False) -> Cadence:
    """Rates from the local steps of a task."""
    return Cadence.tuned(setting.steps, variates, noisy)


METHODS = {
    "cadence": Method(
        cadence,
        "unit steps in a unit from losses and gradients; rates from K and the staleness seen",
        "this project",
        "asynchronous",
        Cost(down=2, up=2, client=1, server=4, extra_down=3, extra_up=1),
        theory="none: local 0.12/sqrt(K), server 0.96 sqrt(K) while a client is at work, both by trying",
        # noise on two vectors drowns both, and the ratio would have to be protected as well
        private_defaults=(("noisy", True),),
        unclipped_defaults=(("variates", False),),
    ),
}
