"""Wrappers that a run may put around a method: a local optimiser, and rate schedules.

`LocallyOptimized` gives a method whose local steps are those of `core.sgd` another optimiser and a bound on
gradient norms: in place of its `local_lr` the method passes a `core.LocalRule` to `sgd`. The state of the
optimiser is reset for each task. `Scheduled` multiplies `local_lr` and `server_lr` by factors that depend on
the version: for a server step its own version, for a task the version that it started from. The local rate is
part of the message, so clients need not know the schedule.

The optimisers follow torch's: `LocalMomentum` and `LocalNesterov` are its SGD, and `LocalAdam` corrects its
moments. A schedule is a function from the version, counted from 0, to a factor.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

from offbeat.algorithms.registry import MAX_RATE, check_interval, empty, zero_vector
from offbeat.core import (
    AnyAlgorithm,
    Batches,
    Cohort,
    Gradient,
    LocalOptimizer,
    LocalRule,
    Rate,
    Tensor,
    Traits,
    Vector,
    Visit,
    descend,
    traits_of,
    zeros_like,
)
from offbeat.errors import InputError, check_attributes


@dataclass(frozen=True)
class LocalSGD:
    """x <- x - lr g."""

    init = empty

    def __call__(self, x: Vector, gradient: Vector, state: tuple[()], lr: Rate) -> tuple[Vector, tuple[()]]:
        return descend(x, gradient, lr), state


@dataclass(frozen=True)
class LocalMomentum:
    """m <- beta m + g; x <- x - lr m."""

    beta: float = 0.9

    init = zero_vector

    def __post_init__(self) -> None:
        check_interval("beta of local momentum", self.beta, "[0, 1)")

    def __call__(self, x: Vector, gradient: Vector, state: Vector, lr: Rate) -> tuple[Vector, Vector]:
        m = self.beta * state + gradient
        return descend(x, m, lr), m


@dataclass(frozen=True)
class LocalNesterov:
    """m <- beta m + g; x <- x - lr (g + beta m)."""

    beta: float = 0.9

    init = zero_vector

    def __post_init__(self) -> None:
        check_interval("beta of local momentum", self.beta, "[0, 1)")

    def __call__(self, x: Vector, gradient: Vector, state: Vector, lr: Rate) -> tuple[Vector, Vector]:
        m = self.beta * state + gradient
        return descend(x, gradient + self.beta * m, lr), m


class _Moments(NamedTuple):
    m: Vector
    v: Vector
    steps: Tensor  # ()


@dataclass(frozen=True)
class LocalAdam:
    """Moments of g and g^2, corrected for their start at zero; x <- x - lr m / (sqrt(v) + eps)."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_interval("beta1 of local Adam", self.beta1, "[0, 1)")
        check_interval("beta2 of local Adam", self.beta2, "[0, 1)")
        check_interval("eps of local Adam", self.eps, "(0, inf)")

    def init(self, x: Vector) -> _Moments:
        return _Moments(zeros_like(x), zeros_like(x), x.new_zeros(()))

    def __call__(self, x: Vector, gradient: Vector, state: _Moments, lr: Rate) -> tuple[Vector, _Moments]:
        m = self.beta1 * state.m + (1 - self.beta1) * gradient
        v = self.beta2 * state.v + (1 - self.beta2) * gradient**2
        steps = state.steps + 1
        m_hat, v_hat = m / (1 - self.beta1**steps), v / (1 - self.beta2**steps)
        return descend(x, m_hat / (v_hat.sqrt() + self.eps), lr), _Moments(m, v, steps)


@dataclass(frozen=True)
class LocalAdamW:
    """Adam, with x first multiplied by 1 - lr decay."""

    decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_interval("decay of local AdamW", self.decay, "[0, inf)")
        self._adam()

    def _adam(self) -> LocalAdam:
        return LocalAdam(self.beta1, self.beta2, self.eps)

    def init(self, x: Vector) -> _Moments:
        return self._adam().init(x)

    def __call__(self, x: Vector, gradient: Vector, state: _Moments, lr: Rate) -> tuple[Vector, _Moments]:
        return self._adam()(x - lr * self.decay * x, gradient, state, lr)


LOCAL_OPTIMIZERS: Mapping[str, type[LocalOptimizer]] = MappingProxyType(
    {
        "sgd": LocalSGD,
        "momentum": LocalMomentum,
        "nesterov": LocalNesterov,
        "adam": LocalAdam,
        "adamw": LocalAdamW,
    }
)


Schedule: TypeAlias = Callable[[int], float]


