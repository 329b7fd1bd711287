"""Studies are values that can be run, and their tables say what the records hold."""

import json
import math
import operator
import os
import re
import signal
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.__main__ import main
from experiments.reproduce.measures import LastModel, LastRounds, TimeTo
from experiments.reproduce.outcome import ComputeOptions, placed_experiment, run_cell
from experiments.reproduce.page import aligned, markdown, marker, terms, written
from experiments.reproduce.pause import Pause, PausedError
from experiments.reproduce.records import Curve, append, recorded
from experiments.reproduce.study import Cell, Study, Table, Version
from experiments.reproduce.sweep_figure import drawings
from experiments.reproduce.tables import Best, Swept, change, entries_of, least
from experiments.reproduce.workers import results
from experiments.reproduce.writers import by_writer
from experiments.studies.fadas import TABLE2, TABLE4, TABLE7
from experiments.studies.momentum import evenly, speed_ups
from experiments.studies.registry import STUDIES, find_study

from offbeat.algorithms import Setting, build
from offbeat.data.datasets import Source, load
from offbeat.data.download import downloads
from offbeat.data.partition import parse_partition
from offbeat.data.population import Examples
from offbeat.errors import InputError
from offbeat.report.chart import Axis
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import parse_delay
from offbeat.schedule.scheduler import Scheduler
from offbeat.schedule.staleness import parse_weights
from offbeat.schedule.statistics import simulate
from offbeat.training.build import build_dispatch, build_run
from offbeat.training.experiment import Experiment
from offbeat.training.loop import check_fit
from offbeat.training.task import named_task

DIGITS = load("digits")
VERSIONS = [
    pytest.param(version, id=f"{study.name}-{name}")
    for study in STUDIES.values()
    for name, version in (("full", study.full), ("quick", study.quick))
]
QUICK = Experiment.of(algorithm="fedbuff", clients=20, concurrency=10, rounds=8, eval_every=4)

# Quick studies of data that the reader has to get, and most minutes: text,
# a map over many places, and 200 clients a step.
OWN_DATA = {
    "language-glue": 8,
    "language-glue-small": 8,
    "adamasfl-map": 60,
    "momentum-c200": 50,
    "momentum-table1": 30,
}


def curve(*accuracies: float, failure: str | None = None, every: int = 10) -> Curve:
    versions = tuple(every * place for place in range(len(accuracies)))
    return Curve(
        versions, tuple(2.0 * v for v in versions), accuracies, failure, None, 60.0, "CPU", "2026-01-02"
    )


def cell(row: str, column: str = "c", lr: float = 0.1, seed: int = 0) -> Cell:
    made = replace(
        QUICK, parameters=(("local_lr", lr),), seed=seed, partition=f"dirichlet:{sum(map(ord, row))}"
    )
    return Cell(row, column, made)


