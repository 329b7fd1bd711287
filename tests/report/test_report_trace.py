from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.report import trace as module
from offbeat.report.load import read_runs
from offbeat.report.trace import DamagedFileError, PendingTask, TraceEnd, summarise_trace
from report_world import lines, make_run


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digest") / "lossy"
    return make_run(folder, rounds=40, max_staleness=1, dropout=0.2, delays="exponential:2")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("digest") / "plain", rounds=60)


def of(trace: list[dict[str, Any]], **more: Any) -> module.TraceSummary:
    end = TraceEnd(trace[-1]["version"], trace[-1]["time"])
    return summarise_trace(trace, end, more.pop("clients", 12), more.pop("buffer", 3), **more)


def test_all_is_added_up_as_one_would_by_hand(lossy: Path) -> None:
    trace = lines(lossy, "trace")
    found = of(trace)
    tasks = [(line["version"], line["time"], task) for line in trace for task in line["tasks"]]
    assert found.staleness == Counter(version - 1 - task[1] for version, _, task in tasks)
    clients = Counter(task[0] for _, _, task in tasks)
    assert found.taken.tolist() == [clients[client] for client in range(12)]
    assert found.used.sum() == len(tasks)
    for name, counts in (("dropped", found.dropped), ("lost", found.lost)):
        assert counts.sum() == sum(len(line[name]) for line in trace) > 0
    width = found.time.end / found.time.count
    places = Counter(min(int(task[4] / width), found.time.count - 1) for *_, task in tasks)
    assert found.used.tolist() == [places[place] for place in range(found.time.count)]
    ages = [
        [version - 1 - task[1] for version, _, task in tasks if place_of(version, found) == place]
        for place in range(found.steps.count)
    ]
    assert found.age_max.tolist() == [max(each) for each in ages]
    np.testing.assert_allclose(found.age_mean, [np.mean(each) for each in ages])


def place_of(version: int, found: module.TraceSummary) -> int:
    return int((version - 1) * found.steps.count / found.versions + 1e-9)


def test_blocks_of_any_size_give_the_same(lossy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = lines(lossy, "trace")
    whole = of(trace)
    monkeypatch.setattr(module, "_BLOCK", 5)
    parts = of(trace)
    assert parts.staleness == whole.staleness
    for name in ("age_mean", "age_max", "busy", "used", "dropped", "lost", "taken"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), atol=1e-9, err_msg=name)


def test_as_many_clients_are_at_work_as_the_concurrency_asks_for(plain: Path) -> None:
    (run,) = read_runs([plain])
    assert run.whole
    assert run.trace is not None
    np.testing.assert_allclose(run.trace.busy, 5.0)


def test_without_those_still_at_work_the_line_falls_at_the_end(plain: Path) -> None:
    assert of(lines(plain, "trace")).busy[-1] < 4.5


def test_times_that_a_trace_lacks_are_estimated_well(lossy: Path) -> None:
    (run,) = read_runs([lossy])
    assert run.trace is not None
    assert run.trace.busy.mean() == pytest.approx(5.0, rel=0.1)


def test_the_start_is_work_but_nobodys_participation(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", algorithm="adamasfl")
    trace = lines(folder, "trace")
    assert trace[0]["version"] == 0
    found = of(trace)
    assert found.used.sum() == found.taken.sum() + 12


def test_tasks_under_way_count_as_work() -> None:
    line = {"version": 1, "time": 10.0, "tasks": [[0, 0, 0, 0.0, 10.0]], "dropped": [], "lost": []}
    found = of([line], buffer=1, flights=(PendingTask(5.0, 99.0),))
    np.testing.assert_allclose(found.busy, [1.0] * 5 + [2.0] * 5)


GOOD = {"version": 1, "time": 1.0, "tasks": [[0, 0, 0, 0.0, 1.0]], "dropped": [], "lost": []}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "1"}, "no valid version"),
        ({"time": float("nan")}, "no valid version or time"),
        ({"time": 1e300}, "no valid version or time"),
        ({"version": 2}, "version 2 is where version 1 should be"),
        ({"tasks": None}, "no list of tasks"),
        ({"tasks": [[0, 0, 0, 0.0]]}, "an entry that is not a task"),
        ({"tasks": [[0, 0, 0, 0.0, None]]}, "an entry that is not a task"),
        ({"tasks": [[0, 0, 0, 0.0, 10**400]]}, "an entry that is not a task"),
        ({"tasks": [[0, 0, 0, 0.0, {}]]}, "an entry that is not a task"),
        ({"tasks": [[-1, 0, 0, 0.0, 1.0]]}, "an entry that is not a task"),
        ({"tasks": [[0, 1, 0, 0.0, 1.0]]}, "an entry that is not a task"),
        ({"tasks": [[12, 0, 0, 0.0, 1.0]]}, "client 12, but there are 12 clients"),
        ({"lost": [[0, 0]]}, "an entry that is not a task"),
        ({"dropped": [[0, 7, 0]]}, "an entry that is not a task"),
    ],
)
def test_what_no_run_writes_is_found(change: dict[str, Any], words: str) -> None:
    summarise_trace([GOOD], TraceEnd(1, 1.0), 12, 1)
    with pytest.raises(DamagedFileError, match=words):
        summarise_trace([GOOD | change], TraceEnd(1, 1.0), 12, 1)
