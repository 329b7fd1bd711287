"""The runs of FADAS's paper (Wang et al., ICML 2024, arXiv 2407.18365) as values.

Where the paper and its authors' scripts differ, rows are the paper's rule under the scripts' schedule
(refill by rounds, seed 42), which is the one that gives the delays that the paper prints; what else the
scripts do is in rows of its own (`VARIANTS`).
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from offbeat.experiment import Experiment
from offbeat.reproduce.study import Cell

SOURCE = "arXiv 2407.18365"
SEED = 42  # of the scripts
ALPHAS = (0.1, 0.3)
Rates = tuple[tuple[str, Any], ...]
Grids = tuple[tuple[str, tuple[Rates, ...]], ...]

LARGE: dict[str, Any] = {"clients": 50, "concurrency": 25, "buffer": 5, "delays": "tiers:large"}
MILD: dict[str, Any] = {"clients": 100, "concurrency": 20, "buffer": 10, "delays": "tiers:mild"}
RESNET: dict[str, Any] = {
    "data": "cifar10",
    "model": "resnet18",
    "local_steps": 20,  # an epoch of fifty clients, in the mean
    "batch_size": 50,
    "weight_decay": 1e-4,
    "rounds": 500,
    "every": 25,
    "precision": "bfloat16",
}
CNN: dict[str, Any] = RESNET | {"model": "cnn", "every": 10, "precision": "torch"}
HALF: dict[str, Any] = {"local_steps": 10}  # an epoch of a hundred
QUICK: dict[str, Any] = {
    "data": "digits",
    "local_steps": 5,
    "batch_size": 10,
    "rounds": 500,
    "every": 25,
}
REDUCED = (
    "Reduced in full, to fit minutes of one GPU: as many minibatches as one local epoch has in the mean, the "
    "same for every client, for two epochs; ResNet-18 in bfloat16; and where a column or a table says CNN, "
    "two convolutions and two linear layers (278k weights) for ResNet-18 (11M)."
)
# What the authors' scripts do and the paper does not, and what the paper leaves open.
VARIANTS: tuple[tuple[str, Rates, dict[str, Any]], ...] = (
    ("fadas, bias-corrected", (("unbiased", True),), {}),
    ("fadas-da, bias-corrected", (("unbiased", True),), {}),
    ("fadas, delta base", (("trailing", True),), {}),
    ("fadas-da, delta base", (("trailing", True),), {}),
    ("fadas, both as in the scripts", (("unbiased", True), ("trailing", True)), {}),
    ("fadas-da, both as in the scripts", (("unbiased", True), ("trailing", True)), {}),
    ("fadas-da, tau_c 8", (("tau_c", 8.0),), {}),
    ("fadas, replaced on arrival", (), {"dispatch": "asynchronous"}),
    ("fadas-da, replaced on arrival", (), {"dispatch": "asynchronous"}),
)
# Local steps a second of an H200 as in docs/speed.md; of the CNN half, since few tasks are in flight.
_SPEEDS = {"resnet18": 330.0, "cnn": 4500.0}


def both(local: float, server: float, **more: Any) -> Rates:
    """Rates of a method with a server rate of its own."""
    return ("local_lr", local), ("server_lr", server), *more.items()


def servers(*rates: float) -> tuple[Rates, ...]:
    """A grid of server rates at the paper's local rate for FADAS."""
    return tuple(both(0.1, server) for server in rates)


def locals_(*rates: float) -> tuple[Rates, ...]:
    """A grid of local rates at a server rate of 1."""
    return tuple(both(local, 1.0) for local in rates)


def column(alpha: float, model: str | None = None) -> str:
    """As the paper writes it, and the model where it is not the paper's."""
    return f"Dir({alpha:g}){', CNN' if model == 'cnn' else ''}"


def cell(row: str, alpha: float, rates: Rates, setting: dict[str, Any], **more: Any) -> Cell:
    """One run; a row is a method, a comma and what is different."""
    method = row.partition(",")[0]
    made = Experiment.of(
        **setting
        | {
            "algorithm": method,
            "parameters": rates,
            "partition": f"dirichlet:{alpha:g}",
            "dispatch": "synchronous" if method in ("fedavg", "fedams") else "rounds",
            "weights": "polynomial:0.5" if method == "fedasync" else "constant",
            "seed": SEED,
        }
        | more
    )
    scale = 1
    if method == "fedasync":
        scale = made.buffer
        made = replace(made, buffer=1, rounds=made.rounds * scale, every=made.every * scale)
    return Cell(row, column(alpha, made.model), made, scale)


def tuned(setting: dict[str, Any], alphas: Iterable[float], grids: Grids) -> tuple[Cell, ...]:
    """Each method with its grid."""
    return tuple(
        cell(row, alpha, rates, setting) for alpha in alphas for row, grid in grids for rates in grid
    )


def variants(setting: dict[str, Any], grids: Grids) -> tuple[Cell, ...]:
    """FADAS in other ways, each with the grid of the method that it is a variant of, at Dir(0.1)."""
    known = dict(grids)
    return tuple(
        cell(row, 0.1, (*rates, *given), setting, **more)
        for row, given, more in VARIANTS
        for rates in known[row.partition(",")[0]]
    )


def pace(cells: Iterable[Cell]) -> float:
    """Local steps a second of a mixture of models, about."""
    steps, seconds = 0, 0.0
    for one in cells:
        steps += one.gradients
        seconds += one.gradients / _SPEEDS[str(one.experiment.model)]
    return steps / seconds
