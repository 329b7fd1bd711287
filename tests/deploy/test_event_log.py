"""The structured log."""

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.deploy.monitor.state import EventLog, printable
from offbeat.deploy.protocol.strict_json import Reason


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_an_event_is_one_json_line_at_once(tmp_path: Path) -> None:
    events = EventLog(tmp_path, "run-1", lambda: 1_700_000_000.25)
    events.tell("sent", client=3, bytes=10)
    expected = {"time": "2023-11-14T22:13:20.250Z", "event": "sent", "run": "run-1", "client": 3, "bytes": 10}
    assert lines(tmp_path) == [expected]
    events.close()


def test_what_has_a_sentence_is_told_to_people_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events = EventLog(tmp_path, "run-1")
    with caplog.at_level(logging.INFO, "offbeat"):
        events.tell("sent", client=1)
        events.tell("left", client=1)
    assert caplog.messages == ["client 1 left"]
    events.close()


def test_a_line_cut_short_by_a_kill_goes_and_the_rest_stays(tmp_path: Path) -> None:
    events = EventLog(tmp_path, "run-1")
    events.tell("sent")
    events.close()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": "20')
    events = EventLog(tmp_path, "run-1")
    events.tell("lost")
    events.close()
    assert [line["event"] for line in lines(tmp_path)] == ["sent", "lost"]


def test_repetitions_are_counted_and_the_count_is_told_once_a_minute(tmp_path: Path) -> None:
    clock = Clock()
    events = EventLog(tmp_path, "run-1", clock)
    for _ in range(100):
        events.tell("rejected", node=1, reason=Reason.LATE, sentence="no")
    events.tell("rejected", node=2, reason=Reason.LATE, sentence="no")
    clock.now = 61.0
    events.tell("sent")
    events.tell("rejected", node=1, reason=Reason.LATE, sentence="no")
    events.close()
    assert [(line["event"], line.get("node"), line.get("times")) for line in lines(tmp_path)] == [
        ("rejected", 1, None),
        ("rejected", 2, None),
        ("rejected", 1, 99),
        ("sent", None, None),
        ("rejected", 1, None),
    ]


def test_what_was_only_counted_is_told_at_the_end(tmp_path: Path) -> None:
    events = EventLog(tmp_path, "run-1", Clock())
    for _ in range(3):
        events.tell("rejected", node=1, reason=Reason.LATE, sentence="no")
    events.close()
    assert [line.get("times") for line in lines(tmp_path)] == [None, 2]


def test_no_repetition_goes_uncounted_however_many_nodes_there_are(tmp_path: Path) -> None:
    events = EventLog(tmp_path, "run-1", Clock())
    for node in range(1000):
        events.tell("rejected", node=node, reason=Reason.LATE, sentence="no")
        events.tell("rejected", node=node, reason=Reason.LATE, sentence="no")
    events.close()
    assert sum(int(str(line.get("times", 1))) for line in lines(tmp_path)) == 2000


@given(st.text(st.characters(), max_size=400))
def test_text_from_outside_is_short_printable_and_on_one_line(text: str) -> None:
    safe = printable(text)
    assert safe.isprintable()
    assert len(safe) <= 200 * len("\\U0010ffff")


def test_text_that_is_harmless_stays_as_it_is() -> None:
    assert printable("Klinikum Köln, Haus 3") == "Klinikum Köln, Haus 3"
    assert printable("a\x1b[2J\n\u202eb") == "a\\x1b[2J\\n\\u202eb"


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    events = EventLog(tmp_path, "run-1")
    events.tell("stepped", staleness=float("nan"), accuracy=float("inf"), loss=1.0)
    events.close()
    (line,) = lines(tmp_path)
    assert (line["staleness"], line["accuracy"], line["loss"]) == (None, None, 1.0)


def test_a_folder_that_cannot_be_written_does_not_stop_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "events.jsonl").mkdir()
    events = EventLog(tmp_path, "run-1")
    events.tell("sent")
    events.close()
    assert "continues without it" in caplog.text


def test_a_full_disk_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    events = EventLog(tmp_path, "run-1")
    events.tell("sent")
    events.tell("sent")
    events.close()
    assert caplog.text.count("continues without it") == 1
