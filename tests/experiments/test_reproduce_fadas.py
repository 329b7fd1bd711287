"""FADAS's studies: what is varied, what is shared, and what the table of its ablations says."""

import json
import math
from dataclasses import replace

import pytest
from experiments.reproduce.outcome import ComputeOptions, run_cell
from experiments.reproduce.records import Curve
from experiments.reproduce.study import Cell, Study, Table, Version
from experiments.studies.fadas import SEED, TABLE2, TABLE4, TABLE7, pace
from experiments.studies.fadas_fig1 import (
    BUFFERS,
    CONCURRENCIES,
    FIG1,
    THRESHOLDS,
    TRIPS,
    AtVersion,
    SettingKey,
    place_of,
)

from offbeat.algorithms import Setting, build
from offbeat.algorithms.fadas import Trailing
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import parse_delay
from offbeat.schedule.scheduler import Scheduler
from offbeat.schedule.statistics import simulate
from offbeat.training.build import build_dispatch

STUDIES = (TABLE2, TABLE4, TABLE7, FIG1)


def curve(last: float, reached: int = 100, rounds: int = 500, failure: str | None = None) -> Curve:
    """From 0 up to the last accuracy, which it has from a version on."""
    versions = tuple(range(0, rounds + 1, 10))
    accuracies = tuple(last if version >= reached else 0.0 for version in versions)
    times = tuple(2.0 * version for version in versions)
    return Curve(versions, times, accuracies, failure, None, 60.0, "CPU", "2026-01-02")


def table(version: Version, curves: dict[SettingKey, Curve]) -> Table:
    found = {one.key: curves[place_of(one)] for one in version.cells if place_of(one) in curves}
    return version.tabulate(version.cells, found)


@pytest.mark.parametrize("version", [TABLE2.full, TABLE2.quick], ids=["full", "quick"])
def test_what_the_scripts_do_otherwise_is_in_rows_of_its_own_with_the_same_rates(version: Version) -> None:
    rates: dict[str, set[str]] = {}
    for one in version.cells:
        if one.row.startswith("fadas") and one.experiment.model != "resnet18":
            made = one.experiment
            given = dict(made.parameters)
            rates.setdefault(one.row, set()).add(json.dumps([given.pop("local_lr"), given.pop("server_lr")]))
            method = build(made.algorithm, Setting(made.buffer, 1, 1), dict(made.parameters))
            assert isinstance(method, Trailing) == ("delta base" in one.row or "scripts" in one.row)
            assert not isinstance(method, Trailing) or method.buffer == 5
            assert ("unbiased" in given) == ("bias" in one.row or "scripts" in one.row)
            assert ("tau_c" in given) == ("tau_c" in one.row)
            assert (made.dispatch == "asynchronous") == ("arrival" in one.row)
    assert len(rates) == 11
    for row, own in rates.items():
        assert own == rates[row.partition(",")[0]]


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_the_full_version_fits_what_is_left_of_a_device(study: Study) -> None:
    assert study.full.minutes < (21 if study is TABLE2 else 4)
    assert study.full.pace == pytest.approx(pace(study.full.cells))
    assert "one local epoch has in the mean" in study.unknown
    made = [one.experiment for one in study.full.cells]
    assert {(one.local_epochs, one.clients * one.local_steps * one.batch_size) for one in made} == {
        (None, 50_000)
    }
    large = {(one.row, one.column) for one in study.full.cells if one.experiment.model == "resnet18"}
    assert len(large) == (6 if study is TABLE2 else 0)


