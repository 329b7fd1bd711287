"""Build everything that a run needs from its settings: data, clients, model, method, aggregation, engine."""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from offbeat import trees
from offbeat.aggregate.compression import check_compression, parse_compression
from offbeat.aggregate.mean import AggregationContext, Aggregator, Mean, PlainSum, Summation
from offbeat.aggregate.private import Private
from offbeat.aggregate.robust import parse_aggregate
from offbeat.aggregate.secure import Secure
from offbeat.algorithms import Setting, find
from offbeat.algorithms.fedopt import STAMP_SHARE
from offbeat.algorithms.momentum_approximation import Ridge
from offbeat.algorithms.rates import local_optimizer, unwrapped
from offbeat.core import AnyAlgorithm, Batch
from offbeat.data.client_store import make_client_store, parse_memory_backend, with_folder
from offbeat.data.partition import parse_partition
from offbeat.data.population import Epochs, Examples, ExampleSource, Population, Steps
from offbeat.data.sources import ClientData
from offbeat.engines.engine import Engine
from offbeat.engines.execution import EXECUTIONS
from offbeat.engines.local import SMALL_MODEL, ClientMemory, load_examples
from offbeat.engines.process_pool import Workers, available_cores
from offbeat.engines.ray_cluster import RayCluster, check_cluster
from offbeat.engines.simulation import Sequential, Vectorised
from offbeat.errors import InputError, setting_name
from offbeat.nn.layers import below_scaling
from offbeat.nn.problem import Precision, Problem
from offbeat.privacy.accountant import Accountant, largest_within, parse_accountant, round_up
from offbeat.privacy.correlated import default_separation, parse_correlation
from offbeat.privacy.ledger import PrivacyAccounting, ReleaseTotals
from offbeat.privacy.mechanism import AdaptiveClipping
from offbeat.schedule.availability import (
    Always,
    Availability,
    DataAvailability,
    Dropout,
    parse_availability,
)
from offbeat.schedule.delays import parse_delay
from offbeat.schedule.devices import TaskWork, WorkDelay, for_work
from offbeat.schedule.dispatch import Dispatch, PooledDispatch
from offbeat.schedule.participation import Participation
from offbeat.schedule.staleness import StalenessWeights, parse_weights
from offbeat.training.experiment import (
    Experiment,
    build_dispatch,
    build_limits,
    check_limits_private,
    personal_layers,
)
from offbeat.training.loop import check_extendable, check_fit
from offbeat.training.method import build_method, check_schedules_last
from offbeat.training.standardise import Scaling, describe_scales, measure_scaling
from offbeat.training.stopping import StopRules, parse_target
from offbeat.training.task import LearningTask, failure, named_task

_WORKERS_GRADIENTS = 2_000  # gradients of a larger model that make up for the start of worker processes
_FEW_OPERATIONS = 20_000_000  # of a gradient, below which torch's calls dominate, which `vmap` saves
_MAPPED_MODEL = 200_000  # parameters up to which this holds
_MAPPED_CORES = 4  # cores above which workers save more
_GRAIN = 1e-3  # relative precision of the noise that is searched for
_MAX_GRAINS = 20_000  # the search is limited to noise between exp(-20) and exp(20)
_PERSONAL_LR = 0.1  # of personal layers, where the method has no local rate


def build_aggregate(
    experiment: Experiment, algorithm: AnyAlgorithm, summation: Summation | None = None
) -> Aggregator:
    """The aggregation of an experiment, whose noise must be known."""
    if summation is None:
        summation = Secure() if experiment.secure else PlainSum()
    if experiment.aggregate != "mean":
        return parse_aggregate(experiment.aggregate)
    if experiment.clip is None:
        return Mean(summation)
    assert experiment.noise is not None
    assert experiment.delta is not None
    correlation = parse_correlation(experiment.noise_correlation)
    separation = experiment.min_separation
    return Private.of(
        algorithm,
        _parse_bounds(experiment.clip),
        experiment.noise,
        experiment.delta,
        epsilon=experiment.epsilon,
        simulate_amplification=experiment.simulate_amplification,
        participation=Participation(
            experiment.max_participations,
            default_separation(correlation) if separation is None else separation,
        ),
        correlation=correlation,
        accountant=parse_accountant(experiment.accountant),
        adaptive=None if experiment.adaptive_clip is None else AdaptiveClipping(experiment.adaptive_clip),
        nominal=experiment.nominal_cohort,
        summation=summation,
        noise_seed=experiment.noise_seed,
        noise_source=experiment.noise_source,
    )


