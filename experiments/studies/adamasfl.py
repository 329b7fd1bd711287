"""MasFL and AdaMasFL (ICML 2025, PMLR 267:70410): Figs 1 and 2, of which no number is known.

Everything but data, model and split was chosen here. The grids, and at concurrency 20 the rates of Fig. 2,
are those of experiments/concurrency.
"""

from typing import Any

from experiments.reproduce.measures import LastModel
from experiments.reproduce.study import Cell, Study, Version
from experiments.reproduce.tables import Best, Swept, change
from experiments.studies.claim_map import ClaimMap
from experiments.studies.fadas import Rates, both
from experiments.studies.map_table import Place
from offbeat.report.chart import COUNT, Axis
from offbeat.training.experiment import Experiment

_SOURCE = "PMLR 267:70410"
_UNKNOWN = "Not told: N, S, K, T, batch, layers, concurrency and every accuracy. Ours: all of them."
_FASHION: dict[str, Any] = {
    "data": "fashion-mnist",
    "clients": 100,
    "partition": "dirichlet:0.5",
    "hand_out": "after",
    "buffer": 10,
    "concurrency": 20,
    "delays": "tiers:mild",
    "local_steps": 10,
    "batch_size": 50,
    "rounds": 500,
}
_DIGITS: dict[str, Any] = _FASHION | {"data": "digits", "batch_size": 20, "rounds": 200}
_SEEDS = (0, 1, 2)
_TUNED = ("masfl", "fedbuff", "ca2fl", "fadas", "fadas-da", "defedavg")

GRIDS: tuple[tuple[str, tuple[Rates, ...]], ...] = (
    ("adamasfl", ((),)),
    ("masfl", tuple(both(local, server) for local in (0.05, 0.1) for server in (0.1, 0.3))),
    ("fedbuff", tuple(both(local, 1.0) for local in (0.05, 0.1, 0.2))),
    ("ca2fl", tuple(both(local, 1.0) for local in (0.03, 0.05, 0.1))),
    ("fadas", (both(0.03, 1e-3), both(0.1, 1e-3), both(0.1, 3e-3))),
    ("fadas-da", tuple(both(0.1, server) for server in (1e-3, 3e-3, 1e-2))),
    ("defedavg", tuple(both(local, 1.0) for local in (0.05, 0.1, 0.2))),
)
CHOSEN: dict[str, Rates] = {
    "adamasfl": (),
    "masfl": both(0.05, 0.1),
    "fedbuff": both(0.2, 1.0),
    "ca2fl": both(0.1, 1.0),
    "fadas": both(0.1, 1e-3),
    "fadas-da": both(0.1, 3e-3),
    "defedavg": both(0.1, 1.0),
}
SMALL_GRIDS: tuple[tuple[str, tuple[Rates, ...]], ...] = (
    ("adamasfl", ((),)),
    ("masfl", (both(0.05, 0.1), both(0.05, 0.3))),
    ("fedbuff", tuple(both(local, 1.0) for local in (0.1, 0.5))),
    ("ca2fl", tuple(both(local, 1.0) for local in (0.1, 0.5))),
    ("fadas", tuple(both(0.1, server) for server in (3e-3, 1e-2))),
    ("fadas-da", tuple(both(0.1, server) for server in (1e-2, 3e-2))),
    ("defedavg", tuple(both(local, 1.0) for local in (0.1, 0.5))),
)
SMALL_CHOSEN: dict[str, Rates] = {
    "adamasfl": (),
    "masfl": both(0.05, 0.3),
    "fedbuff": both(0.5, 1.0),
    "ca2fl": both(0.5, 1.0),
    "fadas": both(0.1, 1e-2),
    "fadas-da": both(0.1, 3e-2),
    "defedavg": both(0.5, 1.0),
}
_FIG1 = "accuracy at T"


def _cell(method: str, column: str, rates: Rates, setting: dict[str, Any], seed: int) -> Cell:
    own = {"algorithm": method, "parameters": rates, "seed": seed}
    return Cell(method, column, Experiment.of(**setting | own))


def _fig1(
    setting: dict[str, Any], grids: tuple[tuple[str, tuple[Rates, ...]], ...], seeds: tuple[int, ...]
) -> tuple[Cell, ...]:
    return tuple(
        _cell(method, _FIG1, rates, setting, seed)
        for seed in seeds
        for method, grid in grids
        for rates in grid
    )


