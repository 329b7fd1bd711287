"""What the experiments' pages show is what their records hold."""

import itertools
import json
import math
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments.concurrency import table
from experiments.momentum import table as momentum
from experiments.momentum import table4
from experiments.reproduce.outcome import ComputeOptions, run_cell
from experiments.reproduce.page import fill_sections, marker
from experiments.reproduce.records import append, present_key, recorded
from experiments.studies import momentum_gap
from experiments.studies.momentum import BETAS, NEAR, SCALE, TABLE2, beta_of, rate_of, speed_ups
from experiments.studies.momentum_gap import CLAIMED, COHORTS, SYNCHRONOUS, TABLE1, Gap

from offbeat.algorithms import find
from offbeat.cli.main import parser
from offbeat.data.datasets import load
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import parse_delay
from offbeat.schedule.dispatch import current_name
from offbeat.schedule.scheduler import Scheduler
from offbeat.schedule.statistics import iterate_buffers
from offbeat.training.build import build_dispatch, build_run
from offbeat.training.task import named_task

FOLDER = Path(__file__).parent.parent.parent / "experiments" / "concurrency"
FILES = ["records", "digits"]
METHODS = {"adamasfl", "masfl", "fedbuff", "ca2fl", "fadas", "fadas-da", "defedavg", "dude", "fedasync"}
MOMENTUM = FOLDER.parent / "momentum"
DIGITS = load("digits")
PAGE = (FOLDER / "README.md").read_text()
COMMANDS = re.findall(r"^offbeat .+$", PAGE, re.MULTILINE)


def last_accuracies(name: str) -> dict[str, dict[int, Any]]:
    return {m: {c: table._end(one) for c, one in trial.items()} for m, trial in table.trials(name).items()}


def test_every_table_is_made_from_the_records() -> None:
    assert fill_sections(PAGE, table.tables()) == PAGE


def test_nothing_stands_between_markers_but_what_is_made() -> None:
    assert set(re.findall(r"<!-- (.+) -->", PAGE)) - {"end"} == table.tables().keys()


def test_every_other_table_would_be_noticed() -> None:
    changed = table.tables() | {"digits": "| method |"}
    assert fill_sections(PAGE, changed) != PAGE


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_parses(command: str) -> None:
    parser().parse_args(shlex.split(command)[1:])


def test_the_page_shows_commands_for_both_data_sets() -> None:
    assert len(COMMANDS) > 1
    assert {"fashion-mnist" in command for command in COMMANDS} == {True, False}


@pytest.mark.parametrize("name", FILES)
def test_commands_differ_in_the_concurrency_alone(name: str) -> None:
    groups: dict[int, set[str]] = {}
    for run in table.load(name)["runs"]:
        words = f"--concurrency {run['concurrency']} "
        assert run["command"].count(words) == 1
        groups.setdefault(run["concurrency"], set()).add(run["command"].replace(words, ""))
    assert sorted(groups) == list(table.CONCURRENCIES)
    assert len({frozenset(group) for group in groups.values()}) == 1


@pytest.mark.parametrize("name", FILES)
def test_every_method_ran_at_every_concurrency_under_its_own_protocol(name: str) -> None:
    trials = table.trials(name)
    assert trials.keys() == METHODS
    for method, trial in trials.items():
        assert sorted(trial) == list(table.CONCURRENCIES)
        assert {current_name(one["dispatch"]) for one in trial.values()} == {find(method).dispatch}


@pytest.mark.parametrize("name", FILES)
def test_the_rates_are_those_that_the_grid_chose(name: str) -> None:
    best = table.chosen(table.load(name)["data"])
    assert best.keys() == METHODS - {"adamasfl"}
    for method, trial in table.trials(name).items():
        for one in trial.values():
            assert one["rates"] == best.get(method, {})


@pytest.mark.parametrize("name", FILES)
def test_a_run_went_to_its_last_step_or_says_why_not(name: str) -> None:
    for method, trial in table.trials(name).items():
        trips = {one["records"]["trips"][-1] - one["records"]["trips"][0] for one in trial.values()}
        failed = [one for one in trial.values() if one["failure"]]
        assert len(trips) == 1 or failed, method
        assert all("NaN or infinite at server step" in one["failure"] for one in failed)


