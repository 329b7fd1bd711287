"""From a settings file to the objects of a run: model, test data, method and aggregation.

`set_up` builds them for a server. `set_up_replay` builds them for a replay in one process, with the data of
all sites in one population.
"""

import dataclasses
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from offbeat import trees
from offbeat.aggregate.mean import Aggregator, PlainSum, Summation
from offbeat.aggregate.private import Private
from offbeat.aggregate.secure import RemoteSecure, Secure
from offbeat.aggregate.uploads import clients_read_staleness
from offbeat.core import AnyAlgorithm, traits_of
from offbeat.data.population import Epochs, Examples, ExampleSource, Population, Steps
from offbeat.data.sources import ClientData
from offbeat.deploy.config import (
    CodeConfig,
    LoadData,
    ServeConfig,
    frozen_weights_digest,
    load_examples,
)
from offbeat.deploy.helper.client import HttpsHelperConnection
from offbeat.deploy.helper.protocol import read_token
from offbeat.deploy.monitor.observer import Observer
from offbeat.deploy.server.registry import ClientRegistry
from offbeat.engines.engine import Engine
from offbeat.engines.simulation import Sequential, Vectorised
from offbeat.errors import InputError, naming_settings
from offbeat.nn.problem import Problem
from offbeat.schedule.dispatch import Dispatch
from offbeat.schedule.staleness import StalenessWeights, parse_weights
from offbeat.training.build import (
    RunSpec,
    build_aggregate,
    build_problem,
    check_privacy,
    dry_run,
    parameters_under_noise,
    parse_device,
    personal_arguments,
    standardised_problem,
    with_calibrated_noise,
)
from offbeat.training.experiment import Experiment, build_dispatch
from offbeat.training.method import build_method
from offbeat.training.standardise import Moments, Scaling, limb_secure, moments_of
from offbeat.training.stopping import StopRules
from offbeat.training.task import LearningTask, load_task

_LOG = logging.getLogger("offbeat")


class ServerSetup(NamedTuple):
    """Everything of a run except its engine."""

    config: ServeConfig
    experiment: Experiment
    algorithm: AnyAlgorithm
    dispatch: Dispatch
    weights: StalenessWeights
    max_staleness: float
    problem: Problem
    task: LearningTask
    test: Examples | ExampleSource | ClientData | None
    aggregate: Aggregator
    parameters: dict[str, Any]
    scaling: Scaling | None = None  # of the inputs, once the sites have agreed on it

    @property
    def site_plan(self) -> dict[str, Any]:
        """The plan that sites receive with every task."""
        module = self.problem.module(*self.problem.initial())
        own = module.get_submodule("module") if self.scaling is not None else module  # what sites have
        digest = frozen_weights_digest(own)
        personal = personal_arguments(self.experiment, self.algorithm) if self.problem.personal else {}
        personal.pop("personal_optimizer", None)  # it is that of the method
        return self.config.note(self.parameters) | personal | ({} if digest is None else {"frozen": digest})

    @property
    def noise(self) -> float | None:
        """The noise multiplier of a private run."""
        return self.aggregate.noise if isinstance(self.aggregate, Private) else None

    def run_spec(self, engine: Engine) -> RunSpec:
        """What the training loop runs."""
        known = self._asdict()
        return RunSpec(engine=engine, **{name: known[name] for name in RunSpec._fields if name in known})

    def standardised(self, scaling: Scaling) -> Self:
        """The same run with inputs that are scaled."""
        problem = standardised_problem(self.experiment, self.problem, self.algorithm, scaling)
        return self._replace(problem=problem, scaling=scaling)

    def moments(self) -> Moments:
        """The method by which sites agree on the scaling of features."""
        features = self.config.prepare.features
        some = None
        if isinstance(self.test, ClientData):
            some = self.test.examples(next(iter(self.test.names or ())))
        elif self.test is not None:
            some = self.test.gather(np.arange(1))
        if some is None and features is None:
            raise InputError(
                "standardise of [prepare] needs to know how many features an example has: give features "
                "there, or give the task test examples."
            )
        found = Moments(features or 0) if some is None else moments_of(self.problem, some)
        return found if features is None else dataclasses.replace(found, features=features)


