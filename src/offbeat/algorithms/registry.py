"""The entries of the catalogue, how methods are found, and definitions that many methods share.

Each file of this package holds the methods of one paper and, in `METHODS`, their entries by name. A new file
is found without being listed. Nothing here imports torch, so that methods can be listed without it.
"""

import functools
import inspect
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from types import MappingProxyType
from typing import Any, Concatenate, NamedTuple, TypeAlias

from offbeat.core import AnyAlgorithm, State, Vector, zeros_like
from offbeat.errors import InputError, unknown_name

_NAME = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")

log = logging.getLogger(__name__)


class Setting(NamedTuple):
    """The quantities S, K and T of the papers' theorems, which depend on the run.

    Attributes:
        cohort: S, the updates of a server step.
        steps: K, the local steps of a task.
        rounds: T, the server steps.
    """

    cohort: int
    steps: int
    rounds: int


class Cost(NamedTuple):
    """What one round sends and what is stored, in vectors of the model's size.

    Attributes:
        down: Vectors that a client receives in a round.
        up: Vectors that it sends.
        client: Vectors that it keeps between tasks.
        server: Vectors that the server keeps.
        extra_down: Single numbers that a client receives beside the vectors.
        extra_up: Single numbers that it sends beside the vectors.
    """

    down: int = 1
    up: int = 1
    client: int = 0
    server: int = 1
    extra_down: int = 0
    extra_up: int = 0

    def vectors(self) -> dict[str, int]:
        """The vectors by name."""
        return {"down": self.down, "up": self.up, "client": self.client, "server": self.server}


Defaults: TypeAlias = tuple[tuple[str, bool | float | str], ...]  # of parameters, by name


