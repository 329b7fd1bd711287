"""Time limits of tasks: fixed, by quantile, with partial work, and before updates get too stale."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from offbeat import Asynchronous, Sequential, Setting, Vectorised, build, train
from offbeat.cli import main
from offbeat.core import Task
from offbeat.errors import InputError
from offbeat.schedule.availability import Dropout
from offbeat.schedule.clock import Clock
from offbeat.schedule.deadline import (
    FixedDeadline,
    QuantileDeadline,
    TaskLimits,
    parse_deadline,
)
from offbeat.schedule.delays import Exponential, Tiers
from offbeat.schedule.rng import KeyedRng
from offbeat.schedule.scheduler import Scheduler
from offbeat.schedule.statistics import simulate
from offbeat.training.replay import replay
from offbeat.training.runner import _trace
from oracles.fednova import fednova
from worlds import SEED, make_world, play, trace


def clock(limits: TaskLimits, steps: int = 10, delays: Any = Exponential(1.0)) -> Clock:
    draws = KeyedRng(1)
    return Clock(delays.bind(draws, 100), draws, Dropout(), limits, lambda client: steps)


def test_a_task_beyond_a_fixed_limit_is_lost_then_and_its_client_free() -> None:
    time = clock(TaskLimits(FixedDeadline(0.5)))
    for client in range(50):
        time.start(Task(client, 0, 0))
    arrivals = [time.next() for _ in range(50)]
    assert all(each is not None for each in arrivals)
    lost = [each for each in arrivals if each and each.lost]
    assert 20 < len(lost) < 40  # exp(-1/2) of them
    assert all(each.time - each.started == 0.5 for each in lost)
    assert time.working == 0


def test_a_sure_task_has_no_limit() -> None:
    time = clock(TaskLimits(FixedDeadline(1e-6)))
    time.start(Task(0, 0, 0), sure=True)
    arrival = time.next()
    assert arrival
    assert not arrival.lost


def test_a_quantile_gives_up_about_as_many_as_it_says() -> None:
    time = clock(TaskLimits(QuantileDeadline(0.9)))
    lost = 0
    for visit in range(6000):
        time.start(Task(visit % 100, 0, visit // 100))
        arrival = time.next()
        assert arrival
        lost += arrival.lost and visit >= 1000
    assert 0.07 < lost / 5000 < 0.14


def test_a_quantile_follows_durations_that_grow() -> None:
    tracker = QuantileDeadline(0.9).open()
    assert tracker.limit() == float("inf")
    for _ in range(100):
        tracker.add(1.0, given_up=False)
    assert tracker.limit() == 1.0
    for _ in range(30):  # all tasks now take 8 seconds
        limit = tracker.limit()
        tracker.add(min(8.0, limit), given_up=limit < 8.0)
    assert tracker.limit() >= 8.0


def test_a_tracker_resumes_as_it_was() -> None:
    one, two = QuantileDeadline(0.5, 2.0).open(), QuantileDeadline(0.5, 2.0).open()
    for number in range(2500):
        one.add(float(np.sin(number) ** 2), given_up=number % 7 == 0)
    two.load(json.loads(json.dumps(one.save())))
    assert one.limit() == two.limit()
    one.add(3.0, given_up=False)
    two.add(3.0, given_up=False)
    assert one.limit() == two.limit()
    assert one.save() == two.save()


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
def test_tasks_cut_short_report_the_steps_that_they_did(engine: Any) -> None:
    """FedNova divides by these steps, so the oracle of unequal steps gives the same models."""
    world = make_world()
    rates = {"local_lr": 0.2, "server_lr": 0.7}
    limits = TaskLimits(FixedDeadline(2.5), partial_work=True)
    shots = play(
        build("fednova", Setting(3, 3, 8), rates),
        engine(world.problem, world.population, Tiers("mild"), limits=limits),
        Asynchronous(5),
    )
    steps = {
        (task.client, task.visit): done
        for shot in shots[1:]
        if shot.filled and shot.filled.steps
        for task, done in zip(shot.filled.tasks, shot.filled.steps, strict=True)
    }
    short = {done for done in steps.values() if done is not None}
    assert short == {1, 2}
    whole = world.oracle.batches

    class Cut:
        def __getattr__(self, name: str) -> Any:
            return getattr(world.oracle, name)

        def steps(self, client: int, visit: int) -> int:
            return steps.get((client, visit)) or len(whole(client, visit))

    x0 = world.problem.initial()[0].numpy()
    models = fednova(Cut(), 8, x0, trace(shots), **rates)  # type: ignore[arg-type]
    for shot, expected in zip(shots, models, strict=True):
        np.testing.assert_allclose(shot.x.numpy(), expected, rtol=0, atol=1e-10)


def test_a_run_with_limits_resumes_to_the_bit_and_is_replayed_from_its_trace() -> None:
    world = make_world()
    algorithm = build("fedbuff", Setting(3, 3, 12), {})
    limits = TaskLimits(QuantileDeadline(0.6), partial_work=True, recall_stale=True)
    options: dict[str, Any] = {
        "dispatch": Asynchronous(5), "buffer": 3, "rounds": 12, "seed": SEED, "max_staleness": 1,
    }  # fmt: skip
    engine = Vectorised(world.problem, world.population, Exponential(1.0), limits=limits)
    saved, shots = [], []
    for shot in train(algorithm, engine, **options):
        shots.append(shot)
        if shot.version == 9:
            saved.append(shot.checkpoint())
    assert any(shot.filled and shot.filled.steps for shot in shots)
    again = list(train(algorithm, engine, resume=saved[0], **options))
    assert torch.equal(again[-1].x, shots[-1].x)
    assert [shot.filled for shot in again] == [shot.filled for shot in shots[10:]]
    lines = [json.loads(json.dumps(_trace(shot))) for shot in shots[1:]]
    told = list(replay(algorithm, Sequential(world.problem, world.population), lines, **options))
    torch.testing.assert_close(told[-1].x, shots[-1].x, rtol=0, atol=1e-12)


def test_clients_that_would_be_too_stale_are_asked_for_what_they_have() -> None:
    def counts(recall: bool) -> Any:
        draws = KeyedRng(3)
        limits = TaskLimits(recall_stale=recall)
        time = Clock(Tiers("large").bind(draws, 60), draws, Dropout(), limits, lambda client: 100)
        scheduler = Scheduler(time, Asynchronous(20), draws, 60, 5, 6)
        return simulate(scheduler, 200)

    without, asked = counts(False), counts(True)
    assert without.dropped > 30
    assert asked.dropped < without.dropped / 3
    assert asked.staleness_max <= 6


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--deadline", "0"], "--deadline must be above 0 seconds, not 0."),
        (
            ["--deadline", "soon"],
            "--deadline must be a number of seconds or quantile:Q[:FACTOR], not 'soon'.",
        ),
        (["--deadline", "quantile:2"], "the quantile of --deadline must be above 0 and below 1, not 2."),
        (["--deadline", "quantile"], "'quantile' is not a deadline: write it as quantile:QUANTILE[:FACTOR]."),
        (["--partial-work"], "--partial-work is for tasks beyond a time limit: give --deadline, too."),
        (
            ["--recall-stale"],
            "--recall-stale is for updates that would be discarded: give --max-staleness, too.",
        ),
    ],
)
def test_bad_limits_are_refused_in_one_sentence(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schedule", *options]) == 2
    assert capsys.readouterr().err.strip().removeprefix("offbeat: ") == sentence


def test_the_text_of_a_limit_is_read_back() -> None:
    for text in ("30", "quantile:0.9", "quantile:0.9:1.5"):
        assert str(parse_deadline(text)) == text
    assert parse_deadline(30) == FixedDeadline(30.0)
    assert parse_deadline(None) == FixedDeadline()
    with pytest.raises(InputError):
        parse_deadline("nan")
