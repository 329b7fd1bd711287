"""A deployment in one process: its settings, and the data of its sites in one pile, for a replay."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat import trees
from offbeat.aggregate.secure import Secure
from offbeat.deploy.loading import Load, find_own, load_examples, seeded_module
from offbeat.deploy.plan import Code, Plan
from offbeat.deploy.roster import Roster
from offbeat.deploy.stage import set_up
from offbeat.engines.simulated import Sequential, Vectorised
from offbeat.errors import InputError
from offbeat.experiment import Experiment
from offbeat.population.batches import Epochs, Steps
from offbeat.population.population import Examples, Population
from offbeat.problem import Problem
from offbeat.trial import Trial


def is_deployment(settings: Mapping[str, Any]) -> bool:
    """Whether a run's settings are of sites; a simulation's name its data."""
    return "task" in settings


def stage_again(
    settings: Mapping[str, Any],
    folder: Path,
    data: str,
    module: str | None = None,
    losses: str | None = None,
    *,
    together: bool = False,
) -> Trial:
    """What a deployed run was put together from, with all its sites as clients of a simulated engine.

    The functions are named as for a site; `together` computes clients side by side.
    """
    own = find_own(data, module, losses)
    experiment, secure = Experiment.from_settings(dict(settings)), settings.get("secure_sums")
    named = Code(module or f"{data.partition(':')[0]}:module", losses)
    stage = set_up(
        Plan(Path.cwd(), named, experiment, settings.get("examples")),
        summation=None if secure is None else Secure(secure["minimum"]),
    )
    made = seeded_module(own.module, experiment.seed).to(stage.problem.device)
    problem = Problem(
        made, own.losses, stage.problem.weight_decay, stage.problem.precision
    )  # as sites have it
    count, size = experiment.local_epochs, experiment.batch_size
    work = Steps(experiment.local_steps, size) if count is None else Epochs(count, size)
    members = Roster(folder / "roster.json", experiment.clients, bound=False).members
    names = [members[client].name if client in members else None for client in range(experiment.clients)]
    population = piled(own.load, names, work).to(problem.device)
    engine = Vectorised(problem, population) if together else Sequential(problem, population)
    return stage._replace(problem=problem).trial(engine)


@dataclass(frozen=True)
class Pile:
    """Parts of examples that lie client after client; one without a site has none."""

    ends: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, client: int) -> NDArray[np.int64]:
        if not 0 <= client < len(self.ends):
            raise IndexError(f"client {client} of {len(self.ends)}")
        return np.arange(self.ends[client - 1] if client else 0, self.ends[client])


def piled(load: Load, sites: Sequence[str | None], work: Steps | Epochs) -> Population:
    """The sites' examples as clients of one population, in the order of their numbers."""
    each = [None if name is None else load_examples(load, name) for name in sites]
    there = [(name, own) for name, own in zip(sites, each, strict=True) if own is not None]
    if not there:
        raise InputError("no site ever joined this run: there is nothing to replay.")
    name, first = there[0]
    for other, own in there:
        if _form(own) != _form(first):
            raise InputError(
                f"the examples of sites '{name}' and '{other}' differ in kind: load what the sites loaded."
            )
    data: Examples = trees.over(lambda *parts: torch.cat(parts), *(own for _, own in there))
    ends = np.cumsum([0 if own is None else own.total for own in each]).tolist()
    return Population(data, Pile(tuple(ends)), work)


def _form(data: Examples) -> tuple[Any, ...]:
    """What examples must share to lie in one pile."""

    def kind(leaf: Tensor) -> tuple[Any, ...]:
        return leaf.dtype, tuple(leaf.shape[1:])

    return trees.shape(data), [kind(leaf) for leaf in trees.leaves(data)]
