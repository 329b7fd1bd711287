"""An experiment made real: data, clients, model, method and engine put together."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from offbeat import models
from offbeat.aggregate.aggregation import Aggregate, Opening
from offbeat.aggregate.private import Private
from offbeat.algorithms import Setting, build, find
from offbeat.core import AnyAlgorithm
from offbeat.engines.cluster import Cluster
from offbeat.engines.engine import Engine
from offbeat.engines.how import HOWS
from offbeat.engines.reach import check_cluster
from offbeat.engines.simulated import Sequential, Vectorised
from offbeat.engines.workers import Workers, cores
from offbeat.errors import InputError
from offbeat.experiment import Experiment
from offbeat.fit import check_end, check_fit
from offbeat.population.batches import Epochs, Steps
from offbeat.population.homes import make_memories, parse_home, within
from offbeat.population.partition import Partition, parse_partition
from offbeat.population.population import Examples, Population
from offbeat.population.sources import Source, load
from offbeat.precision import Precision
from offbeat.problem import Problem
from offbeat.protection import aggregate_of, check_protection, steadied, with_noise
from offbeat.schedule.availability import Always, Availability, Dropout, parse_availability
from offbeat.schedule.delays import parse_delay
from offbeat.schedule.dispatch import Dispatch, parse_dispatch
from offbeat.schedule.staleness import Weights, parse_weights

_TOGETHER = 50_000  # parameters up to which a CPU gains from computing clients together
_WORTH = 2_000  # gradients of larger models that pay for the start of worker processes

Simulated: TypeAlias = Sequential | Vectorised | Workers | Cluster


class Trial(NamedTuple):
    """What a run needs."""

    algorithm: AnyAlgorithm
    engine: Engine
    dispatch: Dispatch
    weights: Weights
    limit: float
    problem: Problem
    test: Examples | None  # None: nothing is evaluated
    source: Source | None  # None: the data is with the clients
    aggregate: Aggregate
    parameters: dict[str, Any]  # hyperparameters that were given, or that follow from the noise


def timing(experiment: Experiment) -> Dispatch:
    """The part of an experiment that needs no data."""
    return parse_dispatch(
        experiment.dispatch,
        concurrency=experiment.concurrency,
        buffer=experiment.buffer,
        population=experiment.clients,
        hand_out=experiment.hand_out,
    )


def rehearse(
    experiment: Experiment, dispatch: Dispatch, weights: Weights, availability: Availability = Always()
) -> Opening:
    """The run on a model of one number, which shows what does not go together before anything is loaded."""
    method = build(experiment.algorithm, Setting(1, 1, 1), dict(experiment.parameters))
    limit = math.inf if experiment.limit is None else experiment.limit
    check_fit(method, dispatch, weights, experiment.rounds, limit)
    return Opening(
        method,
        torch.zeros(1),
        dispatch,
        weights,
        experiment.buffer,
        experiment.clients,
        experiment.rounds,
        limit,
        experiment.seed,
        availability,
    )


def check_longer(experiment: Experiment, rounds: int) -> None:
    """Refuse a later end for a run that was laid out for the one it has."""
    check_end(experiment.algorithm, dict(experiment.parameters), experiment.rounds, rounds)
    often = experiment.rounds if experiment.most is None else experiment.most
    simulated, shaped = experiment.simulate_amplification, experiment.noise_shape != "independent"
    if experiment.epsilon is not None and (simulated or shaped or often > experiment.rounds):
        raise InputError(
            f"noise and epsilon of this run are for {experiment.rounds} server steps, and more would tell "
            "more of its clients: name another --out, whose epsilon adds up with this one's."
        )


def prepare(
    experiment: Experiment,
    source: Source | None = None,
    folder: Path | None = None,
    module: nn.Module | None = None,
) -> Trial:
    """Load, split and put together what an experiment names; most bad input is refused before the loading.

    The folder is where the run is going to be: what clients keep has to fit there, or in memory. A module
    stands for the model that is named.
    """
    dispatch = timing(experiment)
    delays, availability = parse_delay(experiment.delays), parse_availability(experiment.availability)
    dropout, weights = Dropout(experiment.dropout), parse_weights(experiment.weights)
    partition = parse_partition(experiment.partition)
    delays.bind(dispatch.source(experiment.seed), experiment.clients)  # complains of a bad file of delays
    opening = rehearse(experiment, dispatch, weights, availability)
    method, limit = opening.algorithm, opening.limit
    aggregate = aggregate_of(with_noise(experiment, opening), method)
    check_protection(aggregate, opening)
    device = _device(experiment.device)
    if experiment.engine == "ray":
        check_cluster(experiment.ray_address)
    data_dir = Path(experiment.data_dir) if experiment.data_dir else None
    source = source or load(experiment.data, data_dir)
    population = _population(experiment, source, partition).to(device)
    precision = Precision[experiment.precision.upper()]
    if precision is Precision.TF32 and device.type == "cpu":
        raise InputError("a CPU does not round products to tf32: use --device cuda, or no --precision.")
    module = module or _module(experiment, source)
    problem = Problem(module.to(device), _losses, experiment.weight_decay, precision)
    if problem.tracks and (experiment.clip is not None or experiment.secure):
        raise InputError(
            f"the model '{experiment.model}' keeps running statistics, which would leave clients in plain "
            "sight: use a model without them."
        )
    setting = Setting(experiment.buffer, _steps(population), experiment.rounds)
    parameters = steadied(experiment, aggregate)
    algorithm = build(experiment.algorithm, setting, parameters)
    home = parse_home(experiment.memory)
    place = within(home, folder) if folder else home
    make_memories(place, algorithm.memory(problem.initial()[0]), len(population), device)  # or complains
    kind = _kind(experiment, problem, setting)
    HOWS[experiment.how].work(problem, population).close()  # or complains
    engine = kind(problem, population, delays, availability, dropout, memory=home)
    test = source.test.to(device)
    return Trial(algorithm, engine, dispatch, weights, limit, problem, test, source, aggregate, parameters)


def _kind(experiment: Experiment, problem: Problem, setting: Setting) -> Callable[..., Simulated]:
    """The engine that was named; by itself, one that suits the model and is worth its start."""
    name, count = experiment.engine, experiment.workers or cores()
    if name == "auto":
        enough = setting.rounds * setting.cohort * setting.steps >= _WORTH
        if problem.device.type != "cpu" or (problem.size <= _TOGETHER and experiment.workers is None):
            name = "vectorised"
        else:
            name = "workers" if experiment.workers or (count > 1 and enough) else "sequential"
    if name != "vectorised" and experiment.how != "auto":
        raise InputError(f"the engine '{name}' has no --how: leave it out, or add --engine vectorised.")
    # a small buffer alone would leave workers idle
    many: dict[str, Any] = {
        "workers": experiment.workers,
        "ahead": 2 * count if setting.cohort < 2 * count else 0,
    }
    match name:
        case "sequential":
            return Sequential
        case "vectorised":
            return partial(Vectorised, how=HOWS[experiment.how])
        case "workers":
            return partial(Workers, **many)
        case _:
            gpus = 1.0 if problem.device.type == "cuda" else 0.0
            return partial(Cluster, address=experiment.ray_address, gpus=gpus, **many)


def settled(experiment: Experiment, trial: Trial) -> Experiment:
    """The same with the noise that was computed from its epsilon."""
    if isinstance(trial.aggregate, Private):
        return dataclasses.replace(experiment, noise=trial.aggregate.noise)
    return experiment


def housed(engine: Engine, folder: Path) -> Engine:
    """The same, with the file of what clients keep in this folder, where it needs one."""
    if isinstance(engine, Simulated):
        return dataclasses.replace(engine, memory=within(engine.memory, folder))
    return engine


def resolved(experiment: Experiment, trial: Trial) -> dict[str, Any]:
    """What the settings came to: every hyperparameter, also those that follow from S, K and T."""
    given = trial.parameters
    values = {
        name: given.get(name, each.default) for name, each in find(experiment.algorithm).parameters().items()
    }
    return {
        "hyperparameters": {
            name: getattr(trial.algorithm, name, None) if value is None else value
            for name, value in values.items()
        },
        "model_size": trial.problem.size,
        "engine": "ray" if isinstance(trial.engine, Cluster) else type(trial.engine).__name__.lower(),
    }


def _module(experiment: Experiment, source: Source) -> nn.Module:
    name = experiment.model or models.default_model(source.name)
    module = models.build(name, tuple(source.train.inputs.shape[1:]), source.classes, experiment.seed)
    models.check_inputs(name, source.train.inputs, source.classes)
    return module


def _population(experiment: Experiment, source: Source, partition: Partition) -> Population:
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
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise InputError(f"unknown device '{name}': choose cpu or cuda.")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise InputError(f"the device '{name}' is not to be had here: use --device cpu.") from None
    return device


def _losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets, reduction="none")
