"""Many clients at once, where memory is short."""

import logging

import pytest
import torch

from offbeat import Asynchronous, FedOpt, InputError, Sequential, Vectorised
from offbeat.engines import vmap
from worlds import make_world, play


def short_of_memory(monkeypatch: pytest.MonkeyPatch, room: int) -> list[int]:
    """Let no more than so many clients fit at once; how many were tried."""
    tried: list[int] = []
    real = vmap.stacked_inputs

    def inputs(starts, *rest):  # type: ignore[no-untyped-def]
        tried.append(len(starts))
        if len(starts) > room:
            raise torch.OutOfMemoryError("no memory is left")
        return real(starts, *rest)

    monkeypatch.setattr(vmap, "stacked_inputs", inputs)
    return tried


@pytest.mark.parametrize("room", [1, 2, 3])
def test_groups_are_halved_until_they_fit_which_is_said_once(
    room: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world()
    plain = play(FedOpt(0.1, 1.0), Sequential(world.problem, world.population), Asynchronous(8), buffer=6)
    tried = short_of_memory(monkeypatch, room)
    with caplog.at_level(logging.WARNING):
        tight = play(FedOpt(0.1, 1.0), Vectorised(world.problem, world.population), Asynchronous(8), buffer=6)
    torch.testing.assert_close(plain[-1].x, tight[-1].x, rtol=0, atol=1e-10)
    (said,) = (record.message for record in caplog.records)
    assert said.endswith("clients at once do not fit into memory, so they are computed in smaller groups.")
    first = next(place for place, count in enumerate(tried) if count <= room)
    assert max(tried[first:]) <= room < tried[0]  # what did not fit is not tried again


def test_a_single_client_that_does_not_fit_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world()
    short_of_memory(monkeypatch, 0)
    with pytest.raises(InputError, match="a single client does not fit into the device's memory"):
        play(FedOpt(0.1, 1.0), Vectorised(world.problem, world.population), Asynchronous(8))
