"""One frozen value that names a run, and what it takes to make it happen."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from offbeat import models
from offbeat.algorithms import Setting, build, find
from offbeat.core import AnyAlgorithm
from offbeat.engines.engine import Engine
from offbeat.engines.simulation import Sequential, Vectorised
from offbeat.errors import InputError, unknown
from offbeat.population.batches import Epochs, Steps
from offbeat.population.partition import parse_partition
from offbeat.population.population import Examples, Population
from offbeat.population.sources import Source, load
from offbeat.problem import Problem
from offbeat.schedule.availability import Dropout, parse_availability
from offbeat.schedule.delays import parse_delay
from offbeat.schedule.dispatch import Dispatch, parse_dispatch
from offbeat.schedule.staleness import Weights, parse_weights

_TOGETHER = 50_000  # parameters up to which a CPU gains from computing clients together

ENGINES = ("auto", "sequential", "vectorised")


@dataclass(frozen=True)
class Experiment:
    """Every setting of a run, in the words of the command line."""

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
    seed: int = 0

    @classmethod
    def of(cls, **given: Any) -> Self:
        """What was given; the rest as the method's own protocol has it, and some twenty evaluations."""
        entry = find(given.get("algorithm", cls.algorithm))
        own = {
            "dispatch": "asynchronous" if entry.asynchronous else "synchronous",
            "buffer": entry.buffer or cls.buffer,
            "weights": entry.weights,
            "every": max(1, given.get("rounds", cls.rounds) // 20),
        }
        return cls(**own | given)

    def __post_init__(self) -> None:
        for name in ("clients", "concurrency", "buffer", "local_steps", "batch_size", "rounds", "every"):
            _check(name, getattr(self, name) >= 1, getattr(self, name), "at least 1")
        _check(
            "local_epochs",
            self.local_epochs is None or self.local_epochs >= 1,
            self.local_epochs,
            "at least 1",
        )
        _check("limit", self.limit is None or self.limit >= 0, self.limit, "at least 0")
        _check("average", self.average is None or 0 < self.average < 1, self.average, "between 0 and 1")
        _check("weight_decay", 0 <= self.weight_decay < math.inf, self.weight_decay, "at least 0 and finite")
        _check("seed", 0 <= self.seed < 2**32, self.seed, "at least 0 and below 2^32")
        if self.engine not in ENGINES:
            raise unknown("engine", self.engine, ENGINES)

    def settings(self) -> dict[str, Any]:
        """As JSON-able values."""
        return dataclasses.asdict(self) | {"parameters": dict(self.parameters)}

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        """What `settings` gave, back again."""
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: value for name, value in settings.items() if name in known}
        return cls(**values | {"parameters": tuple(settings["parameters"].items())})


class Trial(NamedTuple):
    """An experiment made real."""

    algorithm: AnyAlgorithm
    engine: Engine
    dispatch: Dispatch
    weights: Weights
    limit: float
    problem: Problem
    test: Examples


def timing(experiment: Experiment) -> Dispatch:
    """The part of an experiment that needs no data."""
    return parse_dispatch(
        experiment.dispatch,
        concurrency=experiment.concurrency,
        buffer=experiment.buffer,
        population=experiment.clients,
        hand_out=experiment.hand_out,
    )


def prepare(experiment: Experiment, source: Source | None = None) -> Trial:
    """Load, split and put together what an experiment names."""
    dispatch = timing(experiment)
    delays, availability = parse_delay(experiment.delays), parse_availability(experiment.availability)
    dropout, weights = Dropout(experiment.dropout), parse_weights(experiment.weights)
    partition = parse_partition(experiment.partition)
    build(experiment.algorithm, Setting(1, 1, 1), dict(experiment.parameters))
    device = _device(experiment.device)
    source = source or fetch(experiment)
    population = _population(experiment, source, partition).to(device)
    problem = Problem(
        _module(experiment, source).to(device),
        _losses,
        experiment.weight_decay,
    )
    setting = Setting(experiment.buffer, _steps(population), experiment.rounds)
    algorithm = build(experiment.algorithm, setting, dict(experiment.parameters))
    together = experiment.engine == "vectorised" or (
        experiment.engine == "auto" and (device.type != "cpu" or problem.size <= _TOGETHER)
    )
    kind = Vectorised if together else Sequential
    engine = kind(problem, population, delays, availability, dropout)
    limit = math.inf if experiment.limit is None else experiment.limit
    return Trial(algorithm, engine, dispatch, weights, limit, problem, source.test.to(device))


def fetch(experiment: Experiment) -> Source:
    """The data an experiment names."""
    return load(experiment.data, Path(experiment.data_dir) if experiment.data_dir else None)


def _module(experiment: Experiment, source: Source) -> nn.Module:
    name = experiment.model or models.default_model(source.name)
    return models.build(name, tuple(source.train.inputs.shape[1:]), source.classes, experiment.seed)


def _population(experiment: Experiment, source: Source, partition: Any) -> Population:
    parts = partition.split(source.labels, experiment.clients, experiment.seed, source.groups)
    if experiment.local_epochs is not None:
        return Population(source.train, parts, Epochs(experiment.local_epochs, experiment.batch_size))
    return Population(source.train, parts, Steps(experiment.local_steps, experiment.batch_size))


def _steps(population: Population) -> int:
    """Local steps per task; their mean over clients where they differ."""
    work = population.work
    if isinstance(work, Steps):
        return work.count
    sizes = [population.size(client) for client in range(len(population))]
    return max(1, round(sum(work.count * math.ceil(size / work.size) for size in sizes) / len(sizes)))


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise InputError(f"the device '{name}' is not to be had here: use --device cpu.") from None
    return device


def _check(name: str, fine: bool, value: object, wanted: str) -> None:
    if not fine:
        raise InputError(f"--{name.replace('_', '-')} must be {wanted}, not {value}.")


def _losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets, reduction="none")
