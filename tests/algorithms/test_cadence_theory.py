"""What docs/cadence.md proves about Cadence: what changes nothing, and why stale unit steps are stable."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat import Cadence
from offbeat.algorithms import cadence as cadence_module
from offbeat.core import Batch, Batches, Cohort, Vector, Visit

VISIT = Visit(torch.tensor(0), torch.tensor(0))
Height = Callable[[Vector], Tensor]


class Landscape:
    """One function, and the slope that the batch says."""

    def __init__(self, height: Height) -> None:
        self.height = height

    def __call__(self, x: Vector, batch: Batch) -> Vector:
        return self.with_loss(x, batch)[0]

    def with_loss(self, x: Vector, batch: Batch) -> tuple[Vector, Tensor]:
        slope, height = torch.func.grad_and_value(self.height)(x)
        return slope + batch.data[0], height + x @ batch.data[0]

    def descend(self, x: Vector, batch: Batch, lr: float) -> Vector:
        return x - lr * self(x, batch)


def drift(
    method: Cadence, x: Tensor, height: Height, noise: Tensor, late: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """The path, and the units of the steps along it.

    Every update is `late` versions old, once that is possible.
    """
    state, memory, messages = method.init(x), method.memory(x), []
    path, units = [state.path], []
    for version in range(len(noise)):
        messages.append(method.broadcast(state, version))
        stale = min(late, version)
        batches = Batches(tuple(Batch((each,)) for each in noise[version]))
        upload, memory = method.local(messages[version - stale], memory, batches, VISIT, Landscape(height))
        state = method.step(state, upload, Cohort(version, 4, (stale,), (1.0,)))
        path.append(state.path)
        units.append(state.unit)
    return path, units


def bowl(curvature: Tensor | float, bottom: float = 0.0) -> Height:
    """Half of the squares times the curvature."""
    return lambda at: (curvature * at.square()).sum() / 2 + bottom


def drawn(seed: int) -> tuple[Tensor, Tensor, torch.Generator]:
    """A model and noise."""
    rng = torch.Generator().manual_seed(seed)
    return (
        torch.randn(5, generator=rng, dtype=torch.float64),
        torch.randn(12, 4, 5, generator=rng, dtype=torch.float64),
        rng,
    )


CURVATURES = torch.arange(1.0, 6.0, dtype=torch.float64)


@pytest.mark.parametrize("variates", [True, False])
@given(seed=st.integers(0, 1000), scale=st.floats(-6, 6), late=st.integers(0, 3))
@settings(max_examples=10, deadline=None)
def test_a_loss_times_a_constant_gives_the_same_path(
    variates: bool, seed: int, scale: float, late: int
) -> None:
    x, noise, _ = drawn(seed)
    method, times = Cadence.tuned(4, variates), 10**scale
    one, _ = drift(method, x, bowl(CURVATURES, 3.0), noise, late)
    other, _ = drift(method, x, bowl(times * CURVATURES, times * 3.0), times * noise, late)
    torch.testing.assert_close(torch.stack(one), torch.stack(other), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("variates", [True, False])
@given(seed=st.integers(0, 1000), late=st.integers(0, 3))
@settings(max_examples=10, deadline=None)
def test_weights_in_another_order_or_of_the_other_sign_take_the_same_steps(
    variates: bool, seed: int, late: int
) -> None:
    x, noise, rng = drawn(seed)
    order = torch.randperm(5, generator=rng)
    signs = torch.randint(0, 2, (5,), generator=rng).double() * 2 - 1
    method = Cadence.tuned(4, variates)

    def moved(v: Tensor) -> Tensor:
        return signs * v[..., order]

    one, _ = drift(method, x, bowl(CURVATURES, 3.0), noise, late)
    other, _ = drift(method, moved(x), bowl(CURVATURES[order], 3.0), moved(noise), late)
    torch.testing.assert_close(moved(torch.stack(one)), torch.stack(other), rtol=1e-7, atol=1e-7)


def core(monkeypatch: pytest.MonkeyPatch, unit: float) -> Cadence:
    """What the proofs are about: one local step, no control variates, coordinates as they are.

    In the unit that the method takes, no proof says more than that the model comes back.
    """
    monkeypatch.setattr(cadence_module, "_equalise", lambda step, squares: step)
    monkeypatch.setattr(cadence_module, "_UNIT", unit)
    return Cadence.tuned(1, variates=False)


def least_slope(method: Cadence, late: int) -> float:
    """In units: where |g| by L is above it, a step makes the function smaller."""
    return min(2 * method.leap, 0.12 * (2 * late + 0.5))


def in_flight(units: list[Tensor], n: int, late: int) -> float:
    """The longest unit of the n-th step and of those that its update did not see."""
    return float(torch.stack(units[n - late : n + 1]).max())


@pytest.mark.parametrize("late", [0, 1, 5, 20])
@pytest.mark.parametrize("curvature", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("fixed", [True, False])
def test_stale_unit_steps_reach_and_keep_the_bottom_of_any_bowl(
    monkeypatch: pytest.MonkeyPatch, fixed: bool, curvature: float, late: int
) -> None:
    """|x| shrinks while it is above 2 x 0.96 units, and 0.12 (2 late + 1/2), whatever the curvature.

    Losses below zero say nothing, and leave the unit. If it follows them, the longest counts.
    """
    rng = torch.Generator().manual_seed(late)
    x = 3 * torch.randn(6, generator=rng, dtype=torch.float64)
    plain = core(monkeypatch, 2.0 if fixed else 0.3)
    height = bowl(curvature, -1e3 * curvature if fixed else 0.0)
    path, units = drift(plain, x, height, torch.zeros(400, 1, 6).double(), late)
    if fixed:
        torch.testing.assert_close(torch.stack(units), (x.norm() / 10).expand(400))
    else:
        assert float(units[-1]) < 0.8 * float(units[0])
    assert plain.leap == pytest.approx(0.96)
    lengths = torch.stack(path).norm(dim=1)
    begun = 2 * late + 1  # from there on all that is in flight was sent at the rate for this staleness
    gap = least_slope(plain, late)
    above = [n for n in range(begun, 400) if lengths[n] > gap * in_flight(units, n, late)]
    assert above
    assert all(lengths[n + 1] < lengths[n] for n in above)
    last = in_flight(units, 399, late)
    assert float(lengths[-1]) <= gap * last + min(plain.leap / (1 + late), 0.12) * last


@pytest.mark.parametrize(("late", "nearer"), [(0, 0.02), (1, 0.05), (5, 0.3)])
@pytest.mark.parametrize("curvature", [1e-6, 1.0, 1e6])
def test_in_its_own_unit_a_model_comes_nearer_to_the_bottom_of_any_bowl(
    late: int, nearer: float, curvature: float
) -> None:
    """The unit is three times as long as the way at first, and shrinks with the ratio."""
    rng = torch.Generator().manual_seed(late)
    x = 3 * torch.randn(6, generator=rng, dtype=torch.float64)
    path, units = drift(
        Cadence.tuned(1, variates=False), x, bowl(curvature), torch.zeros(400, 1, 6).double(), late
    )
    assert float(units[0] / x.norm()) == pytest.approx(3)
    assert float(units[-1]) < 0.7 * float(units[0])
    assert float(path[-1].norm() / x.norm()) < nearer


@pytest.mark.parametrize("late", [0, 2, 8])
@pytest.mark.parametrize("steep", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_smooth_function_falls_wherever_its_slope_is_above_the_bound(
    monkeypatch: pytest.MonkeyPatch, seed: int, late: int, steep: float
) -> None:
    """Of the sum of log(1 + (a x)^2), which is not convex; its gradient changes by at most 2 a^2 a unit."""
    method = core(monkeypatch, unit=3e-3)
    x = torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def height(at: Vector) -> Tensor:
        return torch.log1p((steep * at).square()).sum()

    path, units = drift(method, x, height, torch.zeros(150, 1, 6).double(), late)
    slopes = [float(torch.func.grad(height)(at).norm()) for at in path]
    bound = least_slope(method, late) * 2 * steep**2
    above = [n for n in range(2 * late + 1, 150) if slopes[n] > bound * in_flight(units, n, late)]
    assert above
    assert all(float(height(path[n + 1])) < float(height(path[n])) for n in above)


@pytest.mark.parametrize("late", [0, 3, 10])
def test_while_a_client_is_at_work_the_server_goes_no_further_than_eight_times_the_clients_way(
    late: int,
) -> None:
    """With control variates and equalised coordinates, too, for gradients that are nothing but noise."""
    rng = torch.Generator().manual_seed(late)
    steps = 4
    x, noise = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in ((9,), (80, steps, 9)))
    path, units = drift(Cadence.tuned(steps), x, lambda at: 0 * at.sum() + 3, noise, late)
    assert float(max(units)) > 1.1 * float(min(units))
    for n in range(2 * late + 2, 80):
        gone = sum(float((path[m + 1] - path[m]).norm()) for m in range(n - late - 1, n))
        assert gone <= 8 * 0.12 * math.sqrt(steps) * in_flight(units, n - 1, late) + 1e-12


@pytest.mark.parametrize(("late", "farthest"), [(0, 1.0), (1, 1.0), (5, 1.86), (20, 4.82)])
def test_on_a_bowl_the_distance_first_grows_by_as_much_as_the_page_says(
    monkeypatch: pytest.MonkeyPatch, late: int, farthest: float
) -> None:
    monkeypatch.setattr(cadence_module, "_equalise", lambda step, squares: step)
    x = 4 * torch.ones(6, dtype=torch.float64)
    path, _ = drift(Cadence.tuned(1, variates=False), x, bowl(1.0), torch.zeros(60, 1, 6).double(), late)
    distances = [float(place.norm() / x.norm()) for place in path]
    assert max(distances) == pytest.approx(farthest, abs=0.005)


@given(
    ratios=st.lists(st.floats(1e-3, 1e2), min_size=1, max_size=8),
    size=st.floats(2, 1e3),
)
def test_the_first_ratio_is_between_the_harmonic_and_the_arithmetic_mean(
    ratios: list[float], size: float
) -> None:
    """Whatever the norm is with which the clients compare; but it is no more than that norm."""
    method, x = Cadence.tuned(1, variates=False), torch.tensor([size, 0.0], dtype=torch.float64)
    told = x.new_tensor([ratio / (ratio + size) for ratio in ratios])
    count = len(ratios)
    mean = cadence_module.Descent(x / (2 * size), told.mean())
    state = method.step(method.init(x), mean, Cohort(0, 99, (0,) * count, (1.0,) * count))
    found = float(state.unit) / 6
    harmonic, arithmetic = count / sum(1 / ratio for ratio in ratios), sum(ratios) / count
    assert min(harmonic, size) * (1 - 1e-9) <= found <= min(arithmetic, size) * (1 + 1e-9)
