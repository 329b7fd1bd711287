"""What Cadence promises beside its oracle: bounded uploads, one unit of length, no knob and no end."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
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
    Steps,
    Vectorised,
    train,
)
from offbeat.aggregate.mean import PlainSum
from offbeat.algorithms import cadence as cadence_module
from offbeat.algorithms.cadence import Upload, Watch
from offbeat.core import Batch, Batches, Cohort, Vector, Visit
from offbeat.errors import InputError
from oracles.cadence import cadence
from oracles.replay import Run
from worlds import make_world, play, trace

VISIT = Visit(torch.tensor(0), torch.tensor(0))


class Bowl:
    """Slopes of |x - goal|^2 / 2 in a space that is so many times as large."""

    def __init__(self, size: float) -> None:
        self.size = size

    def __call__(self, x: Vector, batch: Batch) -> Vector:
        return x / self.size - batch.data[0]

    def with_loss(self, x: Vector, batch: Batch) -> tuple[Vector, Tensor]:
        raise NotImplementedError

    def descend(self, x: Vector, batch: Batch, lr: float) -> Vector:
        return x - lr * self(x, batch)


class Given(Bowl):
    """The gradient is what the batch says, wherever the model is."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def __call__(self, x: Vector, batch: Batch) -> Vector:
        return batch.data[0]


def walk(method: Cadence, x: Tensor, goals: Tensor, size: float = 1.0, versions: int = 6) -> list[Tensor]:
    """One client, asked again and again, nobody late."""
    state, memory = method.init(x), method.memory(x)
    found = []
    for version in range(versions):
        batches = Batches(tuple(Batch((goal,)) for goal in goals))
        upload, memory = method.local(method.broadcast(state, version), memory, batches, VISIT, Bowl(size))
        state = method.step(state, upload, Cohort(version, 1, (0,), (1.0,)))
        found.append(state.x)
    return found


@pytest.mark.parametrize("variates", [True, False])
@given(seed=st.integers(0, 1000), size=st.floats(0.5, 1e4))
@settings(max_examples=15, deadline=None)
def test_a_larger_space_is_crossed_in_as_many_steps(variates: bool, seed: int, size: float) -> None:
    """Weights in other units, as in a model whose layers are scaled, change nothing but the units."""
    rng = torch.Generator().manual_seed(seed)
    x, goals = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in ((7,), (4, 7)))
    x = 4 * x / x.norm()  # above 1 in both spaces
    method = Cadence.tuned(4, variates)
    small, large = walk(method, x, goals), walk(method, size * x, goals, size)
    for one, other in zip(small, large, strict=True):
        torch.testing.assert_close(size * one, other, rtol=1e-8, atol=1e-8 * size)


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
        upload, memory = method.local(method.broadcast(state, version), memory, batches, VISIT, Bowl(1.0))
        assert upload._fields == tuple(method.traits.bounds)
        for name, bound in method.traits.bounds.items():
            assert float(getattr(upload, name).norm()) <= bound + 1e-12
        state = method.step(state, upload, Cohort(version, 9, (2, 0), (1.0, 1.0)))