def found(pairs: dict[Cell, Curve]) -> dict[str, Curve]:
    return {one.key: seen for one, seen in pairs.items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_study_has_each_run_once_and_every_setting_fits_its_method(version: Version) -> None:
    keys = [one.key for one in version.cells]
    assert len(set(keys)) == len(keys) > 1
    for one in version.cells:
        made = one.experiment
        method = build(made.algorithm, Setting(made.buffer, 10, made.rounds), dict(made.parameters))
        limit = math.inf if made.max_staleness is None else made.max_staleness
        check_fit(method, build_dispatch(made), parse_weights(made.weights), made.rounds, limit)
        build_dispatch(made).check(made.buffer, made.clients)
        parse_delay(made.delays)
        parse_partition(made.partition)
        assert made.rounds % one.scale == made.eval_every % one.scale == 0


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_a_quick_study_needs_no_download_and_is_meant_for_minutes(study: Study) -> None:
    if study.name in OWN_DATA:
        assert study.quick.minutes < OWN_DATA[study.name]
        return
    assert {one.experiment.data for one in study.quick.cells} == {"digits"}
    assert study.quick.minutes < 8
    methods = {(one.experiment.algorithm, one.experiment.partition): one for one in study.quick.cells}
    for one in methods.values():
        build_run(
            placed_experiment(one, ComputeOptions()),
            named_task(placed_experiment(one, ComputeOptions()), DIGITS),
        )


def test_a_study_is_found_by_its_name_and_a_near_one_is_offered() -> None:
    assert all(find_study(name).name == name for name in STUDIES)
    with pytest.raises(InputError, match=r"unknown study 'fadas-table3': did you mean fadas-table"):
        find_study("fadas-table3")


@pytest.mark.parametrize("quick", [False, True])
def test_the_schedule_of_table_2_has_the_delays_that_the_paper_prints(quick: bool) -> None:
    """Of 500 rounds the stalest update of each: 127 at most, 10.89 on average, the median 6."""
    version = TABLE2.quick if quick else TABLE2.full
    schedules = {
        (e.clients, e.concurrency, e.buffer, e.delays, e.seed, e.rounds)
        for e in (one.experiment for one in version.cells if one.scale == 1)
        if e.dispatch == "round-refill"
    }
    ((clients, _, buffer, delays, seed, rounds),) = schedules
    dispatch = build_dispatch(version.cells[0].experiment)
    draws = dispatch.source(seed)
    clock = Clock(parse_delay(delays).bind(draws, clients), draws)
    summary = simulate(Scheduler(clock, dispatch, draws, clients, buffer), rounds)
    worst = summary.staleness_max, round(summary.staleness_mean_of_max, 2), summary.staleness_median_of_max
    assert worst == (127, 10.89, 6.0)


def test_a_method_that_steps_on_each_arrival_gets_as_many_client_trips() -> None:
    for study in (TABLE2, TABLE4):
        trips = {one.experiment.rounds * one.experiment.buffer for one in study.full.cells}
        assert len(trips) == 1
        assert {one.experiment.buffer for one in study.full.cells if one.row == "fedasync"} == {1}


def test_runs_that_two_tables_share_are_run_once() -> None:
    shared = {one.key for one in TABLE4.full.cells} & {one.key for one in TABLE7.full.cells}
    rows = {one.row for one in TABLE7.full.cells if one.key in shared}
    assert rows == {"fadas", "fadas-da"}


def test_where_a_run_is_computed_is_not_part_of_what_it_is() -> None:
    one = cell("a")
    elsewhere = replace(
        one, row="b", column="d", experiment=replace(one.experiment, device="cuda", execution="mapped")
    )
    assert elsewhere.key == one.key
    for other in (
        replace(one, tested=5),
        replace(one, scale=2),
        replace(one, experiment=replace(one.experiment, seed=1)),
        replace(one, experiment=replace(one.experiment, precision="bfloat16")),
    ):
        assert other.key != one.key


def test_a_shortened_run_is_another_run_and_a_longer_one_is_not_made() -> None:
    one = replace(cell("a"), scale=2)
    assert one.shortened(None) is one
    short = one.shortened(3)
    assert (short.experiment.rounds, short.experiment.eval_every) == (6, 4)
    assert short.key != one.key
    assert one.shortened(100).key == one.key


def test_the_last_rounds_are_per_cent_with_their_deviation_or_that_of_seeds() -> None:
    rising = curve(0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
    assert LastRounds()([rising]).text == "30.00 ± 15.81"  # of 10, 20, 30, 40 and 50
    assert LastRounds()([rising, curve(*[0.5] * 5)]).text == "40.00 ± 14.14"  # of 30 and 50


def test_time_to_a_target_is_the_mean_of_seeds_that_all_reach_it() -> None:
    slow, fast = curve(0.1, 0.2, 0.8), curve(0.1, 0.9, 0.9)
    assert TimeTo(0.8)([slow]).text == "40.0"
    assert TimeTo(0.8)([slow, fast]) == (-30.0, "30.0")
    assert TimeTo(0.85)([slow, fast]) == (-math.inf, "not reached (best 0.850)")


def test_the_best_rates_are_those_with_the_best_mean_over_seeds() -> None:
    pairs = {
        cell("a", lr=0.1, seed=0): curve(0.5),
        cell("a", lr=0.1, seed=1): curve(0.9),
        cell("a", lr=0.2, seed=0): curve(0.8),
        cell("a", lr=0.2, seed=1): curve(0.7),
        cell("a", lr=0.3, seed=0): curve(0.99),
        cell("a", lr=0.3, seed=1): curve(0.99, failure="it diverged"),
        cell("a", lr=0.4, seed=0): curve(1.0),
    }
    unfinished = cell("a", lr=0.4, seed=1)
    entry = entries_of((*pairs, unfinished), found(pairs), LastModel())["a", "c"]
    first = cell("a", lr=0.4, seed=0)
    table = Best(LastModel(), {})((first, unfinished), found({first: curve(1.0)}))
    assert table.rows == (("a", "1.000", "1 of 2"),)
    assert table.notes == ("Shown: seed 0 of 0, 1.",)
    other = cell("b", lr=0.4, seed=0)
    table = Best(LastModel(), {})((first, unfinished, other), found({first: curve(1.0)}))
    assert table.rows == (("a", "seeds are missing", "1 of 2"), ("b", "not run", "0 of 1"))
    assert table.notes == ()
    assert (entry.rates, entry.figure.text, entry.tried) == ("local 0.2", "0.750 ± 0.071", 3)


def test_a_table_has_claimed_beside_measured_and_says_what_came_out() -> None:
    pairs = {
        cell("a"): curve(0.5),
        cell("b", lr=0.1): curve(0.4),
        cell("b", lr=0.2): curve(0.6),
        cell("bad"): curve(failure="it diverged"),
    }
    cells = (*pairs, cell("absent"), cell("d", "other"))
    claims = {("a", "c"): "12.3", ("b", "c"): "45.6"}
    above = (("b", ("a", "bad")), ("a", ("b",)), ("a", ("absent",)))
    table = Best(LastModel(), claims, above)(cells, found(pairs))
    assert table.head == ("", "c: claimed", "measured", "other", "runs")
    assert table.rows == (
        ("a", "12.3", "0.500", "", "1"),
        ("b", "45.6", "0.600 (local 0.2)", "", "2"),
        ("bad", "–", "diverged", "", "1"),
        ("absent", "–", "not run", "", "0 of 1"),
        ("d", "–", "", "not run", "0 of 1"),
    )
    assert table.notes[:3] == (
        "c: b is claimed to be better than a, bad: it is.",
        "c: a is claimed to be better than b: it is not better than b.",
        "c: a is claimed to be better than absent: not known yet.",
    )


def test_published_delays_stand_beside_those_of_the_runs() -> None:
    one = Cell("a", "c", replace(QUICK, dispatch="round-refill"))
    seen = curve(0.5)._replace(worst=(127, 10.89, 6.0))
    note = Best(LastModel(), {}, delays="1 / 2 / 3")((one,), {one.key: seen}).notes[-1]
    assert note.endswith("claimed 1 / 2 / 3, measured 127 / 10.89 / 6.0.")
    short = Cell("b", "c", replace(QUICK, dispatch="round-refill", seed=5))
    both = {one.key: seen, short.key: curve(failure="it diverged")._replace(worst=(6, 3.4, 3.5))}
    assert Best(LastModel(), {}, delays="1 / 2 / 3")((one, short), both).notes[-1] == note
    assert Best(LastModel(), {}, delays="1 / 2 / 3")((one,), {}).notes[-1].endswith("measured not yet.")


@pytest.mark.parametrize(
    ("of_row", "whole"), [(change, ("+0.300", "diverged", "")), (least, ("0.200", "diverged", ""))]
)
def test_a_sweep_orders_its_columns_by_value_and_sums_up_each_row(
    of_row: Callable[..., str], whole: tuple[str, ...]
) -> None:
    pairs = {
        cell("a", "10"): curve(0.5),
        cell("a", "9"): curve(0.2),
        cell("bb", "9"): curve(0.4),
        cell("bb", "10"): curve(failure="it diverged"),
        cell("ccc", "9"): curve(0.4),
    }
    pairs = {
        replace(one, experiment=replace(one.experiment, seed=n)): c
        for n, (one, c) in enumerate(pairs.items())
    }
    missing = cell("ccc", "10", seed=9)
    table = Swept(LastModel(), "whole", of_row, {"a": "flat"})((*pairs, missing), found(pairs))
    assert table.head == ("", "9", "10", "whole", "claimed", "runs")
    assert [row[:3] for row in table.rows] == [
        ("a", "0.200", "0.500"),
        ("bb", "0.400", "diverged"),
        ("ccc", "0.400", "not run"),
    ]
    assert tuple(row[3] for row in table.rows) == whole
    assert [row[4] for row in table.rows] == ["flat", "–", "–"]
    never = cell("dd", "9", seed=10), cell("dd", "10", seed=10)
    longer = Swept(LastModel(), "whole", of_row, {"a": "flat"})((*pairs, missing, *never), found(pairs))
    assert longer.rows == table.rows
    assert (table.notes[-1].startswith("Shown"), longer.notes[-1]) == (True, "Not run: dd.")
    nothing = Swept(LastModel(), "whole", of_row, {})(never, {})
    assert [row[:3] for row in nothing.rows] == [("dd", "not run", "not run")]


def test_a_sweep_is_drawn_row_by_row_and_breaks_where_a_run_diverged() -> None:
    places = {
        ("a: x", "0.01"): 0.1,
        ("a: x", "0.1"): 0.2,
        ("a: x", "1"): 0.3,
        ("a: y", "0.01"): 0.4,
        ("a: y", "0.1"): None,
        ("a: y", "1"): 0.5,
        ("b: y", "0.01"): None,
        ("b: y", "1"): 0.6,
        ("c: x", "1"): None,
    }
    pairs = {
        cell(row, step, seed=n): curve(failure="it diverged") if score is None else curve(score)
        for n, ((row, step), score) in enumerate(places.items())
    }
    made = Swept(LastModel(), "whole", least, {}, Axis("step size", log=True))
    drawn = drawings(made, tuple(pairs), found(pairs), "s")
    assert [*drawn] == ["s-1.svg", "s-2.svg"]  # nothing of c is left to draw
    first, second = drawn.values()
    assert "a: accuracy" in first
    told = re.findall(r"<title>([xy]: \S+ at \S+)</title>", first)
    assert told == ["x: 0.1 at 0.01", "x: 0.2 at 0.1", "x: 0.3 at 1", "y: 0.4 at 0.01", "y: 0.5 at 1"]
    looks = [re.findall(r'class="line (c\d)', each) for each in (first, second)]
    assert looks == [["c0", "c1", "c1"], ["c1"]]
    assert drawings(made, tuple(pairs), {}, "s") == {}
    alone = {one: each for one, each in pairs.items() if one.row == "a: x"}
    assert [*drawings(made, tuple(alone), found(alone), "s")] == ["s.svg"]


def test_a_speed_up_is_steps_of_the_best_baseline_over_steps_to_the_same() -> None:
    scores = {
        ("fedbuff", 0.5, 1.0): (0.7, 0.7, 0.7, 0.7),
        ("fedbuff", 0.0, 1.0): (0.1, 0.3, 0.79, 0.8),
        ("fedbuff", 0.0, 2.0): (0.1, 0.3, 0.8, 0.8),
        ("ma", 0.9, 1.0): (0.1, 0.9, 0.9, 0.9),
        ("ma-light", 0.9, 1.0): (0.1, 0.2, 0.3, 0.79),
    }
    cells = {}
    for (method, beta, rate), each in scores.items():
        rates = (("local_lr", 0.1), ("server_lr", rate), ("beta", beta))
        rule = "fedavgm" if method == "fedbuff" else f"{method}-fedavgm"
        made = replace(QUICK, algorithm=rule, parameters=rates, eval_every=10)
        cells[Cell("digits, fedavgm", method, made)] = each
    table = speed_ups(tuple(cells), {one.key: curve(*s) for one, s in cells.items()})
    assert table.rows == (
        (
            "digits, fedavgm",
            "0.8000 (beta 0, rate 2)",
            "20 / 10 / not reached",
            "2.00 / –",
            "3.56 / 3.01",
            "3.96 / 3.30",
            "20 / 10 / 30",
            "5",
        ),
    )
    assert all(len(row) == len(table.head) for row in table.rows)
    (one, *_) = cells
    partly = speed_ups(tuple(cells), {one.key: curve(0.1)})
    assert partly.rows[0][1:4] == ("",) * 3
    assert partly.rows[0][-1] == "1 of 5"
    assert len(partly.rows[0]) == len(partly.head)


def test_the_many_records_at_the_end_of_a_curve_do_not_count_as_steps() -> None:
    one = replace(cell("a"), experiment=replace(QUICK, eval_every=4))
    whole = Curve((0, 4, 7, 8), (0.0, 1.0, 2.0, 3.0), (0.1, 0.2, 0.9, 0.3), None, None, 1.0, "CPU", "")
    assert evenly(one, whole)[:3] == ((0, 4, 8), (0.0, 1.0, 3.0), (0.1, 0.2, 0.3))


def test_records_are_read_back_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "records.jsonl"
    assert recorded(path) == {}
    one = cell("a")
    record = run_cell(one, ComputeOptions())
    append(path, record)
    with path.open("a") as file:
        file.write('{"key": "torn')
    append(path, record | {"key": "other"})
    held = recorded(path)
    assert held.keys() == {one.key, "other"}
    assert held[one.key].versions == (0, 4, 5, 6, 7, 8)  # every 4, and the last 5 rounds
    assert held[one.key].failure is None
    assert held[one.key].device == "CPU"


RECORD: dict[str, Any] = {
    "key": "a",
    "version": [0, 4],
    "time": [0.0, 2.5],
    "accuracy": [0.1, 1],
    "staleness_of_worst": [6, 3.5, 3.0],
    "failure": None,
    "seconds": 2,
    "device": "CPU",
    "date": "2026-01-02",
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"staleness_of_worst": None, "weights": "c0ffee"},
        {"failure": "it diverged.", "version": [], "time": [], "accuracy": []},
        {"time": []},  # as the first records have it
    ],
)
def test_a_record_is_read_back_as_it_is(change: dict[str, Any], tmp_path: Path) -> None:
    path, record = tmp_path / "x.jsonl", RECORD | change
    append(path, record)
    held = recorded(path)["a"]
    assert held.versions == tuple(record["version"])
    assert held.accuracies == tuple(record["accuracy"])
    assert held.times == (
        tuple(record["time"]) or pytest.approx((math.nan,) * len(held.versions), nan_ok=True)
    )
    assert held.worst == (record["staleness_of_worst"] and tuple(record["staleness_of_worst"]))
    assert held[5:] == (2, "CPU", "2026-01-02", record.get("weights"))


