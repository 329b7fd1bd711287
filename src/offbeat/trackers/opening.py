"""Opens the trackers that were asked for, and those that a resumed run had."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from offbeat.errors import InputError
from offbeat.trackers.board import check_tensorboard, open_board
from offbeat.trackers.mlflow_run import check_mlflow, open_mlflow
from offbeat.trackers.place import Place, Placed, Wanted
from offbeat.trackers.tracker import Guarded, Several, Tracker
from offbeat.trackers.weights_biases import check_wandb, open_wandb


class _Kind(NamedTuple):
    """What is asked for, where the run was before, and how to get there."""

    title: str
    wanted: str | None
    held: Place | None
    check: Callable[[str], None]
    open: Callable[[str, str, Mapping[str, Any], Place | None, int | None], tuple[Tracker, Place]]


def check_trackers(wanted: Wanted) -> None:
    """Refuse, before anything is written, what is not installed."""
    for kind in _kinds(wanted, Placed()):
        if kind.wanted is not None:
            kind.check(kind.wanted)


def open_trackers(
    wanted: Wanted,
    name: str,
    settings: Mapping[str, Any],
    held: Placed = Placed(),
    since: int | None = None,
) -> tuple[Several, Placed]:
    """Trackers of a run of that name, and where it is there.

    `held` is where the run was before, up to `since`, its last checkpoint: there it goes on, unless another
    place is wanted. A place that is held and not to be had today is left out with a warning.
    """
    found: list[Guarded] = []
    places: list[Place | None] = []
    for kind in _kinds(wanted, held):
        place = kind.wanted if kind.wanted is not None else kind.held.place if kind.held else None
        if place is None:
            places.append(None)
            continue
        try:
            kind.check(place)
            tracker, at = kind.open(place, name, settings, kind.held, since)
        except InputError as error:
            if kind.wanted is not None:
                Several(tuple(found)).close({"error": str(error)})
                raise
            logging.getLogger("offbeat").warning("%s gets no records this time: %s", kind.title, error)
            places.append(kind.held)
            continue
        found.append(Guarded(kind.title, tracker))
        places.append(at)
    return Several(tuple(found)), Placed(*places)


def _kinds(wanted: Wanted, held: Placed) -> tuple[_Kind, ...]:
    return (
        _Kind("TensorBoard", wanted.tensorboard, held.tensorboard, check_tensorboard, open_board),
        _Kind("Weights & Biases", wanted.wandb, held.wandb, check_wandb, open_wandb),
        _Kind("MLflow", wanted.mlflow, held.mlflow, check_mlflow, open_mlflow),
    )
