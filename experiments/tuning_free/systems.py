"""What the bench runs: tasks under several systems, and each competitor's grid."""

from collections.abc import Iterator, Mapping
from typing import Any

from offbeat.algorithms import find

SEEDS = (0, 1, 2)
OURS: tuple[str, dict[str, Any]] = ("cadence", {})
# Of cadence: 1 divided each gradient by its own norm, and did not even out coordinates; 2 had the model's
# norm for its unit of length; 3 found it from how far the path had come; 4 began with half the unit, and let
# it grow more slowly and less far; 5 had unit steps throughout, also in tasks of more than 10 steps; 6 had a
# unit that never shrank, and no way back from a model that has died; 7 took its unit from directions; 8 had
# server steps of up to a unit by the length of the mean step.
FORM = 9
PRINTED: tuple[str, dict[str, Any]] = ("adamasfl", {})

# Data, model and who has what; sizes are those of `runs.DEFAULT` where nothing else is said.
TASKS: Mapping[str, dict[str, Any]] = {
    "Fashion-MNIST, CNN": {"model": "cnn", "batch": 20, "rounds": 400},
    "CIFAR-10, CNN": {"data": "cifar10", "model": "cnn", "batch": 20, "rounds": 300},
    "CIFAR-10, ResNet-18": {
        "data": "cifar10",
        "model": "resnet18",
        "rounds": 150,
        "steps": 5,
        "precision": "bfloat16",
    },
    "MNIST by writer, CNN": {
        "data": "mnist",
        "model": "cnn",
        "batch": 20,
        "clients": 539,
        "partition": "natural",
        "writers": True,
        "rounds": 150,
        "steps": 5,
    },
    "Shakespeare by role, transformer": {
        "data": "shakespeare",
        "model": "charformer",
        "batch": 10,
        "clients": 1000,
        "partition": "natural",
        "rounds": 400,
    },
    "digits, MLP": {"data": "digits", "model": "mlp", "batch": 10, "rounds": 200},
    "Fashion-MNIST of 14 x 14, MLP": {"model": "mlp", "pool": 2, "batch": 20},
    "MNIST, linear": {"data": "mnist", "model": "linear", "batch": 20},
    "MNIST of 14 x 14, MLP": {"data": "mnist", "model": "mlp", "pool": 2, "batch": 10},
    "CIFAR-10 of 8 x 8, MLP": {"data": "cifar10", "model": "mlp", "pool": 4, "batch": 20},
    "digits, linear": {"data": "digits", "model": "linear", "batch": 5},
}


def _at(task: str, concurrency: int, dirichlet: float | None = None, **more: Any) -> dict[str, Any]:
    label = {} if dirichlet is None else {"partition": f"dirichlet:{dirichlet:g}"}
    return {"task": task} | label | {"concurrency": concurrency} | more


_FASHION, _DIGITS, _POOLED = "Fashion-MNIST, CNN", "digits, MLP", "Fashion-MNIST of 14 x 14, MLP"
SYSTEMS: tuple[dict[str, Any], ...] = (
    *(_at(_FASHION, count, 0.5) for count in (10, 20, 60, 90)),
    *(_at(_FASHION, count, 0.1) for count in (20, 90)),
    _at(_FASHION, 60, 0.5, delays="tiers:large"),
    _at("CIFAR-10, CNN", 20, 0.5),
    _at("CIFAR-10, CNN", 60, 0.1),
    _at("CIFAR-10, ResNet-18", 20, 0.5),
    *(_at("MNIST by writer, CNN", count) for count in (20, 90)),
    *(_at("Shakespeare by role, transformer", count) for count in (10, 20)),
    *(_at(_DIGITS, count, alpha) for alpha in (0.5, 0.1) for count in (10, 20, 60, 90)),
    _at(_DIGITS, 60, 0.5, delays="tiers:large"),
    _at(_POOLED, 60, 0.3, buffer=30, steps=5, rounds=100),
    _at(_POOLED, 20, 0.3, buffer=4, steps=20, rounds=200),
    _at(_POOLED, 30, 0.3, buffer=10, steps=2, rounds=300, delays="tiers:large"),
)
# Chosen before any method had run on them, and run once its constants were what they are.
HELD_OUT: tuple[dict[str, Any], ...] = (
    _at("MNIST, linear", 50, 0.1, rounds=100),
    _at("MNIST of 14 x 14, MLP", 20, 0.5, rounds=30),
    _at("MNIST of 14 x 14, MLP", 30, 0.3, buffer=5, steps=20, rounds=100, delays="tiers:large"),
    _at("CIFAR-10 of 8 x 8, MLP", 60, 0.5, buffer=20, steps=5, rounds=300),
    _at("digits, linear", 10, 0.5, buffer=5, steps=3, rounds=40),
    # these two for the rule for long tasks, once it had been taken
    _at(_DIGITS, 40, 0.3, buffer=8, steps=40, rounds=60),
    _at("MNIST of 14 x 14, MLP", 25, 0.1, steps=30, rounds=80),
)