def set_up(
    config: ServeConfig,
    noise: float | None = None,
    summation: Summation | None = None,
    task: LearningTask | None = None,
) -> ServerSetup:
    """Build what the settings name; a resumed run gives the noise that it was calibrated to before.

    A task takes the place of the one that the settings name.
    """
    experiment = config.experiment
    if str(config.folder) not in sys.path:
        sys.path.insert(0, str(config.folder))  # modules may lie beside the settings file
    with naming_settings(str):  # as the keys of the settings file
        dispatch, weights = build_dispatch(experiment), parse_weights(experiment.weights)
        opening = dry_run(experiment, dispatch, weights)
        method, max_staleness = opening.algorithm, opening.max_staleness
        check_deployable(experiment.algorithm, method)
        sums = PlainSum() if summation is None else summation
        known = (
            with_calibrated_noise(experiment, opening, sums)
            if noise is None
            else dataclasses.replace(experiment, noise=noise)
        )
        aggregate = build_aggregate(known, method, sums)
        check_privacy(aggregate, opening)
        task = task or load_task(config.code.function, experiment.seed, "function of [task]")
        if experiment.personal is None and task.personal:
            experiment = dataclasses.replace(experiment, personal=",".join(task.personal))
        parameters = parameters_under_noise(experiment, aggregate)
        algorithm = build_method(experiment, config.setting, parameters)
        problem = build_problem(experiment, task, algorithm, parse_device(experiment.device))
    if problem.personal and task.test is not None:
        _LOG.warning("personal layers stay at the sites, so the server does not evaluate the model.")
    test = None if problem.personal else task.test_data()
    with naming_settings(str):
        StopRules.of(experiment, task.goals, evaluated=test is not None)  # or raises
    test = test.to(problem.device) if isinstance(test, Examples) else test
    return ServerSetup(
        config,
        experiment,
        algorithm,
        dispatch,
        weights,
        max_staleness,
        problem,
        task,
        test,
        aggregate,
        parameters,
    )


def check_deployable(name: str, algorithm: AnyAlgorithm) -> None:
    """Refuse a method whose clients need what a site cannot know."""
    if clients_read_staleness(algorithm):
        raise InputError(
            f"clients of {name} need the staleness of their update, which is not known before it arrives: "
            "use another method, or other parameters."
        )
    if traits_of(algorithm).reads_rank:
        raise InputError(
            f"clients of {name} with these parameters depend on the order in which tasks begin, "
            "which a site does not know: use other parameters."
        )


def secure_summation(
    config: ServeConfig, run: bytes, observer: Observer, *, limbs: bool = False
) -> Summation | None:
    """Secure aggregation with the helper of the settings, under the run's id; None if it is not used.

    `limbs` selects the fixed point in which sites agree on the scaling of features.
    """
    secure = config.secure
    if secure is None:
        return None
    certificate = None if secure.certificate is None else config.near(secure.certificate)
    helper = HttpsHelperConnection(
        secure.helper,
        read_token(config.near(secure.token)),
        certificate,
        on_failure=lambda sentence: observer.tell("helper_away", sentence=sentence),
        on_recovery=lambda: observer.tell("helper_back"),
    )
    form = limb_secure(secure.minimum) if limbs else Secure(secure.minimum)
    return RemoteSecure(form, run, helper, secure.signed)


def set_up_replay(settings: Mapping[str, Any], folder: Path, task: str, *, together: bool = False) -> RunSpec:
    """A deployed run with its sites as clients of a simulated engine; `together`: of the vectorised one."""
    experiment, secure = Experiment.from_settings(dict(settings)), settings.get("secure_sums")
    setup = set_up(
        ServeConfig(Path.cwd(), CodeConfig(task), experiment, settings.get("examples")),
        summation=None if secure is None else Secure(secure["minimum"]),
        task=load_task(task, experiment.seed, "--task"),
    )
    scaling = Scaling.from_settings(settings)
    setup = setup if scaling is None else setup.standardised(scaling)
    problem = setup.problem
    count, size = experiment.local_epochs, experiment.batch_size
    work = Steps(experiment.local_steps, size) if count is None else Epochs(count, size)
    members = ClientRegistry(folder / "roster.json", experiment.clients, bound=False).members
    names = [members[client].name if client in members else None for client in range(experiment.clients)]
    population = pool_site_data(setup.task.site_examples, names, work).to(problem.device)
    engine = Vectorised(problem, population) if together else Sequential(problem, population)
    return setup.run_spec(engine)


def pool_site_data(load: LoadData, sites: Sequence[str | None], work: Steps | Epochs) -> Population:
    """The examples of all sites as one population, by client number; a client without a site has none."""
    loaded = [None if name is None else load_examples(load, name) for name in sites]
    joined = [(name, own) for name, own in zip(sites, loaded, strict=True) if own is not None]
    if not joined:
        raise InputError("no site ever joined this run: there is nothing to replay.")
    name, first = joined[0]
    for other, own in joined:
        if _example_spec(own) != _example_spec(first):
            raise InputError(
                f"the examples of sites '{name}' and '{other}' differ in dtype or shape: "
                "load what the sites loaded."
            )
    data: Examples = trees.map(lambda *parts: torch.cat(parts), *(own for _, own in joined))
    ends = np.cumsum([0 if own is None else own.total for own in loaded])
    parts = dict(enumerate(np.split(np.arange(ends[-1]), ends[:-1])))  # those of a list may not be empty
    return Population(data, parts, work)


def _example_spec(data: Examples) -> tuple[Any, ...]:
    """What examples of one population have in common."""
    return trees.structure(data), [(leaf.dtype, leaf.shape[1:]) for leaf in trees.leaves(data)]
