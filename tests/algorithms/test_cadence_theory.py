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
Slope = Callable[[Vector], Vector]


class Landscape:
    """The gradient of one function, plus what the batch says."""

    def __init__(self, slope: Slope) -> None:
        self.slope = slope

    def __call__(self, x: Vector, batch: Batch) -> Vector:
        return self.slope(x) + batch.data[0]

    def with_loss(self, x: Vector, batch: Batch) -> tuple[Vector, Tensor]:
        raise NotImplementedError

    def descend(self, x: Vector, batch: Batch, lr: float) -> Vector:
        return x - lr * self(x, batch)


def drift(
    method: Cadence, x: Tensor, slope: Slope, noise: Tensor, late: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """The path and the units of a server whose every update is `late` versions old, once that is possible."""
    state, memory, messages = method.init(x), method.memory(x), []
    path, units = [state.path], [state.unit]
    for version in range(len(noise)):
        messages.append(method.broadcast(state, version))
        stale = min(late, version)
        batches = Batches(tuple(Batch((each,)) for each in noise[version]))
        upload, memory = method.local(messages[version - stale], memory, batches, VISIT, Landscape(slope))
        state = method.step(state, upload, Cohort(version, 4, (stale,), (1.0,)))
        path.append(state.path)
        units.append(state.unit)
    return path, units


@pytest.mark.parametrize("variates", [True, False])
@given(seed=st.integers(0, 1000), scale=st.floats(-6, 6), late=st.integers(0, 3))
@settings(max_examples=10, deadline=None)
def test_a_loss_times_a_constant_gives_the_same_path(
    variates: bool, seed: int, scale: float, late: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    x, noise = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in ((5,), (12, 4, 5)))
    method, curvature = Cadence.tuned(4, variates), torch.arange(1.0, 6.0, dtype=torch.float64)
    one, _ = drift(method, x, lambda at: curvature * at, noise, late)
    other, _ = drift(method, x, lambda at: 10**scale * curvature * at, 10**scale * noise, late)
    torch.testing.assert_close(torch.stack(one), torch.stack(other), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("variates", [True, False])
@given(seed=st.integers(0, 1000), late=st.integers(0, 3))
@settings(max_examples=10, deadline=None)
def test_weights_in_another_order_or_of_the_other_sign_take_the_same_steps(
    variates: bool, seed: int, late: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    x, noise = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in ((5,), (12, 4, 5)))
    order = torch.randperm(5, generator=rng)
    signs = torch.randint(0, 2, (5,), generator=rng).double() * 2 - 1
    method, curvature = Cadence.tuned(4, variates), torch.arange(1.0, 6.0, dtype=torch.float64)

    def moved(v: Tensor) -> Tensor:
        return signs * v[..., order]

    one, _ = drift(method, x, lambda at: curvature * at, noise, late)
    other, _ = drift(method, moved(x), lambda at: curvature[order] * at, moved(noise), late)
    torch.testing.assert_close(moved(torch.stack(one)), torch.stack(other), rtol=1e-7, atol=1e-7)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Cadence:
    """The core that the proofs are about: one local step, no control variates, coordinates as they are."""
    monkeypatch.setattr(cadence_module, "_EQUALISED", 0.0)
    return Cadence.tuned(1, variates=False)


@pytest.mark.parametrize("late", [0, 1, 5, 20])
@pytest.mark.parametrize("curvature", [1e-6, 1.0, 1e6])
def test_stale_unit_steps_reach_and_keep_the_bottom_of_any_bowl(
    plain: Cadence, curvature: float, late: int
) -> None:
    """|x| shrinks while it is above 2 x 0.48 units, whatever the curvature and the staleness."""
    rng = torch.Generator().manual_seed(late)
    x = 3 * torch.randn(6, generator=rng, dtype=torch.float64)
    path, units = drift(plain, x, lambda at: curvature * at, torch.zeros(400, 1, 6).double(), late)
    lengths = torch.stack(path).norm(dim=1)
    bound = 2 * plain.leap * torch.stack(units)
    begun = 2 * late + 1  # from there on all that is in flight was sent at the rate for this staleness
    above = [n for n in range(begun, 400) if lengths[n] > bound[n]]
    assert all(lengths[n + 1] < lengths[n] for n in above)
    assert float(lengths[-1]) <= float(bound[-1] + plain.leap / (1 + late) * units[-1])


@given(seed=st.integers(0, 1000), late=st.integers(0, 8), steep=st.floats(0.1, 10))
@settings(max_examples=10, deadline=None)
def test_a_smooth_function_falls_wherever_its_slope_is_above_the_bound(
    seed: int, late: int, steep: float
) -> None:
    """Of the sum of log(1 + (a x)^2), which is not convex; its gradient changes by at most 2 a^2 a unit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cadence_module, "_EQUALISED", 0.0)
        method = Cadence.tuned(1, variates=False)
        rng = torch.Generator().manual_seed(seed)
        x = torch.randn(6, generator=rng, dtype=torch.float64)

        def slope(at: Vector) -> Vector:
            return 2 * steep**2 * at / (1 + (steep * at).square())

        path, units = drift(method, x, slope, torch.zeros(150, 1, 6).double(), late)
    for n in range(2 * late + 1, 150):
        if slope(path[n]).norm() > 2 * method.leap * 2 * steep**2 * units[n]:
            before, after = (torch.log1p((steep * path[m]).square()).sum() for m in (n, n + 1))
            assert float(after) < float(before)


@pytest.mark.parametrize("late", [0, 3, 10])
def test_while_a_client_is_at_work_the_server_goes_no_further_than_four_times_the_clients_way(
    late: int,
) -> None:
    """With control variates and equalised coordinates, too, for gradients that are nothing but noise."""
    rng = torch.Generator().manual_seed(late)
    steps = 4
    x, noise = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in ((9,), (80, steps, 9)))
    path, units = drift(Cadence.tuned(steps), x, torch.zeros_like, noise, late)
    for n in range(2 * late + 2, 80):
        gone = sum(float((path[m + 1] - path[m]).norm()) for m in range(n - late - 1, n))
        longest = max(float(units[m]) for m in range(n - late - 1, n))
        assert gone <= 4 * 0.12 * math.sqrt(steps) * longest + 1e-12