def _grid(locals_: tuple[float, ...], servers: tuple[float, ...]) -> tuple[dict[str, Any], ...]:
    return tuple({"local_lr": local, "server_lr": server} for local in locals_ for server in servers)


Grids = Mapping[str, tuple[dict[str, Any], ...]]
# Every competitor's server steps fall linearly to nothing, and its averages are looked at, too.
_IMAGES: Grids = {
    "fedbuff": _grid((0.05, 0.1, 0.2), (0.5, 1.0)),
    "fadas-da": _grid((0.1,), (3e-3, 1e-2, 3e-2)),
    "ma-light-fedavgm": _grid((0.1,), (0.5, 1.0)),
    "ca2fl": _grid((0.1,), (0.5, 1.0)),
}
_DEEP: Grids = {  # which asks for less
    "fedbuff": (*_IMAGES["fedbuff"], *_grid((0.01, 0.03), (1.0,))),
    "fadas-da": (*_IMAGES["fadas-da"], *_grid((0.1,), (1e-4, 3e-4, 1e-3))),
    "ma-light-fedavgm": (*_IMAGES["ma-light-fedavgm"], *_grid((0.01, 0.03), (1.0,))),
    "ca2fl": (*_IMAGES["ca2fl"], *_grid((0.01, 0.03), (1.0,))),
}
_LETTERS: Grids = {
    "fedbuff": _grid((0.1, 0.3), (0.5, 1.0)),
    "fadas-da": _grid((0.03, 0.1), (3e-3, 1e-2)),
    "ma-light-fedavgm": _grid((0.1, 0.3), (1.0,)),
    "ca2fl": _grid((0.1, 0.3), (1.0,)),
}
_SMALL: Grids = {
    "fedbuff": _grid((0.1, 0.3, 1.0), (0.5, 1.0, 2.0)),
    "fadas-da": _grid((0.1, 0.3), (3e-3, 1e-2, 3e-2)),
    "ma-light-fedavgm": _grid((0.1, 0.3), (0.5, 1.0)),
    "ca2fl": _grid((0.1, 0.3), (0.5, 1.0)),
}
GRIDS: Mapping[str, Grids] = dict.fromkeys(TASKS, _IMAGES) | {
    "CIFAR-10, ResNet-18": _DEEP,
    "Shakespeare by role, transformer": _LETTERS,
    _DIGITS: _SMALL,
    _POOLED: _SMALL,
    **dict.fromkeys((system["task"] for system in HELD_OUT), _SMALL),
}


def whole(cell: dict[str, Any]) -> dict[str, Any]:
    """With what its task says, so that a record tells everything."""
    return TASKS[cell["task"]] | cell


def cells() -> Iterator[dict[str, Any]]:
    """Every run but those of finalists: ours on all seeds, the others on the first."""
    for system in (*SYSTEMS, *HELD_OUT):
        for seed in SEEDS:
            yield whole({"method": OURS[0], "words": OURS[1], "form": FORM, "seed": seed} | system)
        yield whole({"method": PRINTED[0], "words": PRINTED[1], "seed": SEEDS[0]} | system)
        for method, grid in GRIDS[system["task"]].items():
            for words in grid:
                given = {"method": method, "words": words, "seed": SEEDS[0], "falls": True}
                given |= {"weights": find(method).weights}
                yield whole(given | system)