def test_what_the_page_says_of_fashion_mnist_holds() -> None:
    ends = last_accuracies("records")
    finished = {c: {m: e[c] for m, e in ends.items() if e[c] is not None} for c in table.CONCURRENCIES}
    lowest = {c: min(scores, key=scores.__getitem__) for c, scores in finished.items()}
    assert lowest == {10: "adamasfl", 20: "adamasfl", 40: "adamasfl", 60: "adamasfl", 90: "dude"}
    own = [ends["adamasfl"][c] for c in table.CONCURRENCIES]
    assert own == sorted(own, reverse=True)
    assert max(finished[10], key=finished[10].__getitem__) == "ca2fl"
    diverged = {(m, c) for m, e in ends.items() for c, score in e.items() if score is None}
    assert diverged == {("ca2fl", 60), ("ca2fl", 90), ("masfl", 40)}
    losses = {m: e[10] - e[90] for m, e in ends.items() if None not in (e[10], e[90])}
    assert sorted(losses, key=losses.__getitem__)[:2] == ["defedavg", "fedbuff"]

    assert f"{ends['defedavg'][20]:.4f} in the table" in PAGE
    tried = max(e["accuracy"] for e in table._grid("fashion-mnist") if e["method"] == "defedavg")
    assert f"{tried:.4f} on the grid" in PAGE


def test_what_the_page_says_of_digits_holds() -> None:
    ends = last_accuracies("digits")
    own = ends.pop("adamasfl")
    assert max(own.values()) - min(own.values()) < 3 / 360
    assert all(ends[m][c] > own[c] for m in ("defedavg", "fedbuff") for c in table.CONCURRENCIES)
    lost = {m for m, e in ends.items() if e[90] <= e[10] - 0.0995}
    assert lost == {"fadas", "fadas-da", "dude", "ca2fl", "masfl"}
    assert {m for m, e in ends.items() if e[90] < own[90]} == lost | {"fedasync"}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.name)
def test_records_are_small_and_name_no_place_on_a_machine(path: Path) -> None:
    text = path.read_text()
    assert len(text) < 300_000
    assert not re.search(r"[\"\s]/\w", text)


def momentum_runs(name: str) -> dict[str, Any]:
    return momentum.groups(momentum.VERSIONS[name], recorded(momentum.path_of(name)))


def best_at(runs: Any, method: str) -> float:
    return max(run.best for run in runs if run.method == method)


def first(runs: Any, method: str, share: float = 1.0) -> int | None:
    """The version at which a method is as good as that share of the baseline's best."""
    target = share * best_at(runs, "fedbuff")
    curves = [run.curve for run in runs if run.method == method]
    return min((c.versions[at] for c in curves if (at := c.reached(target)) is not None), default=None)


def baseline(runs: Any) -> Any:
    tuned = [run for run in runs if run.method == "fedbuff"]
    return min(tuned, key=lambda run: (-run.best, run.curve.reached(run.best)))


def test_every_table_on_momentum_is_made_from_the_records() -> None:
    page = (MOMENTUM / "README.md").read_text()
    made = momentum.tables()
    assert fill_sections(page, made) == page
    for name in made:
        assert fill_sections(page, made | {name: "| data |"}) != page
    simulated = table4.tables(json.loads(table4.RECORDS.read_text()))
    assert fill_sections(page, simulated) == page
    versions = [(study, quick) for study in (TABLE2, SCALE) for quick in (False, True)]
    studied = {marker(study, quick).strip("<!->\n ") for study, quick in [*versions, (TABLE1, True)]}
    assert (
        set(re.findall(r"<!-- (.+) -->", page)) - {"end", "glance"}
        == made.keys() | simulated.keys() | studied
    )


def test_the_records_on_momentum_are_of_the_studys_own_runs() -> None:
    for name, version in momentum.VERSIONS.items():
        keys = [
            present_key(json.loads(line)["key"]) for line in momentum.path_of(name).read_text().splitlines()
        ]
        found = recorded(momentum.path_of(name))
        scaled = {cell.key for study in (TABLE1, SCALE) for cell in getattr(study, name).after(found).cells}
        assert sorted(set(keys) - scaled) == sorted(cell.key for cell in version.cells)
        assert len(set(keys)) == len(keys)
    assert (len(TABLE2.full.cells), len(TABLE2.quick.cells)) == (120, 48)