def with_calibrated_noise(
    experiment: Experiment, context: AggregationContext, summation: Summation | None = None
) -> Experiment:
    """Compute the noise that keeps all server steps below epsilon, if only epsilon was given.

    If noise and epsilon are given and no amplification is simulated, clients may contribute as often as the
    budget allows.
    """
    if experiment.clip is None or (experiment.noise is not None and experiment.epsilon is None):
        return experiment
    if experiment.noise is not None:
        return _with_fitting_participations(experiment, context, summation)
    tried = dataclasses.replace(experiment, noise=1.0, epsilon=None)
    draft = build_aggregate(tried, context.algorithm, summation)
    check_privacy(draft, context)
    assert isinstance(draft, Private)
    assert experiment.epsilon is not None
    spending = draft.accounting(context)
    start, most = context.algorithm.warmup() is not None, draft.participation.max_participations
    times = context.rounds if most is None else min(context.rounds, most - start)
    noise = _least_noise(spending, ReleaseTotals(start, context.rounds, times), experiment.epsilon)
    return dataclasses.replace(experiment, noise=noise)


def _with_fitting_participations(
    experiment: Experiment, context: AggregationContext, summation: Summation | None
) -> Experiment:
    aggregate = build_aggregate(experiment, context.algorithm, summation)
    check_privacy(aggregate, context)
    assert isinstance(aggregate, Private)
    assert experiment.epsilon is not None
    start = context.algorithm.warmup() is not None
    fit = aggregate.accounting(context).budget(experiment.epsilon, start, context.rounds).contributions
    return (
        experiment
        if math.isinf(fit)
        else dataclasses.replace(experiment, max_participations=int(fit) + start)
    )


def parameters_under_noise(experiment: Experiment, aggregate: Aggregator) -> dict[str, Any]:
    """The hyperparameters; under noise, momentum approximation gets a penalty unless a solver was chosen."""
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


def check_privacy(aggregate: Aggregator, context: AggregationContext) -> None:
    """Reject settings early that the run itself would reject."""
    bounds, population = aggregate.participation, context.population
    if isinstance(context.dispatch, PooledDispatch):
        bounds.check(context.dispatch.pool(population), population, context.buffer)
    if context.algorithm.warmup() is not None:
        bounds.check_start()
    aggregate.open(context)


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

    def noise(index: int) -> float:
        return math.exp(-_GRAIN * index)

    def search(accountant: Accountant, start: int) -> int:
        def spent(index: int) -> float:
            return dataclasses.replace(spending, noise=noise(index), accountant=accountant).epsilon(tally)

        found = largest_within(spent, epsilon, start, 100, -_MAX_GRAINS, _MAX_GRAINS)
        if found < -_MAX_GRAINS:
            raise InputError(
                f"no noise brings epsilon down to {epsilon:g} by the {accountant.name} accountant: "
                f"raise {setting_name('epsilon')} or {setting_name('delta')}."
            )
        return found

    rougher = spending.accountant.rougher()
    found = search(spending.accountant, 0 if rougher is None else search(rougher, 0))
    return round_up(noise(found))


AnySimulatedEngine: TypeAlias = Sequential | Vectorised | Workers | RayCluster


class RunSpec(NamedTuple):
    """Everything that a run needs, built from an experiment."""

    algorithm: AnyAlgorithm
    engine: Engine
    dispatch: Dispatch
    weights: StalenessWeights
    max_staleness: float
    problem: Problem
    test: Examples | ExampleSource | ClientData | None  # None: nothing is evaluated
    task: LearningTask | None  # None: the sites of a deployment have it
    aggregate: Aggregator
    parameters: dict[str, Any]  # hyperparameters that were given, or that follow from the noise
    scaling: Scaling | None = None  # of the inputs, where they are standardised
    unscaled: str | None = None  # a sentence about features that are far from unit scale
    engine_reason: str | None = None  # why this engine was chosen, if none was named

    def loop_arguments(self, experiment: Experiment) -> dict[str, Any]:
        """The keyword arguments of `train` and `replay` that follow from the settings."""
        return {
            "dispatch": self.dispatch,
            "buffer": experiment.buffer,
            "rounds": experiment.rounds,
            "weights": self.weights,
            "max_staleness": self.max_staleness,
            "aggregate": self.aggregate,
            "compress": parse_compression(experiment.compress),
            "seed": experiment.seed,
        }