def _fig2(
    setting: dict[str, Any], chosen: dict[str, Rates], counts: tuple[int, ...], seeds: tuple[int, ...]
) -> tuple[Cell, ...]:
    return tuple(
        _cell(method, str(count), rates, setting | {"concurrency": count}, seed)
        for seed in seeds
        for count in counts
        for method, rates in chosen.items()
    )


_HIGHEST = Best(
    LastModel(),
    {("adamasfl", _FIG1): "highest", **{(method, _FIG1): "below" for method in _TUNED}},
    (("adamasfl", _TUNED),),
)
_FLAT = Swept(
    LastModel(),
    "change",
    change,
    {"adamasfl": "nearly flat", **dict.fromkeys(_TUNED, "falls")},
    Axis("clients at work", COUNT),
)

FIG1 = Study(
    "adamasfl-fig1",
    "adamasfl",
    f"{_SOURCE}, Fig. 1",
    "Fashion-MNIST under delay: AdaMasFL at its theorem's rates above all methods tuned by grid",
    Version(_fig1(_FASHION, GRIDS, _SEEDS), _HIGHEST, 5000),
    Version(_fig1(_DIGITS, SMALL_GRIDS, (0, 1)), _HIGHEST, 2000),
    _UNKNOWN,
)
FIG2 = Study(
    "adamasfl-fig2",
    "adamasfl",
    f"{_SOURCE}, Fig. 2",
    "the same by concurrency, rates frozen: AdaMasFL nearly flat, the others fall",
    Version(_fig2(_FASHION, CHOSEN, (20, 10, 40, 60, 90), _SEEDS), _FLAT, 5000),
    Version(_fig2(_DIGITS, SMALL_CHOSEN, (20, 10, 60, 90), (0,)), _FLAT, 2000),
    _UNKNOWN,
)

_SPLITS = (_HALF, _TENTH, _EVEN) = "dirichlet:0.5", "dirichlet:0.1", "iid"
_WHOLE = (
    *(Place(split, 5, 5, 300) for split in _SPLITS),
    *(Place(split, 50, 5, 300) for split in (_HALF, _TENTH)),
    Place(_HALF, 16, 16, 300),
)
_LASTING = (Place(_HALF, 5, 5, 1000), Place(_HALF, 5, 5, 3000))
_BRIEF = (
    *_LASTING,
    Place(_HALF, 50, 16, 300),
    Place(_HALF, 50, 5, 1000),
    Place(_HALF, 5, 50, 300),
    Place(_EVEN, 50, 5, 300),
)
_FURTHER = (
    *(Place(split, 16, 16, 300) for split in (_TENTH, _EVEN)),
    Place(_TENTH, 5, 50, 300),
    Place(_HALF, 16, 16, 1000),
    Place(_HALF, 50, 50, 300),
    Place(_HALF, 50, 5, 3000),
)  # too long for a CPU
_DECISIVE = (*_WHOLE[:3], Place(_HALF, 50, 5, 300))
_MAPPED: dict[str, Any] = {
    "data": "fashion-mnist",
    "clients": 100,
    "hand_out": "after",
    "delays": "tiers:mild",
    "batch_size": 10,
}
FULL_MAP = ClaimMap(
    (*_WHOLE, *_BRIEF, *_FURTHER),
    (*_BRIEF, *_FURTHER),
    _LASTING,
    _DECISIVE,
    _MAPPED | {"model": "cnn", "batch_size": 50},
)
QUICK_MAP = ClaimMap((*_WHOLE, *_BRIEF), _BRIEF, _LASTING, _DECISIVE, _MAPPED | {"model": "mlp"}, pooled=2)
MAP = Study(
    "adamasfl-map",
    "adamasfl",
    f"{_SOURCE}, Figs 1 and 2",
    "where over S, K, T and the split AdaMasFL is nearly flat and above tuned methods",
    Version(FULL_MAP.cells(), FULL_MAP, 5000, FULL_MAP.follow),
    Version(QUICK_MAP.cells(), QUICK_MAP, 10_000, QUICK_MAP.follow),
    _UNKNOWN,
)
