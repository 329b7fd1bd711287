"""How a deployment stands, as it is told."""

import gc
import json
import math
import tracemalloc
from pathlib import Path
from threading import Event, Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.core import Task
from offbeat.deploy.monitor.observer import Monitor
from offbeat.deploy.monitor.state import RunInfo
from offbeat.deploy.protocol.strict_json import Reason
from offbeat.training.runner import Progress


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock | None = None, folder: Path | None = None, clients: int = 4) -> Monitor:
    outline = RunInfo(
        "run-1", "fedbuff", clients, buffer=2, rounds=10, concurrency=3, epsilon=8.0, delta=1e-5
    )
    return Monitor(outline, folder, clock or Clock())


def step(version: int, trips: int, ages: tuple[int, ...], **scores: float) -> Progress:
    record = {"version": version, **scores} if scores else None
    return Progress(version, 10.0 * version, trips, 1.0, record, ages=ages)


def test_a_client_is_working_idle_aside_or_away() -> None:
    clock = Clock()
    watch = make(clock)

    def standing() -> str:
        (client,) = watch.status()["clients"]
        return str(client["standing"])

    watch.tell("joined", node=11, name="north", client=2)
    assert standing() == "idle"
    watch.tell("sent", **Task(2, 0, 0)._asdict(), bytes=10)
    assert standing() == "working"
    watch.tell("lost", **Task(2, 0, 0)._asdict())
    watch.tell("aside", client=2, seconds=30.0)
    assert standing() == "aside"
    clock.now += 31
    assert standing() == "idle"
    watch.tell("left", node=11, client=2)
    assert standing() == "away"


def test_a_site_that_comes_back_as_another_node_is_one_client() -> None:
    watch = make()
    watch.tell("joined", node=11, name="north", client=2)
    watch.tell("joined", node=12, name="north", client=2)
    watch.tell("left", node=11, client=2)
    status = watch.status()
    assert status["present"] == 1
    assert [(c["node"], c["standing"]) for c in status["clients"]] == [("12", "idle")]


def test_the_buffer_fills_and_is_used_up_by_the_step() -> None:
    watch = make()
    waiting = []
    watch.tell("accepted", **Task(0, 0, 0)._asdict(), seconds=1.0, work=0.5, bytes=10)  # of the start
    watch.stepped(step(0, 0, ()))
    for visit in range(3):
        watch.tell("accepted", **Task(0, 0, visit)._asdict(), seconds=1.0, work=0.5, bytes=10)
        waiting.append(watch.status()["buffer"]["waiting"])
    watch.stepped(step(1, 2, (0, 0)))  # the third is already for the next
    waiting.append(watch.status()["buffer"]["waiting"])
    assert waiting == [1, 2, 3, 1]


def test_scores_are_kept_over_versions_and_time() -> None:
    watch = make()
    watch.recall([{"version": 0, "time": 0.0, "accuracy": 0.1, "loss": 2.0}])
    watch.stepped(step(1, 2, (0, 0)))
    watch.stepped(step(2, 4, (0, 1), accuracy=0.5, loss=1.0))
    status = watch.status()
    assert status["history"] == {
        "version": [0, 2],
        "time": [0.0, 20.0],
        "accuracy": [0.1, 0.5],
        "loss": [2.0, 1.0],
    }
    assert status["scores"] == {"accuracy": 0.5, "loss": 1.0}
    assert status["staleness"]["counts"][:2] == [3, 1]


def test_arrivals_are_counted_by_the_minute() -> None:
    clock = Clock()
    watch = make(clock)
    watch.tell("accepted", **Task(0, 0, 0)._asdict(), seconds=1.0, work=0.5, bytes=10)
    clock.now += 60
    watch.tell("accepted", **Task(0, 0, 1)._asdict(), seconds=1.0, work=0.5, bytes=10)
    watch.tell("rejected", node=1, client=None, reason=Reason.SIZE, sentence="too large")
    assert watch.status()["arrivals"] == {"accepted": [1, 1], "rejected": [0, 1]}


def test_the_network_is_away_until_it_is_back(tmp_path: Path) -> None:
    watch = make(folder=tmp_path)
    for _ in range(5):
        watch.tell("unreachable", sentence="connection refused")
    assert watch.status()["trouble"] == "the network is unreachable: connection refused"
    watch.tell("reachable")
    watch.tell("reachable")
    assert watch.status()["trouble"] is None
    events = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert events == ["unreachable", "reachable"]
    watch.close()


def test_the_end_says_why() -> None:
    watch = make()
    watch.tell("ended", sentence="the privacy budget is spent.")
    assert (watch.status()["ended"], watch.status()["sentence"]) == (True, "the privacy budget is spent.")


