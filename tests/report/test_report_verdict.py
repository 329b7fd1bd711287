"""The verdict of a report, its marks of best values, and metrics by client."""

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.errors import InputError
from offbeat.report.build import make_report
from offbeat.report.load import ClientAccuracies, Run, RunEnding, metric_columns, read_runs
from offbeat.report.tables import (
    SummaryRow,
    Target,
    check_comparable,
    client_table,
    summary_table,
    verdict,
)
from report_world import change_settings, lines, make_run, write_lines

NONE: dict[str, ClientAccuracies | str] = {}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Run:
    (run,) = read_runs([make_run(tmp_path_factory.mktemp("verdict") / "run")])
    return run


def with_records(run: Run, label: str, **columns: Any) -> Run:
    rows = len(next(iter(columns.values())))
    named = (column for name in columns for column in metric_columns(name))
    blank = {name: np.full(rows, np.nan) for name in (*run.records, *named)}
    whole = blank | {"version": np.arange(rows), "time": np.arange(rows), "client_updates": np.arange(rows)}
    records = {name: np.array(values, dtype=float) for name, values in (whole | columns).items()}
    return replace(run, label=label, records=records)


def row(runs: list[Run], name: str) -> SummaryRow:
    return next(each for each in summary_table(runs, NONE) if each.name == name)


def test_the_best_run_comes_first_with_its_margin_and_cost(made: Run) -> None:
    one = with_records(made, "one", accuracy=[0.1, 0.5, 0.9], bytes=[0, 1e6, 2e6])
    two = with_records(made, "two", accuracy=[0.1, 0.85, 0.8], bytes=[0, 1e6, 2e6], time=[0, 10, 400])
    low = with_records(made, "low", accuracy=[0.1, 0.2, 0.3])
    first, cost, reach, *rest = verdict([two, one, low])
    assert first == "one is best: accuracy 0.9 at the end, 0.1 above two (0.8), and low is last with 0.3."
    assert cost == "one took 2 server steps, 2 client updates, 2 s of virtual time and 2 MB."
    assert reach == "one is the first to reach accuracy 0.855, after 2 s. two and low did not reach it."
    assert rest[0].startswith("Updates of one had a mean staleness of ")
    assert "one seed" in rest[-1]


def test_how_much_longer_the_next_run_takes_is_said(made: Run) -> None:
    one = with_records(made, "one", accuracy=[0.1, 0.89, 0.9], time=[0, 10, 20])
    two = with_records(made, "two", accuracy=[0.1, 0.5, 0.88], time=[0, 10, 25])
    assert "one is the first to reach accuracy 0.855, after 10 s; two takes 2.5 times as long." in verdict(
        [one, two]
    )


def test_runs_that_are_nearly_equal_are_called_equal(made: Run) -> None:
    one, two = (
        with_records(made, name, accuracy=[0.1, value]) for name, value in (("one", 0.9), ("two", 0.8999))
    )
    assert verdict([one, two])[0] == "one and two are equal within 0.1%: accuracy 0.9 at the end."


def test_lower_is_better_where_the_run_says_so(made: Run) -> None:
    settings = {**made.settings, "metrics": {"perplexity": "min", "loss": "min"}}
    one, two = (
        replace(with_records(made, name, perplexity=[90.0, value]), settings=settings)
        for name, value in (("one", 20.0), ("two", 12.0))
    )
    assert verdict([one, two])[0] == "two is best: perplexity 12 at the end, 8 below one (20)."
    assert row([one, two], "perplexity at the end").best == (False, True)
    target = Target.of([one, two])
    assert target is not None
    assert target.value == pytest.approx(12.6)


def test_a_single_run_and_runs_without_the_metric_have_a_verdict(made: Run) -> None:
    assert verdict([with_records(made, "a", accuracy=[0.1, 0.7])])[0] == "a ends with accuracy 0.7."
    none = with_records(made, "a", loss=[1.0])
    assert verdict([none]) == ["No run has a recorded accuracy, so none can be called best."]
    gone = replace(with_records(made, "b", accuracy=[0.1]), ending=RunEnding(diverged="it became NaN"))
    assert "b diverged." in verdict([with_records(made, "a", accuracy=[0.5]), gone])


def test_the_last_value_counts_and_not_a_missing_one(made: Run) -> None:
    one = with_records(made, "one", accuracy=[0.1, 0.7, np.nan])
    assert verdict([one])[0] == "one ends with accuracy 0.7."


def test_a_row_has_one_unit_and_marks_the_best(made: Run) -> None:
    one = with_records(made, "one", accuracy=[0.1, 0.9], time=[0, 136.2], bytes=[0, 5e5])
    two = with_records(made, "two", accuracy=[0.1, 0.9], time=[0, 189.72], bytes=[0, 5e7])
    time = row([one, two], "virtual time to accuracy 0.855")
    assert time.texts == ("2.27 min", "3.162 min")
    assert time.best == (True, False)
    sent = row([one, two], "bytes sent and received")
    assert sent.texts == ("0.5 MB", "50 MB")
    assert sent.best == (False, False)  # what was sent is a cost only together with what it bought
    assert row([one, two], "accuracy at the end").best == (False, False)  # equal


def with_clients(folder: Path, **values: Any) -> Path:
    change_settings(folder, metrics={"auc": "max", "loss": "min"}, client_names=list(values))
    extra = {"auc": 0.8, "auc_mean": 0.75, "auc_worst_tenth": 0.5, "auc_spread": 0.1}
    write_lines(folder, "records", [record | extra for record in lines(folder, "records")])
    (folder / "clients.json").write_text(json.dumps({"version": 8, "clients": {"auc": values}}))
    return folder


def test_metrics_by_client_are_in_table_figure_and_page(tmp_path: Path) -> None:
    one = with_clients(make_run(tmp_path / "one"), **{"St Mary": 0.9, "Mercy": 0.5, "Charité": None})
    two = with_clients(make_run(tmp_path / "two", seed=1), **{"St Mary": 0.8, "Mercy": 0.6, "Charité": 0.7})
    runs = read_runs([one, two])
    table = client_table(runs)
    assert [each.name for each in table] == ["Mercy", "Charité", "St Mary"]
    assert table[0].texts == ("0.5", "0.6")
    assert table[0].best == (False, True)
    assert table[1].texts == (None, "0.7")
    assert row(runs, "auc over clients, worst tenth").texts == ("0.5", "0.5")
    done = make_report([one, two], tmp_path / "page.html")
    page = html.unescape(done.page.read_text())
    assert "Charité" in page
    assert "auc on each client's test examples at the end" in page
    assert {"auc-by-time", "clients"} <= set(done.figures)
    assert re.search(r'<td class="r1 best">0.6 <span class="star" title="best">★</span></td>', page)


def test_a_damaged_file_of_clients_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one")
    for content in ("[", "{}", '{"clients": {"auc": {"a": "high"}}}', '{"clients": 3}'):
        (folder / "clients.json").write_text(content)
        with pytest.raises(InputError, match=r"clients\.json is damaged") as caught:
            read_runs([folder])
        assert "\n" not in str(caught.value)


def test_runs_with_other_metrics_are_not_compared_and_runs_of_before_are(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two", seed=1)
    settings = json.loads((two / "settings.json").read_text())
    settings.pop("metrics", None)
    (two / "settings.json").write_text(json.dumps(settings))
    change_settings(one, metrics={"accuracy": "max", "loss": "min"})
    check_comparable(read_runs([one, two]))
    with_clients(two, a=0.5)
    with pytest.raises(InputError, match="metrics of one are accuracy, loss and of the other auc, loss:"):
        check_comparable(read_runs([one, two]))