@runtime_checkable
class FollowsRounds(Protocol):
    """A schedule that by default ends with the run."""

    def over(self, rounds: int) -> Schedule:
        """The schedule of a run of `rounds` server steps."""
        ...


@dataclass(frozen=True)
class ConstantRate:
    """The factor 1."""

    def __call__(self, version: int) -> float:
        return 1.0


@dataclass(frozen=True)
class CosineRate:
    """From 1 to `end` along half a cosine, over `steps` server steps; 0: all those of the run."""

    end: float = 0.0
    steps: float = 0

    def __post_init__(self) -> None:
        check_interval("end of a cosine schedule", self.end, "[0, inf)")
        _check_count("steps of a cosine schedule", self.steps, 0)

    def over(self, rounds: int) -> Self:
        return self if self.steps else replace(self, steps=rounds)

    def __call__(self, version: int) -> float:
        return self.end + (1 - self.end) * (1 + math.cos(math.pi * min(1.0, version / self.steps))) / 2


@dataclass(frozen=True)
class LinearRate:
    """From 1 to `end` along a line, over `steps` server steps; 0: all those of the run."""

    end: float = 0.0
    steps: float = 0

    def __post_init__(self) -> None:
        check_interval("end of a linear schedule", self.end, "[0, inf)")
        _check_count("steps of a linear schedule", self.steps, 0)

    def over(self, rounds: int) -> Self:
        return self if self.steps else replace(self, steps=rounds)

    def __call__(self, version: int) -> float:
        return 1 + (self.end - 1) * min(1.0, version / self.steps)


