"""Local SGD with one server rule, x <- x - lr m / h: FedAvg, FedAvgM, FedAdam and related methods.

A *momentum* turns the history of mean updates into m, a *scale* turns it into h, and a *damp*
may lower the rate depending on the staleness of a cohort. The methods are combinations of these:

| method | momentum | scale | source |
|---|---|---|---|
| FedAvg, FedBuff | `Plain` | `Identity` | McMahan et al. 2017; Nguyen et al. 2022 |
| FedAvgM | `HeavyBall` or `Ema` | `Identity` | Hsu et al. 2019; arXiv 2402.09247 eq. 1 |
| FedAdam, FedYogi, FedAdagrad | `Ema` | `Adam`, `Yogi`, `Adagrad` | Reddi et al. 2021 |
| FedAMS | `Ema` | `AmsGrad` with a floor | Wang et al. 2022 |
| any of them under delay | `Approximation`, `LightApproximation` | any | arXiv 2402.09247 |

FedBuff is FedAvg on a buffer; its staleness weights are an argument of `train`. Bias correction of
the moments is optional (`unbiased`), because papers and their code differ; the default follows the
papers and does not correct.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from offbeat.algorithms.registry import (
    Cost,
    Method,
    Setting,
    check_interval,
    check_ranges,
    empty,
    no_warmup,
    zero_vector,
)
from offbeat.core import Batches, Cohort, Gradient, Tensor, Traits, Vector, Visit, sgd, zeros_like
from offbeat.trees import Tree

STAMP_SHARE = math.sqrt(1 - 1 / 1.1**2)  # makes the joint sensitivity 1.1 times that of the update


class Momentum(Protocol):
    """Turns the history of mean updates into a direction."""

    @property
    def span(self) -> int | None:
        """The staleness of an accepted update must be below this number; None: any staleness."""
        ...

    def init(self, x: Vector) -> Any: ...

    def stamp(self, x: Vector, version: int) -> Tree:
        """What a client sends back with its update, for a momentum that needs the version it started from."""
        ...

    def __call__(self, past: Any, mean: "Upload", cohort: Cohort) -> tuple[Vector, Any]: ...


class Scale(Protocol):
    """Turns the history of mean updates into the divisor of the step."""

    def init(self, x: Vector) -> Any: ...

    def __call__(self, past: Any, r: Vector, cohort: Cohort) -> tuple[Tensor | float, Any]: ...


class Damp(Protocol):
    """The server's rate for this cohort."""

    def __call__(self, lr: float, cohort: Cohort) -> float: ...


def no_stamp(owner: object, x: Vector, version: int) -> tuple[()]:
    """For a momentum that does not need the version an update started from."""
    return ()


@dataclass(frozen=True)
class Plain:
    """m = r."""

    span: ClassVar[None] = None

    init = empty
    stamp = no_stamp

    def __call__(self, past: tuple[()], mean: "Upload", cohort: Cohort) -> tuple[Vector, tuple[()]]:
        return mean.delta, past


@dataclass(frozen=True)
class HeavyBall:
    """m <- beta m + r."""

    beta: float
    span: ClassVar[None] = None

    init = zero_vector
    stamp = no_stamp

    def __post_init__(self) -> None:
        check_interval("momentum beta", self.beta, "(-1, 1)")

    def __call__(self, past: Vector, mean: "Upload", cohort: Cohort) -> tuple[Vector, Vector]:
        m = self.beta * past + mean.delta
        return m, m


@dataclass(frozen=True)
class Ema:
    """m <- beta m + (1 - beta) r."""

    beta: float
    unbiased: bool = False
    span: ClassVar[None] = None

    init = zero_vector
    stamp = no_stamp

    def __post_init__(self) -> None:
        check_interval("momentum beta", self.beta, "(-1, 1)")

    def __call__(self, past: Vector, mean: "Upload", cohort: Cohort) -> tuple[Vector, Vector]:
        m = self.beta * past + (1 - self.beta) * mean.delta
        return m / _bias_correction(self.beta, cohort, self.unbiased), m


@dataclass(frozen=True)
class Identity:
    """h = 1."""

    init = empty

    def __call__(self, past: tuple[()], r: Vector, cohort: Cohort) -> tuple[float, tuple[()]]:
        return 1.0, past


