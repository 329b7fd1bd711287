"""Many clients at once, where memory is short."""

import logging
import warnings

import pytest
import torch

from offbeat import Asynchronous, FedOpt, InputError, Problem, Sequential, Vectorised
from offbeat.engines import vmap
from offbeat.engines.execution import Vmap
from offbeat.engines.local import NOT_COMPILED
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


def test_a_cpu_maps_as_many_clients_at_a_time_as_its_caches_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(clients=12)
    plain = play(FedOpt(0.1, 1.0), Sequential(world.problem, world.population), Asynchronous(12), buffer=12)
    tried = short_of_memory(monkeypatch, room=12)
    monkeypatch.setattr(vmap, "_CACHED_WEIGHTS", 9 * world.problem.size)
    engine = Vectorised(world.problem, world.population)
    found = play(FedOpt(0.1, 1.0), engine, Asynchronous(12), buffer=12)
    torch.testing.assert_close(plain[-1].x, found[-1].x, rtol=0, atol=1e-10)
    assert tried[:2] == [9, 3]


class Refuses(torch.nn.Linear):
    """A module whose graph cannot be captured, since its path depends on the data."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        return outputs if outputs.sum() > -1e30 else -outputs


class ByNumPy(torch.nn.Linear):
    """A module that leaves torch."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs * float(inputs.detach().numpy().ndim))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [Refuses, ByNumPy])
def test_a_module_that_cannot_be_mapped_runs_one_by_one_which_is_said_once(
    kind: type[torch.nn.Linear], compiled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world()
    torch.manual_seed(3)
    problem = Problem(kind(world.population.data.inputs.shape[1], 3).double(), world.problem.loss)
    plain = play(FedOpt(0.1, 1.0), Sequential(problem, world.population), Asynchronous(8), buffer=6)
    engine = Vectorised(problem, world.population, execution=Vmap(compiled=compiled))
    found = play(FedOpt(0.1, 1.0), engine, Asynchronous(8), buffer=6)
    torch.testing.assert_close(plain[-1].x, found[-1].x, rtol=0, atol=1e-10)
    (said,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert said.startswith("this module cannot be computed for many clients at once, so it runs one by one: ")


def test_a_module_that_cannot_be_compiled_runs_without_the_compiler_which_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*rest: object, **others: object) -> None:
        raise RuntimeError("no compiler is there\nmore")

    monkeypatch.setattr(torch, "compile", fail)
    world = make_world()
    plain = play(FedOpt(0.1, 1.0), Sequential(world.problem, world.population), Asynchronous(8), buffer=6)
    engine = Vectorised(world.problem, world.population, execution=Vmap(compiled=True))
    found = play(FedOpt(0.1, 1.0), engine, Asynchronous(8), buffer=6)
    torch.testing.assert_close(plain[-1].x, found[-1].x, rtol=0, atol=1e-10)
    (said,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert said == "this module cannot be compiled, so it runs without the compiler: no compiler is there"


class Recurrent(torch.nn.LSTM):
    """A layer that torch maps client by client, and does not compile when it is mapped."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(inputs.unsqueeze(1))[0][:, -1]


@pytest.mark.parametrize("compiled", [False, True])
def test_torch_s_own_warning_of_what_it_maps_slowly_is_not_shown_beside_a_sentence_of_this_package(
    compiled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world()
    torch.manual_seed(3)
    problem = Problem(Recurrent(world.population.data.inputs.shape[1], 3), world.problem.loss)
    clients = world.population.to(dtype=torch.float32)
    plain = play(FedOpt(0.1, 1.0), Sequential(problem, clients), Asynchronous(8), buffer=6)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # within torch's compiler
        engine = Vectorised(problem, clients, execution=Vmap(compiled=compiled))
        found = play(FedOpt(0.1, 1.0), engine, Asynchronous(8), buffer=6)
    torch.testing.assert_close(plain[-1].x, found[-1].x, rtol=0, atol=1e-5)
    assert [str(each.message) for each in shown] == []
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [sentence.partition(":")[0] for sentence in said] == [NOT_COMPILED.partition(":")[0]] * compiled
