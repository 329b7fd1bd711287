"""From an experiment to what a run needs: data, clients, model, method, aggregation and engine."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from offbeat.aggregate.mean import AggregationContext, Aggregator, Mean, PlainSum, Summation
from offbeat.aggregate.private import Private, sampling_rate
from offbeat.aggregate.secure import Secure
from offbeat.algorithms import Setting, build, find
from offbeat.algorithms.fedopt import STAMP_SHARE
from offbeat.algorithms.momentum_approximation import Ridge
from offbeat.core import AnyAlgorithm
from offbeat.data.client_store import make_client_store, parse_memory_backend, with_folder
from offbeat.data.datasets import Source, load
from offbeat.data.partition import Partition, parse_partition
from offbeat.data.population import Epochs, Examples, Population, Steps
from offbeat.engines.engine import Engine
from offbeat.engines.execution import EXECUTIONS
from offbeat.engines.process_pool import Workers, available_cores
from offbeat.engines.ray_cluster import RayCluster, check_cluster
from offbeat.engines.simulation import Sequential, Vectorised
from offbeat.errors import InputError, setting_name
from offbeat.nn import models
from offbeat.nn.problem import Precision, Problem, cross_entropies
from offbeat.privacy.accountant import Accountant, largest_within, parse_accountant
from offbeat.privacy.correlated import BandedNoise, parse_correlation
from offbeat.privacy.ledger import PrivacyAccounting, ReleaseTotals
from offbeat.privacy.mechanism import AdaptiveClipping
from offbeat.schedule.availability import Always, Availability, Dropout, parse_availability
from offbeat.schedule.delays import parse_delay
from offbeat.schedule.dispatch import Dispatch
from offbeat.schedule.participation import Participation
from offbeat.schedule.staleness import StalenessWeights, parse_weights
from offbeat.training.experiment import Experiment, build_dispatch
from offbeat.training.loop import check_extendable, check_fit

_VMAP_PARAMETERS = 50_000  # parameters up to which a CPU gains from computing clients together
_WORKERS_GRADIENTS = 2_000  # gradients of larger models that pay for the start of worker processes
_GRAIN = 1e-3  # relative precision of the noise that is searched for
_MAX_GRAINS = 20_000  # between noise of 1 and the least and most noise that is tried
_NOISE_DIGITS = 4  # significant


def build_aggregate(experiment: Experiment, algorithm: AnyAlgorithm) -> Aggregator:
    """The aggregation that an experiment asks for; the noise must be known."""
    summation: Summation = Secure() if experiment.secure else PlainSum()
    if experiment.clip is None:
        return Mean(summation)
    assert experiment.noise is not None
    assert experiment.delta is not None
    shape = parse_correlation(experiment.noise_correlation)
    apart = shape.bands if isinstance(shape, BandedNoise) else 1
    return Private.of(
        algorithm,
        _parse_bounds(experiment.clip),
        experiment.noise,
        experiment.delta,
        epsilon=experiment.epsilon,
        simulate_amplification=experiment.simulate_amplification,
        participation=Participation(
            experiment.max_participations,
            apart if experiment.min_separation is None else experiment.min_separation,
        ),
        correlation=shape,
        accountant=parse_accountant(experiment.accountant),
        adaptive=None if experiment.adaptive_clip is None else AdaptiveClipping(experiment.adaptive_clip),
        nominal=experiment.nominal_cohort,
        summation=summation,
        noise_seed=experiment.noise_seed,
    )


def with_calibrated_noise(experiment: Experiment, opening: AggregationContext) -> Experiment:
    """The same with the noise that keeps all its server steps below its epsilon, where none was given.

    Where noise and epsilon are given and no amplification is simulated, a client may contribute as often
    as fits.
    """
    if experiment.clip is None or (experiment.noise is not None and experiment.epsilon is None):
        return experiment
    if experiment.noise is not None:
        return _with_fitting_participations(experiment, opening)
    draft = build_aggregate(dataclasses.replace(experiment, noise=1.0, epsilon=None), opening.algorithm)
    check_privacy(draft, opening)
    assert isinstance(draft, Private)
    assert experiment.epsilon is not None
    spending = _spending(draft, opening)
    start, most = opening.algorithm.warmup() is not None, draft.participation.max_participations
    times = opening.rounds if most is None else min(opening.rounds, most - start)
    noise = _least_noise(spending, ReleaseTotals(start, opening.rounds, times), experiment.epsilon)
    return dataclasses.replace(experiment, noise=noise)


def _with_fitting_participations(experiment: Experiment, opening: AggregationContext) -> Experiment:
    aggregate = build_aggregate(experiment, opening.algorithm)
    check_privacy(aggregate, opening)
    assert isinstance(aggregate, Private)
    assert experiment.epsilon is not None
    start = opening.algorithm.warmup() is not None
    fit = _spending(aggregate, opening).budget(experiment.epsilon, start, opening.rounds).contributions
    return (
        experiment
        if math.isinf(fit)
        else dataclasses.replace(experiment, max_participations=int(fit) + start)
    )


def _spending(private: Private, opening: AggregationContext) -> PrivacyAccounting:
    simulated = private.simulate_amplification
    return PrivacyAccounting(
        private.noise,
        private.delta,
        sampling_rate(opening.dispatch, opening.buffer, opening.population) if simulated else None,
        private.participation.max_participations,
        private.participation.min_separation,
        private.correlation,
        private.accountant,
    )


def parameters_under_noise(experiment: Experiment, aggregate: Aggregator) -> dict[str, Any]:
    """The hyperparameters; under noise momentum approximation gets a penalty, unless one was chosen."""
    given = dict(experiment.parameters)
    chosen = {"penalty", "rcond"} & given.keys()
    if (
        not isinstance(aggregate, Private)
        or "penalty" not in find(experiment.algorithm).parameters()
        or chosen
    ):
        return given
    share = dict(aggregate.shares).get("stamp", STAMP_SHARE)
    scale = 1.0 if aggregate.nominal is None else experiment.buffer / aggregate.nominal
    solver = Ridge.under_noise(aggregate.noise * scale / share, experiment.buffer)
    return given | {"penalty": solver.penalty}


def check_privacy(aggregate: Aggregator, opening: AggregationContext) -> None:
    """Refuse early what the run itself would refuse."""
    bounds, population = aggregate.participation, opening.population
    bounds.check(opening.dispatch.pool(population), population, opening.buffer)
    if opening.algorithm.warmup() is not None:
        bounds.check_start()
    aggregate.open(opening)


def _parse_bounds(text: str) -> float | Mapping[str, float]:
    """One number, or `FIELD=BOUND` separated by commas."""
    parts = text.split(",")
    if len(parts) == 1 and "=" not in text:
        return _parse_bound(text, text)
    bounds: dict[str, float] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals:
            raise InputError(
                f"{setting_name('clip')} takes one BOUND for all, or FIELD=BOUND for each field: name them."
            )
        if name in bounds:
            raise InputError(f"{setting_name('clip')} gives {name} twice: leave one out.")
        bounds[name] = _parse_bound(value, part)
    return bounds


def _parse_bound(value: str, text: str) -> float:
    try:
        bound = float(value)
    except ValueError:
        raise InputError(f"{setting_name('clip')} takes BOUND or FIELD=BOUND, not '{text}'.") from None
    if not bound > 0:
        raise InputError(f"{setting_name('clip')} must be above 0, not {text}.")
    return bound


def _least_noise(spending: PrivacyAccounting, tally: ReleaseTotals, epsilon: float) -> float:
    """The least noise for epsilon, rounded up; a slow accountant starts from the result of a faster one."""

    def noise(place: int) -> float:
        return math.exp(-_GRAIN * place)

    def search(accountant: Accountant, start: int) -> int:
        def spent(place: int) -> float:
            return dataclasses.replace(spending, noise=noise(place), accountant=accountant).epsilon(tally)

        found = largest_within(spent, epsilon, start, 100, -_MAX_GRAINS, _MAX_GRAINS)
        if found < -_MAX_GRAINS:
            raise InputError(
                f"no noise brings epsilon down to {epsilon:g} by the {accountant.name} accountant: "
                f"raise {setting_name('epsilon')} or {setting_name('delta')}."
            )
        return found

    rougher = spending.accountant.rougher()
    found = search(spending.accountant, 0 if rougher is None else search(rougher, 0))
    unit = 10.0 ** (math.floor(math.log10(noise(found))) + 1 - _NOISE_DIGITS)
    return float(f"{math.ceil(noise(found) / unit) * unit:.{_NOISE_DIGITS}g}")


_VMAP_PARAMETERS = 50_000  # parameters up to which a CPU gains from computing clients together
_WORKERS_GRADIENTS = 2_000  # gradients of larger models that pay for the start of worker processes

AnySimulatedEngine: TypeAlias = Sequential | Vectorised | Workers | RayCluster


class RunSpec(NamedTuple):
    """Everything that a run needs, built from an experiment."""

    algorithm: AnyAlgorithm
    engine: Engine
    dispatch: Dispatch
    weights: StalenessWeights
    limit: float
    problem: Problem
    test: Examples | None  # None: nothing is evaluated
    source: Source | None  # None: the clients have the data
    aggregate: Aggregator
    parameters: dict[str, Any]  # hyperparameters that were given, or that follow from the noise


def dry_run(
    experiment: Experiment,
    dispatch: Dispatch,
    weights: StalenessWeights,
    availability: Availability = Always(),
) -> AggregationContext:
    """The run with a model of one parameter, to find incompatible settings before anything is loaded."""
    method = build(experiment.algorithm, Setting(1, 1, 1), dict(experiment.parameters))
    limit = math.inf if experiment.max_staleness is None else experiment.max_staleness
    check_fit(method, dispatch, weights, experiment.rounds, limit)
    return AggregationContext(
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


def check_extension(experiment: Experiment, rounds: int) -> None:
    """Refuse more rounds for a run whose noise or rates were computed for its number of rounds."""
    check_extendable(experiment.algorithm, dict(experiment.parameters), experiment.rounds, rounds)
    often = experiment.rounds if experiment.max_participations is None else experiment.max_participations
    simulated, shaped = experiment.simulate_amplification, experiment.noise_correlation != "independent"
    if experiment.epsilon is not None and (simulated or shaped or often > experiment.rounds):
        raise InputError(
            f"noise and epsilon of this run are for {experiment.rounds} server steps, and more would tell "
            f"more of its clients: name another {setting_name('out')}, whose epsilon adds up with this one's."
        )


def build_run(
    experiment: Experiment,
    source: Source | None = None,
    folder: Path | None = None,
    module: nn.Module | None = None,
) -> RunSpec:
    """Load, split and put together what an experiment names; most bad input is refused before the loading.

    The folder is where the run is going to be: what clients keep has to fit there, or in memory. A module
    stands for the model that is named.
    """
    dispatch = build_dispatch(experiment)
    delays, availability = parse_delay(experiment.delays), parse_availability(experiment.availability)
    dropout, weights = Dropout(experiment.dropout), parse_weights(experiment.weights)
    partition = parse_partition(experiment.partition)
    delays.bind(dispatch.source(experiment.seed), experiment.clients)  # raises on a bad file of delays
    opening = dry_run(experiment, dispatch, weights, availability)
    method, limit = opening.algorithm, opening.max_staleness
    aggregate = build_aggregate(with_calibrated_noise(experiment, opening), method)
    check_privacy(aggregate, opening)
    device = _parse_device(experiment.device)
    if experiment.engine == "ray":
        check_cluster(experiment.ray_address)
    data_dir = Path(experiment.data_dir) if experiment.data_dir else None
    source = source or load(experiment.data, data_dir)
    population = _build_population(experiment, source, partition).to(device)
    precision = Precision[experiment.precision.upper()]
    if precision is Precision.TF32 and device.type == "cpu":
        raise InputError(
            f"a CPU does not round products to tf32: use {setting_name('device')} cuda, or no "
            f"{setting_name('precision')}."
        )
    module = module or _build_module(experiment, source)
    problem = Problem(module.to(device), cross_entropies, experiment.weight_decay, precision)
    if problem.tracks_statistics and (experiment.clip is not None or experiment.secure):
        raise InputError(
            f"the model '{experiment.model}' keeps running statistics, which would leave clients in plain "
            "sight: use a model without them."
        )
    setting = Setting(experiment.buffer, _local_steps(population), experiment.rounds)
    parameters = parameters_under_noise(experiment, aggregate)
    algorithm = build(experiment.algorithm, setting, parameters)
    home = parse_memory_backend(experiment.memory)
    place = with_folder(home, folder) if folder else home
    make_client_store(place, algorithm.memory(problem.initial()[0]), len(population), device)  # or raises
    kind = _engine_type(experiment, problem, setting)
    EXECUTIONS[experiment.execution].executor(problem, population).close()  # or raises
    engine = kind(problem, population, delays, availability, dropout, memory=home)
    test = source.test.to(device)
    return RunSpec(algorithm, engine, dispatch, weights, limit, problem, test, source, aggregate, parameters)


def _engine_type(
    experiment: Experiment, problem: Problem, setting: Setting
) -> Callable[..., AnySimulatedEngine]:
    """The engine that was named; for `auto` one that suits the model and the amount of work."""
    name, count = experiment.engine, experiment.workers or available_cores()
    if name == "auto":
        enough = setting.rounds * setting.cohort * setting.steps >= _WORKERS_GRADIENTS
        if problem.device.type != "cpu" or (problem.size <= _VMAP_PARAMETERS and experiment.workers is None):
            name = "vectorised"
        else:
            name = "workers" if experiment.workers or (count > 1 and enough) else "sequential"
    if name != "vectorised" and experiment.execution != "auto":
        raise InputError(
            f"the engine '{name}' has no {setting_name('execution')}: leave it out, or add "
            f"{setting_name('engine')} vectorised."
        )
    # a small buffer alone would leave workers idle
    many: dict[str, Any] = {
        "workers": experiment.workers,
        "ahead": 2 * count if setting.cohort < 2 * count else 0,
    }
    match name:
        case "sequential":
            return Sequential
        case "vectorised":
            return partial(Vectorised, execution=EXECUTIONS[experiment.execution])
        case "workers":
            return partial(Workers, **many)
        case _:
            gpus = 1.0 if problem.device.type == "cuda" else 0.0
            return partial(RayCluster, address=experiment.ray_address, gpus=gpus, **many)


def with_computed_noise(experiment: Experiment, trial: RunSpec) -> Experiment:
    """The experiment with the noise that was computed from its epsilon."""
    if isinstance(trial.aggregate, Private):
        return dataclasses.replace(experiment, noise=trial.aggregate.noise)
    return experiment


def with_run_folder(engine: Engine, folder: Path) -> Engine:
    """The engine with the file of the clients' memory in this folder, where it needs one."""
    if isinstance(engine, AnySimulatedEngine):
        return dataclasses.replace(engine, memory=with_folder(engine.memory, folder))
    return engine


