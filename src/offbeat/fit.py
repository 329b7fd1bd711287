"""Which methods go with which protocols."""

from collections.abc import Mapping
from typing import Any

import torch

from offbeat import trees
from offbeat.algorithms import Setting, build
from offbeat.core import AnyAlgorithm, Spans, TwoTrips, wants_rank
from offbeat.errors import InputError
from offbeat.schedule.dispatch import Dispatch, Phases, RoundRefill
from offbeat.schedule.staleness import Equal, Weights


def check_fit(
    algorithm: AnyAlgorithm, dispatch: Dispatch, weights: Weights, rounds: int, limit: float
) -> None:
    """Refuse a method under a protocol that it is not defined for."""
    name = type(algorithm).__name__
    if not isinstance(weights, Equal) and trees.leaves(algorithm.memory(torch.zeros(1))):
        # sums over what clients keep, such as the mean of control variates, would break
        raise InputError(f"{name} has no staleness weights, since its clients keep memory: use constant.")
    if isinstance(algorithm, TwoTrips) and algorithm.two_trips:
        if not isinstance(dispatch, Phases):
            raise InputError(f"{name} asks each cohort twice in a row: use phases dispatch.")
        if rounds % 2:
            raise InputError(
                f"{name} takes two server steps a round: give an even number of rounds, not {rounds}."
            )
    if wants_rank(algorithm) and not isinstance(dispatch, RoundRefill):
        raise InputError("trailing is defined where tasks are replaced by rounds: use --dispatch rounds.")
    if isinstance(algorithm, Spans) and algorithm.span is not None:
        oldest = min(limit, rounds - 1)
        if oldest >= algorithm.span:
            raise InputError(
                f"{name} with a span of {algorithm.span} takes updates of a staleness below that, "
                f"and here it may reach {oldest:.0f}: lower the staleness limit, or raise the span."
            )


def check_end(name: str, parameters: Mapping[str, Any], rounds: int, later: int) -> None:
    """Refuse a later end for a method whose rates follow from the one it has, which is found by trying."""
    if len({repr(build(name, Setting(1, 1, each), parameters)) for each in (rounds, later)}) > 1:
        raise InputError(
            f"{name} sets its rates by --rounds, so {later} in place of {rounds} is another run: name "
            "another --out; to train until told to stop use a method that does not, such as cadence."
        )
