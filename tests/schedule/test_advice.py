"""Advice from the schedule alone: it agrees with the scheduler, and a trace predicts other settings."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from deploy_world import Deployment, Network, ramdisk
from offbeat import Cycle, InputError, Tiers, advise
from offbeat.cli.main import main
from offbeat.report.trace import pending_durations, read_lines, task_durations
from offbeat.schedule.advice import ScheduleChoice, _beats, _sentence, _take, _with_frontier
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import Observed, parse_delay
from offbeat.schedule.dispatch import Asynchronous
from offbeat.schedule.rng import KeyedRng
from offbeat.schedule.scheduler import Scheduler
from offbeat.schedule.statistics import ScheduleSummary, iterate_buffers, simulate

HETEROGENEOUS = "tiers:large:0.5"  # some clients take 50 s and more, the others a few


def schedule(concurrency: int, buffer: int, seed: int) -> Scheduler:
    source = KeyedRng(seed)
    clock = Clock(parse_delay(HETEROGENEOUS).bind(source, 40), source)
    return Scheduler(clock, Asynchronous(concurrency), source, 40, buffer)


def lines_of(scheduler: Scheduler, rounds: int) -> list[dict[str, object]]:
    """A trace as a run writes it."""
    return [
        {
            "version": step.version + 1,
            "time": step.time,
            "tasks": [
                [*task, started, arrived]
                for task, started, arrived in zip(step.tasks, step.started, step.arrived, strict=True)
            ],
            "dropped": [list(task) for task in step.dropped],
            "lost": [list(task) for task in step.lost],
        }
        for step in iterate_buffers(scheduler, rounds)
    ]


def measured(concurrency: int, buffer: int, seed: int, updates: int = 4000) -> ScheduleSummary:
    return simulate(schedule(concurrency, buffer, seed), updates // buffer)


@pytest.mark.parametrize(("concurrency", "buffer"), [(24, 4), (6, 6), (30, 15)])
def test_a_recorded_run_predicts_others_within_a_tenth(concurrency: int, buffer: int) -> None:
    """Recorded at 12 and 8, with the delays of each client known from its trace alone."""
    seen = task_durations(lines_of(schedule(12, 8, seed=3), 500))
    found = advise(
        Observed(seen.seconds), 40, concurrency=[concurrency], buffer=[buffer], updates=4000, seed=9
    )
    truth = measured(concurrency, buffer, seed=3)
    assert found.take.steps_per_second == pytest.approx(truth.steps / truth.time, rel=0.1)
    assert found.take.updates_per_second == pytest.approx(truth.consumed / truth.time, rel=0.1)
    assert found.take.staleness_mean == pytest.approx(truth.staleness_mean, rel=0.1)
    recorded = measured(12, 8, seed=3)  # which is far from what was predicted
    assert recorded.consumed / recorded.time != pytest.approx(truth.consumed / truth.time, rel=0.3)


class UnequalNetwork(Network):
    """Sites that differ: the slowest takes nine times as long as the fastest."""

    def push(self, node: int, kind: str, header: str, payload: bytes, timeout: float) -> str:
        number = super().push(node, kind, header, payload, timeout)
        letter = self.letters[number]
        letter.due = max(self.clock.now, self._free.get(-node, 0.0)) + self.random.uniform(1, 1.5) * (
            1 + node % 9
        )
        self._free[-node] = letter.due
        return number


def deploy(place: Path, concurrency: int, buffer: int, rounds: int) -> Path:
    world = Deployment(place, "fedbuff", 12, rounds, buffer, Asynchronous(concurrency))
    world.network = UnequalNetwork(world.clock)
    with world.joined():
        world.serve()
    settings = json.loads((world.folder / "settings.json").read_text())
    settings.pop("checksum")
    (world.folder / "settings.json").write_text(json.dumps(settings | {"concurrency": concurrency}))
    return world.folder


def test_a_recorded_deployment_predicts_another_one_within_a_tenth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both are real sessions over sites in memory; the twin sees the trace of the first one only."""
    with ramdisk() as place:
        first = deploy(place / "first", 4, 4, 50)
        assert main(["advise", str(first), "--concurrency", "4,9", "--buffer", "3,4", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        second = task_durations(read_lines(deploy(place / "second", 9, 3, 70) / "trace.jsonl"))
        assert pending_durations(first)
    (twin,) = (each for each in told["choices"] if (each["concurrency"], each["buffer"]) == (9, 3))
    assert twin["steps_per_second"] == pytest.approx(second.steps_per_second, rel=0.1)
    assert twin["updates_per_second"] == pytest.approx(second.updates_per_second, rel=0.1)
    assert twin["staleness_mean"] == pytest.approx(second.staleness_mean, rel=0.1)
    own = told["recorded"]
    assert own["twin"]["updates_per_second"] == pytest.approx(own["updates_per_second"], rel=0.1)
    assert own["updates_per_second"] != pytest.approx(second.updates_per_second, rel=0.3)


def test_from_the_start_the_figures_are_those_of_the_scheduler() -> None:
    (choice,) = advise(HETEROGENEOUS, 40, concurrency=[12], buffer=[8], updates=800, seed=5).choices
    truth = simulate(schedule(12, 8, seed=5), 100)
    assert choice.steps_per_second == truth.steps / truth.time
    assert choice.staleness_mean == truth.staleness_mean
    assert choice.staleness_max == truth.staleness_max
    assert choice.idle == pytest.approx(1 - 12 / 40)


def test_the_start_is_left_out_unless_updates_are_given() -> None:
    """At the start nobody is slow yet: the first updates are all of fast clients."""
    settled = advise(Tiers("large"), 100, concurrency=[80], buffer=[5]).take
    (begun,) = advise(Tiers("large"), 100, concurrency=[80], buffer=[5], updates=200).choices
    assert settled.staleness_max > 2 * begun.staleness_max


def test_settled_figures_leave_out_what_was_done_before() -> None:
    """All at work are always at work, so that their number over a task's time is the rate (Little's law)."""
    (choice,) = advise("exponential:2", 50, concurrency=[10], buffer=[5]).choices
    assert choice.idle == pytest.approx(1 - 10 / 50, abs=1e-3)
    assert choice.updates_per_second == pytest.approx(10 / 2, rel=0.06)
    assert choice.updates_per_second == pytest.approx(5 * choice.steps_per_second)


def choice_of(steps: float, updates: float, staleness: float, buffer: int = 1) -> ScheduleChoice:
    return ScheduleChoice(
        8, buffer, None, None, steps, updates, staleness, 1, 1, 0.0, 0.0, 0.0, 0, 0, 8, 100
    )  # fmt: skip


def test_what_is_as_fast_but_for_a_twentieth_is_chosen_by_its_client_updates() -> None:
    fastest, near, far = choice_of(100, 100, 1, 1), choice_of(95.1, 190, 1, 2), choice_of(94.9, 300, 1, 3)
    assert _take([fastest, near, far], 2.0) is near
    stale = choice_of(200, 400, 2.5, 4)
    assert _take([fastest, near, far, stale], 2.0) is near
    assert (
        _take([stale, choice_of(1, 1, 2.4, 5)], 2.0).buffer == 5
    )  # the freshest, where none is fresh enough


def test_differences_of_a_hundredth_beat_nothing() -> None:
    one, alike, better = choice_of(100, 100, 1), choice_of(99.5, 100.5, 1, 2), choice_of(99.5, 102, 1, 3)
    assert not any(_beats(*pair) for pair in ((one, alike), (alike, one)))
    assert _beats(better, one)  # more client updates, and the server steps differ by chance alone
    assert not _beats(one, better)
    assert [each.frontier for each in _with_frontier([one, alike, better])] == [False, False, True]


def test_the_sentence_names_what_is_given_up_beyond_a_twentieth() -> None:
    take = choice_of(100, 100, 1)
    for other, said in (
        (choice_of(104, 104, 1, 2), "it gives up nothing that was compared"),
        (choice_of(106, 50, 3, 2), "it gives up 1.1 times as many server steps, which a concurrency of 8"),
        (choice_of(90, 106, 3, 2), "it gives up 1.1 times as many client updates, which a concurrency of 8"),
    ):
        assert said in _sentence([take, other], take, 2.0)


def test_the_choice_is_the_fastest_of_those_that_are_fresh_enough() -> None:
    found = advise("tiers:mild", 30, updates=1000)
    fresh = [each for each in found.choices if each.staleness_mean <= 2]
    assert found.take in fresh
    assert found.take.steps_per_second >= 0.95 * max(each.steps_per_second for each in fresh)
    assert "it gives up" in found.sentence
    stricter = advise("tiers:mild", 30, accept_staleness=1.2, updates=1000)
    assert stricter.take.staleness_mean <= 1.2
    assert stricter.take.steps_per_second < found.take.steps_per_second
    stale = advise("tiers:mild", 30, concurrency=[24], buffer=[2, 3], updates=1000)
    assert "which no choice keeps below 2" in stale.sentence
    assert stale.take.buffer == 3


def test_the_frontier_has_what_nothing_beats() -> None:
    choices = advise("tiers:mild", 30, updates=1000).choices
    best = [each for each in choices if each.frontier]
    for each in choices:
        beaten = any(
            other.steps_per_second > 1.02 * each.steps_per_second
            and other.updates_per_second > 1.02 * each.updates_per_second
            and other.staleness_mean < 0.98 * each.staleness_mean
            for other in choices
        )
        assert not (beaten and each.frontier)
    assert max(choices, key=lambda each: each.steps_per_second) in best
    assert 0 < len(best) < len(choices)


def test_a_deadline_loses_slow_tasks_and_a_limit_drops_them() -> None:
    plain, cut, limited = (
        advise(HETEROGENEOUS, 40, concurrency=[12], buffer=[4], updates=2000, **given).take
        for given in ({}, {"deadline": [20.0]}, {"max_staleness": [3]})
    )
    assert plain.wasted == 0
    assert cut.lost > 0 == cut.dropped
    assert limited.dropped > 0 == limited.lost
    assert cut.updates_per_second > plain.updates_per_second  # nobody is held up for more than 20 s
    assert cut.staleness_max < plain.staleness_max
    assert limited.staleness_max <= 3


def test_a_client_that_was_not_seen_is_like_another_one() -> None:
    bound = Observed({0: [1.0, 2.0], 7: [9.0]}).bind(KeyedRng(0), 100)
    assert {bound(0, visit, u) for visit, u in ((0, 0.0), (1, 0.7), (2, 0.99))} == {1.0, 2.0}
    assert bound(7, 3, 0.5) == 9.0
    for client in range(20, 40):
        assert {bound(client, 0, u) for u in (0.0, 0.3, 0.99)} in ({1.0, 2.0}, {9.0})
    assert {bound(client, 0, 0.0) for client in range(20, 60)} == {1.0, 9.0}


def test_tasks_that_were_dropped_or_are_in_flight_count_as_slow() -> None:
    """Otherwise the twin would take clients whose updates never count for fast ones."""
    source = KeyedRng(3)
    clock = Clock(parse_delay(HETEROGENEOUS).bind(source, 40), source)
    scheduler = Scheduler(clock, Asynchronous(12), source, 40, 4, max_staleness=2)
    lines = lines_of(scheduler, 400)
    seen = task_durations(lines)
    assert seen.dropped > 20
    bound = parse_delay(HETEROGENEOUS).bind(KeyedRng(3), 40)
    slow = {client for client in seen.seconds if bound(client, 0, 0.0) >= 50}
    assert slow
    assert {client for client, seconds in seen.seconds.items() if min(seconds) > 40} == slow
    waiting = task_durations(lines, [(39, 1e6)])
    assert max(waiting.seconds[39]) == 1e6


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"clients": 1}, "nothing to choose with 1 of them: give at least 2 clients"),
        ({"clients": "many"}, "the number of clients is 'many': give a whole number"),
        ({"delays": None}, "delays is None: give delays such as"),
        ({"delays": "constant:1e308"}, "take too long"),
        ({"concurrency": 5}, "concurrency is 5: give a list of the values to compare"),
        ({"concurrency": "5"}, "concurrency is '5': give a list"),
        ({"concurrency": [math.nan]}, "a value of concurrency is nan: give a whole number"),
        ({"buffer": [0]}, "a value of buffer is 0: give a whole number of at least 1"),
        ({"max_staleness": [1.5]}, "a value of max_staleness is 1.5: give a whole number of at least 0"),
        ({"deadline": 30.0}, "deadline is 30.0: give a list"),
        ({"deadline": ["soon"]}, "a value of deadline is 'soon': give a number"),
        ({"availability": 3}, "availability is 3: give one such as"),
        ({"seed": -1}, "seed is -1: give a whole number of at least 0"),
        ({"concurrency": [2], "buffer": [5]}, "no buffer is as small as a concurrency"),
        ({"dispatch": "allocation"}, "steps by a clock"),
        ({"deadline": [0.5]}, "fewer than one task in a hundred"),
        ({"deadline": [math.nan]}, "must be above 0"),
        ({"updates": 0}, "updates is 0: give a whole number of at least 1"),
        ({"accept_staleness": -1}, "must be at least 0"),
        ({"delays": "constant:0"}, "take no time"),
        ({"concurrency": [50]}, "exceeds the 40 clients"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        advise(**{"delays": HETEROGENEOUS, "clients": 40} | given)  # type: ignore[arg-type]


def test_availability_is_a_value_or_its_text() -> None:
    given: dict[str, Any] = {"concurrency": [5], "updates": 200}
    by_text = advise("tiers:mild", 40, availability="cycle:24:0.3", **given)
    assert advise("tiers:mild", 40, availability=Cycle(24, 0.3), **given) == by_text
    assert advise("tiers:mild", 40, **given) != by_text


# ---- the command ----


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["advise", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0
    return said


def test_the_command_draws_and_advises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "frontier.svg"
    assert (
        main(["advise", "--delays", "tiers:mild", "--clients", "20", "--updates", "500", "--out", str(file)])
        == 0
    )
    said = capsys.readouterr().out
    assert "Take a concurrency of" in said
    drawn = file.read_text()
    assert drawn.startswith("<svg")
    assert all(f"buffer {size}" in drawn for size in (1, 2, 4, 8, 16))
    taken = said.partition("Take a concurrency of ")[2].partition(" ")[0]
    assert f"take: concurrency {taken}" in drawn


def test_recorded_delays_say_how_many_clients_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "delays.csv"
    file.write_text("client,seconds\n" + "".join(f"{task % 12},{1 + task % 5}\n" for task in range(60)))
    for words in ([str(file)], ["--delays", f"recorded:{file}"]):
        assert main(["advise", *words, "--updates", "500", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert max(each["concurrency"] for each in told["choices"]) == 9
    file.write_text("seconds\n1\n2\n")
    assert main(["advise", str(file), "--clients", "5", "--json"]) == 0


def test_the_twin_of_a_simulated_run_reads_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--rounds 30 --clients 20 --concurrency 8 --buffer 4 --local-steps 1 --model logistic --dropout 0.1"
    )
    assert main(["run", "fedbuff", *words.split(), "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["advise", str(tmp_path / "run"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    own = told["recorded"]
    assert told["updates"] == 120
    assert (own["concurrency"], own["buffer"]) == (8, 4)
    assert own["twin"]["updates_per_second"] == pytest.approx(own["updates_per_second"], rel=0.2)
    assert own["twin"]["lost"] > 0
    words = "--rounds 5 --clients 20 --buffer 4 --local-steps 1 --dispatch synchronous --model logistic"
    assert main(["run", "fedbuff", *words.split(), "--out", str(tmp_path / "rounds")]) == 0
    capsys.readouterr()
    assert main(["advise", str(tmp_path / "rounds"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {each["concurrency"] - each["buffer"] for each in told["choices"]} == {0}
    assert told["recorded"]["twin"]["staleness_mean"] == told["recorded"]["staleness_mean"] == 0


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = tmp_path / "one.csv"
    one.write_text("client,seconds\n3,1\n3,2\n")
    assert "tasks of one client only" in refused(capsys, str(one))
    assert "there is no folder" in refused(capsys, str(tmp_path / "nowhere"))
    assert "is not the folder of a run" in refused(capsys, str(tmp_path))
    assert "leave out --delays" in refused(capsys, str(one), "--delays", "tiers:mild")
    assert "'none' is for" in refused(capsys, "--buffer", "none")
    assert "is not a whole number" in refused(capsys, "--concurrency", "5,x")
    assert "the concurrency of 300 exceeds the 100 clients" in refused(capsys, "--concurrency", "300")
    assert "a value of --buffer is 0" in refused(capsys, "--buffer", "0")
    assert "is not the name of a file" in refused(capsys, "--out", "")
    assert "cannot be written" in refused(capsys, "--clients", "9", "--out", str(tmp_path / "a" / "b.svg"))
    run = tmp_path / "run"
    words = "--rounds 2 --clients 4 --concurrency 2 --buffer 1 --local-steps 1 --model logistic"
    assert main(["run", "fedbuff", *words.split(), "--out", str(run)]) == 0
    capsys.readouterr()
    trace = run / "trace.jsonl"
    line = {"version": 1, "time": 2.0, "tasks": [[1, 0, 0, 0.0, 2.0]], "dropped": [], "lost": []}
    (run / "checkpoint" / "state.safetensors").unlink()
    trace.write_text(json.dumps(line) + "\n")
    assert "tasks of one client only" in refused(capsys, str(run))
    trace.write_text("{}\n")
    assert "is damaged" in refused(capsys, str(run))
    trace.write_text("")
    assert "has no trace yet" in refused(capsys, str(run))
    trace.unlink()
    assert "has no trace yet" in refused(capsys, str(run))