def test_the_times_in_the_records_on_momentum_are_those_of_the_schedule() -> None:
    lines = [json.loads(line) for line in momentum.path_of("full").read_text().splitlines()]
    cells = {cell.key: cell.experiment for cell in TABLE2.full.cells}
    schedules: dict[int, list[Any]] = {}
    for line in lines:
        made = cells.get(present_key(line["key"]))
        if made is None or line["failure"]:  # another study's, or not to its end
            continue
        if made.clients not in schedules:
            dispatch = build_dispatch(made)
            source = dispatch.source(made.seed)
            clock = Clock(parse_delay(made.delays).bind(source, made.clients), source)
            flow = Scheduler(clock, dispatch, source, made.clients, made.buffer, made.max_staleness or 0)
            schedules[made.clients] = [(step, flow.counts) for step in iterate_buffers(flow, made.rounds)]
        steps = schedules[made.clients]
        ages = [age for step, _ in steps for age in step.staleness]
        assert line["staleness"] == round(sum(ages) / len(ages), 3)
        assert line["dropped"] == steps[-1][1].dropped
        assert line["staleness_of_worst"][0] == max(ages)
        for version, time, trips in zip(
            line["version"][1:], line["time"][1:], line["trips"][1:], strict=True
        ):
            step, counts = steps[version - 1]
            assert (time, trips) == (round(step.time, 4), counts.client_updates)
    assert len(schedules) == 2


def test_the_runs_at_the_papers_scale_have_its_settings() -> None:
    tried = {
        (cell.row, cell.column, rate_of(cell))
        for cell in SCALE.quick.cells
        if cell.column != "fedbuff" or beta_of(cell) == 0
    }
    plain, noisy = (f"fashion-mnist, MLP{noise}, fedavgm" for noise in ("", " + DP"))
    assert tried == {
        *(
            (group, method, rate)
            for group in (plain, noisy)
            for method in ("fedbuff", "ma")
            for rate in (1, 3, 6, 10, 20)
        ),
        (plain, "ma-light", 1),
        (noisy, "ma-light", 3),
        (noisy, "fedbuff", 40),
        (noisy, "ma", 40),
    }
    for cell in (*SCALE.full.cells, *SCALE.quick.cells):
        made, given = cell.experiment, dict(cell.experiment.parameters)
        assert (made.buffer, made.dispatch, made.rounds, made.ema_decay) == (200, "poisson", 2000, 0.99)
        assert (made.delays, made.max_staleness, made.batch_size) == ("half-normal:1", 20, 16)
        assert given["local_lr"] == 0.1
        adam = "fedadam" in made.algorithm
        assert given.get("eps") == (0.01 if adam else None)
        least, most = (0.01, 0.1) if adam else (0.1, 1.0)  # where the paper searches
        assert least <= given["server_lr"] <= most or cell in SCALE.quick.cells
        assert given.get("span", 21) == 21
        assert cell.column == "fedbuff" or given["beta"] == 0.9
        assert made.noise == (0.609 if "+ DP" in cell.row else None)
    assert set(Counter(cell.row for cell in SCALE.full.cells).values()) == {12}


def test_less_regularisation_fits_momentum_better_with_larger_weights() -> None:
    for row in table4.measure_solvers(rounds=40, clients=20_000).values():
        errors, largest = ([one[name] for one in row.values()] for name in ("error", "largest"))
        assert list(row) == list(table4.SOLVERS)
        assert errors == sorted(errors, reverse=True)
        assert largest == sorted(largest)


def test_what_the_page_says_of_solvers_for_momentum_holds() -> None:
    found = json.loads(table4.RECORDS.read_text())["solvers"]
    for law in ("uniform", "exponential"):
        told = table4.PAPER[law][0] / 100
        assert found[law]["ridge 1e-05"]["error"] < told < found[law]["ridge 0.0001"]["error"]
    least = min(one["error"] for name, one in found["half-normal"].items() if name != "least squares")
    assert table4.PAPER["half-normal"][0] / 100 < least
    for row in found.values():
        assert row["least squares"]["error"] < 0.002
        assert 5e5 < row["least squares"]["largest"] < 1e12


