"""One frozen value that names a run, in the words of the command line."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Self

from offbeat import models
from offbeat.algorithms import find
from offbeat.errors import InputError, unknown
from offbeat.population.homes import HOMES
from offbeat.population.sources import NAMES as SOURCES

ENGINES = ("auto", "sequential", "vectorised")
_COUNTS = ("clients", "concurrency", "buffer", "local_steps", "local_epochs", "batch_size", "rounds", "every")


@dataclass(frozen=True)
class Experiment:
    """Every setting of a run."""

    algorithm: str = "adamasfl"
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
    memory: str = "auto"
    seed: int = 0

    @classmethod
    def of(cls, **given: Any) -> Self:
        """What was given; the rest as the method's own protocol has it, and some twenty evaluations."""
        entry = find(given.get("algorithm", cls.algorithm))
        own = {
            "dispatch": entry.dispatch,
            "buffer": entry.buffer or cls.buffer,
            "weights": entry.weights,
            "model": models.default_model(given.get("data", cls.data)),
            "every": max(1, given.get("rounds", cls.rounds) // 20),
        }
        return cls(**own | given)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            _check(name, value is None or 1 <= value < 2**31, value, "at least 1 and below 2^31")
        _check("limit", self.limit is None or self.limit >= 0, self.limit, "at least 0")
        _check("average", self.average is None or 0 < self.average < 1, self.average, "between 0 and 1")
        _check("weight_decay", 0 <= self.weight_decay < math.inf, self.weight_decay, "at least 0 and finite")
        _check("dropout", 0 <= self.dropout < 1, self.dropout, "at least 0 and below 1")
        _check("seed", 0 <= self.seed < 2**32, self.seed, "at least 0 and below 2^32")
        for kind, value, known in (
            ("data set", self.data, SOURCES),
            ("model", self.model, (*models.NAMES, None)),
            ("engine", self.engine, ENGINES),
            ("memory", self.memory, HOMES),
        ):
            if value not in known:
                raise unknown(kind, str(value), filter(None, known))
        if self.data == "digits" and self.data_dir is not None:
            raise InputError("digits ships with scikit-learn and needs no --data-dir: leave it out.")

    def settings(self) -> dict[str, Any]:
        """As JSON-able values."""
        return dataclasses.asdict(self) | {"parameters": dict(self.parameters)}

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        """What `settings` gave, back again."""
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: value for name, value in settings.items() if name in known}
        try:
            return cls(**values | {"parameters": tuple(settings["parameters"].items())})
        except (KeyError, AttributeError, TypeError):
            raise InputError("these settings are not of a run: start it anew in another folder.") from None


def _check(name: str, fine: bool, value: object, wanted: str) -> None:
    if not fine:
        raise InputError(f"--{name.replace('_', '-')} must be {wanted}, not {value}.")
