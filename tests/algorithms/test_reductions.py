"""Identities between methods, and the invariants of the normalised ones."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat import (
    AdaMasFL,
    Asynchronous,
    Cycle,
    Dropout,
    Exponential,
    FedAsync,
    FedOpt,
    InputError,
    OpenSlots,
    Poisson,
    Polynomial,
    RoundRefill,
    Sequential,
    Setting,
    Synchronous,
    Vectorised,
    build,
    fadas,
    trees,
)
from offbeat.algorithms.ca2fl import CA2FL
from offbeat.algorithms.fadas import Shrink
from offbeat.algorithms.fedopt import Adagrad, Adam, AmsGrad, Ema, HeavyBall
from offbeat.algorithms.masfl import MasFL
from offbeat.algorithms.scaffold import Scaffold
from offbeat.core import AnyAlgorithm, Batch, Batches, Visit
from offbeat.schedule.dispatch import Dispatch, Queues
from offbeat.training.checkpoint import Checkpoint
from offbeat.training.loop import train
from worlds import SEED, make_world, play

DISPATCHES = [Synchronous(3), Asynchronous(5), Asynchronous(5, eager=False), RoundRefill(5), Poisson(0.4)]


def last(algorithm: AnyAlgorithm, dispatch: Dispatch, **options: object) -> np.ndarray:
    world = make_world()
    engine = Vectorised(world.problem, world.population, Exponential(1.0))
    return play(algorithm, engine, dispatch, **options)[-1].x.numpy()  # type: ignore[arg-type]


def test_fadas_without_a_threshold_is_fedams_on_stale_updates() -> None:
    amsgrad = FedOpt(0.2, 0.03, Ema(0.9), AmsGrad(0.99, 1e-8))
    never = fadas(0.2, 0.03, damp=Shrink(float("inf")))
    for dispatch in DISPATCHES:
        np.testing.assert_array_equal(last(never, dispatch), last(amsgrad, dispatch))


def test_the_delay_adaptive_rate_changes_nothing_without_delay() -> None:
    np.testing.assert_array_equal(
        last(fadas(0.2, 0.03, damp=Shrink(1)), Synchronous(3)), last(fadas(0.2, 0.03), Synchronous(3))
    )


def test_momentum_of_zero_is_no_momentum() -> None:
    for dispatch in DISPATCHES:
        plain = last(FedOpt(0.2, 0.5), dispatch)
        np.testing.assert_allclose(last(FedOpt(0.2, 0.5, Ema(0.0)), dispatch), plain, rtol=0, atol=1e-14)
        np.testing.assert_allclose(
            last(FedOpt(0.2, 0.5, HeavyBall(0.0)), dispatch), plain, rtol=0, atol=1e-14
        )


def test_the_two_forms_of_momentum_differ_by_a_factor_in_the_rate() -> None:
    for dispatch in DISPATCHES:
        np.testing.assert_allclose(
            last(FedOpt(0.2, 0.5, Ema(0.8)), dispatch),
            last(FedOpt(0.2, 0.1, HeavyBall(0.8)), dispatch),
            rtol=0,
            atol=1e-12,
        )


def test_a_buffer_of_one_without_delay_is_sequential_fedavg_and_so_is_full_mixing() -> None:
    one = {"buffer": 1, "rounds": 20}
    np.testing.assert_allclose(
        last(FedOpt(0.2, 1.0), Synchronous(1), **one),
        last(FedAsync(0.2, alpha=1.0), Synchronous(1), **one),
        rtol=0,
        atol=1e-13,
    )


def test_without_delay_fading_weights_are_equal_weights() -> None:
    np.testing.assert_array_equal(
        last(FedOpt(0.2, 1.0), Synchronous(3), weights=Polynomial(0.5)),
        last(FedOpt(0.2, 1.0), Synchronous(3)),
    )


APPROXIMATED = {  # what stands under an approximation: its rates and parameters, and the plain method
    "fedavgm": ({"server_lr": 0.5}, FedOpt(0.2, 0.5, Ema(0.8))),
    "fedadam": (
        {"server_lr": 0.03, "beta2": 0.95, "eps": 0.02},
        FedOpt(0.2, 0.03, Ema(0.8), Adam(0.95, 0.02)),
    ),
    "fedadagrad": ({"server_lr": 0.03, "eps": 0.02}, FedOpt(0.2, 0.03, Ema(0.8), Adagrad(0.02))),
    "fadas": (
        {"server_lr": 0.03, "beta2": 0.95, "eps": 1e-4},
        FedOpt(0.2, 0.03, Ema(0.8), AmsGrad(0.95, 1e-4)),
    ),
}


def approximated(name: str, **parameters: object) -> AnyAlgorithm:
    return build(name, Setting(3, 3, 8), {"local_lr": 0.2, "beta": 0.8, "span": 5} | parameters)


@pytest.mark.parametrize("below", APPROXIMATED)
def test_without_delay_momentum_approximation_is_the_momentum(below: str) -> None:
    """Invariant 6; a penalty of p alone makes all weights smaller by 1 + p, which the rate can undo."""
    parameters, plain = APPROXIMATED[below]
    rate = parameters["server_lr"]
    for algorithm in (
        approximated(f"ma-{below}", **parameters | {"rcond": 1e-2}),
        approximated(f"ma-{below}", **parameters | {"penalty": 0.01, "server_lr": 1.01 * rate}),
        approximated(f"ma-light-{below}", **parameters),
    ):
        np.testing.assert_allclose(
            last(algorithm, Synchronous(3), max_staleness=4), last(plain, Synchronous(3)), rtol=0, atol=1e-12
        )
        late = last(algorithm, Asynchronous(8), max_staleness=4)
        assert np.abs(late - last(plain, Asynchronous(8), max_staleness=4)).max() > 1e-4


def test_without_delay_and_momentum_an_approximation_is_fedbuff() -> None:
    """Invariant 7."""
    for name, solver in (("ma-fedavgm", {"rcond": 1e-2}), ("ma-light-fedavgm", {})):
        np.testing.assert_allclose(
            last(approximated(name, server_lr=0.5, beta=0.0, **solver), Synchronous(3), max_staleness=4),
            last(FedOpt(0.2, 0.5), Synchronous(3)),
            rtol=0,
            atol=1e-12,
        )


@pytest.mark.parametrize("remembered", [False, True])
@pytest.mark.parametrize("below", ["fedavgm", "fedadam"])
def test_without_delay_weight_prediction_is_the_method_below(below: str, remembered: bool) -> None:
    parameters, plain = APPROXIMATED[below]
    common = {"local_lr": 0.2, "beta": 0.8, "rule": below, "remembered": remembered}
    algorithm = build("weight-prediction", Setting(3, 3, 8), common | parameters)
    np.testing.assert_allclose(
        last(algorithm, Synchronous(3)), last(plain, Synchronous(3)), rtol=0, atol=1e-14
    )
    assert np.abs(last(algorithm, Asynchronous(8)) - last(plain, Asynchronous(8))).max() > 1e-5


KEEPING = {  # methods whose clients keep something, and the server's mean of it
    "adamasfl": "c",
    "ca2fl": "h",
    "dude": "g",
    "feddyn": "h",
    "masfl": "c",
    "padamfed-vr": "c",
    "scaffold": "c",
    "scaffold-m-vr": "c",
}


@settings(max_examples=30)
@given(
    method=st.sampled_from(sorted(KEEPING)),
    seed=st.integers(0, 1000),
    dispatch=st.sampled_from([*DISPATCHES, Asynchronous(8), Queues(6)]),
    lost=st.floats(0, 0.5),
    limit=st.sampled_from([0, 1, 3, float("inf")]),
)
def test_the_servers_mean_is_the_mean_of_what_clients_keep_and_unit_steps_stay_within_bounds(
    method: str, seed: int, dispatch: Dispatch, lost: float, limit: float
) -> None:
    """Invariants 1, 4 and 12, under losses, drops and a client twice in one buffer."""
    world = make_world(seed=seed)
    engine = Sequential(world.problem, world.population, Exponential(1.0), Cycle(4.0, 0.8), Dropout(lost))
    algorithm = build(method, Setting(3, 3, 6), {})
    before = None
    shots = train(algorithm, engine, dispatch=dispatch, buffer=3, rounds=6, max_staleness=limit, seed=seed)
    for shot in shots:
        saved = shot.checkpoint()
        table = torch.zeros(8, world.problem.size, dtype=torch.float64)
        rows = saved.facts["session"]["clients"]
        if rows:
            table[rows] = saved.tensors["session.memory.0"]
        torch.testing.assert_close(table.mean(0), getattr(shot.state, KEEPING[method]), rtol=0, atol=1e-12)
        if before is not None and method in ("adamasfl", "padamfed-vr"):
            assert (shot.x - before).norm() <= algorithm.server_lr + 1e-12  # type: ignore[attr-defined]
        before = shot.x
        counts = shot.counts
        assert (
            counts.started
            == counts.consumed + counts.waiting + counts.dropped + counts.lost + counts.in_flight
        )


def test_with_everybody_in_each_buffer_ca2fl_is_the_mean_of_the_updates() -> None:
    """Invariant 9: the cache cancels."""
    everybody = {"buffer": 8, "rounds": 5}
    np.testing.assert_allclose(
        last(CA2FL(0.2, 0.7), Synchronous(8), **everybody),
        last(FedOpt(0.2, 0.7), Synchronous(8), **everybody),
        rtol=0,
        atol=1e-13,
    )


def test_with_beta_one_scaffold_m_is_scaffold_at_another_rate() -> None:
    """Invariant 5, when control variates start alike: eta_g = gamma / (eta K)."""
    np.testing.assert_allclose(
        last(MasFL(0.2, 0.3, 1.0, lazy=True), Synchronous(3)),
        last(Scaffold(0.2, 0.3 / (0.2 * 3)), Synchronous(3)),
        rtol=0,
        atol=1e-12,
    )


def test_without_delay_the_momentum_is_the_mean_of_the_local_directions() -> None:
    """Invariant 3: g = beta (mean shift + c) + (1 - beta) g is what clients walked along."""
    directions = []
    world = make_world()
    algorithm = MasFL(0.2, 0.3, 0.4)
    engine = Sequential(world.problem, world.population)
    shots = play(algorithm, engine, Synchronous(3), rounds=1)
    start, after = shots
    assert after.filled
    anchor = algorithm.broadcast(start.state, 0).anchor.numpy()
    kept = dict(zip(*_rows(start_of(algorithm, engine)), strict=True))
    for client, _, visit in after.filled.tasks:
        x = start.x.numpy()
        for k in range(3):
            u = 0.4 * (world.oracle.gradient(client, visit, k, x) - kept[client]) + anchor
            x = x - 0.2 * u
            directions.append(u)
    np.testing.assert_allclose(after.state.g.numpy(), np.mean(directions, axis=0), rtol=0, atol=1e-13)


def start_of(algorithm: AnyAlgorithm, engine: Sequential) -> Checkpoint:
    return next(train(algorithm, engine, dispatch=Synchronous(3), buffer=3, rounds=1, seed=SEED)).checkpoint()


def _rows(saved: Checkpoint) -> tuple[list[int], list[np.ndarray]]:
    return saved.facts["session"]["clients"], list(saved.tensors["session.memory.0"].numpy())


def test_the_start_moves_nothing_and_fills_momentum_and_control_variates_with_mean_gradients() -> None:
    world = make_world()
    engine = Vectorised(world.problem, world.population)
    first = play(AdaMasFL.tuned(3, 3, 12), engine, Asynchronous(5))[0]
    x0 = world.problem.initial()[0]
    torch.testing.assert_close(first.x, x0, rtol=0, atol=0)
    rows = [
        np.mean([world.oracle.gradient(client, 0, k, x0.numpy()) for k in range(3)], axis=0)
        for client in range(8)
    ]
    np.testing.assert_allclose(first.state.c.numpy(), np.mean(rows, axis=0), rtol=0, atol=1e-14)
    np.testing.assert_allclose(first.state.g.numpy(), np.mean(rows, axis=0), rtol=0, atol=1e-14)
    assert first.counts.client_updates == 8
    assert first.time > 0


def test_with_beta_one_the_momentum_is_ignored() -> None:
    world = make_world()
    engine = Vectorised(world.problem, world.population, Exponential(1.0))
    algorithm = AdaMasFL(0.05, 0.1, 1.0)
    shots = play(algorithm, engine, Asynchronous(5))
    for shot in shots:
        torch.testing.assert_close(
            algorithm.broadcast(shot.state, shot.version).anchor, shot.state.c, rtol=0, atol=0
        )


def test_a_gradient_of_zero_is_no_step_and_no_nan() -> None:
    zero = torch.zeros(4, dtype=torch.float64)
    algorithm = AdaMasFL(0.1, 0.1, 0.5)
    upload, memory = algorithm.local(
        algorithm.broadcast(algorithm.init(zero), 0),
        zero,
        Batches((Batch(()), Batch(()))),
        Visit(torch.tensor(0), torch.tensor(0)),
        lambda x, batch: torch.zeros_like(x),
    )
    assert torch.equal(upload.descent, zero)
    assert torch.equal(memory, zero)


def test_adamasfl_refuses_fading_weights() -> None:
    world = make_world()
    engine = Vectorised(world.problem, world.population, Exponential(1.0))
    with pytest.raises(InputError, match="no staleness weights"):
        play(AdaMasFL.tuned(3, 3, 12), engine, Asynchronous(5), weights=Polynomial(0.5))


@pytest.mark.parametrize("name", ["fedavg", "fadas", "scaffold"])
def test_open_slots_give_the_model_of_synchronous_and_asynchronous_runs_to_the_bit(name: str) -> None:
    """NVFlare's K, B and O: K = B = O is FedAvg's protocol, and O = 1 the asynchronous one."""
    algorithm = build(name, Setting(3, 3, 8), {})
    np.testing.assert_array_equal(last(algorithm, OpenSlots(3, 3)), last(algorithm, Synchronous(3)))
    np.testing.assert_array_equal(
        last(algorithm, OpenSlots(5)), last(algorithm, Asynchronous(5, eager=False))
    )
    assert not np.array_equal(last(algorithm, OpenSlots(5, 3)), last(algorithm, OpenSlots(5)))


@pytest.mark.parametrize(
    "method", ["adamasfl", "dude", "fedcm", "fednova", "masfl", "scaffold", "scaffold-m-vr"]
)
def test_a_minibatch_that_is_all_padding_changes_nothing(method: str) -> None:
    """A method that divides by the number of local steps counts the real ones."""
    algorithm = build(method, Setting(3, 2, 10), {})
    x = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    real = [Batch((torch.full((2, 3), value, dtype=torch.float64),)) for value in (1.0, 3.0)]
    padding = Batch((torch.full((2, 3), 9.0, dtype=torch.float64),), torch.zeros(2, dtype=torch.bool))
    masked = tuple(Batch(batch.data, torch.ones(2, dtype=torch.bool)) for batch in real)
    visit = Visit(torch.tensor(0), torch.tensor(0))

    class Quadratic:
        def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
            return x - batch.data[0].mean(0)

        def with_loss(self, x: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
            return self(x, batch), x.sum()

        def descend(self, x: torch.Tensor, batch: Batch, lr: float) -> torch.Tensor:
            return x - lr * self(x, batch)

    found = [
        trees.leaves(
            algorithm.local(
                algorithm.broadcast(algorithm.init(x), 0),
                algorithm.memory(x),
                Batches(items, tuple(real)),
                visit,
                Quadratic(),
            )
        )
        for items in (tuple(real), (*masked, padding, padding))
    ]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)