@dataclass(frozen=True)
class Adam:
    """v <- beta v + (1 - beta) r^2; h = sqrt(v) + eps; v starts at eps^2, or at 0 if unbiased."""

    beta: float
    eps: float
    unbiased: bool = False

    def __post_init__(self) -> None:
        check_interval("beta of Adam", self.beta, "[0, 1)")
        check_interval("eps of Adam", self.eps, "(0, inf)")

    def init(self, x: Vector) -> Vector:
        return _initial_square(x, self.eps, self.unbiased)

    def __call__(self, past: Vector, r: Vector, cohort: Cohort) -> tuple[Vector, Vector]:
        v = self.beta * past + (1 - self.beta) * r**2
        return (v / _bias_correction(self.beta, cohort, self.unbiased)).sqrt() + self.eps, v


@dataclass(frozen=True)
class Yogi:
    """v <- v - (1 - beta) r^2 sign(v - r^2); h = sqrt(v) + eps; v starts as Adam's."""

    beta: float
    eps: float
    unbiased: bool = False

    def __post_init__(self) -> None:
        check_interval("beta of Yogi", self.beta, "[0, 1)")
        check_interval("eps of Yogi", self.eps, "(0, inf)")

    def init(self, x: Vector) -> Vector:
        return _initial_square(x, self.eps, self.unbiased)

    def __call__(self, past: Vector, r: Vector, cohort: Cohort) -> tuple[Vector, Vector]:
        v = past - (1 - self.beta) * r**2 * (past - r**2).sign()
        return (v / _bias_correction(self.beta, cohort, self.unbiased)).sqrt() + self.eps, v


@dataclass(frozen=True)
class Adagrad:
    """v <- v + r^2; h = sqrt(v) + eps; v starts at eps^2."""

    eps: float

    def __post_init__(self) -> None:
        check_interval("eps of Adagrad", self.eps, "(0, inf)")

    def init(self, x: Vector) -> Vector:
        return _initial_square(x, self.eps, False)

    def __call__(self, past: Vector, r: Vector, cohort: Cohort) -> tuple[Vector, Vector]:
        v = past + r**2
        return v.sqrt() + self.eps, v


@dataclass(frozen=True)
class AmsGrad:
    """v <- beta v + (1 - beta) r^2; peak <- max(peak, v, floor); h = sqrt(peak) + eps."""

    beta: float
    eps: float
    floor: float = 0.0
    unbiased: bool = False

    def __post_init__(self) -> None:
        check_ranges(self)
        check_interval("beta of AmsGrad", self.beta, "[0, 1)")
        check_interval("sum of eps and floor of AmsGrad", self.eps + self.floor, "(0, inf)")

    def init(self, x: Vector) -> tuple[Vector, Vector]:
        return zeros_like(x), x.new_full(x.shape, self.floor)

    def __call__(
        self, past: tuple[Vector, Vector], r: Vector, cohort: Cohort
    ) -> tuple[Vector, tuple[Vector, Vector]]:
        v, peak = past
        v = self.beta * v + (1 - self.beta) * r**2
        peak = peak.maximum(v)
        return (peak / _bias_correction(self.beta, cohort, self.unbiased)).sqrt() + self.eps, (v, peak)


@dataclass(frozen=True)
class Steady:
    """The rate, whatever the staleness."""

    def __call__(self, lr: float, cohort: Cohort) -> float:
        return lr


class State(NamedTuple):
    """Server state."""

    x: Vector
    momentum: Any
    scale: Any


class Message(NamedTuple):
    """Server to client."""

    x: Vector
    stamp: Tree = ()  # of the version, where the momentum wants one; clients send it back


class Upload(NamedTuple):
    """Client to server."""

    delta: Vector  # start minus end
    stamp: Tree = ()


@dataclass(frozen=True)
class FedOpt:
    """Local SGD, and at the server x <- x - lr m / h.

    Attributes:
        local_lr: The local learning rate.
        server_lr: The learning rate of the server.
        momentum: How the server remembers earlier updates.
        scale: How the server divides the coordinates of an update.
        damp: How the server's rate depends on the staleness.
    """

    local_lr: float
    server_lr: float
    momentum: Momentum = Plain()
    scale: Scale = Identity()
    damp: Damp = Steady()

    memory = empty
    warmup = no_warmup

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def traits(self) -> Traits:
        # A stamp is a one-hot vector, where there is one.
        return Traits(span=self.momentum.span, bounds={"stamp": 1.0}, shares={"stamp": STAMP_SHARE})

    def init(self, x: Vector) -> State:
        return State(x, self.momentum.init(x), self.scale.init(x))

    def broadcast(self, state: State, version: int) -> Message:
        return Message(state.x, self.momentum.stamp(state.x, version))

    def local(
        self, message: Message, memory: tuple[()], batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, tuple[()]]:
        return Upload(message.x - sgd(message.x, batches, grad, self.local_lr), message.stamp), memory

    def step(self, state: State, mean: Upload, cohort: Cohort) -> State:
        m, momentum = self.momentum(state.momentum, mean, cohort)
        h, scale = self.scale(state.scale, mean.delta, cohort)
        lr = self.damp(self.server_lr, cohort)
        return State(state.x - lr * m / h, momentum, scale)


