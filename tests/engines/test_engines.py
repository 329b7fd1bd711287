"""Two ways to compute, one trajectory."""

import gc
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from offbeat import (
    AdaMasFL,
    Asynchronous,
    Cadence,
    Epochs,
    Exponential,
    FedOpt,
    InputError,
    Phases,
    Problem,
    Sequential,
    Setting,
    Steps,
    Synchronous,
    Vectorised,
    build,
    train,
)
from offbeat.engines.execution import Vmap
from offbeat.engines.process_pool import ProcessPool, Workers
from offbeat.training.loop import Snapshot
from worlds import CLASSES, FEATURES, make_world, play

METHODS = {"adamasfl": AdaMasFL(0.05, 0.1, 0.5), "cadence": Cadence.tuned(3), "fedavg": FedOpt(0.1, 1.0)}


def small(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 6), *layers, nn.Linear(6, CLASSES)).double()


class Noise(nn.Module):
    """Draws by a generator, which cannot be mapped."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * (1 + 0.1 * torch.randn_like(inputs))


class Branching(nn.Module):
    """Decides on what it sees, which cannot be mapped."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES).double()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.linear(inputs)
        return outputs if outputs.sum() > 0 else 2 * outputs


class Applied(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(inputs)


class Counting(nn.Module):
    """Adds up what it sees, in a buffer that is part of the module's state or not."""

    total: Tensor

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros((), dtype=torch.float64), persistent=persistent)

    def forward(self, inputs: Tensor) -> Tensor:
        self.total += inputs.detach().mean()
        return inputs


def add_in_place(inputs: Tensor) -> Tensor:
    total = torch.zeros(inputs.shape[-1], dtype=inputs.dtype)
    total += inputs.detach().mean(0)
    return inputs - total


class OldFunction(torch.autograd.Function):
    """Written before torch had transforms."""

    @staticmethod
    def forward(ctx, inputs):  # type: ignore[no-untyped-def,override]
        return inputs.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def,override]
        return 2 * grad


class WithoutRule(torch.autograd.Function):
    """Without a rule for `vmap`."""

    @staticmethod
    def forward(inputs):  # type: ignore[no-untyped-def]
        return inputs.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
        pass

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def,override]
        return 2 * grad


def both(
    module: Callable[[], nn.Module], work: Steps | Epochs, method: str
) -> tuple[list[Snapshot], list[Snapshot]]:
    world = make_world(work=work, module=module())
    runs = [
        play(METHODS[method], kind(world.problem, world.population, Exponential(1.0)), Asynchronous(5))
        for kind in (Sequential, Vectorised)
    ]
    return runs[0], runs[1]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: small(nn.Tanh()),
    "batch norm": lambda: small(nn.BatchNorm1d(6), nn.ReLU()),
    "group norm": lambda: small(nn.GroupNorm(2, 6), nn.ReLU()),
    "dropout": lambda: small(nn.Dropout(0.4)),
    "noise": lambda: small(Noise()),
    "branching": Branching,
}
ODD_MODULES: dict[str, Callable[[], nn.Module]] = MODULES | {
    "hidden state": lambda: small(Counting(persistent=False)),
    "NumPy": lambda: small(Applied(lambda inputs: inputs * float(np.asarray(inputs.detach()).max()))),
    "one vector for all": lambda: small(Applied(add_in_place)),
    "function without a rule": lambda: small(Applied(WithoutRule.apply)),  # type: ignore[arg-type]
    "old function": lambda: small(Applied(OldFunction.apply)),  # type: ignore[arg-type]
    "dynamic shape": lambda: small(Applied(lambda inputs: inputs * len(inputs.detach().nonzero()))),
    "statistics": lambda: small(Counting(persistent=True)),
}
ONE_BY_ONE = "this module cannot be computed for many clients at once, so it runs one by one"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("module", "work"),
    [
        (module, work)
        for module in MODULES
        for work in (Steps(3, 4), Epochs(2, 4), Epochs(1, 100))
        if (module, work) != ("batch norm", Epochs(2, 4))
    ],  # torch refuses to normalise a last batch of one
)
def test_both_engines_give_one_trajectory(module: str, work: Steps | Epochs, method: str) -> None:
    one, many = both(MODULES[module], work, method)
    for left, right in zip(one, many, strict=True):
        torch.testing.assert_close(left.x, right.x, rtol=0, atol=1e-10)
        torch.testing.assert_close(left.statistics, right.statistics, rtol=0, atol=1e-10)
    assert not torch.equal(one[0].x, one[-1].x)


