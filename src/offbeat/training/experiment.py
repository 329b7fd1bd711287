"""One frozen value that names a run, in the words of the command line."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import InitVar, dataclass
from typing import Any, Self, get_args, get_type_hints

from offbeat.aggregate.private import own_bounds
from offbeat.algorithms import Setting, build, find
from offbeat.data.client_store import MEMORY_BACKENDS
from offbeat.data.datasets import NAMES as SOURCES
from offbeat.engines.execution import EXECUTIONS
from offbeat.errors import InputError, unknown_name
from offbeat.nn import models
from offbeat.nn.problem import Precision
from offbeat.privacy.ledger import amplification_refused
from offbeat.training.settings_file import renamed

ENGINES = ("auto", "sequential", "vectorised", "workers", "ray")
PRECISIONS = tuple(precision.name.lower() for precision in Precision)
_COUNTS = (
    "clients",
    "concurrency",
    "buffer",
    "local_steps",
    "local_epochs",
    "batch_size",
    "rounds",
    "every",
    "workers",
    "most",
    "apart",
    "nominal_cohort",
)
# What means nothing where nothing is private.
_PRIVATE = (
    "noise",
    "epsilon",
    "delta",
    "most",
    "apart",
    "simulate_amplification",
    "noise_shape",
    "accountant",
    "adaptive_clip",
    "nominal_cohort",
    "noise_seed",
)


@dataclass(frozen=True)
class Experiment:
    """Every setting of a run."""

    algorithm: str = "cadence"
    parameters: tuple[tuple[str, Any], ...] = ()
    data: str = "digits"
    data_dir: str | None = None
    model: str | None = None  # None: by data
    clients: int = 100
    partition: str = "dirichlet:0.5"
    dispatch: str = "asynchronous"
    hand_out: str = "before"
    buffer: int = 10
    concurrency: int = 20
    delays: str = "tiers:mild"
    availability: str = "always"
    dropout: float = 0.0
    weights: str = "constant"
    limit: int | None = None
    local_steps: int = 10
    local_epochs: int | None = None
    batch_size: int = 20
    weight_decay: float = 0.0
    rounds: int = 200
    average: float | None = None
    every: int = 10
    engine: str = "auto"
    device: str = "cpu"
    how: str = "auto"
    precision: str = "torch"
    memory: str = "auto"
    workers: int | None = None  # None: as many as there are cores, or room on the cluster
    ray_address: str | None = None  # None: a cluster of our own
    seed: int = 0
    clip: str | None = None  # None: nothing is private
    noise: float | None = None  # None: by epsilon
    epsilon: float | None = None
    delta: float | None = None
    most: int | None = None
    apart: int | None = None  # None: by the shape of the noise
    simulate_amplification: bool = False
    noise_shape: str = "independent"
    accountant: str = "pld"
    adaptive_clip: float | None = None
    nominal_cohort: int | None = None
    noise_seed: int | None = None
    secure: bool = False
    amplified: InitVar[bool] = False  # refused: it does not hold for a buffer of fixed size

    @classmethod
    def of(cls, **given: Any) -> Self:
        """What was given; the rest as the method has it, and some twenty evaluations.

        Where privacy is asked for without `clip`, the method's parameters for that count, too, unless they
        were given, and a method that bounds all its uploads sets the clip.
        """
        entry = find(given.get("algorithm", cls.algorithm))
        own = {
            "dispatch": entry.dispatch,
            "buffer": entry.buffer or cls.buffer,
            "weights": entry.weights,
            "limit": entry.max_staleness,
            "model": models.default_model(given.get("data", cls.data)),
            "every": max(1, given.get("rounds", cls.rounds) // 20),
        }
        values = own | given
        private = any(values.get(name, getattr(cls, name)) != getattr(cls, name) for name in _PRIVATE)
        if private:
            bare = values.get("clip") is None
            chosen = (*entry.private_defaults, *entry.unclipped_defaults) if bare else entry.private_defaults
            parameters = dict(chosen) | dict(values.get("parameters", ()))
            values["parameters"] = tuple(sorted(parameters.items()))
            if bare:
                values["clip"] = clip_of(values.get("algorithm", cls.algorithm), values["parameters"])
        return cls(**values)

    def __post_init__(self, amplified: bool) -> None:
        if amplified:
            raise amplification_refused("--most", "--simulate-amplification")
        for name in _COUNTS:
            value = getattr(self, name)
            _check(name, value is None or 1 <= value < 2**31, value, "at least 1 and below 2^31")
        _check("limit", self.limit is None or self.limit >= 0, self.limit, "at least 0")
        _check("average", self.average is None or 0 < self.average < 1, self.average, "between 0 and 1")
        _check("weight_decay", 0 <= self.weight_decay < math.inf, self.weight_decay, "at least 0 and finite")
        _check("dropout", 0 <= self.dropout < 1, self.dropout, "at least 0 and below 1")
        _check("seed", 0 <= self.seed < 2**32, self.seed, "at least 0 and below 2^32")
        self._check_privacy()
        for kind, value, known in (
            ("data set", self.data, SOURCES),
            ("model", self.model, (*models.NAMES, None)),
            ("engine", self.engine, ENGINES),
            ("way to compute", self.how, EXECUTIONS),
            ("precision", self.precision, PRECISIONS),
            ("memory", self.memory, MEMORY_BACKENDS),
        ):
            if value not in known:
                raise unknown_name(kind, str(value), filter(None, known))
        if self.workers is not None and self.engine in ("sequential", "vectorised"):
            raise InputError(f"the engine '{self.engine}' has no --workers: use workers or ray.")
        if self.ray_address is not None and self.engine != "ray":
            raise InputError("--ray-address is for --engine ray: give that, too.")
        if self.data == "digits" and self.data_dir is not None:
            raise InputError("digits ships with scikit-learn and needs no --data-dir: leave it out.")

    def _check_privacy(self) -> None:
        """Refuse options that contradict each other, or that would do nothing."""
        if self.clip is None:
            for field in dataclasses.fields(self):
                if field.name in _PRIVATE and getattr(self, field.name) != field.default:
                    raise InputError(
                        f"--{field.name.replace('_', '-')} needs --clip, the most that a client may add to "
                        "a sum: give it, or nothing is private."
                    )
            return
        noise, epsilon, delta = self.noise, self.epsilon, self.delta
        _check("noise", noise is None or 0 <= noise < math.inf, noise, "at least 0 and finite")
        _check("epsilon", epsilon is None or 0 < epsilon < math.inf, epsilon, "above 0 and finite")
        _check("delta", delta is None or 0 < delta < 1, delta, "above 0 and below 1")
        quantile, seed = self.adaptive_clip, self.noise_seed
        _check("adaptive_clip", quantile is None or 0 < quantile < 1, quantile, "above 0 and below 1")
        _check("noise_seed", seed is None or 0 <= seed < 2**32, seed, "at least 0 and below 2^32")
        if noise is None and epsilon is None:
            raise InputError("privacy needs noise: give --noise, or --epsilon to have it computed.")
        if delta is None:
            raise InputError("privacy needs --delta, well below one in the number of clients, such as 1e-6.")
        if self.simulate_amplification and self.dispatch != "poisson":
            raise InputError(
                "--simulate-amplification is for clients that are drawn by --dispatch poisson, not "
                f"{self.dispatch}: give that, or --most in its place."
            )
        if not self.simulate_amplification and self.most is None:
            raise InputError(
                "privacy rests on how often a client contributes: give --most, or --dispatch poisson and "
                "--simulate-amplification for a figure that is not a guarantee."
            )

    def settings(self) -> dict[str, Any]:
        """As JSON-able values."""
        return dataclasses.asdict(self) | {"parameters": dict(self.parameters)}

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        """What `settings` gave, back again."""
        known = {field.name for field in dataclasses.fields(cls)}
        settings = renamed(settings)
        values = {name: value for name, value in settings.items() if name in known}
        hints = get_type_hints(cls)
        for name, value in values.items():
            if name != "parameters" and not _fits(value, hints[name]):
                raise InputError(
                    f"the settings of this run are damaged ({name} is {value!r}): put them back."
                )
        try:
            return cls(**values | {"parameters": tuple(settings["parameters"].items())})
        except (KeyError, AttributeError, TypeError):
            raise InputError("these settings are not of a run: start it anew in another folder.") from None


def _fits(value: object, hint: Any) -> bool:
    """Whether a value from JSON is of a type, or of one of several."""
    kinds = get_args(hint) or (hint,)
    return type(value) in kinds or (type(value) is int and float in kinds)


def clip_of(algorithm: str, parameters: Iterable[tuple[str, Any]]) -> str | None:
    """The bounds of a method that sets them all itself, in the words of --clip; None: it does not."""
    bounds = own_bounds(build(algorithm, Setting(1, 1, 1), dict(parameters)))
    if bounds is None:
        return None
    return ",".join(f"{name}={str(bound).removesuffix('.0')}" for name, bound in bounds.items())


def _check(name: str, fine: bool, value: object, wanted: str) -> None:
    if not fine:
        raise InputError(f"--{name.replace('_', '-')} must be {wanted}, not {value}.")