def _bias_correction(beta: float, cohort: Cohort, unbiased: bool) -> float:
    """Return the sum of the weights of an average that began at zero."""
    return 1 - beta ** (cohort.version + 1) if unbiased else 1.0


def _initial_square(x: Vector, eps: float, unbiased: bool) -> Vector:
    return zeros_like(x) if unbiased else x.new_full(x.shape, eps**2)


def fedavg(setting: Setting, *, local_lr: float = 0.1, server_lr: float = 1.0) -> FedOpt:
    """The mean of the updates."""
    return FedOpt(local_lr, server_lr)


def fedavgm(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 1.0,
    beta: float = 0.9,
    averaged: bool = False,
) -> FedOpt:
    """Momentum on the server: heavy-ball, or an exponential average (`averaged`)."""
    return FedOpt(local_lr, server_lr, Ema(beta) if averaged else HeavyBall(beta))


def _adaptive(scale: type[Adam] | type[Yogi]) -> Callable[..., FedOpt]:
    def build(
        setting: Setting,
        *,
        local_lr: float = 0.1,
        server_lr: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.99,
        eps: float = 1e-3,
        unbiased: bool = False,
    ) -> FedOpt:
        """Adam or Yogi on the server."""
        return FedOpt(local_lr, server_lr, Ema(beta1, unbiased), scale(beta2, eps, unbiased))

    return build


def fedadagrad(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 0.03,
    beta1: float = 0.0,
    eps: float = 1e-3,
) -> FedOpt:
    """Adagrad on the server."""
    return FedOpt(local_lr, server_lr, Ema(beta1), Adagrad(eps))


def fedams(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    floor: float = 1e-3,
    eps: float = 0.0,
    unbiased: bool = False,
) -> FedOpt:
    """AMSGrad with a floor on the server."""
    return FedOpt(local_lr, server_lr, Ema(beta1, unbiased), AmsGrad(beta2, eps, floor, unbiased))


METHODS = {
    "defedavg": Method(
        fedavg,
        "FedAvg with clients that queue the models they are sent",
        "arXiv 2402.11198",
        "queues",
        theory="local <= 1/(4 sqrt(3) K L), local x server <= 1/(4 K L tau)",
    ),
    "defedavg-iid": Method(
        fedavg,
        "the same, but the new model is sent back to the clients that reported",
        "arXiv 2402.11198",
        "round-refill",
        theory="local x server <= 1/(4 K L tau)",
    ),
    "fedadagrad": Method(
        fedadagrad, "Adagrad on the server", "ICLR 2021, arXiv 2003.00295", "synchronous", Cost(server=3)
    ),
    "fedadam": Method(
        _adaptive(Adam), "Adam on the server", "ICLR 2021, arXiv 2003.00295", "synchronous", Cost(server=3)
    ),
    "fedams": Method(
        fedams,
        "AMSGrad with a floor on the server",
        "ICML 2022, arXiv 2205.02719",
        "synchronous",
        Cost(server=4),
    ),
    "fedavg": Method(
        fedavg, "local SGD, the mean of the updates", "AISTATS 2017, arXiv 1602.05629", "synchronous"
    ),
    "fedavgm": Method(
        fedavgm, "FedAvg with momentum on the server", "arXiv 1909.06335", "synchronous", Cost(server=2)
    ),
    "fedbuff": Method(
        fedavg,
        "the mean of a buffer, with lower weights for stale updates",
        "AISTATS 2022, arXiv 2106.06639",
        "asynchronous",
        weights="polynomial:0.5",
        theory="local x server <= 1/(4 K tau^(3/2))",
    ),
    "fedyogi": Method(
        _adaptive(Yogi), "Yogi on the server", "ICLR 2021, arXiv 2003.00295", "synchronous", Cost(server=3)
    ),
}
