"""Time limits of tasks: fixed, by quantile, with partial work, and before updates get too stale."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from offbeat import (
    Asynchronous,
    OpenSlots,
    Phases,
    Poisson,
    Queues,
    RoundRefill,
    Sequential,
    Setting,
    Synchronous,
    Vectorised,
    build,
    train,
)
from offbeat.cli import main
from offbeat.core import Task
from offbeat.errors import InputError
from offbeat.schedule.availability import Dropout
from offbeat.schedule.clock import (
    Clock,
    FixedDeadline,
    QuantileDeadline,
    TaskLimits,
    parse_deadline,
)
from offbeat.schedule.delays import Exponential, Tiers, Uniform, parse_delay
from offbeat.schedule.rng import KeyedRng
from offbeat.schedule.scheduler import Scheduler
from offbeat.schedule.statistics import simulate
from offbeat.training.replay import replay
from offbeat.training.runner import _trace
from oracles.fednova import fednova
from oracles.replay import Run
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


def test_a_task_that_is_recalled_has_done_its_part_of_the_steps_by_then() -> None:
    time = clock(TaskLimits(recall_stale=True), steps=10, delays=parse_delay("constant:8"))
    time.start(Task(0, 0, 0))
    time.start(Task(1, 1, 0))
    time.wait(0.7)
    assert time.recall(0) == []  # not one step is done
    time.wait(3.0)
    assert time.recall(0) == [Task(0, 0, 0)]
    first, second = time.next(), time.next()
    assert first
    assert second
    assert (first.task.client, first.time, first.steps, first.lost) == (0, 3.0, 3, False)  # of 3.75
    assert (second.task.client, second.time, second.steps) == (1, 8.0, None)


def test_a_run_in_which_all_tasks_are_lost_ends_after_as_many_as_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("offbeat.schedule.scheduler.MAX_USELESS_TASKS", 10)
    time = clock(TaskLimits(FixedDeadline(1e-9)))
    scheduler = Scheduler(time, Asynchronous(5), KeyedRng(1), 100, 3)
    with pytest.raises(InputError, match="10 tasks in a row were lost or too stale"):
        scheduler.fill(0)
    assert scheduler.counts.lost == 10


def test_a_buffer_names_steps_only_where_a_task_was_cut_short() -> None:
    for limit, cut in ((1e9, False), (0.5, True)):
        time = clock(TaskLimits(FixedDeadline(limit), partial_work=True), delays=parse_delay("constant:1"))
        steps = Scheduler(time, Asynchronous(5), KeyedRng(1), 100, 3).fill(0).steps
        assert steps == ((5, 5, 5) if cut else ())


def test_a_sure_task_has_no_limit() -> None:
    time = clock(TaskLimits(FixedDeadline(1e-6)))
    time.start(Task(0, 0, 0), sure=True)
    arrival = time.next()
    assert arrival
    assert not arrival.lost


@pytest.mark.parametrize("dropout", [0.0, 0.9])
def test_a_limit_below_every_duration_ends_with_a_sentence(dropout: float) -> None:
    """All tasks are lost, so a run would go on for ever; mere losses, however many, are waited out."""
    draws = KeyedRng(1)
    limits = TaskLimits(FixedDeadline(1e-9 if dropout == 0 else 10.0))
    time = Clock(Uniform(1.0, 2.0).bind(draws, 100), draws, Dropout(dropout), limits)
    scheduler = Scheduler(time, Asynchronous(10), draws, 100, 5)
    if dropout:
        assert len(scheduler.fill(0).lost) > 20
        return
    with pytest.raises(InputError, match="100,000 tasks in a row were lost or too stale, so no buffer"):
        scheduler.fill(0)


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


def test_the_limit_is_the_quantile_of_the_last_thousand_tasks_and_doubles_if_too_few_were_done() -> None:
    """As the module says it, by sorting all that was seen; those that were given up rank last."""
    quantile, factor, first = 0.8, 1.5, 77.0
    tracker = QuantileDeadline(quantile, factor).open(first)
    seen: list[tuple[float, bool]] = []
    rng = np.random.default_rng(3)
    limits = []
    for number in range(1300):
        last = seen[-1000:]
        done = sorted(seconds for seconds, given_up in last if not given_up)
        longest = max((seconds for seconds, given_up in last if given_up), default=0.0)
        rank = math.ceil(quantile * len(last))
        expected = factor * done[rank - 1] if 0 < rank <= len(done) else 2 * longest
        limits.append((number >= 20, rank == len(done), rank > len(done)))
        assert tracker.limit() == (expected if number >= 20 else first)
        seen.append((float(rng.exponential(1 + number % 5)), bool(rng.random() < 0.2)))
        tracker.add(seen[-1][0], given_up=seen[-1][1])
    assert {(True, True, False), (True, False, True), (True, False, False)} <= set(limits)  # all occurred


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


DISPATCHES = {
    "asynchronous": Asynchronous(5),
    "asynchronous, lazy": Asynchronous(5, eager=False),
    "synchronous": Synchronous(3),
    "over-selected": Synchronous(5),
    "round-refill": RoundRefill(5),
    "poisson": Poisson(0.5),
    "phases": Phases(3),
    "queues": Queues(5),
    "open-slots": OpenSlots(5, 2),
}


@pytest.mark.parametrize("engine", [Sequential, Vectorised])
@pytest.mark.parametrize("dispatch", DISPATCHES.values(), ids=DISPATCHES)
def test_tasks_cut_short_report_the_steps_that_they_did(engine: Any, dispatch: Any) -> None:
    """FedNova divides by these steps, so the oracle of unequal steps gives the same models."""
    world = make_world()
    rates = {"local_lr": 0.2, "server_lr": 0.7}
    limits = TaskLimits(FixedDeadline(2.5), partial_work=True)
    shots = play(
        build("fednova", Setting(3, 3, 8), rates),
        engine(world.problem, world.population, Tiers("mild"), limits=limits),
        dispatch,
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
    models = fednova(Run(Cut(), 8, x0, trace(shots)), **rates)  # type: ignore[arg-type]
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
    for refused in ("nan", "quantile:0", "quantile:1", "quantile:0.5:0", "quantile:0.5:inf"):
        with pytest.raises(InputError):
            parse_deadline(refused)