@dataclass(frozen=True)
class Method:
    """One entry of the catalogue."""

    build: Callable[Concatenate[Setting, ...], AnyAlgorithm]
    summary: str
    paper: str
    dispatch: str  # of the paper's protocol
    cost: Cost = Cost()
    weights: str = "constant"  # of stale updates, unless the user says otherwise
    buffer: int | None = None  # of the paper's protocol, where it fixes one
    max_staleness: int | None = None  # in the paper's protocol
    theory: str = ""  # the rates of the paper's theorem
    private_defaults: Defaults = ()  # parameters of private runs, unless given
    unclipped_defaults: Defaults = ()  # further parameters of private runs without a clip
    former_name: str = ""  # by which files of earlier versions may call it

    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The hyperparameters, with their defaults."""
        every = inspect.signature(self.build).parameters
        return {name: p for name, p in every.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}


def discover(package: str, path: list[str]) -> Mapping[str, Method]:
    """The methods of all modules of a package, by name."""
    found: dict[str, Method] = {}
    for module in iter_modules(path):
        methods = getattr(import_module(f"{package}.{module.name}"), "METHODS", {})
        if twice := found.keys() & methods.keys():
            raise ImportError(f"two files of {package} define the method {min(twice)}")
        found |= methods
    return MappingProxyType(dict(sorted(found.items())))


class Catalogue(Mapping[str, Method]):
    """Methods by name: those of this package, those registered, and those of installed packages.

    The entry points of installed packages are loaded only for a name that is not known otherwise, or when all
    names are listed.
    """

    def __init__(self, own: Mapping[str, Method]) -> None:
        self.own = own
        self._added: dict[str, Method] = {}
        self._plugins: dict[str, Method] | None = None

    def __getitem__(self, name: str) -> Method:
        for known in (self.own, self._added):
            if name in known:
                return known[name]
        return self._installed()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self.own, *self._added, *self._installed()}))

    def __len__(self) -> int:
        return len({*self.own, *self._added, *self._installed()})

    def add(self, name: str, method: Method) -> None:
        """Add a method under a new name; adding the same definition again has no effect."""
        if not _NAME.fullmatch(str(name)):
            raise InputError(
                f"a method cannot be called {name!r}: use lower-case letters, digits and hyphens, beginning "
                "with a letter."
            )
        known = self.own.get(name) or self._added.get(name)
        if known is not None and _origin(known) != _origin(method):
            raise InputError(f"there is a method '{name}' already: choose another name.")
        if known is None or name in self._added:  # a module that is loaded again registers its new class
            self._added[name] = method

    def _installed(self) -> Mapping[str, Method]:
        if self._plugins is None:
            self._plugins = {}
            for point in entry_points(group="offbeat.algorithms"):
                if point.name in self.own or not _NAME.fullmatch(point.name):
                    log.warning(
                        "%s defines a method '%s', a name that cannot be used.", point.value, point.name
                    )
                    continue
                try:
                    self._plugins[point.name] = as_method(point.name, point.load())
                except Exception as error:
                    log.warning("the method '%s' (%s) cannot be loaded: %s", point.name, point.value, error)
        return self._plugins


def _origin(method: Method) -> tuple[str, str]:
    made = inspect.unwrap(method.build)
    return made.__module__, made.__qualname__


def as_method(name: str, given: "Method | Callable[..., AnyAlgorithm]", **facts: Any) -> Method:
    """The catalogue entry of a class or function whose parameters are the hyperparameters."""
    known = {field.name for field in fields(Method)} - {"build", "former_name"}
    for fact in facts:
        if fact not in known:
            raise unknown_name(f"fact about the method {name}", fact, known)
    if isinstance(given, Method):
        return replace(given, **facts)
    if not callable(given):
        raise InputError(
            f"the method '{name}' must be a class or a function that makes an algorithm, not a value of type "
            f"{type(given).__name__}: register the class, not an instance of it."
        )
    summary = (inspect.getdoc(given) or "").partition("\n")[0].rstrip(".")
    own: dict[str, Any] = {
        "summary": summary or "a registered method",
        "paper": "",
        "dispatch": "asynchronous",
    }
    return Method(constructor(given), **own | facts)


def constructor(
    method: Callable[..., AnyAlgorithm], hidden: tuple[str, ...] = (), **defaults: Any
) -> Callable[Concatenate[Setting, ...], AnyAlgorithm]:
    """The `Method.build` of a method whose hyperparameters are its fields, with these defaults."""

    @functools.wraps(method, updated=())
    def build(setting: Setting, **given: Any) -> AnyAlgorithm:
        return method(**defaults | given)

    signature = inspect.signature(method, eval_str=True)
    own = [p for name, p in signature.parameters.items() if name not in hidden]
    keywords = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=defaults.get(p.name, p.default)) for p in own
    ]
    first = inspect.Parameter("setting", inspect.Parameter.POSITIONAL_ONLY)
    build.__signature__ = inspect.Signature([first, *keywords])  # type: ignore[attr-defined]
    return build


def tuned_constructor(
    tuned: Callable[..., AnyAlgorithm],
) -> Callable[Concatenate[Setting, ...], AnyAlgorithm]:
    """The `Method.build` of a method whose rates follow from S, K and T unless they are given."""

    def build(
        setting: Setting,
        *,
        local_lr: float | None = None,
        server_lr: float | None = None,
        beta: float | None = None,
        lazy: bool = False,
    ) -> AnyAlgorithm:
        method = tuned(*setting, beta=beta)
        given = {"local_lr": local_lr, "server_lr": server_lr, "beta": beta, "lazy": lazy}
        return replace(method, **{name: value for name, value in given.items() if value is not None})  # type: ignore[type-var]

    return build


MAX_RATE = 1e38  # which float32 can hold

RANGES: Mapping[str, str] = MappingProxyType(
    {
        "local_lr": f"[0, {MAX_RATE:g}]",
        "server_lr": f"[0, {MAX_RATE:g}]",
        "alpha": "(0, 1]",
        "beta": "[0, 1]",
        "bound": "(0, inf)",
        "c": "(0, inf)",
        "eps": "[0, inf)",
        "floor": "[0, inf)",
        "lower": "(-inf, inf)",
        "rho": "[0, inf)",
        "start": "[0, 1]",
        "steps": "[1, inf)",
        "threshold": "[0, inf]",
    }
)


_RATES = ("local_lr", "server_lr")
_SEARCH_BELOW, _SEARCH_ABOVE = 30.0, 10.0  # times the default of a rate
_SEARCH_WITHOUT_DEFAULT = (1e-3, 1.0)


def search_range(name: str, default: Any) -> tuple[float, float] | None:
    """Where to search for a learning rate, on a logarithmic scale; None if the parameter is not one."""
    if name not in _RATES:
        return None
    if not isinstance(default, int | float) or not default > 0:
        return _SEARCH_WITHOUT_DEFAULT
    return default / _SEARCH_BELOW, default * _SEARCH_ABOVE


def check_ranges(method: Any, **ranges: str) -> None:
    """Reject hyperparameters outside these intervals, or by default outside those of `RANGES`."""
    intervals = {**RANGES, **ranges}
    for field in fields(method):
        if field.name in intervals:
            name = f"{field.name} of {type(method).__name__}"
            check_interval(name, getattr(method, field.name), intervals[field.name])


def check_interval(name: str, value: float, interval: str) -> None:
    """Reject a number outside an interval such as (0, 1]."""
    given: object = value
    if given is None or isinstance(given, str):
        raise InputError(f"the {name} must be a number, not {value!r}.")
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = value > low if interval[0] == "(" else value >= low
    below = value < high if interval[-1] == ")" else value <= high
    if not (above and below) or math.isnan(value):
        raise InputError(f"the {name} must lie in {interval}, not be {value}.")


def cap_beta(method: str, beta: float) -> float:
    """A theorem's beta, the weight of the new gradient; above 1 it is set to 1, with a warning."""
    if beta > 1:
        log.warning(
            "the theorem's beta for %s is %.3g, above 1, and is set to 1: more rounds lower it.",
            method,
            beta,
        )
    return min(1.0, beta)


def empty(owner: object, x: Vector) -> tuple[()]:
    """For methods without client memory: `memory = empty` in the class."""
    return ()


def zero_vector(owner: object, x: Vector) -> Vector:
    """For methods whose clients keep one vector that starts at zero: `memory = zero_vector` in the class."""
    return zeros_like(x)


def send_state(owner: object, state: State, version: int) -> State:
    """For methods whose clients are sent the server's state: `broadcast = send_state` in the class."""
    return state


def no_warmup(owner: object) -> None:
    """For methods without a full-participation start: `warmup = no_warmup` in the class."""
