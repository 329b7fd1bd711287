"""The supervisor over a scripted Flower: what dies is started again, what is stopped ends."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from offbeat.deploy.flower.commands import FlowerError
from offbeat.deploy.flower.supervisor import Supervisor
from offbeat.deploy.server.run import (
    STOP_FILE,
    ServeOutcome,
    ServerProcess,
    is_running,
    write_outcome,
    write_server,
)

GONE = {"pid": 2**22 + 1, "born": "0"}  # above the largest number that Linux gives


class Time:
    def __init__(self) -> None:
        self.now = 0.0
        self.then: list[tuple[float, Callable[[], None]]] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for each in [each for each in self.then if each[0] <= self.now]:
            self.then.remove(each)
            each[1]()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self.then.append((self.now + seconds, action))


@dataclass
class Acted:
    """A Flower whose servers do, one after another, what the script says."""

    folder: Path
    time: Time
    script: list[Callable[["Acted"], None]]
    is_local: bool = True
    resumed: list[bool] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    over: bool = False
    silent: bool = False  # whether the next question has no answer

    def keep_alive(self) -> None: ...

    def submit(self, *, resume: bool) -> str:
        self.resumed.append(resume)
        self.script.pop(0)(self)
        return str(len(self.resumed))

    def is_finished(self, run_id: str) -> bool:
        if self.silent:
            self.silent = False
            raise FlowerError("no answer")
        return self.over

    def stop_run(self, run_id: str) -> None:
        self.stopped.append(run_id)


@dataclass
class Seen:
    records: list[int] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def record(self, record: dict[str, Any]) -> None:
        self.records.append(record["version"])

    def event(self, event: dict[str, Any]) -> None:
        self.events.append(event["event"])

    def message(self, text: str) -> None:
        self.said.append(text)


def finishes(flower: Acted) -> None:
    write_server(flower.folder)
    flower.time.later(2, lambda: write_outcome(flower.folder, ServeOutcome(7)))


def dies(flower: Acted) -> None:
    (flower.folder / "server.json").write_text(json.dumps(GONE))


def dies_with_progress(flower: Acted) -> None:
    dies(flower)
    journal = flower.folder / "journal"
    journal.mkdir(exist_ok=True)
    os.utime(journal, ns=(0, len(flower.resumed)))


def saves_when_asked(flower: Acted) -> None:
    write_server(flower.folder)

    def look() -> None:
        if (flower.folder / STOP_FILE).exists():
            write_outcome(flower.folder, ServeOutcome(3, stopped=True))
        else:
            flower.time.later(1, look)

    flower.time.later(1, look)


def hangs(flower: Acted) -> None:
    write_server(flower.folder)


def never_comes(flower: Acted) -> None: ...


def unreachable(flower: Acted) -> None:
    raise FlowerError("no answer")


def watch(
    folder: Path,
    *script: Callable[[Acted], None],
    stop: Callable[[Time], bool] = lambda time: False,
    **options: Any,
) -> tuple[ServeOutcome, Acted, Seen, Time]:
    time, seen = Time(), Seen()
    flower = Acted(folder, time, list(script), **options)
    outcome = Supervisor(folder, flower, seen, lambda: stop(time), time, time.sleep).run()
    return outcome, flower, seen, time


def test_the_outcome_of_a_server_is_that_of_the_run(tmp_path: Path) -> None:
    outcome, flower, seen, _ = watch(tmp_path, finishes)
    assert outcome == ServeOutcome(7)
    assert (flower.resumed, flower.stopped, seen.said) == ([False], [], [])


def test_an_outcome_of_an_earlier_server_does_not_count(tmp_path: Path) -> None:
    write_outcome(tmp_path, ServeOutcome(2, stopped=True))
    assert watch(tmp_path, finishes)[0] == ServeOutcome(7)


def test_a_server_that_dies_is_started_again_and_resumes(tmp_path: Path) -> None:
    def begins_and_dies(flower: Acted) -> None:
        (tmp_path / "settings.json").write_text("{}")
        dies(flower)

    outcome, flower, seen, _ = watch(tmp_path, begins_and_dies, finishes)
    assert outcome == ServeOutcome(7)
    assert flower.resumed == [False, True]
    assert flower.stopped == ["1"]
    assert seen.said == ["the server ended unexpectedly; the run continues in 1 s from what was saved."]


def test_it_gives_up_after_twenty_tries_without_progress(tmp_path: Path) -> None:
    outcome, flower, _, time = watch(tmp_path, *[dies] * 21)
    assert outcome.error is not None
    assert "20 times in a row" in outcome.error
    assert len(flower.resumed) == 21
    assert time.now > 20 + 15 * 30  # pauses grew, up to half a minute


def test_progress_starts_the_count_anew(tmp_path: Path) -> None:
    script = [dies, dies_with_progress] * 25
    outcome, flower, _, time = watch(tmp_path, *script, finishes)
    assert outcome == ServeOutcome(7)
    assert len(flower.resumed) == 51
    assert time.now < 51 * 3


def test_a_flower_that_cannot_be_asked_is_asked_again(tmp_path: Path) -> None:
    outcome, _, seen, _ = watch(tmp_path, unreachable, unreachable, finishes)
    assert outcome == ServeOutcome(7)
    assert "Flower failed (no answer)" in seen.said[0]


def test_a_server_that_never_shows_is_given_up_when_flower_says_so(tmp_path: Path) -> None:
    outcome, flower, _, time = watch(tmp_path, never_comes, finishes, over=True)
    assert outcome == ServeOutcome(7)
    assert len(flower.resumed) == 2
    assert 60 < time.now < 70


def test_a_stop_waits_for_the_save(tmp_path: Path) -> None:
    outcome, flower, _, _ = watch(tmp_path, saves_when_asked, stop=lambda time: time.now > 5)
    assert outcome == ServeOutcome(3, stopped=True)
    assert flower.stopped == []


def test_a_server_that_does_not_answer_to_a_stop_is_ended(tmp_path: Path) -> None:
    outcome, flower, seen, time = watch(tmp_path, hangs, stop=lambda time: time.now > 5)
    assert outcome.stopped
    assert flower.stopped == ["1"]
    assert 120 < time.now < 130
    assert "did not react to the stop request" in seen.said[0]


def test_a_stop_between_two_servers_starts_no_other(tmp_path: Path) -> None:
    outcome, flower, _, _ = watch(tmp_path, dies, stop=lambda time: time.now > 0.5)
    assert outcome.stopped
    assert len(flower.resumed) == 1


def test_a_stop_that_was_meant_for_an_earlier_run_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / STOP_FILE).touch()
    watch(tmp_path, finishes)
    assert not (tmp_path / STOP_FILE).exists()


@pytest.mark.parametrize(("ours", "stopped"), [(True, []), (False, ["1"])])
def test_an_interrupt_leaves_no_run_at_a_superlink_of_others(
    tmp_path: Path, ours: bool, stopped: list[str]
) -> None:
    def interrupted(flower: Acted) -> None:
        def strike() -> None:
            raise KeyboardInterrupt

        kept.append(flower)
        flower.time.later(1, strike)

    kept: list[Acted] = []
    with pytest.raises(KeyboardInterrupt):
        watch(tmp_path, interrupted, is_local=ours)
    assert kept[0].stopped == stopped


def test_records_and_events_are_shown_once(tmp_path: Path) -> None:
    records, events = tmp_path / "records.jsonl", tmp_path / "events.jsonl"
    records.write_text('{"version": 0}\n')  # of before
    events.write_text('{"event": "old"}\n')

    def begins(flower: Acted) -> None:
        with records.open("a") as file:
            file.write('{"version": 1}\n{"version": 2}\n{"vers')
        with events.open("a") as file:
            file.write('{"event": "joined"}\n')
        flower.time.later(1, lambda: dies(flower))

    def goes_on(flower: Acted) -> None:
        records.write_text('{"version": 0}\n{"version": 1}\n')  # cut back to a checkpoint
        finishes(flower)

        def write() -> None:
            with records.open("a") as file:
                file.write('{"version": 2}\n{"version": 3}\n')

        flower.time.later(1, write)

    _, _, seen, _ = watch(tmp_path, begins, goes_on)
    assert seen.records == [1, 2, 3]
    assert seen.events == ["joined"]


def test_a_process_is_told_from_another_with_its_number(tmp_path: Path) -> None:
    write_server(tmp_path)
    here = ServerProcess(**json.loads((tmp_path / "server.json").read_text()))
    assert here.pid == os.getpid()
    assert is_running(here)
    assert not is_running(here._replace(born="1"))
    assert not is_running(ServerProcess(**GONE))


def test_a_server_of_which_nothing_is_known_is_ended_before_another_is_started(tmp_path: Path) -> None:
    outcome, flower, _, _ = watch(tmp_path, never_comes, finishes, silent=True)
    assert outcome == ServeOutcome(7)
    assert flower.stopped == ["1"]