@pytest.mark.parametrize(
    ("steps", "lengths"), [(10, (1, 1, 1, 1)), (20, (1, 0.8, 0.5, 0.5)), (40, (1, 0.8, 0.4, 0.25))]
)
def test_in_a_long_task_a_client_that_has_fitted_its_data_takes_shorter_steps(
    steps: int, lengths: tuple[float, ...]
) -> None:
    method, x = Cadence.tuned(steps), torch.ones(3, dtype=torch.float64)
    slopes = torch.tensor([2.0, -0.4, 0.2, -0.002], dtype=torch.float64)
    gradients = slopes[:, None] * torch.eye(3, dtype=torch.float64)[[0, 1, 2, 2]]
    batches = Batches(tuple(Batch((gradient,)) for gradient in gradients))
    message = method.broadcast(method.init(x), 0)
    upload, memory = method.local(message, method.memory(x), batches, VISIT, Given())
    first, second, third, fourth = lengths
    expected = torch.tensor([first, -second, third - fourth], dtype=torch.float64) / 4
    torch.testing.assert_close(upload.descent, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(memory, gradients.sum(0) / 8, rtol=0, atol=1e-12)  # which is not cut short
    # what the others found is followed at the same lengths
    message = message._replace(anchor=gradients[3])
    nothing = Batches((Batch((torch.zeros(3, dtype=torch.float64),)),) * 4)
    upload, _ = method.local(message, method.memory(x), nothing, VISIT, Given())
    assert float(upload.descent.norm()) == pytest.approx(fourth)


@pytest.mark.slow
def test_long_tasks_follow_their_oracle_too(monkeypatch: pytest.MonkeyPatch) -> None:
    short = []

    def noted(total: Vector, u: Vector, least: float) -> Vector:
        short.append(float(u.norm()) < 0.25)
        return some(total, u, least)

    some = cadence_module._add_step
    monkeypatch.setattr(cadence_module, "_add_step", noted)
    world = make_world(work=Steps(30, 4))
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    shots = play(Cadence.tuned(30, noisy=True), engine, Asynchronous(5), rounds=12)
    assert 0.02 < sum(short) / len(short) < 0.98
    models = cadence(
        Run(world.oracle, len(world.population), shots[0].x.numpy(), trace(shots)), local_steps=30, noisy=True
    )
    for shot, model in zip(shots, models, strict=True):
        np.testing.assert_allclose(shot.x.numpy(), model, rtol=0, atol=1e-10)
    monkeypatch.undo()
    together = Vectorised(world.problem, world.population, Exponential(1.0))
    same = play(Cadence.tuned(30, noisy=True), together, Asynchronous(5), rounds=12)
    torch.testing.assert_close(same[-1].x, shots[-1].x, rtol=0, atol=1e-10)


def test_a_task_without_steps_is_refused() -> None:
    with pytest.raises(InputError, match=r"steps of Cadence must lie in \[1, inf\), not be 0"):
        Cadence.tuned(0)


def test_a_model_that_begins_at_zero_leaves_it() -> None:
    first, goals = torch.zeros(7, dtype=torch.float64), torch.ones(4, 7, dtype=torch.float64)
    moved = walk(Cadence.tuned(4), first, goals, versions=30)
    assert float(moved[-1].norm()) > 0.1


@pytest.mark.parametrize("variates", [True, False])
def test_a_gradient_of_zero_moves_nothing(variates: bool) -> None:
    x = torch.full((3,), 2.0, dtype=torch.float64)
    assert torch.equal(walk(Cadence.tuned(2, variates), x, torch.stack([x, x]))[-1], x)


def test_rates_follow_from_the_system_and_the_staleness_seen() -> None:
    method = Cadence.tuned(steps=9)
    assert method.local_lr == pytest.approx(0.04)
    assert method.leap == pytest.approx(4 * 0.12 * 3)
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)
    upload = method.local(
        method.broadcast(method.init(x), 0), method.memory(x), _towards(9), VISIT, Bowl(1.0)
    )[0]

    def moved(version: int, *staleness: int, age: float = 0.0, length: float = 0.0) -> float:
        before = method.init(x)._replace(age=torch.tensor(age).double(), length=torch.tensor(length).double())
        after = method.step(before, upload, Cohort(version, 100, staleness, (1.0,) * len(staleness)))
        return float((after.path - x).norm() / (0.02 * 5 * upload.descent.norm()))

    length = float(upload.descent.norm())
    assert moved(0, 0) == pytest.approx(min(0.75 / length, 1))
    assert moved(99, 0, length=length) == pytest.approx(0.075 / length)  # the length of the step decides
    assert moved(99, 0, length=2 * length) == pytest.approx(0.075 / (1.9 * length))
    assert moved(2, 2, 2, length=0.1) == pytest.approx(1.44 / 3)  # the flight, at once for the first clients
    assert moved(3, 2, 2, age=2.0, length=0.1) == pytest.approx(1.44 / 3)
    assert moved(3, 2, 0, age=4.0, length=0.1) == pytest.approx(1.44 / (1 + 4 + 0.1 * (1 - 4)))
    assert moved(1, 0, length=0.0) == pytest.approx(1)  # no step is longer than a unit


