"""How well a run's last model serves each client, on the client's own examples."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from offbeat import trees
from offbeat.data.datasets import Source
from offbeat.errors import InputError
from offbeat.report.load import Run
from offbeat.report.trace import Floats
from offbeat.training import checkpoint
from offbeat.training.build import AnySimulatedEngine, RunSpec, build_run
from offbeat.training.evaluate import accuracy
from offbeat.training.experiment import Experiment

_BATCH = 1000  # examples at once
_TENTH = 0.1


@dataclass(frozen=True)
class ClientAccuracies:
    """Accuracies of all clients."""

    version: int  # of the model
    accuracies: Floats

    @property
    def mean(self) -> float:
        return float(self.accuracies.mean())

    @property
    def deviation(self) -> float:
        return float(self.accuracies.std())

    @property
    def worst(self) -> float:
        """The mean of the worst tenth."""
        count = max(1, round(_TENTH * len(self.accuracies)))
        return float(np.sort(self.accuracies)[:count].mean())


def client_accuracies(runs: Sequence[Run]) -> dict[str, ClientAccuracies | str]:
    """By the labels of runs; or why there is none, in a sentence. Data that runs share are loaded once."""
    loaded: dict[tuple[str, str | None], Source | None] = {}
    found: dict[str, ClientAccuracies | str] = {}
    for run in runs:
        if run.deployed:
            found[run.label] = (
                "its examples are with its sites, so how well each is served is not known here."
            )
            continue
        try:
            experiment = Experiment.from_settings(dict(run.settings))
            data = (experiment.data, experiment.data_dir)
            trial = build_run(_on_this_machine(experiment), loaded.get(data))
            loaded[data] = trial.source
            found[run.label] = _evaluate_clients(trial, run.folder / "checkpoint" / "state.safetensors")
        except InputError as error:
            found[run.label] = f"how well each client is served could not be computed, for {error}"
    return found


def _on_this_machine(experiment: Experiment) -> Experiment:
    """The same clients and model in this process, wherever they were computed."""
    return dataclasses.replace(
        experiment,
        engine="sequential",
        device="cpu",
        execution="auto",
        precision="torch",
        workers=None,
        ray_address=None,
    )


def _evaluate_clients(trial: RunSpec, place: Path) -> ClientAccuracies:
    facts, tensors = checkpoint.load(place)
    x, statistics = trial.problem.initial()
    shape = trees.structure(trial.algorithm.init(x))
    try:
        state = trees.unflatten(shape, [tensors[f"state.{n}"] for n in range(shape.num_leaves)])
        model = tensors.get("average", state.x)
        learned = {name: tensors[f"statistics.{name}"] for name in statistics}
    except (KeyError, ValueError):
        raise InputError(f"the checkpoint {place} is of another model: put the run's own back.") from None
    if model.shape != x.shape:
        raise InputError(f"the checkpoint {place} is of another model: put the run's own back.")
    assert isinstance(trial.engine, AnySimulatedEngine)
    population = trial.engine.population
    right = []
    with torch.no_grad():
        for start in range(0, population.data.total, _BATCH):
            some = trees.map(lambda leaf, at=start: leaf[at : at + _BATCH], population.data)
            outputs = trial.problem.outputs(model, some.inputs, learned)
            right.append(accuracy(outputs, some.targets))
    scores = torch.cat(right).numpy()
    each = np.array([scores[population.parts[client]].mean() for client in range(len(population))])
    return ClientAccuracies(facts["version"], each)