@pytest.mark.parametrize(
    "line",
    [
        b'{"key": "a"}',
        b"[1]",
        b"1",
        b"\xff\xfe\0",
        b"[" * 100_000,
        b"1" * 5000,
        *(
            json.dumps(RECORD | change).encode()
            for change in (
                {"key": 1},
                {"staleness_of_worst": [1]},
                {"staleness_of_worst": [1, 2, "3"]},
                {"staleness_of_worst": 3},
                {"version": [0, 4.5]},
                {"version": [4, 0]},
                {"version": [0, 0]},
                {"version": [-4, 0]},
                {"version": [False, True]},
                {"version": "04"},
                {"version": [0]},
                {"version": None},
                {"time": [0.0]},
                {"time": [0.0, math.nan]},
                {"time": [0.0, math.inf]},
                {"time": [0, 10**400]},
                {"accuracy": ["0.1", "0.2"]},
                {"accuracy": [0.1, 10.0]},
                {"accuracy": [0.1, None]},
                {"accuracy": [0.1, math.nan]},
                {"accuracy": [0.1, [0.2]]},
                {"accuracy": {}},
                {"version": [], "time": [], "accuracy": []},
                {"failure": 1},
                {"seconds": "2"},
                {"seconds": -1},
                {"seconds": None},
                {"device": None},
                {"device": "CPU\n<!-- end -->"},
                {"device": "\ud800"},
                {"date": 20260102},
                {"weights": 1},
            )
        ),
    ],
)
def test_a_line_that_is_no_record_is_one_sentence(
    line: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "quick.jsonl"
    append(path, RECORD)
    with path.open("ab") as file:
        file.write(line)
    sentence = f"line 2 of {path} is no record: remove that line, or name another --out."
    for words in (["fadas-table2", "--quick", "--table"], []):
        assert main([*words, "--out", str(tmp_path)]) == 2
        assert capsys.readouterr().err == f"offbeat: {sentence}\n"


def test_records_that_cannot_be_read_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "quick.jsonl").mkdir()
    assert main(["fadas-table2", "--quick", "--table", "--out", str(tmp_path)]) == 2
    assert "quick.jsonl cannot be read (Is a directory): name another --out.\n" in capsys.readouterr().err