def test_what_a_stranger_sends_is_short_and_printable_everywhere(tmp_path: Path) -> None:
    watch = make(folder=tmp_path)
    bad = '\x1b]0;owned\x07\n{"event": "ended"}\u202e' + "x" * 10_000
    watch.tell("joined", node=5, name=bad, client=0)
    watch.tell("rejected", node=6, client=None, reason=Reason.MALFORMED, sentence=bad)
    watch.tell("unreachable", sentence=bad)
    watch.tell("ended", sentence=bad)
    watch.close()
    told = json.dumps(watch.status(), ensure_ascii=False)
    log = (tmp_path / "events.jsonl").read_text()
    assert told.isprintable()
    assert len(told) < 5000
    assert [json.loads(line)["event"] for line in log.splitlines()] == [
        "joined",
        "rejected",
        "unreachable",
        "ended",
    ]
    assert len(log) < 3000


@settings(max_examples=50)
@given(st.lists(st.floats(), max_size=5), st.floats(), st.floats(0), st.floats(0))
def test_the_status_is_json_whatever_the_numbers(
    losses: list[float], epsilon: float, seconds: float, work: float
) -> None:
    watch = make()
    watch.tell("joined", node=2**64 - 1, name="north", client=0)
    for version, loss in enumerate(losses):
        record = {"loss": loss, "accuracy": None}
        watch.stepped(Progress(version, math.inf, 0, math.nan, record, ages=(version,)))
    watch.tell("spent", epsilon=epsilon)
    watch.tell("accepted", **Task(0, 0, 0)._asdict(), seconds=seconds, work=work, bytes=10)
    watch.metrics()
    status = json.loads(json.dumps(watch.status(), allow_nan=False))
    assert status["clients"][0]["node"] == str(2**64 - 1)  # as text: JavaScript would round it


def test_one_thread_reads_while_another_tells() -> None:
    watch, done, seen = make(), Event(), []

    def read() -> None:
        while not done.is_set():
            json.dumps(watch.status(), allow_nan=False)
            seen.append(len(watch.metrics()))

    thread = Thread(target=read)
    thread.start()
    try:
        for n in range(2000):
            watch.tell("joined", node=n % 7, name="north", client=n % 4)
            watch.tell("accepted", **Task(n % 4, n, n)._asdict(), seconds=1.0, work=0.5, bytes=10)
            watch.tell("rejected", node=n, client=n % 4, reason=Reason.LATE, sentence="late")
            watch.tell("left", node=n % 7, client=n % 4)
    finally:
        done.set()
        thread.join()
    assert seen
    assert watch.status()["tasks"]["accepted"] == 2000


def tell_all(watch: Monitor, clock: Clock, start: int, count: int) -> None:
    reasons = list(Reason)
    for n in range(start, start + count):
        clock.now += 7
        watch.tell("joined", node=n, name=f"site {n}", client=n % 4)
        watch.tell("sent", **Task(n % 4, n, n)._asdict(), bytes=1000)
        watch.tell("accepted", **Task(n % 4, n, n)._asdict(), seconds=1.0, work=0.5, bytes=1000)
        watch.tell(
            "rejected", node=n * 31, client=None, reason=reasons[n % len(reasons)], sentence=f"number {n}"
        )
        watch.tell("unreachable", sentence=f"number {n}")
        watch.stepped(step(n, n, (n % 1000,), accuracy=0.5, loss=1.0 / (n + 1)))
        watch.tell("left", node=n, client=n % 4)


@pytest.mark.slow
def test_memory_stays_flat_over_20000_events() -> None:
    clock = Clock()
    tracemalloc.start()
    try:
        watch = make(clock)
        tell_all(watch, clock, 0, 500)  # everything that has a bound is at it
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        tell_all(watch, clock, 500, 2860)  # 7 events each
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert after - before < 60_000  # of thinning, which halves and fills up again
    assert len(json.dumps(watch.status())) < 30_000


def test_a_helper_that_is_away_is_on_the_page_and_in_the_events(tmp_path: Path) -> None:
    watch = Monitor(RunInfo("run-1", "fedbuff", clients=4, buffer=2, rounds=10, concurrency=3), tmp_path)
    watch.tell(
        "helper_away", sentence="the helper at https://h:1 does not answer (refused); the run waits for it"
    )
    assert "helper at https://h:1 does not answer" in watch.status()["trouble"]
    watch.tell("helper_back")
    assert watch.status()["trouble"] is None
    watch.close()
    events = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event for event in events if event.startswith("helper")] == ["helper_away", "helper_back"]