def resolved_settings(experiment: Experiment, trial: RunSpec) -> dict[str, Any]:
    """Every hyperparameter, including those that follow from buffer size, local steps and rounds."""
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
        "engine": "ray" if isinstance(trial.engine, RayCluster) else type(trial.engine).__name__.lower(),
    }


def _build_module(experiment: Experiment, source: Source) -> nn.Module:
    name = experiment.model or models.default_model(source.name)
    module = models.build(name, tuple(source.train.inputs.shape[1:]), source.classes, experiment.seed)
    models.check_inputs(name, source.train.inputs, source.classes)
    return module


def _build_population(experiment: Experiment, source: Source, partition: Partition) -> Population:
    parts = partition.split(source.labels, experiment.clients, experiment.seed, source.groups)
    if experiment.local_epochs is not None:
        return Population(source.train, parts, Epochs(experiment.local_epochs, experiment.batch_size))
    return Population(source.train, parts, Steps(experiment.local_steps, experiment.batch_size))


def _local_steps(population: Population) -> int:
    """Local steps per task; their mean over clients where they differ."""
    work = population.work
    if isinstance(work, Steps):
        return work.count
    sizes = [population.size(client) for client in range(len(population))]
    return max(1, round(sum(work.count * math.ceil(size / work.size) for size in sizes) / len(sizes)))


def _parse_device(name: str) -> torch.device:
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise InputError(f"unknown device '{name}': choose cpu or cuda.")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise InputError(
            f"the device '{name}' is not to be had here: use {setting_name('device')} cpu."
        ) from None
    return device
