"""PAdaMFed (ICLR 2025): Fig. 1, accuracy at the theorem's rates, and Fig. 2, accuracy by step size.

The paper's EMNIST is not at hand: MNIST, whose clients by writer come from the same forms, and Fashion-MNIST
stand in for it. Its appendix with every setting could not be read.
"""

from dataclasses import dataclass
from typing import Any

from experiments.reproduce.measures import LastModel
from experiments.reproduce.study import Cell, Study, Version
from experiments.reproduce.tables import Best, Swept, least
from experiments.studies.fadas import Rates, both
from offbeat.report.chart import Axis
from offbeat.training.experiment import Experiment

_SOURCE = "ICLR 2025, PAdaMFed"
_UNKNOWN = (
    "Not told: N, S, K, T of Fig. 1, batch, model, split, every value of a curve, and which step size Fig. 2 "
    "sweeps (here the server's and the local one, one at a time, the other from the theorem). Ours: all."
)
_METHODS = ("padamfed", "padamfed-vr", "fedavg", "scaffold", "scaffold-m")


@dataclass(frozen=True)
class Split:
    """Data and who has it."""

    title: str
    data: str
    partition: str
    clients: int = 100
    writers: bool = False


SPLITS = (
    Split("MNIST i.i.d.", "mnist", "iid"),
    Split("MNIST by writer", "mnist", "natural", 539, writers=True),
    Split("Fashion-MNIST i.i.d.", "fashion-mnist", "iid"),
    Split("Fashion-MNIST 2 shards", "fashion-mnist", "shards:2"),
)
SMALL_SPLITS = (Split("digits i.i.d.", "digits", "iid"), Split("digits 2 shards", "digits", "shards:2"))
_CNN: dict[str, Any] = {
    "buffer": 10,
    "local_steps": 10,
    "batch_size": 32,
    "rounds": 400,
    "dispatch": "synchronous",
}
_MLP = _CNN | {"batch_size": 10, "rounds": 200}
_SEEDS = (0, 1, 2)

GRIDS: tuple[tuple[str, tuple[Rates, ...]], ...] = (
    ("padamfed", ((),)),
    ("padamfed-vr", ((),)),
    ("fedavg", tuple(both(local, 1.0) for local in (0.01, 0.03, 0.1, 0.3))),
    ("scaffold", tuple(both(local, 1.0) for local in (0.01, 0.03, 0.1, 0.3))),
    ("scaffold-m", tuple(both(local, server) for local in (0.05, 0.1) for server in (0.1, 0.3))),
)
SMALL_GRIDS: tuple[tuple[str, tuple[Rates, ...]], ...] = (
    ("padamfed", ((),)),
    ("padamfed-vr", ((),)),
    ("fedavg", tuple(both(local, 1.0) for local in (0.03, 0.1, 0.3))),
    ("scaffold", tuple(both(local, 1.0) for local in (0.03, 0.1, 0.3))),
    ("scaffold-m", (both(0.05, 0.1), both(0.05, 0.3), both(0.1, 0.3))),
)
_STEPS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
_CLAIMED_STEPS = (0.003, 0.01, 0.03, 0.1)  # between which the paper finds its methods robust

# Whose step size is swept: the row, the method, the swept rate, and others that stay.
_SWEEPS: tuple[tuple[str, str, str, Rates], ...] = (
    ("padamfed, server", "padamfed", "server_lr", ()),
    ("padamfed, local", "padamfed", "local_lr", ()),
    ("padamfed-vr, server", "padamfed-vr", "server_lr", ()),
    ("padamfed-vr, local", "padamfed-vr", "local_lr", ()),
    ("fedavg, local", "fedavg", "local_lr", (("server_lr", 1.0),)),
    ("scaffold, local", "scaffold", "local_lr", (("server_lr", 1.0),)),
    ("scaffold-m, server", "scaffold-m", "server_lr", (("local_lr", 0.05),)),
)


def _cell(
    row: str, column: str, method: str, rates: Rates, split: Split, setting: dict[str, Any], seed: int
) -> Cell:
    made = Experiment.of(
        **setting,
        algorithm=method,
        parameters=rates,
        data=split.data,
        partition=split.partition,
        clients=split.clients,
        seed=seed,
    )
    return Cell(row, column, made, writers=split.writers)


def _fig1(
    splits: tuple[Split, ...],
    setting: dict[str, Any],
    grids: tuple[tuple[str, tuple[Rates, ...]], ...],
    seeds: tuple[int, ...],
) -> tuple[Cell, ...]:
    return tuple(
        _cell(method, split.title, method, rates, split, setting, seed)
        for seed in seeds
        for split in splits
        for method, grid in grids
        for rates in grid
    )


def _fig2(splits: tuple[Split, ...], setting: dict[str, Any], steps: tuple[float, ...]) -> tuple[Cell, ...]:
    return tuple(
        _cell(f"{split.title}: {row}", f"{step:g}", method, ((rate, step), *rest), split, setting, 0)
        for split in splits
        for row, method, rate, rest in _SWEEPS
        for step in steps
    )


def _claimed(splits: tuple[Split, ...]) -> dict[str, str]:
    """What Fig. 2 is said to show between 0.003 and 0.1, on EMNIST after 400 rounds."""
    return {
        f"{split.title}: {row}": f"above {'0.8' if split.partition == 'iid' else '0.7'}"
        if method.startswith("padamfed")
        else "narrower"
        for split in splits
        for row, method, *_ in _SWEEPS
    }


_RANKED = Best(
    LastModel(),
    {},
    (("padamfed-vr", ("padamfed",)), ("padamfed", _METHODS[2:])),
)


def _swept(splits: tuple[Split, ...]) -> Swept:
    """With the least over the steps of which the paper speaks, whatever else was swept."""
    among = tuple(f"{step:g}" for step in _CLAIMED_STEPS)
    whole = f"least, {among[0]} to {among[-1]}"
    return Swept(LastModel(), whole, least, _claimed(splits), Axis("step size", log=True), among)


FIG1 = Study(
    "padamfed-fig1",
    "padamfed",
    f"{_SOURCE}, Fig. 1",
    "at the theorem's rates PAdaMFed-VR > PAdaMFed > FedAvg, SCAFFOLD and SCAFFOLD-M tuned by grid",
    Version(_fig1(SPLITS, _CNN, GRIDS, _SEEDS), _RANKED, 5000),
    Version(_fig1(SMALL_SPLITS, _MLP, SMALL_GRIDS, (0,)), _RANKED, 2000),
    _UNKNOWN,
)
FIG2 = Study(
    "padamfed-fig2",
    "padamfed",
    f"{_SOURCE}, Fig. 2",
    "accuracy by step size: PAdaMFed and PAdaMFed-VR learn at any from 0.003 to 0.1, the others at few",
    Version(_fig2(SPLITS, _CNN, _STEPS), _swept(SPLITS), 5000),
    Version(
        _fig2(SMALL_SPLITS[1:], _MLP | {"rounds": 100}, _CLAIMED_STEPS),
        _swept(SMALL_SPLITS[1:]),
        2000,
    ),
    _UNKNOWN,
)