def test_a_late_straggler_of_the_first_model_counts_as_one_among_many() -> None:
    method, x = Cadence.tuned(9), torch.tensor([3.0, 4.0], dtype=torch.float64)
    upload = method.local(
        method.broadcast(method.init(x), 0), method.memory(x), _towards(9), VISIT, Bowl(1.0)
    )[0]
    state = method.init(x)
    ages = []
    for version, staleness in ((0, (0, 0)), (1, (1, 0)), (2, (2, 2)), (3, (2, 2)), (4, (4, 2)), (5, (5, 5))):
        state = method.step(state, upload, Cohort(version, 100, staleness, (1.0, 1.0)))
        ages.append(float(state.age))
    assert ages == pytest.approx([0, 0.5, 2, 2, 2.1, 2.1 + 0.1 * 2.9])


def units(
    method: Cadence, x: Tensor, steps: Tensor, tasks: int = 1, late: int = 0, weight: float = 1.0
) -> list[float]:
    """Of length, before and after each of these mean steps, by the first model's norm."""
    state, found = method.init(x), []
    for version, step in enumerate(steps):
        found.append(method.broadcast(state, version).stride)
        cohort = Cohort(version, 99, (min(late, version),) * tasks, (weight,) * tasks)
        state = method.step(state, report(step, 0.0), cohort)
    return [float(stride / method.local_lr / x.norm()) for stride in found]


def report(step: Tensor, along: float, change: float = 0.0) -> Upload:
    """The mean over a buffer, with control variates that stay as they are."""
    return Upload(step, torch.zeros_like(step), step.new_tensor(along), step.new_tensor(change))


def test_directions_that_agree_lengthen_the_unit_and_noise_does_not() -> None:
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(4000, generator=rng, dtype=torch.float64)
    noise = torch.randn(60, 4000, generator=rng, dtype=torch.float64)
    noise /= noise.norm(dim=1, keepdim=True)
    # the length of a mean over 10 tasks of 5 steps that have nothing to do with each other
    usual = 1 / (10 * 5) ** 0.5
    method = Cadence.tuned(5, variates=False)
    assert max(units(method, x, usual * noise, 10)) == pytest.approx(0.02)
    assert max(units(method, x, 1.29 * usual * noise, 10)) == pytest.approx(0.02)
    a_half_more = 1.3 * 1.5**0.5 * usual
    assert units(method, x, a_half_more * noise[:4], 10) == pytest.approx([0.02, 0.03, 0.045, 0.0675])
    assert units(method, x, 9 * usual * noise[:3], 10) == pytest.approx([0.02, 0.06, 0.18])
    assert max(units(method, x, 9 * usual * noise, 10)) == pytest.approx(2)  # and no further
    # while those are at work who were sent the unit of before, it grows by less than e to the excess
    late = units(method, x, a_half_more * noise, 10, late=9)
    assert 1.5 < late[40] / late[30] < math.exp(0.5)
    # what tasks share with variates makes noise as long by itself as trust says
    variates = Cadence.tuned(5)
    assert units(variates, x, 2**0.5 * a_half_more * noise[:3], 10) == pytest.approx([0.02, 0.03, 0.045])
    assert units(Cadence.tuned(5, noisy=True), x, noise, 10) == pytest.approx([1] * 60)


@pytest.mark.parametrize("steps", [1, 5])
def test_a_buffer_that_is_too_small_to_tell_waits_for_the_next(steps: int) -> None:
    rng = torch.Generator().manual_seed(4)
    x = torch.randn(4000, generator=rng, dtype=torch.float64)
    noise = torch.randn(200, 4000, generator=rng, dtype=torch.float64)
    noise /= noise.norm(dim=1, keepdim=True) * steps**0.5
    method, look = Cadence.tuned(steps, variates=False), 20 // steps
    assert max(units(method, x, noise)) == pytest.approx(0.02)
    one_direction = (0.8 * noise[:1] + 0.6 * noise)[: 2 * look + 1]  # that a step alone cannot tell
    found = units(method, x, one_direction)
    assert found[:look] == pytest.approx([0.02] * look)
    assert found[look] > 0.022
    assert found[look : 2 * look] == pytest.approx([found[look]] * look)
    assert found[-1] > 1.1 * found[look]
    # updates that count for half make the mean half as long, and need four times as many
    assert units(method, x, one_direction / 2, weight=0.5)[-1] == pytest.approx(0.02)
    assert units(method, x, (noise[:1] / 2).expand(4 * look + 1, -1), weight=0.5)[-1] == pytest.approx(0.06)
    back_and_forth = noise[:1] * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(100)[:, None]
    assert max(units(method, x, back_and_forth)) == pytest.approx(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.0, 0.7])