def test_what_the_page_says_of_the_gap_by_cohort_holds() -> None:
    found = recorded(momentum.path_of("quick"))
    known = {(gap.rule, gap.cohort): gap for gap in momentum_gap.gaps(TABLE1.quick.cells, found)}
    assert known.keys() == CLAIMED.keys()
    for rule in ("fedavgm", "fedadam"):
        for place, method in enumerate(momentum_gap.METHODS):
            measured = [known[rule, cohort].relative(method) for cohort in COHORTS]
            assert measured[0] > measured[-1]
            assert CLAIMED[rule, 50][place] > CLAIMED[rule, 400][place]
            if method == "ma":
                assert measured == sorted(measured, reverse=True)
    nearer = sum(gap.relative("ma") < gap.relative("ma-light") for gap in known.values())
    claimed = sum(full < light for full, light in CLAIMED.values())
    assert (nearer, claimed) == (3, 7)
    synchronous = [known["fedavgm", cohort].accuracies[SYNCHRONOUS] for cohort in COHORTS]
    assert 83.8 < min(synchronous) < max(synchronous) < 84.1
    assert all(len(gap.seeds) == len(momentum_gap.SEEDS) == 3 for gap in known.values())
    beyond = {}
    for place, gap in known.items():
        words = gap.nearer()
        if float(words.rpartition("p = ")[2].rstrip(")")) < 0.05:
            beyond[place] = words[0]
    assert beyond == {
        ("fedavgm", 50): "-",
        ("fedavgm", 200): "+",
        ("fedadam", 50): "-",
        ("fedadam", 100): "-",
    }
    for (rule, _), gap in known.items():
        largest = max(momentum_gap._RATES[rule])
        assert (gap.rates["ma"] == largest) == (rule == "fedavgm")
        assert gap.rates[SYNCHRONOUS] == largest


def test_a_gap_to_synchronous_rounds_is_relative_and_unknown_where_they_diverged() -> None:
    gap = Gap("fedavgm", 50, {SYNCHRONOUS: 80.0, "ma": 76.0, "ma-light": -math.inf}, {})
    assert gap.relative("ma") == pytest.approx(5.0)
    assert gap.relative("ma-light") == math.inf
    lost = gap._replace(accuracies={SYNCHRONOUS: -math.inf, "ma": 76.0})
    assert math.isnan(lost.relative("ma"))


def test_rows_of_the_gap_are_left_blank_until_all_their_runs_are_recorded() -> None:
    found = recorded(momentum.path_of("quick"))
    lost = TABLE1.quick.cells[0]
    fewer = {key: one for key, one in found.items() if key != lost.key}
    assert len(momentum_gap.gaps(TABLE1.quick.cells, fewer)) == len(CLAIMED) - 1
    table = momentum_gap.gap_table(TABLE1.quick.cells, fewer)
    (row,) = (row for row in table.rows if row[0] == lost.row)
    assert row[1:5] == ("", "", "", "")
    assert row[-1] == "5 of 6"
    assert not any(note.startswith("fedavgm") for note in table.notes)


def test_updates_of_few_clients_are_as_stale_as_those_of_many() -> None:
    """Of the tasks that are asked for, those start whose client is idle."""

    def mean_staleness(started: float, clients: int) -> float:
        ages = table4.staleness("half-normal:1", started, 120, clients)[60:]
        return float(np.mean(ages))

    wanted = mean_staleness(momentum_gap.STARTED, 1_000_000)
    asked = momentum_gap.rate_to_idle(table4.COHORT) / table4.COHORT
    assert abs(mean_staleness(asked, momentum_gap.CLIENTS) - wanted) < 0.2
    assert abs(mean_staleness(momentum_gap.STARTED, momentum_gap.CLIENTS) - wanted) > 0.4


