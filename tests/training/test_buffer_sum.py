"""Sums to which the uploads of a buffer are added in pieces, whoever computes them."""

import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offbeat import (
    Asynchronous,
    EightBit,
    Exponential,
    Median,
    Participation,
    Private,
    Secure,
    Sequential,
    Setting,
    build,
)
from offbeat.aggregate.mean import FiniteCheck, Mean, PlainSum
from offbeat.algorithms import CATALOGUE
from offbeat.core import Task
from offbeat.engines.engine import ClientUpdates
from offbeat.engines.simulation import Simulation
from offbeat.errors import DivergedError
from offbeat.privacy.mechanism import AdaptiveClipping
from offbeat.schedule.staleness import Polynomial
from offbeat.training import loop
from worlds import CLASSES, FEATURES, make_world, play

PARAMETERS = (FEATURES + 1) * CLASSES
BUFFER = 5


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many uploads are handed over at once; two are added at a time."""
    monkeypatch.setattr("offbeat.aggregate.mean._ADDED", 2 * PARAMETERS + 1)
    sizes: list[int] = []
    whole = Simulation.gather

    def gather(self: Simulation, tasks: Sequence[Task], version: int) -> ClientUpdates:
        sizes.append(len(tasks))
        return whole(self, tasks, version)

    monkeypatch.setattr(Simulation, "gather", gather)
    return sizes


def private(**options: Any) -> Private:
    often = Participation(max_participations=40, min_separation=1)
    return Private((("delta", 0.5),), 0.3, 1e-5, participation=often, noise_seed=3, **options)


RUNS: dict[str, dict[str, Any]] = {
    "fedbuff": {"weights": Polynomial(0.5)},
    "fadas": {"compress": EightBit()},
    "cadence": {},
    "ca2fl": {},
    "padamfed-vr": {},
    "private": {"aggregate": private()},
    "adaptive": {"aggregate": private(adaptive=AdaptiveClipping(0.5, noise=1.0))},
}


def models(name: str, module: nn.Module | None = None, **options: Any) -> list[torch.Tensor]:
    """Every model of a run, with its running statistics."""
    world = make_world(module=module)
    method = build(name if name in CATALOGUE else "fedbuff", Setting(BUFFER, 3, 6), {})
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    shots = play(method, engine, Asynchronous(7), buffer=BUFFER, rounds=6, **options)
    return [leaf for shot in shots for leaf in (shot.x, *shot.statistics.values())]


@pytest.mark.parametrize("name", RUNS)
def test_pieces_that_are_gathered_one_by_one_give_the_model_of_a_whole_buffer_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, gathered: list[int], name: str
) -> None:
    pieces = models(name, **RUNS[name])
    assert max(gathered) <= 2
    gathered.clear()
    monkeypatch.setattr(Simulation, "streams", False)
    whole = models(name, **RUNS[name])
    assert max(gathered) >= BUFFER
    assert all(torch.equal(left, right) for left, right in zip(pieces, whole, strict=True))


def test_only_whole_pieces_are_gathered_before_a_buffer_is_full(gathered: list[int]) -> None:
    models("fedbuff")
    rest = [BUFFER % 2] if BUFFER % 2 else []
    assert gathered == 6 * (BUFFER // 2 * [2] + rest)


def test_a_sum_in_pieces_is_that_of_one_product(monkeypatch: pytest.MonkeyPatch, gathered: list[int]) -> None:
    pieces = models("fedbuff", weights=Polynomial(0.5))
    monkeypatch.setattr("offbeat.aggregate.mean._ADDED", 1 << 22)
    whole = models("fedbuff", weights=Polynomial(0.5))
    assert set(gathered) == {2, 1, BUFFER}
    for left, right in zip(pieces, whole, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-15)


def test_running_statistics_are_the_mean_over_the_whole_buffer(
    monkeypatch: pytest.MonkeyPatch, gathered: list[int]
) -> None:
    module = nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES)).double()
    pieces = models("fedbuff", module)
    monkeypatch.setattr(Simulation, "streams", False)
    whole = models("fedbuff", module)
    assert len(pieces) > 7
    assert all(torch.equal(left, right) for left, right in zip(pieces, whole, strict=True))


@pytest.mark.parametrize("aggregate", [Median(), Mean(Secure(2))])
def test_what_needs_every_upload_at_once_is_given_the_whole_buffer(
    gathered: list[int], aggregate: Any
) -> None:
    models("fedbuff", aggregate=aggregate)
    assert set(gathered) == {BUFFER}


def test_an_upload_that_is_not_finite_is_named_in_whichever_piece_it_is(
    monkeypatch: pytest.MonkeyPatch, gathered: list[int]
) -> None:
    spoilt = Simulation.gather

    def gather(self: Simulation, tasks: Sequence[Task], version: int) -> ClientUpdates:
        updates = spoilt(self, tasks, version)
        if version == 2 and len(tasks) == 1:  # the last piece of a buffer
            updates.uploads.delta[0, 1] = torch.nan
        return updates

    monkeypatch.setattr(Simulation, "gather", gather)
    with pytest.raises(DivergedError, match=r"the update of client \d became NaN .* at server step 3"):
        models("fedbuff")


def test_no_more_than_two_pieces_are_held_on_a_device_that_works_asynchronously(
    monkeypatch: pytest.MonkeyPatch, gathered: list[int]
) -> None:
    """Their checks are read late, but not later than when the next piece has been computed."""
    monkeypatch.setattr(loop, "works_asynchronously", lambda device: True)
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    whole = FiniteCheck.add_uploads

    def add_uploads(self: FiniteCheck, uploads: Any, tasks: tuple[Task, ...]) -> None:
        nonlocal most
        alive.append(weakref.ref(uploads.delta))
        most = max(most, sum(each() is not None for each in alive))
        whole(self, uploads, tasks)

    monkeypatch.setattr(FiniteCheck, "add_uploads", add_uploads)
    models("fedbuff")
    assert len(alive) == len(gathered) == 6 * 3
    assert most <= 2


def test_a_piece_has_about_four_million_numbers_and_at_least_one_upload() -> None:
    sizes = (1, 1 << 20, 1 << 22, 10**9)
    assert [PlainSum().piece(numbers) for numbers in sizes] == [1 << 22, 4, 1, 1]
    for on_gpu, pieces in ((False, [1 << 22, 4, 1, 1]), (True, [1 << 26, 64, 16, 1])):
        context: Any = SimpleNamespace(x=SimpleNamespace(is_cuda=on_gpu))
        assert [PlainSum().open(context).piece(numbers) for numbers in sizes] == pieces