@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("steps", [10, 30])
def test_clients_that_see_noise_alone_leave_the_unit(steps: int, spread: float, late: int) -> None:
    """Gradients without any direction, of unequal length, through the clients' own work."""
    rng = torch.Generator().manual_seed(5)
    method, x = Cadence.tuned(steps), torch.randn(2000, generator=rng, dtype=torch.float64)
    state = method.init(x)
    memories: dict[int, Any] = {}
    for version in range(40):
        sums: list[Upload] = []
        for place in range(10):
            client = (10 * version + place) % 50
            lengths = torch.exp(spread * torch.randn(steps, 1, generator=rng, dtype=torch.float64))
            seen = lengths * torch.randn(steps, 2000, generator=rng, dtype=torch.float64)
            batches = Batches(tuple(Batch((gradient,)) for gradient in seen))
            memory = memories.get(client, method.memory(x))
            upload, memories[client] = method.local(
                method.broadcast(state, version), memory, batches, VISIT, Given()
            )
            assert isinstance(upload, Upload)
            sums.append(upload)
        mean = Upload(*(torch.stack(field).mean(0) for field in zip(*sums, strict=True)))
        cohort = Cohort(version, 50, (min(late, version),) * 10, (1.0,) * 10)
        state = method.step(state, mean, cohort)
    assert float(state.unit / x.norm()) == pytest.approx(0.02)


def follow(cosines: list[float], descent: float = 0.0, late: int = 0) -> list[float]:
    """Units by the first one, before and after buffers of 9 tasks that report such a cosine."""
    method, x = Cadence.tuned(4), torch.ones(16, dtype=torch.float64)
    state = method.init(x)
    found = [float(state.unit)]
    for version, along in enumerate(cosines):
        mean = report(torch.full_like(x, descent / 4), along)
        state = method.step(state, mean, Cohort(version, 99, (min(late, version),) * 9, (1.0,) * 9))
        found.append(float(state.unit))
    return [unit / found[0] for unit in found]


def test_the_unit_follows_how_gradients_lie_to_the_control_variates() -> None:
    # 9 tasks count for three quarters, of the cosine and of the way
    assert follow([0.4])[-1] == pytest.approx(math.exp(0.75 * 3 * (0.3 - 0.05)))
    assert follow([-0.8])[-1] == pytest.approx(math.exp(-0.75 * 3 * 0.2))
    assert follow([-0.5, 0.4]) == pytest.approx([1, 1, math.exp(0.75 * 3 * (0.3 - 0.375 / 4 - 0.05))])
    assert follow([0.05] * 20)[-1] == 1  # noise has such cosines
    assert follow([-0.5] * 30)[-1] < 0.02  # there is no lowest unit
    assert follow([1.0] * 30)[-1] == pytest.approx(100)  # but a highest
    # directions that agree lengthen it as before, unless gradients oppose
    agreed = follow([0.0], descent=1.0)[-1]
    assert agreed == pytest.approx(3)
    assert follow([-0.4], descent=1.0)[-1] == pytest.approx(agreed)
    assert follow([0.04], descent=1.0)[-1] == pytest.approx(agreed)
    assert follow([1.0], descent=1.0)[-1] == pytest.approx(math.exp(0.75 * 3 * 0.7))
    assert follow([-0.8], descent=1.0)[-1] == follow([-0.8])[-1] < 1


def test_the_unit_waits_for_those_who_were_sent_it() -> None:
    """While a client is at work, the unit grows by less than e to three times the cosine."""
    for late in (0, 1, 5):
        found = follow([0.2] * 24, late=late)
        grown = [found[n + 1 + late] / found[n] for n in range(3 * late + 1, 23 - late)]
        assert 1.2 < max(grown) < math.exp(3 * 0.2)


