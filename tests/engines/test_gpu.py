"""What runs on a GPU gives what the CPU gives; nothing of this can be tried without one."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from offbeat import (
    AdaMasFL,
    Asynchronous,
    Cadence,
    DivergedError,
    Epochs,
    Examples,
    FedOpt,
    Population,
    Problem,
    Steps,
    train,
)
from offbeat.core import AnyAlgorithm
from offbeat.engines.cuda import GraphCache
from offbeat.engines.execution import EXECUTIONS
from offbeat.engines.simulation import Sequential, Vectorised
from offbeat.nn import models
from offbeat.nn.problem import Precision
from offbeat.training.loop import Snapshot

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # within torch's compiler
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),  # which it recommends
]

METHODS: dict[str, AnyAlgorithm] = {
    "adamasfl": AdaMasFL(0.02, 0.05, 0.5),
    "cadence": Cadence.tuned(3),
    "fedavg": FedOpt(0.05, 1.0),
}
CLIENTS = 24


def losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets, reduction="none")


def clients(work: Steps | Epochs) -> Population:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(600, 1, 28, 28, generator=generator)
    targets = torch.randint(0, 10, (600,), generator=generator)
    cuts = np.cumsum(np.random.default_rng(3).integers(5, 45, CLIENTS - 1))
    parts = [part for part in np.split(np.arange(600), cuts) if len(part)]
    return Population(Examples(inputs, targets), parts, work)


def module(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "dropout":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.Dropout(0.3), nn.Linear(16, 10))
    return models.build("cnn", (1, 28, 28), 10, seed=0)


def movement(x: torch.Tensor) -> torch.Tensor:
    return (x - torch.cat([p.detach().reshape(-1) for p in module("").parameters()]).to(x)).norm()


def run(
    method: str,
    device: str,
    how: str | None,
    work: Steps | Epochs,
    dtype: torch.dtype = torch.float64,
    kind: str = "",
) -> torch.Tensor:
    problem = Problem(module(kind).to(device, dtype), losses, precision=Precision.FLOAT32)
    population = clients(work).to(device, dtype)
    engine = (
        Sequential(problem, population)
        if how is None
        else Vectorised(problem, population, execution=EXECUTIONS[how])
    )
    shots = train(METHODS[method], engine, dispatch=Asynchronous(10), buffer=4, rounds=8, seed=1)
    return list(shots)[-1].x.cpu()


@pytest.mark.parametrize("work", [Steps(3, 10), Epochs(1, 10)])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["mapped", "mapped-compiled", "streamed", "streamed-compiled", "auto"])
def test_every_way_gives_the_sequential_reference_of_the_cpu(
    method: str, how: str, work: Steps | Epochs
) -> None:
    reference, there = run(method, "cpu", None, work), run(method, "cuda", how, work)
    assert (reference - there).norm() / movement(reference) <= 1e-8


@pytest.mark.parametrize("how", ["mapped-compiled", "streamed", "auto"])
def test_in_single_precision_it_is_as_near_as_that_allows(how: str) -> None:
    reference = run("fedavg", "cpu", None, Steps(3, 10))
    there = run("fedavg", "cuda", how, Steps(3, 10), torch.float32)
    assert (reference - there).norm() / movement(reference) <= 1e-4


@pytest.mark.parametrize("how", ["mapped", "streamed"])
@pytest.mark.parametrize("method", METHODS)
def test_a_run_repeats_itself_to_the_bit(method: str, how: str) -> None:
    assert torch.equal(*(run(method, "cuda", how, Steps(3, 10), torch.float32) for _ in range(2)))


@pytest.mark.parametrize("how", ["mapped", "mapped-compiled"])
@pytest.mark.parametrize("method", METHODS)
def test_recording_changes_not_one_bit(method: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = run(method, "cuda", how, Steps(3, 10), torch.float32)
    monkeypatch.setattr(GraphCache, "find", lambda self, key, make: None)
    assert torch.equal(recorded, run(method, "cuda", how, Steps(3, 10), torch.float32))


def test_a_module_that_draws_is_computed_one_by_one_and_repeats() -> None:
    first, again = (run("fedavg", "cuda", "streamed", Steps(3, 10), kind="dropout") for _ in range(2))
    assert torch.equal(first, again)


class Branching(nn.Linear):
    """A module that can be neither mapped nor recorded, since its path depends on the data."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        return outputs if outputs.sum() > -1e30 else -outputs


@pytest.mark.parametrize("how", ["mapped", "mapped-compiled", "streamed", "streamed-compiled", "auto"])
def test_a_module_that_cannot_be_computed_so_says_it_once_and_gives_the_reference(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    branching, found = nn.Sequential(nn.Flatten(), Branching(784, 10)).double(), []
    for device, execution in (("cpu", None), ("cuda", EXECUTIONS[how])):
        problem = Problem(branching.to(device), losses, precision=Precision.FLOAT32)
        population = clients(Steps(3, 10)).to(device, torch.float64)
        engine = (
            Vectorised(problem, population, execution=execution)
            if execution
            else Sequential(problem, population)
        )
        shots = train(METHODS["fedavg"], engine, dispatch=Asynchronous(10), buffer=4, rounds=6, seed=1)
        found.append(list(shots)[-1].x.cpu())
    torch.testing.assert_close(*found, rtol=0, atol=1e-8)
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == len(set(said)) <= 1
    assert said or how == "streamed-compiled"  # which the compiler may be able to record


@pytest.mark.parametrize("how", ["mapped", "streamed"])
def test_too_little_memory_makes_groups_smaller_and_says_so_once(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    work = Steps(2, 1500)
    whole = run("fedavg", "cuda", how, work)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 4 * 2**30) / total)
        tight = run("fedavg", "cuda", how, work)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (whole - tight).norm() <= 1e-8 * movement(whole)
    assert any("memory" in record.message for record in caplog.records)


@pytest.mark.parametrize("how", ["mapped", "streamed"])
def test_memory_stays_the_same_over_many_steps_with_groups_that_vary(how: str) -> None:
    problem = Problem(module("dropout").to("cuda"), losses)
    engine = Vectorised(problem, clients(Epochs(1, 10)).to("cuda"), execution=EXECUTIONS[how])
    held = []
    # clients keep memory, so that groups have as many tasks as there are clients without another one
    for snapshot in train(METHODS["adamasfl"], engine, dispatch=Asynchronous(10), buffer=4, rounds=2000):
        if snapshot.version in (500, 1000, 2000):
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
    assert max(held[1:]) <= held[0] + 2**20


def test_a_run_that_diverges_says_at_which_step_and_saves_nothing_of_it() -> None:
    problem = Problem(module("").to("cuda"), losses)
    engine = Vectorised(problem, clients(Steps(3, 10)).to("cuda"), execution=EXECUTIONS["mapped"])
    seen: list[Snapshot] = []
    steps = train(FedOpt(1e30, 1.0), engine, dispatch=Asynchronous(10), buffer=4, rounds=50)
    with pytest.raises(DivergedError, match="became NaN or infinite at server step") as caught:
        seen.extend(steps)
    last = seen[-1]
    with pytest.raises(DivergedError) as again:
        last.checkpoint()
    assert str(again.value) == str(caught.value)
    assert f"server step {last.version}" in str(caught.value)