def test_the_vectorised_engine_repeats_itself_to_the_bit() -> None:
    first, second = (both(MODULES["plain"], Epochs(2, 4), "adamasfl")[1] for _ in range(2))
    for left, right in zip(first, second, strict=True):
        assert torch.equal(left.x, right.x)
        assert left.time == right.time
        assert left.filled == right.filled


def test_a_chunk_size_changes_nothing_but_rounding() -> None:
    world = make_world()
    runs = [
        play(METHODS["adamasfl"], Vectorised(world.problem, world.population, chunk=chunk), Asynchronous(5))
        for chunk in (None, 2)
    ]
    torch.testing.assert_close(runs[0][-1].x, runs[1][-1].x, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("noise", "this module draws random numbers, so its clients are computed one by one."),
        ("branching", ONE_BY_ONE),
        ("hidden state", ONE_BY_ONE),
        ("NumPy", ONE_BY_ONE),
        ("one vector for all", ONE_BY_ONE),
        ("function without a rule", ONE_BY_ONE),
        ("old function", ONE_BY_ONE),
        ("dynamic shape", ONE_BY_ONE),
        ("statistics", None),
        ("group norm", None),
        ("batch norm", None),
    ],
)
def test_what_cannot_be_mapped_runs_one_by_one_and_says_so_once(
    module: str, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    world = make_world(module=ODD_MODULES[module]())
    one, other = Sequential(world.problem, world.population), Vectorised(world.problem, world.population)
    plain = play(METHODS["fedavg"], one, Asynchronous(5))
    with caplog.at_level(logging.WARNING):
        found = play(METHODS["fedavg"], other, Asynchronous(5))
    torch.testing.assert_close(plain[-1].x, found[-1].x, rtol=0, atol=1e-12)
    assert [record.message.split(":")[0] for record in caplog.records] == ([said] if said else [])
    assert not any(". " in record.message for record in caplog.records)  # one sentence


def test_a_module_that_draws_leaves_the_global_generator_alone() -> None:
    world = make_world(module=MODULES["noise"]())
    torch.manual_seed(5)
    before = torch.get_rng_state()
    play(METHODS["fedavg"], Sequential(world.problem, world.population), Asynchronous(5))
    assert torch.equal(before, torch.get_rng_state())


def test_a_loss_of_one_number_per_batch_works_with_short_batches() -> None:
    world = make_world(work=Epochs(2, 4))
    scalar = Problem(world.problem.module(world.problem.initial()[0]), cross_entropy)
    runs = [
        play(METHODS["adamasfl"], kind(problem, world.population, Exponential(1.0)), Asynchronous(5))
        for kind, problem in ((Sequential, world.problem), (Sequential, scalar), (Vectorised, scalar))
    ]
    for run in runs[1:]:
        torch.testing.assert_close(run[-1].x, runs[0][-1].x, rtol=0, atol=1e-12)


def test_an_error_in_the_users_module_is_not_hidden() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(FEATURES + 1, CLASSES).double()

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.linear(inputs)
            return outputs

    world = make_world(module=Wrong())
    for kind in (Sequential, Vectorised):
        with pytest.raises(RuntimeError, match=r"shapes|size"):
            play(METHODS["fedavg"], kind(world.problem, world.population), Asynchronous(5))


@pytest.mark.parametrize("method", ["padamfed-vr", "scaffold-m-vr", "fedcm-vr", "mime", "fafed"])
@pytest.mark.parametrize("kind", [Sequential, Vectorised])
def test_methods_with_two_gradients_a_minibatch_refuse_a_module_that_draws(
    kind: type[Sequential] | type[Vectorised], method: str
) -> None:
    world = make_world(module=MODULES["dropout"]())
    dispatch = Phases(3) if method == "mime" else Synchronous(3)
    with pytest.raises(InputError, match="takes two gradients of each minibatch"):
        play(build(method, Setting(3, 3, 8), {}), kind(world.problem, world.population), dispatch)


class Centred(nn.Module):
    """Takes the mean over the batch away, unlike any norm of torch; its head starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES).double()
        nn.init.zeros_(self.head.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(inputs - inputs.mean(0))
        return outputs


def test_a_module_that_mixes_the_examples_of_a_batch_is_not_padded() -> None:
    one, many = both(Centred, Epochs(2, 4), "fedavg")
    torch.testing.assert_close(one[-1].x, many[-1].x, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", [Sequential, Vectorised])
@pytest.mark.parametrize("method", ["fedavg", "padamfed-vr"])
def test_batch_norm_on_a_minibatch_of_one_is_one_sentence(
    method: str, kind: type[Sequential] | type[Vectorised]
) -> None:
    world = make_world(work=Epochs(1, 2), module=MODULES["batch norm"]())
    engine = kind(world.problem, world.population)
    with pytest.raises(InputError, match=r"BatchNorm cannot normalise: use Steps, Epochs\(..., least=2\)"):
        play(build(method, Setting(3, 3, 8), {}), engine, Synchronous(3))
    careful = kind(world.problem, replace(world.population, work=Epochs(1, 2, least=2)))
    assert len(play(METHODS["fedavg"], careful, Synchronous(3))) == 9


@pytest.mark.parametrize("seed", range(5))
def test_weak_dropout_is_noticed_whatever_torchs_own_generator_is_at(seed: int) -> None:
    world = make_world(module=small(nn.Dropout(0.01)))
    torch.manual_seed(seed)
    with pytest.raises(InputError, match="takes two gradients"):
        play(
            build("padamfed-vr", Setting(3, 3, 8), {}),
            Sequential(world.problem, world.population),
            Synchronous(3),
        )


def test_a_chunk_beside_a_way_to_compute_is_refused_rather_than_ignored() -> None:
    world = make_world()
    with pytest.raises(InputError, match="give chunk there"):
        Vectorised(world.problem, world.population, chunk=2, execution=Vmap())


def resident(processes: list[int]) -> int:
    """The bytes of memory that processes hold, of shared memory each its own part.

    Files are left out: what a process counts of a library depends on how many others have it mapped.
    """
    text = "".join(Path(f"/proc/{process}/smaps_rollup").read_text() for process in processes)
    return 1024 * sum(
        int(line.split()[1]) for line in text.splitlines() if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
    )


def tensors() -> int:
    """How many there are in this process."""
    gc.collect()
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())  # `isinstance` has objects warn


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads what Linux tells")
@pytest.mark.parametrize("kind", [Sequential, Vectorised, Workers])
def test_memory_stays_the_same_over_many_steps_with_groups_that_vary(
    kind: Callable[..., Sequential | Vectorised | Workers], monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[ProcessPool] = []
    start = ProcessPool.__init__

    def watched(self: ProcessPool, packed: Any, workers: int) -> None:
        start(self, packed, workers)
        pools.append(self)

    monkeypatch.setattr(ProcessPool, "__init__", watched)
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(FEATURES, 300), nn.ReLU(), nn.Linear(300, CLASSES)).double()
    world = make_world(work=Epochs(1, 4), module=module)
    engine = kind(world.problem, world.population, Exponential(1.0))
    counts, sizes = [], []
    # clients keep memory, so that a client that is in a buffer twice makes two groups of it
    for snapshot in train(METHODS["adamasfl"], engine, dispatch=Asynchronous(8), buffer=5, rounds=2000):
        if snapshot.version in (400, 1200, 2000):
            counts.append(tensors())
            sizes.append(resident([os.getpid(), *(pid for pool in pools for pid in pool.process_ids())]))
    assert max(counts[1:]) <= counts[0] + 20
    assert max(sizes[1:]) <= sizes[0] + 2**22  # a kept model of each step would take 30 MB
    assert all(len(pool._segments._made) < 40 for pool in pools)