def test_a_record_holds_what_it_takes_to_judge_it() -> None:
    one = replace(cell("a"), tested=100)
    record = run_cell(one, ComputeOptions())
    json.dumps(record, allow_nan=False)
    assert record["settings"]["algorithm"] == "fedbuff"
    assert record["seed"] == 0
    assert record["version"][0] == 0
    assert record["client_updates"][-1] == 80
    assert "last" not in record
    assert len(record["accuracy"]) == len(record["loss"]) == len(record["version"]) == 6
    # 360 test images, every third: an accuracy is a whole number of 120ths
    assert all(math.isclose(120 * a, round(120 * a), abs_tol=2e-3) for a in record["accuracy"])
    assert record["staleness_of_worst"][0] >= record["staleness_of_worst"][1] > 0
    for name in ("date", "offbeat", "torch", "device", "seconds"):
        assert record[name] not in (None, "")


def test_where_models_are_averaged_a_record_holds_the_last_model_too() -> None:
    plain, averaged = (
        run_cell(replace(cell("a"), experiment=replace(QUICK, ema_decay=average)), ComputeOptions())
        for average in (None, 0.5)
    )
    assert averaged["last"] == plain["accuracy"]
    assert averaged["accuracy"] != plain["accuracy"]


@pytest.mark.parametrize("average", [None, 0.5])
def test_a_run_that_is_paused_after_each_step_gives_the_same_record(
    average: float | None, tmp_path: Path
) -> None:
    one = replace(cell("a"), experiment=replace(QUICK, algorithm="fadas-da", ema_decay=average))
    one = replace(one, experiment=replace(one.experiment, parameters=(), dispatch="round-refill"))
    late = Pause(time.monotonic(), tmp_path / "unfinished")
    pauses, record = 0, None
    while record is None:
        try:
            record = run_cell(one, ComputeOptions(), late)
        except PausedError:
            pauses += 1
            assert len(list(late.folder.iterdir())) == 1
    assert pauses == QUICK.rounds
    whole = run_cell(one, ComputeOptions())
    assert record | {"seconds": 0, "date": ""} == whole | {"seconds": 0, "date": ""}
    with pytest.raises(PausedError):  # another run begins at its own beginning
        run_cell(cell("b"), ComputeOptions(), late)
    assert len(list(late.folder.iterdir())) == 2
    for each in (one, cell("b")):
        late.drop(each.key)
    assert list(late.folder.iterdir()) == []