def test_what_the_page_says_of_momentum_at_the_papers_scale_holds() -> None:
    found = recorded(momentum.path_of("quick"))
    runs, noisy = momentum.groups(SCALE.quick, found).values()
    best, private = (
        {(run.method, run.beta, run.rate): round(run.best, 4) for run in group} for group in (runs, noisy)
    )
    plain = [value for (method, _, rate), value in best.items() if (method, rate) == ("fedbuff", 1.0)]
    assert (len(plain), min(plain), max(plain)) == (4, 0.847, 0.8484)
    same_length = ("fedbuff", 0.0, 6.0), ("ma", 0.9, 3.0)
    assert [group[run] for group in (best, private) for run in same_length] == [0.877, 0.8782, 0.87, 0.8726]
    ahead = []
    for group in (best, private):
        top = {m: max(value for (one, *_), value in group.items() if one == m) for m in ("fedbuff", "ma")}
        ahead.append(round(4000 * (top["ma"] - top["fedbuff"])))
    assert ahead == [6, 3]
    for method, beta in (("fedbuff", 0.0), ("ma", 0.9)):  # both get worse at last
        rising = [best[method, beta, rate] for rate in (1.0, 3.0, 6.0, 10.0, 20.0)]
        assert max(rising) > rising[-1]
    assert max(private, key=private.__getitem__)[0] == "ma"
    assert max((run for run in private if run[0] == "fedbuff"), key=private.__getitem__)[2] == 40.0
    rows = speed_ups(SCALE.quick.cells, found).rows
    assert [row[3] for row in rows] == ["1.47 / –", "0.75 / –"]
    upto = {
        most: tuple(
            cell
            for cell in SCALE.quick.cells
            if rate_of(cell) <= most and cell.row == SCALE.quick.cells[0].row
        )
        for most in (1, 3)
    }
    ratios = {most: speed_ups(cells, found).rows[0][3] for most, cells in upto.items()}
    assert ratios == {1: "1.87 / 1.44", 3: "2.31 / –"}
    made = SCALE.quick.cells[0].experiment
    dispatch = build_dispatch(made)
    source = dispatch.source(made.seed)
    clock = Clock(parse_delay(made.delays).bind(source, made.clients), source)
    flow = Scheduler(clock, dispatch, source, made.clients, made.buffer, made.max_staleness or 0)
    ages = [age for step in iterate_buffers(flow, made.rounds) for age in step.staleness]
    assert made.weights == "polynomial:0.5"
    assert round(sum((1 + age) ** -0.5 for age in ages) / len(ages), 2) == 0.46


def test_tables_by_the_last_model_read_the_last_model(tmp_path: Path) -> None:
    cell = TABLE2.quick.cells[0]
    made = run_cell(cell.shortened(5), ComputeOptions()) | {"key": cell.key}
    assert len(made["last"]) == len(made["accuracy"])
    assert made["last"] != made["accuracy"]
    append(tmp_path / "quick.jsonl", made)
    assert momentum.last_models(tmp_path / "quick.jsonl")[cell.key].accuracies == tuple(made["last"])


def test_a_group_that_is_not_complete_is_not_shown() -> None:
    found = recorded(momentum.path_of("quick"))
    lost = next(cell for cell in TABLE2.quick.cells if cell.experiment.clip is not None)
    shown = momentum.groups(TABLE2.quick, {key: one for key, one in found.items() if key != lost.key})
    assert list(shown) == ["digits, fedavgm", "digits, fedadam", "digits + DP, fedadam"]


def test_groups_of_the_grid_follow_each_other_and_both_sides_get_the_same_rates() -> None:
    cells = TABLE2.full.cells
    order = [cell.row for cell in cells]
    assert sum(one != other for one, other in itertools.pairwise(order)) == len(set(order)) - 1 == 9
    for row in set(order):
        assert order.count(row) == 12
        rates: dict[tuple[str, float], set[float]] = {}
        for cell in cells:
            if cell.row == row:
                rates.setdefault((cell.column, beta_of(cell)), set()).add(rate_of(cell))
        assert {method for method, _ in rates} == {"fedbuff", "ma", "ma-light"}
        assert sorted(beta for method, beta in rates if method == "fedbuff") == [-0.5, 0, 0.5, 0.9]
        assert len(set(map(frozenset, rates.values()))) == 1


@pytest.mark.parametrize("cell", TABLE2.quick.cells, ids=lambda cell: f"{cell.row}, {cell.rates}")
def test_a_cell_is_a_run_that_would_not_be_refused(cell: Any) -> None:
    build_run(cell.experiment, named_task(cell.experiment, DIGITS))


