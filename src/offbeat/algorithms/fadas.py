"""FADAS (Wang et al., ICML 2024, arXiv 2407.18365): AMSGrad on the server, with a rate that falls with delay.

Algorithm 1 with eq. 3 is `FedOpt` with an exponential average and AMSGrad. The delay-adaptive
form lowers the rate of a step whose stalest update is older than a threshold: `Shrink` is
eq. 77, which the paper's experiments use; `Cap` is eq. 4, which its theory uses and which has
no effect while lr < 1 / staleness. The authors' code also corrects the moments for their
start at zero, which eq. 3 does not: `unbiased=True` gives that.

`Trailing` is what the authors' scripts compute, which differs from the paper. The M tasks that refill the
buffer in a round t >= 1 are trained together once x_t exists. Only the last of them starts from x_t; the
others start from x_{t-1}, as if they had been sent before the server's step. But all updates are measured
from x_t, so those of the others also contain the reversed last step of the server:
x_t - end = (x_t - x_{t-1}) + (x_{t-1} - end). And all count as started from version t, so the staleness of
the others is recorded one too low. In the paper's Algorithm 1 an update is measured from its own start.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from offbeat.algorithms import fedopt
from offbeat.algorithms.fedopt import AmsGrad, Ema, FedOpt, Steady, Upload
from offbeat.algorithms.registry import Cost, Method, Setting, check_ranges, empty, no_warmup
from offbeat.core import Batches, Cohort, Gradient, Traits, Vector, Visit, sgd
from offbeat.errors import InputError


@dataclass(frozen=True)
class Shrink:
    """lr / staleness above the threshold (eq. 77)."""

    threshold: float

    def __post_init__(self) -> None:
        check_ranges(self)

    def __call__(self, lr: float, cohort: Cohort) -> float:
        worst = max(cohort.staleness)
        return lr if worst <= self.threshold else min(lr, lr / worst)


@dataclass(frozen=True)
class Cap:
    """At most 1 / staleness above the threshold (eq. 4)."""

    threshold: float

    def __post_init__(self) -> None:
        check_ranges(self)

    def __call__(self, lr: float, cohort: Cohort) -> float:
        worst = max(cohort.staleness)
        return lr if worst <= self.threshold else min(lr, 1 / worst)


def fadas(
    local_lr: float,
    server_lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-8,
    damp: Shrink | Cap | Steady = Steady(),
    unbiased: bool = False,
) -> FedOpt:
    """FADAS; with a `damp`, its delay-adaptive form.

    Args:
        local_lr: The local learning rate.
        server_lr: The learning rate of the server.
        beta1: The decay of the first moment.
        beta2: The decay of the second moment.
        eps: Added to the square root of the second moment.
        damp: How the server's rate depends on the staleness.
        unbiased: Whether the moments are divided by their expected weight, as in Adam.
    """
    return FedOpt(local_lr, server_lr, Ema(beta1, unbiased), AmsGrad(beta2, eps, unbiased=unbiased), damp)


class State(NamedTuple):
    """Server state."""

    x: Vector
    before: Vector  # x of the version before; at version 0, x
    inner: fedopt.State


class Message(NamedTuple):
    """Server to client."""

    x: Vector
    before: Vector


@dataclass(frozen=True)
class Trailing:
    """FADAS in which all tasks of a round but the last start one version behind; for round-refill dispatch.

    The scripts lose no tasks. If tasks are lost here and more than `buffer` of them start at once, those
    beyond `buffer` also start from the current version.
    """

    inner: FedOpt
    buffer: int
    traits: ClassVar[Traits] = Traits(reads_rank=True)

    memory = empty
    warmup = no_warmup

    def init(self, x: Vector) -> State:
        return State(x, x, self.inner.init(x))

    def broadcast(self, state: State, version: int) -> Message:
        return Message(state.x, state.before)

    def local(
        self, message: Message, memory: tuple[()], batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Upload, tuple[()]]:
        if isinstance(visit.rank, tuple):
            raise InputError("this engine does not know in which order tasks start: use a simulated one.")
        start = message.before.where(visit.rank < self.buffer - 1, message.x)
        return Upload(message.x - sgd(start, batches, grad, self.inner.local_lr)), memory

    def step(self, state: State, mean: Upload, cohort: Cohort) -> State:
        inner = self.inner.step(state.inner, mean, cohort)
        return State(inner.x, state.x, inner)


def build_fadas(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 3e-4,  # Table 10 has 1e-4 for large delays and 3e-4 for mild ones
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-8,
    unbiased: bool = False,
    trailing: bool = False,
) -> FedOpt | Trailing:
    """FADAS, or what its authors' scripts compute (`trailing`)."""
    method = fadas(local_lr, server_lr, beta1, beta2, eps, unbiased=unbiased)
    return Trailing(method, setting.cohort) if trailing else method


def build_fadas_da(
    setting: Setting,
    *,
    local_lr: float = 0.1,
    server_lr: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-8,
    tau_c: float = 1.0,
    capped: bool = False,
    unbiased: bool = False,
    trailing: bool = False,
) -> FedOpt | Trailing:
    """The delay-adaptive form, by eq. 77 or by eq. 4 (`capped`)."""
    damp = Cap(tau_c) if capped else Shrink(tau_c)
    method = fadas(local_lr, server_lr, beta1, beta2, eps, damp, unbiased)
    return Trailing(method, setting.cohort) if trailing else method


METHODS = {
    "fadas": Method(
        build_fadas,
        "AMSGrad on the server, with a buffer",
        "ICML 2024, arXiv 2407.18365",
        "asynchronous",
        Cost(server=4),
        theory="server of the order of sqrt(S)",
    ),
    "fadas-da": Method(
        build_fadas_da,
        "FADAS, its rate lowered for stale buffers",
        "ICML 2024, arXiv 2407.18365",
        "asynchronous",
        Cost(server=4),
        theory="server of the order of sqrt(S) / tau_c, tau_c the median staleness",
    ),
}