def test_a_run_that_diverges_says_where_and_keeps_its_curve() -> None:
    one = cell("a", lr=1e30)
    record = run_cell(one, ComputeOptions())
    assert "NaN or infinite" in record["failure"]
    assert record["version"][0] == 0
    assert record["accuracy"] == record["accuracy"][: len(record["version"])]


@dataclass(frozen=True)
class Deadly:
    """A cell whose arrival ends the process that was to run it."""

    key: str = "deadly"

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


@pytest.mark.slow
def test_a_cell_whose_process_dies_is_given_up_and_the_others_run() -> None:
    good = cell("a")
    cells: list[Any] = [Deadly(), good]
    answers = dict(results(cells, ComputeOptions(), 1))
    assert answers[cells[0]] == "its process died 2 times"
    record = answers[good]
    assert isinstance(record, dict)
    assert record["key"] == good.key
    assert record["accuracy"] == run_cell(good, ComputeOptions())["accuracy"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without the device that is asked for")
def test_the_refusal_of_a_worker_process_is_returned() -> None:
    ((_, answer),) = results([cell("a")], ComputeOptions(device="cuda"), 1)
    assert answer == "the device 'cuda' is not available: use --device cpu."


@dataclass(frozen=True)
class Struck(ComputeOptions):
    """A spot that comes with a Ctrl-C, at the one who starts a process or in the process that starts."""

    starter: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        if self.starter:
            signal.raise_signal(signal.SIGINT)
            return ComputeOptions, ()
        return operator.getitem, ([Strike(), ComputeOptions()], 1)


class Strike:
    """A Ctrl-C to whoever reads it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return signal.raise_signal, (signal.SIGINT,)


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("thread", [False, True])
def test_a_process_never_hears_ctrl_c_not_even_while_it_starts(thread: bool) -> None:
    one = cell("a")

    def answers() -> list[Any]:
        return list(results([one], Struck(), 1))

    if thread:
        with ThreadPoolExecutor(1) as pool:
            ((_, record),) = pool.submit(answers).result()
    else:
        ((_, record),) = answers()
    assert isinstance(record, dict), record
    assert record["key"] == one.key
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_a_process_starts_comes_once_it_has_started(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        list(results([cell("a")], Struck(starter=True), 1))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    for process in active_children():
        process.join()
    assert capfd.readouterr().err == ""


def test_nothing_is_waited_for_after_the_deadline() -> None:
    assert list(results([cell("a")], ComputeOptions(), 1, Pause(time.monotonic()))) == []


@pytest.mark.slow
def test_runs_under_way_at_the_deadline_go_on_with_the_same_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["fadas-table7", "--quick", "--rounds", "300", "--runs", "1", "--out", str(tmp_path)]
    assert main([*words, "--minutes", "0.03"]) == 0
    assert "the time is up and 1 runs are left: the same command goes on." in capsys.readouterr().err
    (kept,) = (tmp_path / "unfinished").iterdir()
    assert kept.suffix == ".safetensors"
    assert (tmp_path / "quick.jsonl").read_text() == ""
    assert main(words) == 0
    (record,) = map(json.loads, (tmp_path / "quick.jsonl").read_text().splitlines())
    assert record["version"][0] == 0
    assert record["version"][-1] == 300
    assert list((tmp_path / "unfinished").iterdir()) == []


def run(tmp_path: Path, *words: str) -> int:
    return main(["fadas-table7", "--quick", "--rounds", "2", "--out", str(tmp_path), *words])


@pytest.mark.slow
def test_runs_are_recorded_once_and_shown_as_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- fadas-table7 quick -->\nold\n<!-- end -->\n\nafter\n")
    assert run(tmp_path, "--runs", "2", "--processes", "1") == 0
    shown = capsys.readouterr()
    assert "2 of 10 runs, seed 42, CPU" in shown.out
    assert "--rounds 2`" in shown.out
    assert shown.err.count("of 2] fadas, Dir(0.3)") == 2
    lines = (tmp_path / "quick.jsonl").read_text().splitlines()
    assert len(lines) == 2

    assert run(tmp_path, "--runs", "1", "--json", "--write", str(page)) == 0
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert facts["terms"].startswith("3 of 10 runs")
    assert facts["name"] == "fadas-table7"
    held = (tmp_path / "quick.jsonl").read_text().splitlines()
    assert held[:2] == lines
    assert len(held) == 3
    text = page.read_text()
    assert "old" not in text
    assert text.endswith("<!-- end -->\n\nafter\n")
    assert "| fadas | 228.0 | not reached (best" in text

    assert run(tmp_path, "--table") == 0
    assert "3 of 10 runs" in capsys.readouterr().out
    assert (tmp_path / "quick.jsonl").read_text().splitlines() == held


def test_the_list_tells_what_each_shows_costs_and_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    one = TABLE2.quick.cells[0]
    path = tmp_path / "experiments" / "fadas" / "records" / "quick.jsonl"
    append(path, run_cell(one.shortened(1), ComputeOptions()) | {"key": one.key})
    assert main([]) == 0
    text = capsys.readouterr().out
    for study in STUDIES.values():
        assert f"{study.name}: {study.shows}" in text
    assert f"quick: 1 of {len(TABLE2.quick.cells)} runs are recorded" in text
    assert main(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["studies"]
    assert {row["name"]: row["quick"]["recorded"] for row in rows}["fadas-table2"] == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing"], "unknown study"),
        (["fadas-table2", "--processes", "0"], "--processes must be at least 1"),
        (["fadas-table2", "--rounds", "0"], "--rounds must be at least 1"),
        (["fadas-table2", "--minutes", "0"], "--minutes must be above 0"),
        (["fadas-table2", "--write", "absent.md"], "absent.md is not a page"),
        (["fadas-table2", "--quick", "--write", "file"], "must have one line '<!-- fadas-table2 quick -->'"),
        (["fadas-table2", "--write", "other"], "other is not a page"),
        (["fadas-table2", "--precision", "half"], "unknown precision"),
        (["fadas-table2", "--out", "file"], "file is a file: name a folder with --out."),
        (["fadas-table2", "--quick", "--out", "file/x"], "file is a file: name a folder with --out."),
        (["fadas-table2", "--quick", "--out", "file/x/y", "--table"], "file is a file: name a folder"),
        (
            ["fadas-table2", "--quick", "--out", "x" * 300],
            "cannot be made (File name too long): name a folder",
        ),
        (["fadas-table2", "--quick", "--out", "/proc/foo"], "/proc/foo cannot be made ("),
        (["fadas-table2", "--quick", "--out", "/proc/foo", "--table"], "/proc/foo cannot be made ("),
        (["fadas-table2", "--quick", "--out", "/proc"], "/proc/quick.jsonl cannot be written to ("),
        (["fadas-table2", "--quick", "--out", ""], "--out: it is empty: name a folder"),
        (["fadas-table2", "--quick", "--out", "", "--table"], "--out: it is empty: name a folder"),
        (["--out", ""], "--out: it is empty: name a folder"),
        (["--out", "file/x"], "file is a file: name a folder with --out."),
        (["fadas-table2", "--quick", "--device", "tpu"], "unknown device"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "other").write_bytes(b"\xff")
    assert main([*words]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "other"]


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_in_full_without_data_it_is_one_sentence_on_where_to_get_it(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main([study.name, "--data-dir", "empty"]) == 2
    error = capsys.readouterr().err
    if study.paper == "language":  # which asks for weights first
        assert "name the folder of its weights and tokenizer with --weights" in error
    else:
        data = study.full.cells[0].experiment.data
        assert f"is not in empty/{data}: put it there" in error
        assert any(f"download it from {item.url}.\n" in error for item in downloads(data))
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_a_table_becomes_markdown_and_text() -> None:
    table = Table(("", "c"), (("long name", "1"), ("x", "")), ("one note.", "another."))
    assert (
        markdown(table) == "|  | c |\n| --- | --- |\n| long name | 1 |\n| x |  |\n\n- one note.\n- another."
    )
    assert aligned(table) == "           c\nlong name  1\nx"


@pytest.mark.parametrize(
    ("page", "sentence"),
    [("nothing", "one line"), ("<!-- a -->\n<!-- a -->\n", "one line"), ("<!-- a -->\n", "end")],
)
def test_a_page_without_its_markers_is_one_sentence(page: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        written(page, "<!-- a -->\n", "text")


@pytest.mark.parametrize("other", ["<!-- b -->", "  <!-- b -->", "<!-- b", "<!-- a-b --> text", "<!--b-->"])
def test_another_section_is_never_written_over(other: str) -> None:
    page = f"<!-- a -->\ntext\n{other}\nof others\n<!-- end -->\n"
    with pytest.raises(InputError, match=f"'<!-- end -->' after '<!-- a -->' and before '{other.strip()}'"):
        written(page, "<!-- a -->\n", "text")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_page_keeps_its_line_ends(end: str) -> None:
    page = f"one\ntwo\r\n<!-- a -->{end}old\r\nold\n<!-- end -->\r\nlast"
    made = f"one\ntwo\r\n<!-- a -->{end}{end}| x |{end}| y |{end}{end}<!-- end -->\r\nlast"
    assert written(page, "<!-- a -->\n", "| x |\n| y |") == made


def test_what_is_written_twice_is_the_same() -> None:
    start = marker(TABLE2, quick=True)
    page = f"before\n{start}<!-- end -->\nafter\n"
    once = written(page, start, "| text |")
    assert written(once, start, "| text |") == once
    assert written(once, start, "| other |") != once


def test_the_terms_tell_seeds_machines_dates_cost_and_command() -> None:
    version = STUDIES["adamasfl-fig1"].quick
    study = STUDIES["adamasfl-fig1"]
    assert terms(study, version, {}, True) == (
        "0 of 26 runs, not run yet, about 4 minutes of two cores: "
        "`python -m experiments adamasfl-fig1 --quick`"
    )
    held = {one.key: curve(0.5) for one in version.cells}
    assert terms(study, version, held, False) == (
        "26 of 26 runs, seeds 0, 1, CPU, 2026-01-02, 26 minutes of processes: "
        "`python -m experiments adamasfl-fig1 --device cuda --data-dir DIR`"
    )


def qmnist(labels: list[int], writers: list[int], columns: int = 8) -> bytes:
    rows = np.zeros((len(labels), columns), ">i4")
    rows[:, 0], rows[:, 2] = labels, writers
    return b"\0\0\x0c\x02" + struct.pack(">II", *rows.shape) + rows.tobytes()


def mnist(labels: list[int]) -> Source:
    images, targets = torch.zeros(len(labels), 1, 28, 28), torch.tensor(labels)
    examples = Examples(images, targets)
    return Source("mnist", examples, examples, None, targets.numpy(), 10)


def test_the_writers_of_mnist_are_its_natural_clients(tmp_path: Path) -> None:
    (tmp_path / "qmnist-train-labels-idx2-int").write_bytes(qmnist([3, 1, 4, 1], [70, 70, 12, 70]))
    source = by_writer(mnist([3, 1, 4, 1]), tmp_path)
    parts = parse_partition("natural").split(source.labels, 2, 0, source.groups)
    assert [part.tolist() for part in parts] == [[2], [0, 1, 3]]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (None, "tells who wrote MNIST's digits, is not in"),
        (qmnist([3, 1], [1, 2]), "not those of this MNIST"),
        (qmnist([3, 1, 5], [1, 2, 3]), "not those of this MNIST"),
        (qmnist([3, 1, 4], [1, 2, 3])[:-1], "promises 3 rows"),
        (qmnist([3, 1, 4], [1, 2, 3])[:11], "not an idx file"),
        (b"\0\0\x08\x02" + bytes(20), "not an idx file"),
    ],
)
def test_writers_that_are_not_those_of_the_digits_are_refused(
    data: bytes | None, sentence: str, tmp_path: Path
) -> None:
    if data is not None:
        (tmp_path / "qmnist-train-labels-idx2-int").write_bytes(data)
    with pytest.raises(InputError, match=sentence):
        by_writer(mnist([3, 1, 4]), tmp_path)