def dry_run(
    experiment: Experiment,
    dispatch: Dispatch,
    weights: StalenessWeights,
    availability: Availability = Always(),
) -> AggregationContext:
    """The context of the run with a model of one parameter; raises for incompatible settings."""
    method = build_method(experiment, Setting(1, 1, 1), dict(experiment.parameters))
    limit = math.inf if experiment.max_staleness is None else experiment.max_staleness
    check_fit(method, dispatch, weights, experiment.rounds, limit)
    check_compression(method, parse_compression(experiment.compress))
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
    check_schedules_last(experiment, rounds)
    check_extendable(experiment.algorithm, dict(experiment.parameters), experiment.rounds, rounds)
    often = experiment.rounds if experiment.max_participations is None else experiment.max_participations
    simulated, shaped = experiment.simulate_amplification, experiment.noise_correlation != "independent"
    if experiment.epsilon is not None and (simulated or shaped or often > experiment.rounds):
        raise InputError(
            f"noise and epsilon of this run are for {experiment.rounds} server steps, and more would "
            f"reveal more about its clients: name another {setting_name('out')}, whose epsilon adds to this."
        )


def build_run(
    experiment: Experiment,
    task: LearningTask | None = None,
    folder: Path | None = None,
    scaling: Scaling | None = None,
) -> RunSpec:
    """Load and divide the data and build all objects of a run; most bad input is rejected before the loading.

    `task` replaces the task, or the data and the model, that the experiment names. `folder` is where the run
    will be written: the clients' memory must fit there, or in RAM. `scaling` is that of a run that is resumed
    or replayed; for a new run it is computed from the data of the clients.
    """
    if experiment.task is not None:
        task = task or named_task(experiment)
        task.check_clients(experiment.clients)
    dispatch = build_dispatch(experiment)
    delays = task.parse_delays(experiment.delays) if task else parse_delay(experiment.delays)
    availability = parse_availability(experiment.availability)
    if experiment.stop_at is not None:
        parse_target(experiment.stop_at)  # raises before the data are loaded
    dropout, weights = Dropout(experiment.dropout), parse_weights(experiment.weights)
    if task is None:
        parse_partition(experiment.partition)  # raises before the data are loaded
    any_work = for_work(delays, TaskWork(lambda client: 1, 0.0, 0.0))
    any_work.bind(dispatch.source(experiment.seed), experiment.clients)  # raises on a bad file of delays
    if not isinstance(availability, DataAvailability):
        availability.bind(experiment.seed)  # raises on a bad file
    limits = build_limits(experiment)
    check_limits_private(experiment, limits.deadline, varying=isinstance(delays, WorkDelay))
    context = dry_run(experiment, dispatch, weights, availability)
    method = context.algorithm
    aggregate = build_aggregate(with_calibrated_noise(experiment, context), method)
    check_privacy(aggregate, context)
    device = parse_device(experiment.device)
    if experiment.engine == "ray":
        check_cluster(experiment.ray_address)
    task = task or named_task(experiment)
    count, size = experiment.local_epochs, experiment.batch_size
    work = Steps(experiment.local_steps, size) if count is None else Epochs(count, size)
    population = task.population(experiment, work).to(device)
    if isinstance(availability, DataAvailability):
        availability = availability.with_weights(task.client_weights(population, availability.measure))
    setting = Setting(experiment.buffer, _local_steps(population), experiment.rounds)
    parameters = parameters_under_noise(experiment, aggregate)
    algorithm = build_method(experiment, setting, parameters)
    problem = build_problem(experiment, task, algorithm, device)
    if experiment.standardise:
        if scaling is None:
            sums = Secure() if experiment.secure else PlainSum()
            scaling = measure_scaling(problem, population, sums, experiment.seed)
        problem = standardised_problem(experiment, problem, algorithm, scaling)
    check_minibatch(problem, population, experiment.seed)
    backend = parse_memory_backend(experiment.memory)
    located = with_folder(backend, folder) if folder else backend
    make_client_store(located, ClientMemory.initial(algorithm, problem), len(population), device)  # or raises
    choice = _engine_choice(experiment, problem, population, setting)
    kind = _engine_type(choice.name, experiment, problem, setting)
    EXECUTIONS[experiment.execution].executor(problem, population).close()  # or raises
    engine = kind(problem, population, delays, availability, dropout, memory=backend, limits=limits)
    test = task.personal_test_data(population) if problem.personal else task.test_data()
    test = test.to(device) if isinstance(test, Examples) else test
    StopRules.of(experiment, task.goals, evaluated=test is not None)  # or raises
    return RunSpec(
        algorithm,
        engine,
        dispatch,
        weights,
        context.max_staleness,
        problem,
        test,
        task,
        aggregate,
        parameters,
        scaling if experiment.standardise else None,
        None if experiment.standardise else describe_scales(population),
        choice.reason or None,
    )


