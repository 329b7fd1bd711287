import dataclasses
from typing import Any

import pytest

from offbeat.errors import InputError
from offbeat.report.load import Run, read_runs
from offbeat.report.tables import check_comparable, settings_table
from report_world import make_run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Run:
    (run,) = read_runs([make_run(tmp_path_factory.mktemp("comparing") / "first")])
    return run


def other(run: Run, **values: Any) -> Run:
    return dataclasses.replace(run, label="second", settings=dict(run.settings) | values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"data": "mnist"}, "data is digits in one and mnist in the other"),
        ({"model": "mlp"}, "model is logistic in one and mlp in the other"),
        ({"clients": 13}, "clients is 12 in one and 13 in the other"),
        ({"partition": "iid"}, "partition is dirichlet:0.5 in one and iid in the other"),
        ({"task": {"module": "x"}}, "one is a deployment and the other a simulation"),
        ({"resolved": {"model_size": 3}}, "their models have 650 and 3 parameters"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused_by_the_setting(
    made: Run, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=f"first and second cannot be compared, since {words}.*--anyway"):
        check_comparable([made, other(made, **values)])


def test_what_an_experiment_varies_can_be_compared(made: Run) -> None:
    varied = {
        "algorithm": "fadas",
        "seed": 7,
        "buffer": 5,
        "rounds": 99,
        "delays": "constant:1",
        "local_steps": 3,
    }
    check_comparable([made, other(made, **varied)])


def test_settings_that_differ_come_first(made: Run) -> None:
    rows = settings_table([made, other(made, seed=7, dropout=0.25)])
    differing = {row.name: row.values for row in rows if row.differs}
    assert differing == {"seed": ("0", "7"), "dropout": ("0", "0.25")}
    assert {row.name for row in rows[:2]} == differing.keys()


def test_a_setting_that_one_run_lacks_differs(made: Run) -> None:
    rows = {row.name: row for row in settings_table([made, other(made, max_staleness=3)])}
    assert rows["max_staleness"].differs
    assert rows["max_staleness"].values == (None, "3")


def test_a_difference_is_not_rounded_away(made: Run) -> None:
    near = [other(made, dropout=0.1), other(made, dropout=0.1 + 1e-12)]
    rows = {row.name: row for row in settings_table(near)}
    assert rows["dropout"].differs
    assert len(set(rows["dropout"].values)) == 2


def test_hyperparameters_are_shown_as_they_came_out(made: Run) -> None:
    rows = {row.name: row.values for row in settings_table([made])}
    assert rows["method"] == ("fedbuff",)
    assert rows["method.local_lr"] == ("0.1",)


def test_where_things_were_on_somebodys_machine_is_left_out(made: Run) -> None:
    local = other(made, data_dir="/home/somebody/data", delays="recorded:/home/somebody/delays.csv")
    rows = {row.name: row.values for row in settings_table([local])}
    assert "--data-dir" not in rows
    assert rows["delays"] == ("recorded:delays.csv",)