def test_what_the_page_says_of_momentum_on_digits_holds() -> None:
    found = momentum_runs("quick")
    assert len(found) == 4
    for runs in found.values():
        best = {beta: momentum.best_of(runs, "fedbuff", beta) for beta in BETAS}
        for method in ("ma", "ma-light"):
            assert first(runs, method) is None
            assert (first(runs, method, NEAR) or 1000) > (first(runs, "fedbuff", NEAR) or 1000)
            assert best_at(runs, method) > best[0.9]
        assert baseline(runs).beta <= 0.5
        middling = [best[beta] for beta in (-0.5, 0.0, 0.5)]
        assert max(middling) - min(middling) < 0.012


def test_what_the_page_says_of_momentum_on_a_gpu_holds() -> None:
    found = momentum_runs("full")
    for rule, rate in (("fedavgm", 1.0), ("fedadam", 0.003)):
        runs = found[f"fashion-mnist, {rule}"]
        best = {beta: momentum.best_of(runs, "fedbuff", beta) for beta in BETAS}
        assert sorted(best, key=best.__getitem__, reverse=True)[:2] == [-0.5, 0.0]
        for method in ("ma", "ma-light"):
            top = max((run for run in runs if run.method == method), key=lambda run: run.best)
            assert first(runs, method, NEAR) is None
            assert best[0.9] < top.best < best[0.0]
            assert top.rate == rate
    runs = found["shakespeare, fedavgm"]
    constant = 0.18762
    assert best_at(runs, "fedbuff") < constant + 0.001
    failed = [run.rate for run in runs if run.curve.failure]
    assert failed == [2.0, 2.0]
    leaving = [run for run in runs if run.best > constant + 0.001]
    assert [(run.method, run.rate) for run in leaving] == [("ma", 1.0)]


def test_what_the_page_says_of_all_groups_on_a_gpu_holds() -> None:
    found = momentum_runs("full")
    assert len(found) == 10
    assert sum(first(runs, "ma") is None for runs in found.values()) == 7
    for row, runs in found.items():
        if row.startswith("shakespeare,"):
            continue
        assert baseline(runs).beta in (-0.5, 0.0)
        naive = momentum.best_of(runs, "fedbuff", 0.9)
        for method in ("ma", "ma-light"):
            assert best_at(runs, method) > naive + 0.01
        if "+ DP" in row:
            assert first(runs, "ma-light") is None


def test_what_the_page_says_of_momentum_without_delay_holds() -> None:
    undelayed = json.loads((MOMENTUM / "control.json").read_text())
    found = momentum_runs("quick")
    for rule, best in undelayed.items():
        runs, image = found[f"digits, {rule}"], 1 / 360
        assert 0 < best["0"] - best["0.9"] < 2.5 * image
        assert best["0.9"] - best_at(runs, "ma") < 0.01
        assert best["0.9"] - best_at(runs, "ma-light") < 0.02
        assert 0.03 < best["0.9"] - momentum.best_of(runs, "fedbuff", 0.9) < 0.16
    assert undelayed.keys() == {"fedavgm", "fedadam"}


def test_what_a_study_took_over_from_this_one_is_what_it_has() -> None:
    lines = (FOLDER.parent / "adamasfl" / "records" / "full.jsonl").read_text().splitlines()
    taken = [one for one in map(json.loads, lines) if one.get("source") == "experiments/concurrency"]
    runs = json.loads((FOLDER / "records.json").read_text())["runs"]
    curves = {(name, run["concurrency"]): own for run in runs for name, own in run["methods"].items()}
    grid = json.loads((FOLDER / "grid.json").read_text())["fashion-mnist"]
    assert len(taken) == 48
    for one in taken:
        made, settings = one["settings"], one["settings"]["parameters"]
        own = curves[made["algorithm"], made["concurrency"]]
        if len(one["version"]) > 1:
            assert (one["version"], one["accuracy"]) == (
                own["records"]["version"],
                own["records"]["accuracy"],
            )
            assert one["failure"] == own["failure"]
            assert settings.items() >= own["rates"].items()
            continue
        same = [
            each
            for each in grid
            if (each["method"], each["concurrency"], each["rates"]) == (made["algorithm"], 20, settings)
        ]
        assert made["concurrency"] == 20
        assert one["accuracy"] == [same[-1]["accuracy"]] * (one["failure"] is None)
        assert one["failure"] == same[-1]["failure"]