def build_problem(
    experiment: Experiment, task: LearningTask, algorithm: AnyAlgorithm, device: torch.device
) -> Problem:
    """The model and losses of a task; the initial weights follow from the seed."""
    precision = Precision[experiment.precision.upper()]
    if precision is Precision.TF32 and device.type == "cpu":
        raise InputError(
            f"a CPU does not round products to tf32: use {setting_name('device')} cuda, or no "
            f"{setting_name('precision')}."
        )
    module = copy.deepcopy(task.make_module(experiment.seed)).to(device)
    personal = personal_arguments(experiment, algorithm)
    problem = Problem(module, task.loss, experiment.weight_decay, precision, **personal)
    if problem.tracks_statistics and (experiment.clip is not None or experiment.secure):
        raise InputError(
            "the model keeps running statistics, which clients would send unprotected: use a model without "
            "them, such as one with GroupNorm."
        )
    return problem


def check_minibatch(problem: Problem, population: Population, seed: int) -> None:
    """Refuse a module or a loss that fails on the first minibatch of the first client."""
    batch = Batch(load_examples(population, population.indices(0, 0, seed)[0], problem))
    try:
        problem.draws_random_numbers(batch)
    except (InputError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        words = f"the module or its loss fails on a minibatch of the data: {failure(error)}"
        raise InputError(words) from error


def standardised_problem(
    experiment: Experiment, problem: Problem, algorithm: AnyAlgorithm, scaling: Scaling
) -> Problem:
    """The same problem with inputs that are scaled."""
    module = scaling.wrap(problem.module(*problem.initial())).to(problem.device)
    personal = personal_arguments(experiment, algorithm, scaled=True)
    return Problem(module, problem.loss, problem.weight_decay, problem.precision, **personal)


def personal_arguments(
    experiment: Experiment, algorithm: AnyAlgorithm, *, scaled: bool = False
) -> dict[str, Any]:
    """The arguments of `Problem` for personal layers; `scaled`: the model begins with a scaling layer."""
    rate, inner = experiment.personal_lr, algorithm
    while hasattr(inner, "inner"):  # inside weight prediction, a local optimiser or a rate schedule
        inner = inner.inner
    if rate is None and "local_lr" in find(experiment.algorithm).parameters():
        rate = getattr(inner, "local_lr", None)
    layers = personal_layers(experiment.personal)
    return {
        "personal": below_scaling(layers) if scaled else layers,
        "personal_lr": _PERSONAL_LR if rate is None else rate,
        "personal_optimizer": local_optimizer(algorithm),
    }


class EngineChoice(NamedTuple):
    """The engine of a run that names none, and the reason."""

    name: str
    reason: str


def choose_engine(
    problem: Problem, population: Population, gradients: int, cores: int, workers: int | None = None
) -> EngineChoice:
    """The engine for a model and an amount of work, by a rule, so that results do not depend on timing."""
    size = f"the model has {problem.size:,} weights"
    if problem.device.type != "cpu":
        return EngineChoice("vectorised", "the model is on a GPU")
    if workers:
        return EngineChoice("workers", "a number of workers is given")
    if problem.size <= SMALL_MODEL:
        return EngineChoice("vectorised", f"{size}, at most {SMALL_MODEL:,}")
    if problem.size <= _MAPPED_MODEL and cores <= _MAPPED_CORES:
        operations = _operations(problem, population)
        if operations <= _FEW_OPERATIONS:
            few = f"a gradient takes {operations / 1e6:.3g} million operations"
            return EngineChoice("vectorised", f"{few}, at most {_FEW_OPERATIONS / 1e6:.3g} million")
    if cores == 1:
        return EngineChoice("sequential", f"{size} and the machine one core")
    if gradients < _WORKERS_GRADIENTS:
        few = f"{gradients:,} gradients are too few to start workers for"
        return EngineChoice("sequential", f"{size} and {few}")
    return EngineChoice("workers", f"{size}, more than {SMALL_MODEL:,}, and the machine {cores} cores")


def _operations(problem: Problem, population: Population) -> float:
    """The operations of one gradient; infinite where torch cannot count them."""
    try:
        indices = population.indices(0, 0, 0)[0]
        return problem.flops(Batch(load_examples(population, indices, problem)))
    except Exception:
        return math.inf


def _engine_choice(
    experiment: Experiment, problem: Problem, population: Population, setting: Setting
) -> EngineChoice:
    """The engine that is named, without a reason, or one that is chosen."""
    if experiment.engine != "auto":
        return EngineChoice(experiment.engine, "")
    gradients = setting.rounds * setting.cohort * setting.steps
    return choose_engine(problem, population, gradients, available_cores(), experiment.workers)


def _engine_type(
    name: str, experiment: Experiment, problem: Problem, setting: Setting
) -> Callable[..., AnySimulatedEngine]:
    """Return the engine of that name."""
    count = experiment.workers or available_cores()
    if name != "vectorised" and experiment.execution != "auto":
        raise InputError(
            f"the engine '{name}' has no {setting_name('execution')}: leave it out, or add "
            f"{setting_name('engine')} vectorised."
        )
    # with a small buffer, workers would be idle if no task were computed ahead
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


def with_computed_noise(experiment: Experiment, spec: RunSpec) -> Experiment:
    """The experiment with the noise that was computed from its epsilon."""
    if isinstance(spec.aggregate, Private):
        return dataclasses.replace(experiment, noise=spec.aggregate.noise)
    return experiment


def with_run_folder(engine: Engine, folder: Path) -> Engine:
    """The engine with the file of the clients' memory in this folder, where it needs one."""
    if isinstance(engine, AnySimulatedEngine):
        return dataclasses.replace(engine, memory=with_folder(engine.memory, folder))
    return engine


def resolved_settings(experiment: Experiment, spec: RunSpec) -> dict[str, Any]:
    """Every hyperparameter, including those that follow from buffer size, local steps and rounds."""
    given = spec.parameters
    values = {
        name: given.get(name, each.default) for name, each in find(experiment.algorithm).parameters().items()
    }
    computed = {name: getattr(unwrapped(spec.algorithm), name, None) for name in values}
    values = {name: computed[name] if value is None else value for name, value in values.items()}
    own = {} if spec.scaling is None else {"standardise": spec.scaling.as_json()}
    return own | {
        "hyperparameters": {
            name: value if isinstance(value, bool | int | float | str | None) else repr(value)
            for name, value in values.items()
        },
        "model_size": spec.problem.size,
        **({"personal_size": trees.numel(spec.problem.personal)} if spec.problem.personal else {}),
        "engine": "ray" if isinstance(spec.engine, RayCluster) else type(spec.engine).__name__.lower(),
    }


def describe_run(experiment: Experiment, spec: RunSpec) -> dict[str, Any]:
    """The settings of a run and what followed from them, for its folder."""
    found = experiment.settings() | {"resolved": resolved_settings(experiment, spec)}
    if spec.task is not None:
        found["metrics"] = spec.task.goals
        if spec.task.client_names is not None:
            found["client_names"] = list(spec.task.client_names)
    return found


def _local_steps(population: Population) -> int:
    """Local steps per task; their mean over clients where they differ."""
    work = population.work
    if isinstance(work, Steps):
        return work.count
    sizes = [population.size(client) for client in range(len(population))]
    return max(1, round(sum(work.count * math.ceil(size / work.size) for size in sizes) / len(sizes)))


def parse_device(name: str) -> torch.device:
    """The device of a setting, if this machine has it."""
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise InputError(f"unknown device '{name}': choose cpu or cuda.")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise InputError(f"the device '{name}' is not available: use {setting_name('device')} cpu.") from None
    return device