def test_where_coordinates_die_the_path_begins_again_once_with_a_shorter_unit() -> None:
    method, x = Cadence.tuned(4), torch.ones(16, dtype=torch.float64)
    state, step = method.init(x), torch.full((16,), 0.25, dtype=torch.float64)
    told = [(0.2, 0), (-0.2, 1), (-0.5, 1), (-0.6, 2), (-1, 1), (-1, 2), (0.9, 1), (0, 0), (-0.9, 0)]
    back = []
    for version, (change, stale) in enumerate(told):
        before = state.watch
        assert isinstance(before, Watch)
        state = method.step(state, report(step, 0.0, change), Cohort(version, 99, (stale,) * 91, (1.0,) * 91))
        if torch.equal(state.path, x):
            back.append(version)
            assert float(2 * state.size) == pytest.approx(float(before.sent.exp()) / 4)
        assert float(state.unit) <= float(2 * state.size) + 1e-12
    # version 2 had more than half of the coordinates of before; 4 and 5 were sent older models
    assert back == [3, 8]


def test_a_client_compares_its_coordinates_with_those_of_its_last_task() -> None:
    method, x = Cadence.tuned(2), torch.full((4,), 2.0, dtype=torch.float64)
    message = method.broadcast(method.init(x), 0)._replace(change=x.new_tensor(0.3))

    def told(memory: list[float], gradient: list[float]) -> Upload:
        batches = Batches((Batch((x.new_tensor(gradient),)),) * 2)
        upload, _ = method.local(message, x.new_tensor(memory), batches, VISIT, Given())
        assert isinstance(upload, Upload)
        return upload

    assert float(told([1, 1, 0, 1], [0, 1e-9, -5, 0]).change) == pytest.approx(-1 / 3)
    assert float(told([0, 0, 0, 1e-9], [0, 1, -5, 0]).change) == 0.5
    assert float(told([1, 1, 1, 1], [0, 0, 0, 0]).change) == 0.3  # it has fitted its data
    assert float(told([0, 0, 0, 0], [0, 1, 0, 0]).change) == 0.3  # it takes part for the first time
    assert [float(told([0, 0, 0, 0], [0, each, 0, 0]).along) for each in (0, 1)] == [0, 0]  # nothing was sent
    message = message._replace(anchor=x.new_tensor([0, -0.3, 0, 0.4]))
    assert float(told([0, 0, 0, 0], [0, 7, 0, 0]).along) == pytest.approx(-0.6)


class Field:
    """A slope towards the origin, or away from it and ending at walls but for one coordinate's."""

    def __init__(self, wall: float) -> None:
        self.wall = wall  # 0: towards the origin

    def gradient(self, client: int, visit: int, k: int, x: Any) -> Any:
        """As oracles call it."""
        if not self.wall:
            return x + 0.01 * np.cos(client + np.arange(len(x)))
        slope = np.where(np.abs(x) < self.wall, -np.sign(x) * (1 + client % 2 + np.cos(x)), 0.0)
        slope[0] = np.sin(3 * x[0] + client)
        return slope

    def steps(self, client: int, visit: int) -> int:
        return 4

    def whole_gradient(self, client: int, x: Any) -> Any:
        raise NotImplementedError

    def __call__(self, x: Vector, batch: Batch) -> Vector:
        """As methods do."""
        return torch.from_numpy(self.gradient(int(batch.data[0]), 0, 0, x.numpy()))

    def with_loss(self, x: Vector, batch: Batch) -> tuple[Vector, Tensor]:
        raise NotImplementedError

    def descend(self, x: Vector, batch: Batch, lr: float) -> Vector:
        return x - lr * self(x, batch)


