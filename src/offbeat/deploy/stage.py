"""A plan made real at the server: model, test data, method and the way from uploads to means."""

import dataclasses
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offbeat.aggregate.aggregation import Aggregate
from offbeat.aggregate.mean import Mean
from offbeat.aggregate.private import Private
from offbeat.aggregate.summation import Summation
from offbeat.aggregate.uploads import clients_read_staleness
from offbeat.algorithms import build
from offbeat.core import AnyAlgorithm, wants_rank
from offbeat.deploy.loading import cross_entropies, find, frozen, load_examples, seeded_module
from offbeat.deploy.plan import Plan, in_keys
from offbeat.engines.engine import Engine
from offbeat.errors import InputError
from offbeat.experiment import Experiment
from offbeat.population.population import Examples
from offbeat.precision import Precision
from offbeat.problem import Loss, Problem
from offbeat.protection import aggregate_of, check_protection, steadied, with_noise
from offbeat.schedule.dispatch import Dispatch
from offbeat.schedule.staleness import Weights, parse_weights
from offbeat.trial import Trial, rehearse, timing


class Stage(NamedTuple):
    """All of a run but its engine."""

    plan: Plan
    experiment: Experiment
    algorithm: AnyAlgorithm
    dispatch: Dispatch
    weights: Weights
    limit: float
    problem: Problem
    test: Examples | None
    aggregate: Aggregate
    parameters: dict[str, Any]

    @property
    def note(self) -> dict[str, Any]:
        """What sites are told of the plan."""
        kept = frozen(self.problem.module(*self.problem.initial()))
        return self.plan.note(self.parameters) | ({} if kept is None else {"frozen": kept})

    @property
    def noise(self) -> float | None:
        """The multiplier of the noise, where there is any."""
        return self.aggregate.noise if isinstance(self.aggregate, Private) else None

    def trial(self, engine: Engine) -> Trial:
        """What the loop runs."""
        return Trial(
            self.algorithm,
            engine,
            self.dispatch,
            self.weights,
            self.limit,
            self.problem,
            self.test,
            None,
            self.aggregate,
            self.parameters,
        )


def set_up(plan: Plan, noise: float | None = None, summation: Summation | None = None) -> Stage:
    """Put together what a plan names; `noise` is what an earlier start of the same run came to."""
    experiment = plan.experiment
    try:
        dispatch, weights = timing(experiment), parse_weights(experiment.weights)
        opening = rehearse(experiment, dispatch, weights)
        method, limit = opening.algorithm, opening.limit
        check_sites_can(experiment.algorithm, method)
        plain = dataclasses.replace(experiment, secure=False)
        known = with_noise(plain, opening) if noise is None else dataclasses.replace(plain, noise=noise)
        aggregate = _summed(aggregate_of(known, method), summation)
        check_protection(aggregate, opening)
        problem = problem_of(plan)
        if problem.tracks and (experiment.clip is not None or experiment.secure):
            raise InputError(
                "the model keeps running statistics, which would leave sites in plain sight: "
                "use a model without them."
            )
        parameters = steadied(experiment, aggregate)
        algorithm = build(experiment.algorithm, plan.setting, parameters)
    except InputError as error:
        raise InputError(in_keys(str(error))) from None
    test = _test(plan, problem)
    return Stage(plan, experiment, algorithm, dispatch, weights, limit, problem, test, aggregate, parameters)


def problem_of(plan: Plan) -> Problem:
    """The model of a plan; what it begins with follows from the seed."""
    _search(plan.folder)
    experiment, code = plan.experiment, plan.code
    device = _device(experiment.device)
    precision = Precision[experiment.precision.upper()]
    if precision is Precision.TF32 and device.type == "cpu":
        raise InputError("a CPU does not round products to tf32: use device = 'cuda', or no precision.")
    module = seeded_module(find(code.module, "module of [task]"), experiment.seed).to(device)
    return Problem(module, _losses(code.module, code.losses), experiment.weight_decay, precision)


def check_sites_can(name: str, algorithm: AnyAlgorithm) -> None:
    """Refuse a method whose clients would have to know what nobody knows yet."""
    if clients_read_staleness(algorithm):
        raise InputError(
            f"clients of {name} read how stale their update is, which nobody knows before it arrives: "
            "use another method, or other parameters."
        )
    if wants_rank(algorithm):
        raise InputError(
            f"clients of {name} with these parameters depend on the order in which tasks begin, "
            "which a site is not told: use other parameters."
        )


def _summed(aggregate: Aggregate, summation: Summation | None) -> Aggregate:
    if summation is None:
        return aggregate
    assert isinstance(aggregate, Mean | Private)
    return dataclasses.replace(aggregate, summation=summation)


def _search(folder: Path) -> None:
    """Modules lie beside the settings file, too."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _losses(module: str, losses: str | None) -> Loss:
    """Named, or beside the model, or the cross entropy."""
    home = module.partition(":")[0]
    if losses is None and not hasattr(sys.modules[home], "losses"):
        return cross_entropies
    return find(losses or f"{home}:losses", "losses of [task]")


def _test(plan: Plan, problem: Problem) -> Examples | None:
    if plan.code.test is None:
        return None
    function = find(plan.code.test, "test of [task]")
    return load_examples(lambda name: function(), "server").to(problem.device)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise InputError(f"the device '{name}' is not to be had here: use device = 'cpu'.") from None
    return device
