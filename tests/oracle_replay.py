"""The trace of a run or a deployment, through the oracle of its method: softmax regression in NumPy."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from offbeat import draws
from offbeat.data.population import Epochs, Steps
from oracles.adamasfl import adamasfl
from oracles.cadence import cadence
from oracles.fadas import equation_4, equation_77, fadas
from oracles.fedbuff import fedbuff
from oracles.momentum_approximation import light_momentum_approximation, momentum_approximation
from oracles.replay import Run, Vector
from oracles.server_rules import adam
from oracles.softmax import Softmax
from oracles.weights import Weight, constant, hinge, polynomial


class Settings(NamedTuple):
    """What a trace does not say of its run."""

    method: str  # in the catalogue
    known: Mapping[str, Any]  # every hyperparameter by its name there, as a run's settings resolve them
    x0: np.ndarray  # weight row by row, then bias, as of `nn.Linear`
    work: Steps | Epochs
    seed: int
    weights: str = "constant"  # of stale updates, as a run's settings name them

    @classmethod
    def of(cls, settings: Mapping[str, Any], x0: np.ndarray) -> Self:
        """By the settings.json of a run, simulated or deployed."""
        epochs, size = settings["local_epochs"], settings["batch_size"]
        work = Steps(settings["local_steps"], size) if epochs is None else Epochs(epochs, size)
        known = settings["resolved"]["hyperparameters"]
        return cls(settings["algorithm"], known, x0, work, settings["seed"], settings["weights"])


def oracle_replay(
    trace: Iterable[Mapping[str, Any]], data: Sequence[tuple[np.ndarray, np.ndarray]], settings: Settings
) -> Vector:
    """The last model; `data` has each client's features and labels."""

    def batches(client: int, visit: int) -> list[np.ndarray]:
        rng = draws.generator(settings.seed, "batches", client, visit)
        return settings.work.draw(len(data[client][1]), rng)

    features = data[0][0].shape[1]
    problem = Softmax(
        [inputs.astype(np.float64) for inputs, _ in data],
        [labels for _, labels in data],
        batches,
        len(settings.x0) // (features + 1),
    )
    steps = [[tuple(task[:3]) for task in line["tasks"]] for line in trace if line["version"]]
    oracle, known = _ORACLES[settings.method]
    given = known(settings.known)
    if settings.method == "cadence":
        assert isinstance(settings.work, Steps)
        given["local_steps"] = settings.work.count
    elif settings.method != "adamasfl":  # these two have no weights
        given["weight"] = _weight(settings.weights)
    return oracle(Run(problem, len(data), settings.x0, steps), **given)[-1]


def _weight(text: str) -> Weight:
    name, *numbers = text.split(":")
    return (
        constant
        if name == "constant"
        else {"polynomial": polynomial, "hinge": hinge}[name](*map(float, numbers))
    )


def _only(*names: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    return lambda known: {name: known[name] for name in names}


def _fadas(known: Mapping[str, Any]) -> dict[str, Any]:
    return _only("local_lr", "server_lr", "beta1", "beta2", "eps")(known) | {"correct": known["unbiased"]}


def _fadas_da(known: Mapping[str, Any]) -> dict[str, Any]:
    rate = equation_4 if known["capped"] else equation_77
    return _fadas(known) | {"rate": rate(known["tau_c"])}


_LIGHT = _only("local_lr", "server_lr", "beta", "span")
_FULL = _only("local_lr", "server_lr", "beta", "span", "penalty", "rcond", "window")


def _scaled(known: Mapping[str, Any]) -> dict[str, Any]:
    return {"rule": adam(known["beta2"], known["eps"])}


_ORACLES: dict[str, tuple[Callable[..., list[Vector]], Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    "adamasfl": (adamasfl, _only("local_lr", "server_lr", "beta")),
    "cadence": (cadence, _only("variates", "noisy")),
    "fadas": (fadas, _fadas),
    "fadas-da": (fadas, _fadas_da),
    "fedbuff": (fedbuff, _only("local_lr", "server_lr")),
    "ma-fedavgm": (momentum_approximation, _FULL),
    "ma-fedadam": (momentum_approximation, lambda known: _FULL(known) | _scaled(known)),
    "ma-light-fedavgm": (light_momentum_approximation, _LIGHT),
    "ma-light-fedadam": (light_momentum_approximation, lambda known: _LIGHT(known) | _scaled(known)),
}
