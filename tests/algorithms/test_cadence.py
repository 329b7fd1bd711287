"""What Cadence promises beside its oracle: bounded uploads, one unit of length, no knob and no end."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat import (
    Asynchronous,
    Cadence,
    Exponential,
    Participation,
    Private,
    Secure,
    Sequential,
    train,
)
from offbeat.aggregate.mean import PlainSum
from offbeat.algorithms.cadence import Descent, Ratios, State, Upload
from offbeat.core import Batch, Batches, Cohort, Vector, Visit
from offbeat.errors import InputError
from oracles.cadence import cadence
from oracles.replay import Run
from worlds import make_world, play

VISIT = Visit(torch.tensor(0), torch.tensor(0))


class Bowl:
    """|(x - origin) / size - goal|^2 / 2, with the goal from the batch: in other coordinates, the same."""

    def __init__(self, size: float = 1.0, origin: Vector | float = 0.0) -> None:
        self.size, self.origin = size, origin

    def __call__(self, x: Vector, batch: Batch) -> Vector:
        return ((x - self.origin) / self.size - batch.data[0]) / self.size

    def with_loss(self, x: Vector, batch: Batch) -> tuple[Vector, Tensor]:
        return self(x, batch), ((x - self.origin) / self.size - batch.data[0]).square().sum() / 2

    def descend(self, x: Vector, batch: Batch, lr: float) -> Vector:
        return x - lr * self(x, batch)


class Given(Bowl):
    """The gradient and the loss are what the batch says, wherever the model is."""

    def __init__(self) -> None:
        super().__init__()
        self.visited: list[Vector] = []

    def __call__(self, x: Vector, batch: Batch) -> Vector:
        self.visited.append(x)
        return batch.data[0]

    def with_loss(self, x: Vector, batch: Batch) -> tuple[Vector, Tensor]:
        return self(x, batch), batch.data[1]


def stated(*steps: tuple[list[float], float]) -> Batches:
    """Minibatches that say these gradients and losses."""
    return Batches(tuple(Batch((torch.tensor(g).double(), torch.tensor(f).double())) for g, f in steps))


def walk(method: Cadence, x: Tensor, goals: Tensor, bowl: Bowl, versions: int = 6) -> list[Tensor]:
    """The same clients, asked again and again, nobody late; goals by client and minibatch."""
    state, memories = method.init(x), [method.memory(x) for _ in goals]
    found = []
    for version in range(versions):
        message, uploads = method.broadcast(state, version), []
        for client, memory in enumerate(memories):
            batches = Batches(tuple(Batch((goal,)) for goal in goals[client]))
            upload, memories[client] = method.local(message, memory, batches, VISIT, bowl)
            uploads.append(upload)
        state = method.step(state, mean(uploads), cohort(version, *(0,) * len(goals), of=len(goals)))
        found.append(state.path)
    return found


def mean(uploads: list[Any]) -> Any:
    """Of each field."""
    return type(uploads[0])(*(torch.stack(field).mean(0) for field in zip(*uploads, strict=True)))


def cohort(version: int, *staleness: int, of: int = 99, weight: float = 1.0) -> Cohort:
    return Cohort(version, of, staleness, (weight,) * len(staleness))


def report(ratio: float, step: Vector) -> Upload:
    """The mean over a buffer, with control variates that stay as they are."""
    return Upload(step, torch.zeros_like(step), step.new_tensor(ratio))


def odds(part: float) -> float:
    return part / (1 - part)


X = torch.tensor([3.0, 4.0], dtype=torch.float64)  # of norm 5


def after(*buffers: tuple[float, tuple[int, ...]], method: Cadence = Cadence.tuned(4)) -> list[State]:
    """States after buffers with such a mean of what clients report, and such a staleness of each."""
    states, state = [], method.init(X)
    for version, (ratio, staleness) in enumerate(buffers):
        state = method.step(state, report(ratio, X / 50), cohort(version, *staleness))
        states.append(state)
    return states


def drawn(seed: int, clients: int) -> tuple[Tensor, Tensor]:
    """A model of norm 4, and goals."""
    rng = torch.Generator().manual_seed(seed)
    x, goals = (torch.randn(shape, generator=rng).double() for shape in ((7,), (clients, 4, 7)))
    return 4 * x / x.norm(), goals


# ---- what changes nothing ----


@pytest.mark.parametrize("variates", [True, False])
@given(seed=st.integers(0, 1000), size=st.floats(0.3, 1e4))
@settings(max_examples=15, deadline=None)
def test_a_larger_space_is_crossed_in_as_many_steps(variates: bool, seed: int, size: float) -> None:
    """Weights in other units, as in a model whose layers are scaled, change nothing but the units."""
    x, goals = drawn(seed, clients=3)  # above 1 in both spaces
    method = Cadence.tuned(4, variates)
    small, large = walk(method, x, goals, Bowl()), walk(method, size * x, goals, Bowl(size))
    torch.testing.assert_close(size * torch.stack(small), torch.stack(large), rtol=1e-7, atol=1e-7 * size)


@given(seed=st.integers(0, 1000), size=st.floats(1e-4, 0.1))
@settings(max_examples=10, deadline=None)
def test_below_a_norm_of_one_a_smaller_space_is_the_same_to_a_single_client(seed: int, size: float) -> None:
    """Reports are compared with 1 there, which cancels but in the mean over several of them."""
    x, goals = drawn(seed, clients=1)
    method = Cadence.tuned(4)
    large, small = walk(method, x, goals, Bowl()), walk(method, size * x, goals, Bowl(size))
    torch.testing.assert_close(size * torch.stack(large), torch.stack(small), rtol=0, atol=1e-7 * size)


def test_below_a_norm_of_one_several_clients_see_how_large_the_space_is() -> None:
    x, goals = drawn(3, clients=3)
    goals *= torch.tensor([0.1, 1.0, 10.0]).double()[:, None, None]  # the means of unlike reports differ
    method = Cadence.tuned(4)
    for size, same in ((0.3, True), (0.1, False)):  # of norms 1.2 and 0.4
        large, small = walk(method, x, goals, Bowl()), walk(method, size * x, goals, Bowl(size))
        assert torch.allclose(size * torch.stack(large), torch.stack(small), rtol=0, atol=1e-3) == same


@pytest.mark.parametrize("variates", [True, False])
@given(seed=st.integers(0, 1000), far=st.floats(-3, 3))
@settings(max_examples=10, deadline=None)
def test_a_single_client_does_not_see_where_the_origin_is(variates: bool, seed: int, far: float) -> None:
    x, goals = drawn(seed, clients=1)
    method, moved = Cadence.tuned(4, variates), 10**far * goals[0, 0]
    farthest = (x - goals).norm(dim=-1).max()  # twice the ratio of a bowl, which the norm bounds
    assume(min(x.norm(), (x + moved).norm()) > 0.7 * farthest)
    one, other = walk(method, x, goals, Bowl()), walk(method, x + moved, goals, Bowl(origin=moved))
    torch.testing.assert_close(
        torch.stack(one) + moved, torch.stack(other), rtol=0, atol=1e-7 * 10 ** abs(far)
    )


def test_several_clients_see_the_norm_of_the_first_model_and_nothing_else_of_the_origin() -> None:
    x, goals = drawn(3, clients=3)
    one = torch.stack(walk(Cadence.tuned(4), x, goals, Bowl()))
    for moved, same in ((-2 * x, True), (9 * x, False)):
        other = torch.stack(walk(Cadence.tuned(4), x + moved, goals, Bowl(origin=moved)))
        assert torch.allclose(one + moved, other, rtol=0, atol=1e-9) == same


# ---- what clients report ----


@pytest.mark.parametrize("steps", [4, 40])
@pytest.mark.parametrize("variates", [True, False])
@given(seed=st.integers(0, 1000), scale=st.floats(-12, 12))
@settings(max_examples=20, deadline=None)
def test_no_upload_is_longer_than_it_says(steps: int, variates: bool, seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    method = Cadence.tuned(steps, variates)
    x, goals = torch.from_numpy(rng.normal(size=5)), torch.from_numpy(10**scale * rng.normal(size=(4, 5)))
    state, memory = method.init(x), method.memory(x)
    for version in range(3):
        batches = Batches(tuple(Batch((goal,)) for goal in goals))
        upload, memory = method.local(method.broadcast(state, version), memory, batches, VISIT, Bowl())
        assert upload._fields == tuple(method.traits.bounds)
        for name, bound in method.traits.bounds.items():
            assert float(getattr(upload, name).norm()) <= bound + 1e-12
        state = method.step(state, upload, cohort(version, *((2, 0) if version > 1 else (0, 0))))


def ratio_of(upload: Any) -> float:
    return float(upload.ratio)


def told(
    version: int, *steps: tuple[list[float], float], variates: bool = True
) -> tuple[float, list[Vector]]:
    """What a client of `X` reports, with a unit of 12 but at first, and where it takes gradients."""
    method, slopes = Cadence.tuned(4, variates), Given()
    message = method.broadcast(method.init(X)._replace(unit=X.new_tensor(12.0 if version else 0.0)), version)
    upload, _ = method.local(message, method.memory(X), stated(*steps), VISIT, slopes)
    return ratio_of(upload), slopes.visited


def test_a_client_reports_its_first_loss_by_itself_and_the_norm_of_the_gradient() -> None:
    first, others = ([6.0, 8.0], 30.0), [([0.1, 0.0], 9.0), ([70.0, 0.0], 1e5), ([0.0, 1.0], -1.0)]
    for variates in (True, False):
        # at first by the norm of the model, 5, and later by the unit over six
        assert told(0, first, *others, variates=variates)[0] == pytest.approx(30 / (30 + 5 * 10))
        assert told(7, first, *others, variates=variates)[0] == pytest.approx(30 / (30 + 2 * 10))


@pytest.mark.parametrize("loss", [30.0, 0.6])
def test_a_client_of_the_first_model_takes_its_own_unit_and_others_take_the_servers(loss: float) -> None:
    steps = [([6.0, 8.0], loss), ([3.0, 4.0], 1e3), ([0.0, 9.0], 0.0), ([0.0, 9.0], 0.0)]
    for version, unit in ((0, 6 * loss / 10), (7, 12.0)):
        places = told(version, *steps)[1]
        gone = [float((place - X).norm()) for place in places[:3]]
        assert gone == pytest.approx([0, 0.06 * unit, 2 * 0.06 * unit])
        assert torch.allclose(places[1], X - 0.06 * unit * torch.tensor([0.6, 0.8]).double())


@pytest.mark.parametrize("loss", [0.0, -2.0, math.inf, -math.inf, math.nan])
def test_a_client_whose_loss_says_nothing_is_silent(loss: float) -> None:
    found, places = told(0, ([6.0, 8.0], loss), ([6.0, 8.0], 5.0))
    assert found == pytest.approx(1 / 21)
    assert float((places[1] - X).norm()) == pytest.approx(0.06 * 6 * 5 / 20)
    found, places = told(7, ([6.0, 8.0], loss), ([6.0, 8.0], 5.0))
    assert found == 0.5
    assert float((places[1] - X).norm()) == pytest.approx(0.06 * 12)


def test_a_client_whose_gradients_are_zero_is_silent() -> None:
    for version, silent in ((0, 1 / 21), (7, 0.5)):
        for loss in (0.0, 1e-3, 5.0):
            found, places = told(version, ([0.0, 0.0], loss), ([0.0, 0.0], 1.0))
            assert found == pytest.approx(silent)
            assert torch.equal(places[1], X)
        # the first gradient that is not zero counts
        assert told(version, ([0.0, 0.0], 7.0), ([6.0, 8.0], 1e9))[0] == pytest.approx(0.99)


@pytest.mark.parametrize("version", [0, 7])
@given(
    loss=st.floats(),
    slope=st.lists(st.floats(), min_size=2, max_size=2),
)
def test_a_report_is_a_part_whatever_the_loss_and_the_gradient(
    version: int, loss: float, slope: list[float]
) -> None:
    assert 0 <= told(version, (slope, loss))[0] <= 0.99


# ---- the unit ----


@pytest.mark.parametrize("variates", [True, False])
def test_the_first_unit_is_six_times_the_loss_by_the_norm_of_its_gradient(variates: bool) -> None:
    method = Cadence.tuned(4, variates)
    slopes = [([6.0, 8.0], 30.0), ([0.0, 1.0], 5.0), ([5.0, 0.0], 20.0)]
    for count in (1, 2, 3):
        message = method.broadcast(method.init(X), 0)
        uploads = [
            method.local(message, method.memory(X), stated(*4 * [slope]), VISIT, Given())[0]
            for slope in slopes[:count]
        ]
        state = method.step(method.init(X), mean(uploads), cohort(0, *(0,) * count))
        reports = [3 / (3 + 5), 5 / (5 + 5), 4 / (4 + 5)][:count]
        assert float(state.unit) == pytest.approx(6 * 5 * odds(sum(reports) / count))
        if count == 1:
            assert float(state.unit) == pytest.approx(6 * 30 / 10)
        # and the server takes its first step in it
        assert float((state.path - X).norm()) == pytest.approx(0.12 * float(state.unit))


def test_the_unit_is_at_most_six_times_the_norm_of_the_model() -> None:
    """A first gradient that almost vanishes, as on a plateau, would make it a hundred times as long."""
    method, state = Cadence.tuned(4), Cadence.tuned(4).init(X)
    message = method.broadcast(state, 0)
    walked = []
    for loss in (500.0, 1000.0):
        grad = Given()
        method.local(message, method.memory(X), stated(*4 * [([0.6, 0.8], loss)]), VISIT, grad)
        walked.append(float((grad.visited[-1] - X).norm()))
    assert walked == pytest.approx([3 * 0.06 * 6 * 5] * 2)
    state = method.step(state, report(0.99, X / 10), cohort(0, 0))
    assert float(state.unit) == pytest.approx(6 * 5)
    farther = state._replace(path=3 * X)  # a model that has grown may take longer steps
    assert float(method.step(farther, report(0.99, X / 10), cohort(1, 0)).unit) == pytest.approx(6 * 15)
    for x in (X / 100, 0 * X):  # a small one has at least a unit of 6
        state = method.step(method.init(x), report(0.99, X / 10), cohort(0, 0))
        assert float(state.unit) == pytest.approx(6)


def test_buffers_of_clients_of_the_first_model_are_averaged() -> None:
    states = after((0.2, (0,)), (0.8, (1,)), (0.6, (2, 2)))
    recent = math.log(5 * odds(0.2))
    for state, ratio, pace, mean_ratio in zip(
        states, (0.2, 0.8, 0.6), (1, 1 / 11, 2 / 12), (0.2, 0.5, 0.55), strict=True
    ):
        recent += pace * (math.log(5 * odds(ratio)) - recent)
        first = 5 * odds(mean_ratio)
        assert float(state.unit) == pytest.approx(6 * first ** (2 / 3) * math.exp(recent / 3))


def test_a_buffer_of_clients_of_the_first_and_of_later_models_changes_no_unit() -> None:
    before, mixed, later = after((0.2, (0, 0)), (0.9, (1, 0)), (0.7, (2, 2)))
    assert float(mixed.unit) == pytest.approx(float(before.unit), rel=1e-12)
    assert isinstance(mixed.ratios, Ratios)
    assert isinstance(before.ratios, Ratios)
    for name in ("tasks", "part", "recent"):
        assert torch.equal(getattr(mixed.ratios, name), getattr(before.ratios, name))
    # which the next one that is not mixed does
    first, recent = 5 * odds((0.2 + 0.7) / 2), 5 * odds(0.2) * (odds(0.7) / odds(0.2)) ** (2 / 12)
    assert float(later.unit) == pytest.approx(6 * (first**2 * recent) ** (1 / 3))


@pytest.mark.parametrize("tasks", [1, 10, 90])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.8])
def test_the_unit_follows_the_cube_root_of_the_recent_ratio(ratio: float, tasks: int) -> None:
    first, second, third = after((0.3, (0,) * tasks), (ratio, (0,) * tasks), (ratio, (0,) * tasks))
    assert float(first.unit) == pytest.approx(30 * odds(0.3))
    # in logarithms the recent ratio moves so far towards what was sent, times the odds
    pace = tasks / (tasks + 10)
    moved = math.log(odds(ratio)) * pace
    assert float(second.unit / first.unit) == pytest.approx(math.exp(moved / 3))
    # then clients were sent a unit, and a ratio, that is longer by a third of that
    moved += pace * (moved / 3 + math.log(odds(ratio)) - moved)
    assert float(third.unit / first.unit) == pytest.approx(math.exp(moved / 3))


@pytest.mark.parametrize("late", [0, 1, 5])
@pytest.mark.parametrize("change", [0.01, 7.0])
def test_a_ratio_that_has_changed_is_found_however_late_the_reports_are(late: int, change: float) -> None:
    """Clients of the first model see a ratio of 5, and later ones one that is so many times as large."""
    method, state, sent, units = Cadence.tuned(4), Cadence.tuned(4).init(X), [5.0], []
    for version in range(300):
        start = max(0, version - late)
        ratio = 5 * change if start else 5.0
        state = method.step(
            state, report(ratio / (ratio + sent[start]), X / 50), cohort(version, *(version - start,) * 5)
        )
        units.append(float(state.unit))
        sent.append(units[-1] / 6)
    assert units[: late + 1] == pytest.approx([30.0] * (late + 1))
    assert units[-1] == pytest.approx(30 * change ** (1 / 3), rel=1e-3)
    # on its way there it does not go too far by more than a little
    assert max(units) < 1.1 * max(units[0], units[-1])
    assert min(units) > min(units[0], units[-1]) / 1.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    reports=st.lists(st.sampled_from([1e-15, 0.01, 0.5, 0.99]), min_size=1, max_size=40),
    late=st.integers(0, 3),
)
@settings(max_examples=30, deadline=None)
def test_the_unit_has_a_longest_and_a_shortest(dtype: torch.dtype, reports: list[float], late: int) -> None:
    """Reports of 0.99, the most, for ever make it sqrt(99) times as long, and of nearly 0 a millionth."""
    method = Cadence.tuned(4)
    state = method.step(method.init(X.to(dtype)), report(0.2, X.to(dtype) / 50), cohort(0, *(0,) * 90))
    first = state.unit
    for version, ratio in enumerate(reports, 1):
        stale = (min(late, version - 1),) * 90
        state = method.step(state, report(ratio, X.to(dtype) / 50), cohort(version, *stale))
        assert 0.999e-6 < float(state.unit / first) < 99**0.5
        assert bool(torch.isfinite(state.path).all())


@pytest.mark.parametrize(("outside", "within"), [(1.3, 0.99), (1.0, 0.99), (-0.4, 0.0), (-1e-3, 0.0)])
def test_noise_takes_a_report_no_further_than_clients_can(outside: float, within: float) -> None:
    """Nor does a robust mean, or a timed release with more updates than it counts with."""
    strange, usual = (after((ratio, (0,)), (ratio, (0,)), (ratio, (2,))) for ratio in (outside, within))
    for one, other in zip(strange, usual, strict=True):
        assert float(one.unit) == pytest.approx(float(other.unit), rel=1e-12)
        assert bool(torch.isfinite(one.path).all())


def test_a_timed_release_without_updates_is_silent() -> None:
    """Otherwise the first one would make steps too short for ever, and later ones for a long time."""
    for empty, silent in zip(
        after((0.0, (0, 0)), (0.0, (0, 1)), (0.4, (0, 1)), (0.0, (0, 1))),
        after((1 / 21, (0, 0)), (0.5, (0, 1)), (0.4, (0, 1)), (0.5, (0, 1))),
        strict=True,
    ):
        assert float(empty.unit) == pytest.approx(float(silent.unit), rel=1e-12)
    first, none = after((0.3, (0, 0)), (0.0, (0, 0)))
    assert float(none.unit) == pytest.approx(float(first.unit), rel=1e-12)


def test_a_mean_that_is_almost_zero_shortens_the_unit_no_further_than_a_hundredth() -> None:
    """A small release, or noise, may leave one; at first a mean may be as small as it likes."""
    tiny, least = after((0.3, (0, 0)), (1e-9, (0, 1)))[-1], after((0.3, (0, 0)), (0.01, (0, 1)))[-1]
    assert float(tiny.unit) == pytest.approx(float(least.unit), rel=1e-12)
    (begun,) = after((1e-4, (0, 0)))
    assert float(begun.unit) == pytest.approx(6 * float(X.norm()) * 1e-4 / (1 - 1e-4))


def test_weights_do_not_change_the_unit() -> None:
    method, x = Cadence.tuned(4, variates=False), X
    plain = weighted = unequal = method.init(x)
    for version, ratio in enumerate((0.2, 0.6, 0.7)):
        plain = method.step(plain, Descent(x / 50, x.new_tensor(ratio)), cohort(version, 0, 0))
        half = Descent(x / 100, x.new_tensor(ratio / 2))
        weighted = method.step(weighted, half, cohort(version, 0, 0, weight=0.5))
        assert float(weighted.unit) == pytest.approx(float(plain.unit), rel=1e-12)
        # what counts for a quarter, counts for a quarter here, too
        reports = Descent(x / 50, x.new_tensor((ratio - 0.1 + 0.25 * (ratio + 0.4)) / 2))
        unequal = method.step(unequal, reports, Cohort(version, 99, (0, 0), (1.0, 0.25)))
        assert float(unequal.unit) == pytest.approx(float(plain.unit), rel=1e-12)


# ---- rates ----


def test_a_task_without_steps_is_refused() -> None:
    with pytest.raises(InputError, match=r"steps of Cadence must lie in \[1, inf\), not be 0"):
        Cadence.tuned(0)


def test_a_model_that_begins_at_zero_leaves_it() -> None:
    first, goals = torch.zeros(7, dtype=torch.float64), torch.ones(1, 4, 7, dtype=torch.float64)
    moved = walk(Cadence.tuned(4), first, goals, Bowl(), versions=30)
    assert float(moved[-1].norm()) > 0.1


@pytest.mark.parametrize("variates", [True, False])
@pytest.mark.parametrize("loss", [0.0, 3.0])
def test_a_gradient_of_zero_moves_nothing(variates: bool, loss: float) -> None:
    method, state = Cadence.tuned(2, variates), Cadence.tuned(2, variates).init(X)
    memory = method.memory(X)
    for version in range(5):
        message, still = method.broadcast(state, version), stated(([0.0, 0.0], loss), ([0.0, 0.0], loss))
        upload, memory = method.local(message, memory, still, VISIT, Given())
        state = method.step(state, upload, cohort(version, 0))
        assert torch.equal(state.path, X)
        assert torch.equal(state.x, X)
        assert math.isfinite(float(state.unit))


@pytest.mark.parametrize("noisy", [False, True])
def test_rates_follow_from_the_system_and_the_staleness_seen(noisy: bool) -> None:
    times, method = 8, Cadence.tuned(steps=9, noisy=noisy)
    assert method.local_lr == pytest.approx(0.04)
    assert method.leap == pytest.approx(times * 0.12 * 3)
    upload = Upload(torch.tensor([0.6, -0.3]).double(), X.new_zeros(2), () if noisy else X.new_tensor(0.2))
    length = float(upload.descent.norm())

    def moved(version: int, *staleness: int, age: float = 0.0, length: float = 0.0) -> float:
        before = method.init(X)._replace(age=torch.tensor(age).double(), length=torch.tensor(length).double())
        after = method.step(before, upload, cohort(version, *staleness))
        return float((after.path - X).norm() / (after.unit * upload.descent.norm()))

    longest = math.inf if noisy else 0.12 / length
    assert moved(0, 0) == pytest.approx(min(0.75 / length, longest))
    assert moved(99, 0, length=length) == pytest.approx(0.075 / length)  # the length of the step decides
    assert moved(99, 0, length=2 * length) == pytest.approx(0.075 / (1.9 * length))
    # the flight, at once for the first clients
    assert moved(39, 39, 39, length=0.01) == pytest.approx(times * 0.36 / 40)
    assert moved(40, 39, 39, age=39.0, length=0.01) == pytest.approx(times * 0.36 / 40)
    assert moved(40, 39, 0, age=50.0, length=0.01) == pytest.approx(
        times * 0.36 / (1 + 50 + 0.1 * (19.5 - 50))
    )
    by_length = 0.75 / 2**0.5 / (0.1 * length)
    assert moved(1, 0, length=0.0) == pytest.approx(min(by_length, times * 0.36, longest))


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=6), st.floats(0.01, 0.99))
@settings(max_examples=30, deadline=None)
def test_no_server_step_is_longer_than_a_clients_way_of_unrelated_steps(
    lengths: list[float], ratio: float
) -> None:
    method = Cadence.tuned(4)
    state = method.init(X)
    for version, length in enumerate(lengths):
        before = state.path
        state = method.step(state, report(ratio, length * X / X.norm()), cohort(version, 0))
        assert float((state.path - before).norm()) <= 0.12 * float(state.unit) * (1 + 1e-9)


@pytest.mark.parametrize("noisy", [False, True])
def test_coordinates_are_equalised(noisy: bool) -> None:
    method, step = Cadence.tuned(9, noisy=noisy), torch.tensor([0.6, -0.3, 0.1, 0.0]).double()
    state = method.step(
        method.init(torch.ones(4).double()),
        Upload(step, torch.zeros(4).double(), () if noisy else step.new_tensor(0.2)),
        cohort(0, 0),
    )
    moved = 1 - state.path
    torch.testing.assert_close(moved / moved[0], step.sign(), rtol=5e-3, atol=0)


def test_with_noise_the_unit_is_the_norm_of_the_first_model_and_nothing_is_reported() -> None:
    for variates in (True, False):
        method = Cadence.tuned(4, variates, noisy=True)
        for x in (X, X / 100):
            state, memory = method.init(x), method.memory(x)
            for version in range(5):
                message = method.broadcast(state, version)
                batches = stated(*4 * [([6.0, 8.0], 10.0**version)])
                upload, memory = method.local(message, memory, batches, VISIT, Given())
                assert upload.ratio == ()
                state = method.step(state, upload, cohort(version, 0))
                assert float(state.unit) == pytest.approx(max(1, float(x.norm())))
        assert "ratio" not in method.traits.bounds


@pytest.mark.parametrize("variates", [True, False])
def test_with_noise_a_client_uploads_the_direction_of_its_mean_step(variates: bool) -> None:
    batches = stated(*[([1.0, height], 1.0) for height in (3.0, -2.0, -0.5, 2.0)])
    found = []
    for noisy in (False, True):
        method = Cadence.tuned(4, variates, noisy)
        message = method.broadcast(method.init(X), 0)
        upload, _ = method.local(message, method.memory(X), batches, VISIT, Given())
        found.append(upload.descent)
    mean, direction = found
    assert 0.1 < float(mean.norm()) < 0.9
    torch.testing.assert_close(direction, mean / mean.norm())
    assert float(direction.norm()) == pytest.approx(1)  # all that the noise is made for


def test_with_noise_a_client_without_a_gradient_uploads_zeros() -> None:
    method = Cadence.tuned(2, noisy=True)
    still = stated(([0.0, 0.0], 1.0), ([0.0, 0.0], 1.0))
    upload, _ = method.local(method.broadcast(method.init(X), 0), method.memory(X), still, VISIT, Given())
    assert torch.equal(upload.descent, torch.zeros_like(X))


def test_a_late_straggler_of_the_first_model_counts_as_one_among_many() -> None:
    buffers = ((0, 0), (1, 0), (2, 2), (2, 2), (4, 2), (5, 5))
    ages = [float(state.age) for state in after(*((0.3, staleness) for staleness in buffers))]
    assert ages == pytest.approx([0, 0.5, 2, 2, 2.1, 2.1 + 0.1 * 2.9])


# ---- runs ----


class Valley:
    """|x - 3 cos(client)|^2 / 2 by client, and 1 more, as oracles and as methods call it."""

    def goal(self, client: int) -> Any:
        return 3 * np.cos(client + np.arange(6))

    def gradient(self, client: int, visit: int, k: int, x: Any) -> Any:
        return x - self.goal(client)

    def steps(self, client: int, visit: int) -> int:
        return 4

    def loss(self, client: int, visit: int, k: int, x: Any) -> float:
        return 1 + float(np.sum((x - self.goal(client)) ** 2)) / 2

    def whole_gradient(self, client: int, x: Any) -> Any:
        raise NotImplementedError

    def __call__(self, x: Vector, batch: Batch) -> Vector:
        return torch.from_numpy(self.gradient(int(batch.data[0]), 0, 0, x.numpy()))

    def with_loss(self, x: Vector, batch: Batch) -> tuple[Vector, Tensor]:
        return self(x, batch), x.new_tensor(self.loss(int(batch.data[0]), 0, 0, x.numpy()))

    def descend(self, x: Vector, batch: Batch, lr: float) -> Vector:
        return x - lr * self(x, batch)


@pytest.mark.parametrize("variates", [True, False])
def test_stragglers_of_the_first_model_follow_the_oracle(variates: bool) -> None:
    """Buffers of one client and of more, of the first model alone, of others alone, and mixed."""
    method, valley = Cadence.tuned(4, variates), Valley()
    x = torch.from_numpy(np.random.default_rng(1).normal(size=6))
    versions = [[0], [0], [0, 0, 0], [0, 3], [3], [0], [4, 0, 5], [6, 7], [0, 0], [9], [8, 10]]
    versions += [[version - 2, version] for version in range(11, 40)]
    state, messages, memories = method.init(x), [], {}
    models, steps = [x], []
    for version, sent in enumerate(versions):
        messages.append(method.broadcast(state, version))
        steps.append([((3 * version + n) % 20, start, version) for n, start in enumerate(sent)])
        uploads = []
        for client, start, _ in steps[-1]:
            batches = Batches((Batch((torch.tensor(float(client)),)),) * 4)
            memory = memories.get(client, method.memory(x))
            upload, memories[client] = method.local(messages[start], memory, batches, VISIT, valley)
            uploads.append(upload)
        state = method.step(
            state, mean(uploads), cohort(version, *(version - start for start in sent), of=20)
        )
        models.append(state.x)
    expected = cadence(Run(valley, 20, x.numpy(), steps), local_steps=4, variates=variates)
    for model, other in zip(models, expected, strict=True):
        np.testing.assert_allclose(model.numpy(), other, rtol=0, atol=1e-10)


def test_a_checkpoint_of_the_form_before_is_refused_in_a_sentence() -> None:
    world, settings = make_world(), {"dispatch": Asynchronous(5), "buffer": 3, "rounds": 4}

    def steps(resume: Any = None) -> Any:
        engine = Sequential(world.problem, world.population, Exponential(1.0))
        return train(Cadence.tuned(3, noisy=True), engine, **settings, resume=resume)

    shots = steps()
    next(shots)
    facts, tensors = next(shots).checkpoint()
    more = {f"state.{n}": torch.zeros(()) for n in range(9, 13)}  # what the unit grew by
    former = type(next(shots).checkpoint())(facts, tensors | more)
    with pytest.raises(InputError, match=r"state has 13 parts.* now has 9: another version of the method"):
        list(steps(former))


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    world = make_world()

    def run(rounds: int) -> list[Tensor]:
        engine = Sequential(world.problem, world.population, Exponential(1.0))
        shots = play(Cadence.tuned(3), engine, Asynchronous(5), rounds=rounds)
        return [shot.x for shot in shots]

    short, long = run(5), run(12)
    assert all(torch.equal(one, other) for one, other in zip(short, long, strict=False))


def test_the_model_is_a_mean_of_the_path() -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    shots = play(Cadence.tuned(3), engine, Asynchronous(5), rounds=12)
    weights = np.array([math.prod(range(t + 1, t + 9)) for t in range(1, 13)], dtype=np.float64)
    path = np.stack([shot.state.path.numpy() for shot in shots[1:]])
    mean = (weights[:, None] * path).sum(0) / weights.sum()
    first = shots[0].x.numpy()
    # the start has what is left of its weight: that of a polynomial at 0
    start = math.factorial(8) / (math.factorial(8) + weights.sum())
    np.testing.assert_allclose(shots[-1].x.numpy(), (1 - start) * mean + start * first, atol=1e-9)


@pytest.mark.parametrize("variates", [True, False])
@pytest.mark.parametrize("summation", [PlainSum(), Secure(minimum=2)], ids=["plain", "in secret"])
def test_noise_asks_for_no_clipping_bound(variates: bool, summation: Any) -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    aggregate = Private(
        (),
        1.0,
        1e-5,
        participation=Participation(max_participations=4, min_separation=1),
        noise_seed=1,
        summation=summation,
    )
    shots = list(
        train(
            Cadence.tuned(3, variates, noisy=True),
            engine,
            dispatch=Asynchronous(5),
            buffer=3,
            rounds=6,
            aggregate=aggregate,
        )
    )
    assert len(shots) == 7
    assert torch.isfinite(shots[-1].x).all()
    assert (shots[-1].x - shots[0].x).norm() > 0.1