@dataclass(frozen=True)
class StepRate:
    """Multiplied by `factor` after each `every` server steps."""

    every: float
    factor: float = 0.1

    def __post_init__(self) -> None:
        _check_count("period of a step schedule", self.every, 1)
        check_interval("factor of a step schedule", self.factor, "(0, inf)")

    def __call__(self, version: int) -> float:
        return float(self.factor ** (version // self.every))


@dataclass(frozen=True)
class WarmupRate:
    """1/steps, 2/steps and so on up to 1."""

    steps: float

    def __post_init__(self) -> None:
        _check_count("steps of a warm-up", self.steps, 1)

    def __call__(self, version: int) -> float:
        return min(1.0, (version + 1) / self.steps)

    def then(self, schedule: Schedule) -> "WarmupThen":
        """The warm-up followed by another schedule."""
        return WarmupThen(self, schedule)


@dataclass(frozen=True)
class WarmupThen:
    """A warm-up followed by another schedule, which begins when the warm-up is over."""

    warmup: WarmupRate
    schedule: Schedule

    def over(self, rounds: int) -> Self:
        return replace(self, schedule=over_rounds(self.schedule, rounds - int(self.warmup.steps)))

    def __call__(self, version: int) -> float:
        steps = int(self.warmup.steps)
        return self.warmup(version) if version < steps else self.schedule(version - steps)


SCHEDULES: Mapping[str, type[Schedule]] = MappingProxyType(
    {
        "constant": ConstantRate,
        "cosine": CosineRate,
        "linear": LinearRate,
        "step": StepRate,
        "warmup": WarmupRate,
    }
)


def over_rounds(schedule: Schedule, rounds: int) -> Schedule:
    """The schedule of a run of `rounds` server steps."""
    given: Any = schedule
    return given.over(max(1, rounds)) if isinstance(given, FollowsRounds) else schedule


def _check_count(name: str, value: float, least: int) -> None:
    if not math.isfinite(value) or value < least or value != int(value):
        raise InputError(f"the {name} must be a whole number of at least {least}, not {value:g}.")


def has_rate(algorithm: AnyAlgorithm, name: str) -> bool:
    """Whether a method, or a method that it wraps, has a rate of this name."""
    own: Any = algorithm
    if is_dataclass(own) and any(field.name == name for field in fields(own)):
        return True
    inner = getattr(own, "inner", None)
    return inner is not None and has_rate(inner, name)


def unwrapped(algorithm: AnyAlgorithm) -> AnyAlgorithm:
    """The method without the local optimiser and the rate schedules of the run."""
    return unwrapped(algorithm.inner) if isinstance(algorithm, LocallyOptimized | Scheduled) else algorithm


def rate_of(algorithm: AnyAlgorithm, name: str) -> Any:
    """The rate of this name of a method, or of the method that it wraps."""
    own: Any = algorithm
    return getattr(own, name) if hasattr(own, name) else rate_of(own.inner, name)


def with_rate(algorithm: AnyAlgorithm, name: str, value: Any) -> AnyAlgorithm:
    """The method with another rate, which is not checked and may be a tensor that differs between tasks."""
    changed: Any = copy.copy(algorithm)
    own = any(field.name == name for field in fields(changed))
    if own:
        object.__setattr__(changed, name, value)
    else:
        object.__setattr__(changed, "inner", with_rate(changed.inner, name, value))
    made: AnyAlgorithm = changed
    return made


def _inner_init(outer: Any, x: Vector) -> Any:
    return outer.inner.init(x)


def _inner_memory(outer: Any, x: Vector) -> Any:
    return outer.inner.memory(x)


def _inner_warmup(outer: Any) -> Any:
    inner = outer.inner.warmup()
    return None if inner is None else replace(outer, inner=inner)


def _inner_traits(outer: Any) -> Traits:
    return traits_of(outer.inner)


@dataclass(frozen=True)
class LocallyOptimized:
    """A method with another local optimiser, and with gradients clipped to `max_norm`."""

    inner: AnyAlgorithm
    optimizer: LocalOptimizer = LocalSGD()
    max_norm: float | None = None

    init = _inner_init
    memory = _inner_memory
    warmup = _inner_warmup
    traits = property(_inner_traits)

    def __post_init__(self) -> None:
        check_attributes("the local optimiser", self.optimizer, ["init"], "one such as LocalAdam()")
        if self.max_norm is not None:
            check_interval("largest norm of gradients", self.max_norm, "(0, inf)")

    def broadcast(self, state: Any, version: int) -> Any:
        return self.inner.broadcast(state, version)

    def local(
        self, message: Any, memory: Any, batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Any, Any]:
        rule = LocalRule(rate_of(self.inner, "local_lr"), self.optimizer, self.max_norm)
        return with_rate(self.inner, "local_lr", rule).local(message, memory, batches, visit, grad)

    def step(self, state: Any, mean: Any, cohort: Cohort) -> Any:
        return self.inner.step(state, mean, cohort)


def local_optimizer(algorithm: AnyAlgorithm) -> LocalOptimizer | None:
    """The local optimiser that a method is wrapped in; None: SGD."""
    own: Any = algorithm
    if isinstance(own, LocallyOptimized):
        return None if own.optimizer == LocalSGD() else own.optimizer
    return local_optimizer(own.inner) if hasattr(own, "inner") else None


class Message(NamedTuple):
    """Server to client, where the local rate follows a schedule."""

    inner: Any
    local_lr: Tensor  # ()


@dataclass(frozen=True)
class Scheduled:
    """A method whose rates are multiplied by factors that depend on the version; None: a constant rate."""

    inner: AnyAlgorithm
    local_schedule: Schedule | None = None
    server_schedule: Schedule | None = None

    init = _inner_init
    memory = _inner_memory
    warmup = _inner_warmup
    traits = property(_inner_traits)

    def __post_init__(self) -> None:
        for name, schedule in (("local_lr", self.local_schedule), ("server_lr", self.server_schedule)):
            if schedule is not None and not has_rate(self.inner, name):
                raise InputError(f"{type(self.inner).__name__} has no {name}, so it has no schedule either.")

    def broadcast(self, state: Any, version: int) -> Any:
        message = self.inner.broadcast(state, version)
        if self.local_schedule is None:
            return message
        rate = rate_of(self.inner, "local_lr") * schedule_factor(self.local_schedule, version)
        return Message(message, state.x.new_full((), min(rate, MAX_RATE)))

    def local(
        self, message: Any, memory: Any, batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Any, Any]:
        if self.local_schedule is None:
            return self.inner.local(message, memory, batches, visit, grad)
        inner = with_rate(self.inner, "local_lr", message.local_lr)
        return inner.local(message.inner, memory, batches, visit, grad)

    def step(self, state: Any, mean: Any, cohort: Cohort) -> Any:
        if self.server_schedule is None:
            return self.inner.step(state, mean, cohort)
        rate = rate_of(self.inner, "server_lr") * schedule_factor(self.server_schedule, cohort.version)
        return with_rate(self.inner, "server_lr", rate).step(state, mean, cohort)


def schedule_factor(schedule: Schedule, version: int) -> float:
    """The factor of a rate at a version; it is checked, since the function may be the user's."""
    try:
        found: Any = schedule(version)
    except Exception as error:
        raise InputError(
            f"the schedule of a rate failed for version {version} ({type(error).__name__}: {error}): it must "
            "be a function of one number, the version."
        ) from error
    try:
        factor = float(found)
    except (TypeError, ValueError):
        factor = math.nan
    if not 0 <= factor < math.inf:
        raise InputError(
            f"the schedule of a rate gave {found!r} for version {version}: return a number of at least 0."
        )
    return factor
