"""Weight prediction (arXiv 2402.09247, Algorithm 2): clients start from where the server will be.

A wrapper of any algorithm whose message has a field `x`. The server also sends its estimated step, the
drift; a client whose update will be tau versions old starts from x - tau drift, and the rest is that of the
inner algorithm. There are two drifts:

- `MeanDrift` is the paper's, for `FedOpt`: lr x_h / h, where x_h averages the means of the buffers,
  and lr and h are the inner rule's at its last step. The inner momentum is not in it.
- `StepDrift` is for any algorithm: the average of the steps that the server took. Where the
  inner rule is FedAvg or FedBuff the two are the same.

The paper gives no decay of the average; 0.9 is this project's choice. There are two ways to find tau:

- `Foreseen`, the paper's: the staleness that the update will have, which a simulator knows.
- `Remembered`: the staleness of the client's last update, which it learns as it uploads; 0 at its first
  visit. It needs no knowledge of the future, but has no effect for clients that take part once; and since
  it is client memory, staleness weights other than constant ones are rejected.

Both read `Visit.staleness`, one before the local work and the other for the memory after it.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

from offbeat.algorithms.fedopt import Adam, Ema, FedOpt, Identity
from offbeat.algorithms.registry import Cost, Method, Setting, check_interval, empty, zero_vector
from offbeat.core import (
    AnyAlgorithm,
    Batches,
    Cohort,
    Gradient,
    Tensor,
    Traits,
    Vector,
    Visit,
    traits_of,
    zeros_like,
)
from offbeat.errors import InputError, unknown_name
from offbeat.trees import Tree


class InnerStep(NamedTuple):
    """One step of the inner algorithm."""

    inner: AnyAlgorithm
    before: Any  # its state
    after: Any
    mean: Any
    cohort: Cohort


class Drift(Protocol):
    """How far the server moves in a step."""

    def init(self, x: Vector) -> Tree: ...

    def __call__(self, drift: Vector, past: Any, stepped: InnerStep) -> tuple[Vector, Any]: ...


class Foresight(Protocol):
    """How stale an update is going to be."""

    def init(self, x: Vector) -> Tree:
        """What a client keeps for it."""
        ...

    def __call__(self, kept: Any, visit: Visit) -> tuple[Tensor, Any]: ...


@dataclass(frozen=True)
class MeanDrift:
    """x_h <- decay x_h + (1 - decay) r; drift = lr x_h / h."""

    decay: float = 0.9

    init = zero_vector

    def __post_init__(self) -> None:
        check_interval("decay of the drift", self.decay, "[0, 1)")

    def __call__(self, drift: Vector, past: Vector, stepped: InnerStep) -> tuple[Vector, Vector]:
        rule, r, cohort = stepped.inner, stepped.mean.delta, stepped.cohort
        assert isinstance(rule, FedOpt)
        x_h = self.decay * past + (1 - self.decay) * r
        h, _ = rule.scale(stepped.before.scale, r, cohort)
        return rule.damp(rule.server_lr, cohort) * x_h / h, x_h


@dataclass(frozen=True)
class StepDrift:
    """drift <- decay drift + (1 - decay) (x before - x after)."""

    decay: float = 0.9

    init = empty

    def __post_init__(self) -> None:
        check_interval("decay of the drift", self.decay, "[0, 1)")

    def __call__(self, drift: Vector, past: tuple[()], stepped: InnerStep) -> tuple[Vector, tuple[()]]:
        return self.decay * drift + (1 - self.decay) * (stepped.before.x - stepped.after.x), past


@dataclass(frozen=True)
class Foreseen:
    """The staleness that it will have."""

    init = empty

    def __call__(self, kept: tuple[()], visit: Visit) -> tuple[Tensor, tuple[()]]:
        return visit.staleness, kept


@dataclass(frozen=True)
class Remembered:
    """That of the client's last update; 0 at first."""

    def init(self, x: Vector) -> Tensor:
        return x.new_zeros(())

    def __call__(self, kept: Tensor, visit: Visit) -> tuple[Tensor, Tensor]:
        return kept, visit.staleness.to(kept.dtype)


class State(NamedTuple):
    """Server state."""

    inner: Any
    drift: Vector
    past: Tree  # of the drift

    @property
    def x(self) -> Vector:
        """The model."""
        model: Vector = self.inner.x
        return model


class Message(NamedTuple):
    """Server to client."""

    inner: Any
    drift: Vector


class Memory(NamedTuple):
    """What a client keeps."""

    inner: Tree
    staleness: Tree


@dataclass(frozen=True)
class WeightPrediction:
    """The inner algorithm with clients that start from the predicted model of the server."""

    inner: AnyAlgorithm
    drift: Drift = StepDrift()
    foresight: Foresight = Foreseen()

    def __post_init__(self) -> None:
        if isinstance(self.drift, MeanDrift) and not isinstance(self.inner, FedOpt):
            name = type(self.inner).__name__
            raise InputError(f"MeanDrift goes with FedOpt, and this is around {name}: use StepDrift.")

    @property
    def traits(self) -> Traits:
        return traits_of(self.inner)._replace(reads_staleness=True)

    def warmup(self) -> Self | None:
        inner = self.inner.warmup()
        return None if inner is None else replace(self, inner=inner)

    def init(self, x: Vector) -> State:
        return State(self.inner.init(x), zeros_like(x), self.drift.init(x))

    def memory(self, x: Vector) -> Memory:
        return Memory(self.inner.memory(x), self.foresight.init(x))

    def broadcast(self, state: State, version: int) -> Message:
        return Message(self.inner.broadcast(state.inner, version), state.drift)

    def local(
        self, message: Message, memory: Memory, batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Any, Memory]:
        tau, kept = self.foresight(memory.staleness, visit)
        ahead = message.inner._replace(x=message.inner.x - tau * message.drift)
        upload, inner = self.inner.local(ahead, memory.inner, batches, visit, grad)
        return upload, Memory(inner, kept)

    def step(self, state: State, mean: Any, cohort: Cohort) -> State:
        inner = self.inner.step(state.inner, mean, cohort)
        drift, past = self.drift(
            state.drift, state.past, InnerStep(self.inner, state.inner, inner, mean, cohort)
        )
        return State(inner, drift, past)


def weight_prediction(
    setting: Setting,
    *,
    rule: str = "fedavgm",
    local_lr: float = 0.1,
    server_lr: float = 0.1,
    beta: float = 0.9,
    beta2: float = 0.99,
    eps: float = 0.01,
    alpha: float = 0.9,
    remembered: bool = False,
) -> WeightPrediction:
    """Weight prediction over FedAvgM or FedAdam; the default rate is in the paper's range for both."""
    if rule not in ("fedavgm", "fedadam"):
        raise unknown_name("rule of weight-prediction", rule, ("fedavgm", "fedadam"))
    scale = Adam(beta2, eps) if rule == "fedadam" else Identity()
    inner = FedOpt(local_lr, server_lr, Ema(beta), scale)
    return WeightPrediction(inner, MeanDrift(alpha), Remembered() if remembered else Foreseen())


METHODS = {
    "weight-prediction": Method(
        weight_prediction,
        "clients start from the predicted server model; over FedAvgM or FedAdam",
        "arXiv 2402.09247",
        "poisson",
        Cost(down=2, server=4),
        max_staleness=20,
    ),
}
