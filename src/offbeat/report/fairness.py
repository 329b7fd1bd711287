"""The accuracy of a run's last model on each client's own training examples."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offbeat import trees
from offbeat.data.datasets import Source
from offbeat.errors import InputError
from offbeat.report.load import Run
from offbeat.report.trace import Floats
from offbeat.training import checkpoint
from offbeat.training.build import AnySimulatedEngine, RunSpec, build_run
from offbeat.training.evaluate import accuracy, evaluate
from offbeat.training.experiment import Experiment
from offbeat.training.standardise import Scaling
from offbeat.training.task import named_task

_TENTH = 0.1


@dataclass(frozen=True)
class ClientAccuracies:
    """The accuracies of all clients."""

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
        """The mean over the tenth of the clients with the lowest accuracy."""
        count = max(1, round(_TENTH * len(self.accuracies)))
        return float(np.sort(self.accuracies)[:count].mean())


def client_accuracies(runs: Sequence[Run]) -> dict[str, ClientAccuracies | str]:
    """Accuracies by run label, or the reason why there are none. Data that runs share are loaded once."""
    loaded: dict[tuple[str | None, str | None], Source | None] = {}
    found: dict[str, ClientAccuracies | str] = {}
    for run in runs:
        if run.deployed:
            found[run.label] = (
                "its examples are at its sites, so the accuracy of each client is not known here."
            )
            continue
        try:
            experiment = Experiment.from_settings(dict(run.settings))
            data = (experiment.data, experiment.data_dir)
            experiment = _on_this_machine(experiment)
            scaling = Scaling.from_settings(run.settings)
            spec = build_run(experiment, named_task(experiment, loaded.get(data)), scaling=scaling)
            loaded[data] = spec.task.data if spec.task and isinstance(spec.task.data, Source) else None
            found[run.label] = _evaluate_clients(spec, run.folder / "checkpoint" / "state.safetensors")
        except InputError as error:
            found[run.label] = f"the accuracy of each client could not be computed: {error}"
    return found


def _on_this_machine(experiment: Experiment) -> Experiment:
    """The same clients and model, computed in this process on the CPU."""
    return dataclasses.replace(
        experiment,
        engine="sequential",
        device="cpu",
        execution="auto",
        precision="auto",
        workers=None,
        ray_address=None,
    )


def _evaluate_clients(spec: RunSpec, path: Path) -> ClientAccuracies:
    facts, tensors = checkpoint.load(path)
    x, statistics = spec.problem.initial()
    shape = trees.structure(spec.algorithm.init(x))
    try:
        state = trees.unflatten(shape, [tensors[f"state.{n}"] for n in range(shape.num_leaves)])
        model = tensors.get("average", state.x)
        learned = {name: tensors[f"statistics.{name}"] for name in statistics}
    except (KeyError, ValueError):
        raise InputError(f"the checkpoint {path} is of another model: restore the run's own.") from None
    if model.shape != x.shape:
        raise InputError(f"the checkpoint {path} is of another model: restore the run's own.")
    assert isinstance(spec.engine, AnySimulatedEngine)
    population = spec.engine.population
    each = [
        evaluate(
            spec.problem,
            model,
            population.data.gather(population.parts[client]),
            {"accuracy": accuracy},
            statistics=learned,
        )["accuracy"]
        for client in range(len(population))
    ]
    return ClientAccuracies(facts["version"], np.array(each))
