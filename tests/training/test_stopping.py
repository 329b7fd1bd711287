"""A run ends at a target, without progress or at the end of a budget, says why, and goes on if it may."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat import Experiment, InputError, LearningTask
from offbeat.cli.main import main
from offbeat.training.folder import read_jsonl
from offbeat.training.stopping import BestRecord, StopRules

SHORT = {"clients": 10, "concurrency": 5, "buffer": 2, "local_steps": 2, "rounds": 40, "eval_every": 4}


def made(**test: Any) -> LearningTask:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(300, 4, generator=generator)
    labels = (inputs.sum(1) > 0).long()
    return LearningTask(module=lambda: nn.Linear(4, 2), data=(inputs, labels), **test)


def task() -> LearningTask:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(100, 4, generator=generator)
    return made(test=(inputs, (inputs.sum(1) > 0).long()))


def run(out: Path, **settings: Any) -> offbeat.RunResult:
    return offbeat.run(task(), "fedbuff", out=out, **{"progress": False} | SHORT | settings)


def lines(result: offbeat.RunResult, name: str) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if key != "elapsed"}
        for line in read_jsonl(result.folder, name)
    ]


@pytest.mark.parametrize(
    ("rule", "larger", "cost"),
    [
        ({"max_time": 7.3}, {"max_time": 15.0}, "time"),
        ({"max_bytes": 2000}, {"max_bytes": 4000.0}, "bytes"),
        ({"max_client_updates": 13}, {"max_client_updates": 30}, "client_updates"),
    ],
)
def test_a_budget_ends_a_run_and_a_larger_one_continues_it_as_if_it_had_been_there_from_the_start(
    rule: dict[str, float], larger: dict[str, float], cost: str, tmp_path: Path
) -> None:
    first = run(tmp_path / "cut", **rule)
    name, most = next(iter(rule.items()))
    assert first.ended is not None
    assert not first.finished
    assert first.resume is None
    steps = lines(first, "trace")
    *_, before, last = first.records
    assert before[cost] < most <= last[cost]
    assert last["version"] == first.version == steps[-1]["version"]
    again = run(tmp_path / "cut", resume=True)
    assert (again.version, again.ended) == (first.version, first.ended)
    further = run(tmp_path / "cut", resume=True, **larger)
    whole = run(tmp_path / "whole", **larger)
    assert further.ended == whole.ended
    assert further.version == whole.version
    assert first.version is not None
    assert further.version is not None
    assert further.version > first.version
    for part in ("trace", "records"):
        assert lines(further, part) == lines(whole, part)
    assert json.loads((further.folder / "settings.json").read_text())[name] == larger[name]


def test_a_target_ends_a_run_at_the_first_evaluation_that_reaches_it(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    good = [record["version"] for record in whole.records if record["accuracy"] >= 0.8]
    assert 0 < good[0] < 40
    result = run(tmp_path / "cut", stop_at="accuracy:0.8")
    assert result.version == good[0]
    assert result.ended is not None
    assert result.ended.startswith(f"accuracy reached its target of 0.8 at server step {good[0]} (0.")
    further = run(tmp_path / "cut", resume=True, stop_at="loss:0.0")
    assert further.finished
    assert further.ended is None
    assert lines(further, "records") == lines(whole, "records")


def test_patience_counts_evaluations_without_a_better_one(tmp_path: Path) -> None:
    result = run(tmp_path / "run", patience=3, parameters={"local_lr": 0.0})
    assert result.version == 12
    assert result.ended == "accuracy has not improved in 3 evaluations since server step 0"
    further = run(tmp_path / "run", resume=True, patience=5, parameters={"local_lr": 0.0})
    assert further.version == 20
    assert run(tmp_path / "better", patience=40).finished


PRIVATE = {"clip": "0.5", "noise": 1.0, "delta": 1e-5}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"stop_at": "accuracy"}, "stop_at takes METRIC:VALUE, such as accuracy:0.9, not 'accuracy'"),
        ({"stop_at": "accuracy:high"}, "stop_at takes METRIC:VALUE"),
        ({"stop_at": "auc:0.9"}, "unknown metric in stop_at 'auc'"),
        ({"patience": 0}, "patience must be at least 1"),
        ({"max_time": -1.0}, "max_time must be above 0 and finite, not -1.0"),
        ({"max_bytes": 0}, "max_bytes must be above 0"),
        (
            {"max_bytes": 9.0, "dispatch": "allocation", "release_period": 1.0},
            "the end by max_bytes would reveal how many clients contributed, which allocation dispatch keeps",
        ),
        (
            {"max_client_updates": 9, "dispatch": "timed-poisson", "release_period": 1.0, **PRIVATE},
            "the end by max_client_updates would reveal how many clients contributed, which timed-poisson",
        ),
    ],
)
def test_a_rule_that_cannot_work_is_refused_before_anything_is_written(
    settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=sentence):
        run(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_a_target_needs_test_data(tmp_path: Path) -> None:
    for rule in ({"stop_at": "accuracy:0.9"}, {"patience": 2}):
        with pytest.raises(InputError, match="looks at evaluations, and this run has no test data"):
            offbeat.run(made(), "fedbuff", out=tmp_path / "run", progress=False, **SHORT, **rule)


def test_a_budget_that_is_just_spent_is_over_and_so_is_patience() -> None:
    """At the limit itself, where runs with costs of many digits hardly come."""
    rules = StopRules.of(Experiment.of(max_time=7.0, max_bytes=100.0, max_client_updates=5), {"loss": "min"})
    assert rules.over_budget(6.9, 99, 4) is None
    for spent in ((7.0, 99, 4), (6.9, 100, 4), (6.9, 99, 5)):
        assert rules.over_budget(*spent) is not None
    patient = StopRules.of(Experiment.of(patience=3), {"loss": "min"})
    assert patient.satisfied({"version": 9}, BestRecord(0.5, 1, 2)) is None
    assert patient.satisfied({"version": 9}, BestRecord(0.5, 1, 3)) is not None


def test_rules_know_which_way_a_metric_improves() -> None:
    goals = {"auc": "max", "loss": "min"}
    falling = StopRules.of(Experiment.of(stop_at="loss:0.5"), goals)
    record = {"version": 3, "loss": 0.6, "auc": 0.9, "time": 1.0, "bytes": 2, "client_updates": 3}
    assert falling.last_reason(record, BestRecord()) is None
    assert falling.last_reason(record | {"loss": 0.5}, BestRecord()) is not None
    assert falling.last_reason(record | {"loss": None}, BestRecord()) is None
    best = falling.improve(BestRecord(), record)
    assert best == BestRecord(0.9, 3)
    assert falling.improve(best, record | {"auc": 0.8, "version": 4}) == BestRecord(0.9, 3, 1)
    assert falling.improve(best, record | {"auc": 0.95, "version": 4}) == BestRecord(0.95, 4)
    assert falling.improve(best, record | {"version": 4}) == BestRecord(0.9, 3, 1)  # as good is not better
    only_loss = StopRules.of(Experiment.of(patience=1), {"loss": "min"})
    better = only_loss.improve(BestRecord(0.7, 1, 2), record)
    assert better == BestRecord(0.6, 3)


def test_the_command_line_says_why_and_so_do_comparison_and_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["--clients", "8", "--buffer", "2", "--concurrency", "4", "--local-steps", "1", "--rounds", "30"]
    rule = ["--max-client-updates", "9", "--out", "both"]
    assert main(["compare", "fedbuff", "fedprox", *small, *rule]) == 0
    printed = capsys.readouterr().out
    for name in ("fedbuff", "fedprox"):
        assert f"{name} ended early: there were 10 client updates, and --max-client-updates is 9" in printed
    assert main(["report", "both/fedbuff"]) == 0
    assert "there were 10 client updates" in Path("report.html").read_text()
    capsys.readouterr()
    assert main(["run", "--out", "both/fedbuff", "--resume", "--max-client-updates", "15", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["version"] == 8
    assert found["ended"] == "there were 16 client updates, and --max-client-updates is 15"


def halving(version: int) -> float:
    return 0.5**version


def test_a_schedule_may_be_a_function_that_can_be_imported(tmp_path: Path) -> None:
    given: dict[str, Any] = {"rounds": 4}
    one = run(tmp_path / "one", **given, local_lr_schedule=halving, server_lr_schedule="step:1:0.5")
    name = f"{__name__}:halving"
    assert one.experiment.local_lr_schedule == name
    other = run(tmp_path / "other", **given, local_lr_schedule="step:1:0.5", server_lr_schedule=name)
    assert lines(one, "records") == lines(other, "records")
    functions: list[Callable[[int], float]] = [lambda version: 1.0, FACTORS.get]  # type: ignore[list-item]
    for function in functions:
        with pytest.raises(InputError, match="local_lr_schedule must be a function that can be imported"):
            run(tmp_path / "no", **given, local_lr_schedule=function)


FACTORS = {0: 1.0}


def test_a_run_with_a_cosine_over_all_its_steps_is_not_extended(tmp_path: Path) -> None:
    run(tmp_path / "run", rounds=4, local_lr_schedule="cosine:0.1")
    with pytest.raises(
        InputError, match=r"local_lr_schedule cosine:0\.1 ends with the run, so 8 in place of 4"
    ):
        run(tmp_path / "run", rounds=8, resume=True)
    run(tmp_path / "fixed", rounds=4, local_lr_schedule="cosine:0.1:6")
    further = run(tmp_path / "fixed", rounds=8, resume=True)
    whole = run(tmp_path / "whole", rounds=8, local_lr_schedule="cosine:0.1:6")
    assert lines(further, "trace") == lines(whole, "trace")
    assert further.records[-1]["loss"] == whole.records[-1]["loss"]
