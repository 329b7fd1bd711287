"""The supervisor over a scripted Flower: what dies is started again, what is stopped ends."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from offbeat.deploy.flower import supervisor
from offbeat.deploy.flower.supervisor import Supervisor
from offbeat.deploy.server.run import STOP_FILE, ServeOutcome, write_outcome
from offbeat.errors import InputError


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
    resumed: list[bool] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)  # whether each server had to be ended
    alive: bool = False
    restarted: int = 0  # times that the SuperLink was
    frozen: list[str] = field(default_factory=list)  # what is said of it

    def keep_alive(self) -> None: ...

    def thaw(self) -> list[str]:
        return [self.frozen.pop(0)] if self.frozen else []

    def start_server(self, *, resume: bool) -> None:
        self.resumed.append(resume)
        self.alive = True
        self.script.pop(0)(self)

    def is_server_alive(self) -> bool:
        return self.alive

    def stop_server(self) -> None:
        self.ended.append(self.alive)
        self.alive = False

    def restart_superlink(self) -> None:
        self.restarted += 1


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


def ends(flower: Acted, outcome: ServeOutcome | None = None) -> None:
    if outcome is not None:
        write_outcome(flower.folder, outcome)
    flower.alive = False


def finishes(flower: Acted) -> None:
    flower.time.later(2, lambda: ends(flower, ServeOutcome(7)))


def dies(flower: Acted) -> None:
    ends(flower)


def dies_with_progress(flower: Acted) -> None:
    dies(flower)
    journal = flower.folder / "journal"
    journal.mkdir(exist_ok=True)
    os.utime(journal, ns=(0, len(flower.resumed)))


def saves_when_asked(flower: Acted) -> None:
    def look() -> None:
        if (flower.folder / STOP_FILE).exists():
            ends(flower, ServeOutcome(3, stopped=True))
        else:
            flower.time.later(1, look)

    flower.time.later(1, look)


def hangs(flower: Acted) -> None: ...


def unreachable(flower: Acted) -> None:
    raise InputError("no answer")


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
    assert (flower.resumed, flower.ended, seen.said) == ([False], [False], [])


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
    assert flower.ended == [False, False]
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


def test_a_stop_waits_for_the_save(tmp_path: Path) -> None:
    outcome, flower, _, _ = watch(tmp_path, saves_when_asked, stop=lambda time: time.now > 5)
    assert outcome == ServeOutcome(3, stopped=True)
    assert flower.ended == [False]


def test_a_server_that_does_not_answer_to_a_stop_is_ended(tmp_path: Path) -> None:
    outcome, flower, seen, time = watch(tmp_path, hangs, stop=lambda time: time.now > 5)
    assert outcome.stopped
    assert flower.ended == [True]
    assert 120 < time.now < 130
    assert "did not react to the stop request" in seen.said[0]


def test_what_was_frozen_is_named_every_half_minute(tmp_path: Path) -> None:
    def computes_for_long(flower: Acted) -> None:
        flower.time.later(100, lambda: ends(flower, ServeOutcome(7)))

    outcome, flower, seen, _ = watch(tmp_path, computes_for_long, frozen=["one", "two", "three", "four"])
    assert (outcome, len(flower.resumed)) == (ServeOutcome(7), 1)
    assert seen.said == ["one", "two", "three"]


def test_a_stop_between_two_servers_starts_no_other(tmp_path: Path) -> None:
    outcome, flower, _, _ = watch(tmp_path, dies, stop=lambda time: time.now > 0.5)
    assert outcome.stopped
    assert len(flower.resumed) == 1


def test_a_stop_that_was_meant_for_an_earlier_run_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / STOP_FILE).touch()
    watch(tmp_path, finishes)
    assert not (tmp_path / STOP_FILE).exists()


def test_an_interrupt_leaves_no_server(tmp_path: Path) -> None:
    def interrupted(flower: Acted) -> None:
        def strike() -> None:
            raise KeyboardInterrupt

        kept.append(flower)
        flower.time.later(1, strike)

    kept: list[Acted] = []
    with pytest.raises(KeyboardInterrupt):
        watch(tmp_path, interrupted)
    assert kept[0].ended == [True]


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


@pytest.mark.parametrize("server", [hangs, dies])
def test_a_run_waits_while_the_disk_is_full_and_continues_when_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Callable[[Acted], None]
) -> None:
    full = [False]
    monkeypatch.setattr(supervisor, "disk_full", lambda folder, quick=False: full[0])

    def fills_the_disk(flower: Acted) -> None:
        full[0] = True
        flower.time.later(5000, lambda: full.__setitem__(0, False))  # longer than twenty attempts take
        server(flower)

    outcome, flower, seen, time = watch(tmp_path, fills_the_disk, finishes)
    assert outcome == ServeOutcome(7)
    assert time.now > 5000
    assert flower.restarted == 1
    assert len(flower.resumed) == 2
    assert "is full: free some space" in seen.said[0]
    assert "there is space again" in seen.said[1]
    assert len(seen.said) == 2


def test_a_run_that_waits_for_space_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "disk_full", lambda folder, quick=False: True)
    outcome, *_ = watch(tmp_path, hangs, stop=lambda time: time.now > 100)
    assert outcome == ServeOutcome(None, stopped=True)
