"""The accuracy to expect of a method by the runs that are spent on its grid."""

import itertools
import statistics
from dataclasses import replace

import pytest
from experiments.reproduce.measures import AccuracyMeasure, LastModel, LastRounds, TimeTo
from experiments.reproduce.page import cost
from experiments.reproduce.records import Curve
from experiments.reproduce.study import Cell, Version
from experiments.reproduce.tables import Best, Swept, least
from experiments.reproduce.tuning_cost import Cost, cost_table, costs, expected_best
from hypothesis import given
from hypothesis import strategies as st

from offbeat.training.experiment import Experiment

VALUES = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=7)
QUICK = Experiment.of(algorithm="fedbuff", clients=20, concurrency=10, rounds=8, eval_every=4)


def curve(*accuracies: float, failure: str | None = None) -> Curve:
    return Curve(
        tuple(range(len(accuracies))), accuracies, accuracies, failure, None, 1.0, "CPU", "2026-01-02"
    )


def cell(row: str, lr: float | None, seed: int = 0, column: str = "c") -> Cell:
    rates = () if lr is None else (("local_lr", lr),)
    split = f"dirichlet:{sum(map(ord, row + column))}"
    method = row.partition(",")[0]
    return Cell(row, column, replace(QUICK, algorithm=method, parameters=rates, seed=seed, partition=split))


@given(VALUES)
def test_what_is_expected_is_the_mean_over_all_choices_of_so_many(values: list[float]) -> None:
    for spent, expected in enumerate(expected_best(values), 1):
        choices = [max(chosen) for chosen in itertools.combinations(values, spent)]
        assert expected == pytest.approx(statistics.fmean(choices), abs=1e-12)


@given(VALUES)
def test_one_run_gives_the_mean_all_give_the_best_and_more_are_never_worse(values: list[float]) -> None:
    best = expected_best(values)
    assert len(best) == len(values)
    assert best[0] == pytest.approx(statistics.fmean(values), abs=1e-12)
    assert best[-1] == max(values)
    assert all(more >= less - 1e-12 for less, more in itertools.pairwise(best))


def test_seeds_have_grids_of_their_own_and_then_their_mean() -> None:
    held = {
        cell("fedbuff", 0.1, 0): curve(0.5),
        cell("fedbuff", 0.2, 0): curve(0.9),
        cell("fedbuff", 0.1, 1): curve(0.8),
        cell("fedbuff", 0.2, 1): curve(0.6),
    }
    (made,) = costs(held, {one.key: seen for one, seen in held.items()}, LastModel().accuracy)
    assert made.best == pytest.approx((0.7, 0.85))  # the best of seed 0 is 0.9, of seed 1 it is 0.8


def test_a_method_without_rates_is_a_point_and_given_rates_and_variants_are_left_out() -> None:
    held = {
        cell("adamasfl", None): curve(0.7),
        cell("fedbuff", 0.1): curve(0.5),
        cell("fedbuff", 0.2): curve(0.8),
        cell("fedbuff, varied", 0.1): curve(0.5),
        cell("fedbuff, varied", 0.2): curve(0.8),
        cell("ca2fl", 0.1): curve(0.9),
        cell("fadas", 0.1): curve(0.9),
    }
    found = {one.key: seen for one, seen in held.items()}
    made = costs((*held, cell("fadas", 0.2)), found, LastModel().accuracy)
    assert [(one.method, one.tuned, len(one.best)) for one in made] == [
        ("adamasfl", False, 1),
        ("fedbuff", True, 2),
        ("fadas", True, 0),
    ]
    assert costs([one for one in held if one.row in ("adamasfl", "ca2fl")], found, LastModel().accuracy) == ()


@pytest.mark.parametrize("measure", [LastRounds(), LastModel()])
def test_a_run_that_diverged_counts_as_the_untrained_model(measure: AccuracyMeasure) -> None:
    assert measure.accuracy(curve(0.1, 0.8, 0.9, failure="it diverged")) == 0.1
    assert measure.accuracy(curve(failure="it diverged at once")) == 0.0


def test_accuracy_is_that_of_the_table() -> None:
    rising = curve(0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
    assert LastRounds().say(LastRounds().accuracy(rising)) == "30.00"
    assert LastModel().say(LastModel().accuracy(rising)) == "0.500"
    assert LastRounds()([rising]).text.startswith("30.00")
    assert LastModel()([rising]).text == "0.500"


def test_the_table_tells_who_needs_how_many_runs_for_what_one_gives() -> None:
    made = (
        Cost("free", "c", (0.75,), tuned=False),
        Cost("soon", "c", (0.7, 0.8)),
        Cost("never", "c", (0.4, 0.5, 0.6, 0.65)),
        Cost("missing", "c", ()),
    )
    table = cost_table(made, LastModel().say)
    assert table.head == ("", "1 run", "2 runs", "3 runs", "whole grid")
    assert table.rows == (
        ("free", "0.750", "–", "–", "no grid"),
        ("soon", "0.700", "0.800", "–", "0.800 (2 runs)"),
        ("never", "0.400", "0.500", "0.600", "0.650 (4 runs)"),
        ("missing", "–", "–", "–", "runs are missing"),
    )
    assert table.notes[1:] == ("Runs to expect as much as from one of free: soon 2, never more than all 4.",)


def test_columns_are_kept_apart() -> None:
    made = (Cost("free", "a", (0.7,), tuned=False), Cost("x", "a", (0.8, 0.9)), Cost("x", "b", (0.1, 0.2)))
    table = cost_table(made, LastModel().say)
    assert [row[0] for row in table.rows] == ["a: free", "a: x", "b: x"]
    assert table.notes[1:] == ("a: runs to expect as much as from one of free: x 1.",)


def test_only_a_table_that_chooses_rates_by_accuracy_has_a_cost() -> None:
    held = {cell("fedbuff", 0.1, column="1"): curve(0.5), cell("fedbuff", 0.2, column="1"): curve(0.8)}
    found = {one.key: seen for one, seen in held.items()}
    tables = Best(LastModel(), {}), Best(TimeTo(0.5), {}), Swept(LastModel(), "least", least, {})
    spent = [cost(Version(tuple(held), table, 1.0), found) for table in tables]
    assert spent[0] is not None
    assert spent[0].rows == (("fedbuff", "0.650", "0.800", "0.800 (2 runs)"),)
    assert spent[1:] == [None, None]
    assert cost(Version(tuple(held), tables[0], 1.0), {}) is None


def test_what_tuning_costs_is_of_the_seeds_that_are_whole_as_the_table_is() -> None:
    held = {cell("fedbuff", 0.1): curve(0.5), cell("fedbuff", 0.2): curve(0.8)}
    begun = cell("fedbuff", 0.1, seed=1)
    found = {one.key: seen for one, seen in (held | {begun: curve(0.1)}).items()}
    cells = (*held, begun, cell("fedbuff", 0.2, seed=1))
    spent = cost(Version(cells, Best(LastModel(), {}), 1.0), found)
    assert spent is not None
    assert spent.rows == (("fedbuff", "0.650", "0.800", "0.800 (2 runs)"),)