@pytest.mark.parametrize("wall", [0.0, 6.0])
def test_a_unit_that_shrinks_and_a_death_follow_the_oracle(wall: float) -> None:
    method, field = Cadence.tuned(4), Field(wall)
    x = torch.from_numpy(np.sign(np.random.default_rng(1).normal(size=12)))  # which meets all walls at once
    state, messages, memories = method.init(x), [], {}
    models, steps, shrunk, returned = [x], [], [], []
    for version in range(60):
        messages.append(method.broadcast(state, version))
        step = [((3 * version + n) % 30, version - min(n, version), version) for n in range(3)]
        uploads = []
        for client, sent, _ in step:
            batches = Batches((Batch((torch.tensor(float(client)),)),) * 4)
            memory = memories.get(client, method.memory(x))
            upload, memories[client] = method.local(messages[sent], memory, batches, VISIT, field)
            uploads.append(upload)
        mean = Upload(*(torch.stack(part).mean(0) for part in zip(*uploads, strict=True)))
        stale = tuple(version - sent for _, sent, _ in step)
        before, state = state, method.step(state, mean, Cohort(version, 30, stale, (1.0,) * 3))
        returned += [version] if torch.equal(state.path, x) else []
        shrunk += [version] if state.unit < before.unit else []
        models.append(state.x)
        steps.append(step)
    expected = cadence(Run(field, 30, x.numpy(), steps), local_steps=4)
    for model, other in zip(models, expected, strict=True):
        np.testing.assert_allclose(model.numpy(), other, rtol=0, atol=1e-10)
    assert shrunk
    assert bool(returned) == bool(wall)


class Tokens(Given):
    """Only what is in the batch has a slope, towards 1."""

    def __call__(self, x: Vector, batch: Batch) -> Vector:
        return batch.data[0] * (x - 1)


@pytest.mark.parametrize(
    ("buffer", "steps", "rounds"), [(1, 1, 400), (2, 1, 200), (5, 1, 80), (1, 2, 200), (2, 10, 20)]
)
def test_clients_of_few_and_of_many_words_are_not_taken_for_a_death(
    buffer: int, steps: int, rounds: int
) -> None:
    """Gradients that are sparse by data: words of a Zipf law, and clients of ten or ten thousand."""
    rng = np.random.default_rng(buffer + steps)
    count, words = 40, 5000
    often = 1 / np.arange(1, words + 1)
    often /= often.sum()
    usual = 10 ** rng.uniform(1, 4, size=count)

    def batch(client: int) -> Batch:
        length = usual[client] * np.exp(rng.normal()) if client else 1  # one client has one word
        seen = np.zeros(words)
        seen[rng.choice(words, size=max(1, int(length)), p=often) if client else 0] = 1
        return Batch((torch.from_numpy(seen),))

    method, x = Cadence.tuned(steps), torch.zeros(words, dtype=torch.float64)
    state, messages, memories, parts = method.init(x), [], {}, []
    for version in range(rounds):
        messages.append(method.broadcast(state, version))
        uploads = []
        for client in rng.choice(count, size=buffer, replace=False):
            batches = Batches(tuple(batch(client) for _ in range(steps)))
            memory = memories.get(client, method.memory(x))
            upload, memories[client] = method.local(
                messages[max(0, version - 2)], memory, batches, VISIT, Tokens()
            )
            uploads.append(upload)
            parts.append(float((memories[client] != 0).double().mean()))
        mean = Upload(*(torch.stack(part).mean(0) for part in zip(*uploads, strict=True)))
        state = method.step(state, mean, Cohort(version, count, (min(version, 2),) * buffer, (1.0,) * buffer))
        assert not torch.equal(state.path, x)
    assert min(parts) < max(parts) / 100


def _towards(steps: int) -> Batches:
    return Batches(tuple(Batch((torch.tensor([30.0, -7.0], dtype=torch.float64),)) for _ in range(steps)))


def test_a_checkpoint_of_the_form_without_reports_is_refused_in_a_sentence() -> None:
    world, settings = make_world(), {"dispatch": Asynchronous(5), "buffer": 3, "rounds": 4}

    def steps(noisy: bool, resume: Any = None) -> Any:
        engine = Sequential(world.problem, world.population, Exponential(1.0))
        return train(Cadence.tuned(3, noisy=noisy), engine, **settings, resume=resume)

    def former(noisy: bool) -> Any:
        """With the state that the form before had, which was the one with noise."""
        shots = steps(noisy)
        next(shots)
        facts, tensors = next(shots).checkpoint()
        kept = {
            name: value
            for name, value in tensors.items()
            if not name.startswith("state.") or int(name[6:]) < 13
        }
        return type(next(shots).checkpoint())(facts, kept)

    with pytest.raises(InputError, match=r"state has 13 parts.* now has 18: another version of the method"):
        list(steps(False, former(False)))
    assert torch.equal(list(steps(True, former(True)))[-1].x, list(steps(True))[-1].x)


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