@pytest.mark.parametrize("version", [FIG1.full, FIG1.quick], ids=["full", "quick"])
def test_every_ablation_varies_one_thing_and_keeps_the_rates(version: Version) -> None:
    places = {place_of(one) for one in version.cells}
    assert places == {
        *(SettingKey("fadas-da", threshold=t) for t in THRESHOLDS),
        *(SettingKey(method, concurrency=c) for method in ("fadas", "fadas-da") for c in CONCURRENCIES),
        *(SettingKey(method, buffer=b) for method in ("fadas", "fadas-da") for b in BUFFERS),
    }
    assert len(places) == 13
    for method in ("fadas", "fadas-da"):
        rates = {one.rates.partition(", tau")[0] for one in version.cells if place_of(one).method == method}
        assert len(rates) == 1
    fixed = {replace(one.experiment, algorithm="fadas", parameters=(), concurrency=25, buffer=5, seed=0)
             for one in version.cells}  # fmt: skip
    assert len(fixed) == 1
    assert all(TRIPS // b % one.experiment.eval_every == 0 for one in version.cells for b in BUFFERS)


def test_the_ablations_have_the_delays_of_the_authors_scripts() -> None:
    """Largest, mean and median of each buffer's stalest, counted in the scripts with their seed."""
    found = {}
    for one in FIG1.full.cells:
        made = one.experiment
        dispatch, delays = build_dispatch(made), parse_delay(made.delays)
        draws = dispatch.source(made.seed)
        clock = Clock(delays.bind(draws, made.clients), draws)
        summary = simulate(Scheduler(clock, dispatch, draws, made.clients, made.buffer), made.rounds)
        found[made.concurrency, made.buffer] = (
            summary.staleness_max,
            round(summary.staleness_mean_of_max, 2),
            summary.staleness_median_of_max,
        )
    assert found == {
        (25, 5): (127, 10.89, 6.0),
        (15, 5): (53, 7.23, 2.0),
        (35, 5): (206, 13.73, 9.0),
        (25, 3): (212, 12.24, 8.0),
        (25, 10): (53, 7.67, 2.0),
    }


def test_the_default_setting_of_the_ablations_is_that_of_table_2() -> None:
    shared = {one.key for one in FIG1.full.cells} & {one.key for one in TABLE2.full.cells}
    default = [one for one in FIG1.full.cells if one.key in shared and one.experiment.buffer == 5]
    assert {place_of(one) for one in default} >= {SettingKey("fadas"), SettingKey("fadas-da")}
    assert {one.experiment.seed for one in FIG1.full.cells} == {SEED}


def test_an_accuracy_by_trips_is_that_about_its_version() -> None:
    rising = Curve((0, 10, 20, 30), (0.0,) * 4, (0.1, 0.2, 0.3, 0.9), None, None, 1.0, "CPU", "")
    assert AtVersion(20, 10)([rising]).text == "20.00"  # of 10, 20 and 30 per cent
    assert (
        AtVersion(20, 10)([rising, rising._replace(accuracies=(0.2, 0.3, 0.4, 0.0))]).text == "25.00 ± 7.07"
    )
    assert AtVersion(40, 10)([rising]) == (-math.inf, "not reached")
    assert AtVersion(40, 10)([rising._replace(failure="the loss is NaN.")]) == (-math.inf, "diverged")
    ending = Curve((0, 10, 18, 19, 20), (0.0,) * 5, (0.1, 0.2, 0.8, 0.8, 0.3), None, None, 1.0, "CPU", "")
    assert AtVersion(20, 10)([ending]) == AtVersion(20, 10)([rising])  # whatever the last rounds add


def test_the_table_of_the_ablations_tells_claimed_and_measured_orders() -> None:
    curves = {place_of(one): curve(0.5) for one in FIG1.full.cells}
    curves |= {
        SettingKey("fadas-da", threshold=8): curve(0.6),
        SettingKey("fadas-da", threshold=10): curve(0.55),
    }
    curves[SettingKey("fadas", concurrency=35)] = curve(0.7)
    curves[SettingKey("fadas", buffer=3)] = curve(0.45, reached=50)
    curves[SettingKey("fadas", buffer=10)] = curve(0.3)
    made = table(FIG1.full, curves)
    rows = {row[0]: row[1:] for row in made.rows}
    assert made.head == ("", "fadas", "fadas-da", "runs")
    assert rows["tau_c 8"] == ("", "60.00 ± 0.00", "1")
    assert rows["M_c 35"] == ("70.00 ± 0.00", "50.00 ± 0.00", "2")
    assert rows["M 3, by trips"][0] == "45.00"
    assert rows["M 3, time to 40 %"] == ("100.0", "200.0", "2")
    assert rows["M 10, time to 40 %"][0] == "not reached (best 0.300)"
    assert made.notes[0] == "threshold: claimed tau_c 8 slightly before 1, 4 and 10; measured 8, 10, 1, 4."
    assert "M_c 35: claimed fadas before fadas-da; measured fadas, fadas-da." in made.notes
    assert "fadas, M by rounds: claimed 10, 5, 3; measured 5, 3, 10." in made.notes
    assert "fadas, M time to 40 %: claimed 3 first; measured 3, 5, 10 (none)." in made.notes


def test_without_all_runs_an_order_is_not_known_yet() -> None:
    some = {place_of(one): curve(0.5) for one in FIG1.quick.cells if place_of(one).concurrency != 35}
    made = table(FIG1.quick, some)
    rows = {row[0]: row[1:] for row in made.rows}
    assert rows["M_c 35"] == ("not run", "not run", "0 of 6")
    assert rows["M_c 25"] == ("50.00 ± 0.00", "50.00 ± 0.00", "6")
    assert "M_c 35: claimed fadas before fadas-da; measured not yet." in made.notes


def test_a_run_as_the_scripts_do_it_is_recorded_like_any_other() -> None:
    one = next(cell for cell in TABLE2.quick.cells if cell.row == "fadas, both as in the scripts")
    record = run_cell(one.shortened(5), ComputeOptions())
    assert record["failure"] is None
    assert record["settings"]["parameters"]["trailing"] is True
    plain = Cell(one.row, one.column, replace(one.experiment, parameters=one.experiment.parameters[:2]))
    assert run_cell(plain.shortened(5), ComputeOptions())["loss"] != record["loss"]
