"""`offbeat tune`: what is searched, what is pruned, and a killed study that ends as if it had not been."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import offbeat
from offbeat import LearningTask
from offbeat.cli.main import main
from offbeat.cli.tune import parse_search
from offbeat.engines import ray_cluster
from offbeat.errors import InputError
from offbeat.report.figures import tuning_figure
from offbeat.tuning import Study, StudyResult, TrialResult
from offbeat.tuning_plan import SearchRange, search_space

SMALL = "--clients 10 --concurrency 4 --buffer 2 --rounds 12 --eval-every 3 --local-steps 1 --model logistic"
STUDY = ["tune", "fedbuff", *SMALL.split(), "--baseline", "none"]


def tune(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def outline(found: dict[str, Any]) -> list[tuple[Any, ...]]:
    """All of a study but its folder and its seconds."""
    return [
        (each["number"], each["parameters"], each["state"], each["value"], each["steps"])
        for each in found["trials"]
    ]


class Killed(BaseException):
    """The process ends here."""


def kill_at(monkeypatch: pytest.MonkeyPatch, name: str, call: int, *, after: bool) -> None:
    """Let the study die in a call of one of its methods, before or after it has had its effect."""
    whole, calls = getattr(Study, name), 0

    def method(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            raise Killed
        result = whole(*arguments)
        if calls == call:
            raise Killed
        return result

    monkeypatch.setattr(Study, name, method)


@pytest.mark.slow
def test_a_study_that_was_killed_anywhere_ends_as_if_it_had_not_been(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same trials, none lost and none repeated: killed when asking, evaluating, pruning and finishing."""
    words = [*STUDY, "--trials", "9"]
    whole = tune(capsys, *words, "--out", str(tmp_path / "whole"))
    assert {each["state"] for each in whole["trials"]} == {"complete", "pruned"}
    out = str(tmp_path / "killed")
    deaths = [
        ("_add_trial", 3, True),
        ("_add_trial", 2, False),
        ("report", 8, True),
        ("report", 9, False),
        ("_finish", 2, False),
        ("_finish", 1, True),
    ]
    for attempt, (name, call, after) in enumerate(deaths):
        with monkeypatch.context() as patched:
            kill_at(patched, name, call, after=after)
            with pytest.raises(Killed):
                main(["tune", "--out", out, "--resume"] if attempt else [*words, "--out", out])
    resumed = tune(capsys, "tune", "--out", out, "--resume")
    assert outline(resumed) == outline(whole)
    assert resumed["best"]["parameters"] == whole["best"]["parameters"]
    for each in whole["trials"]:
        folder = f"trials/{each['number']:04d}/records.jsonl"
        versions = [
            [json.loads(line)["version"] for line in (tmp_path / name / folder).read_text().splitlines()]
            for name in ("whole", "killed")
        ]
        assert versions[0] == versions[1]
    longer = tune(capsys, "tune", "--out", out, "--resume", "--trials", "10")
    assert outline(longer)[:9] == outline(whole)
    assert len(longer["trials"]) == 10


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_killed_process_loses_no_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], jobs: str
) -> None:
    words = [*STUDY, "--rounds", "30", "--trials", "4", "--pruner", "none", "--jobs", jobs]
    out = tmp_path / "study"
    process = subprocess.Popen(
        [sys.executable, "-m", "offbeat", *words, "--out", str(out)], stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not (out / "trials" / "0001" / "records.jsonl").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(2)  # until the processes of its trials have found that nobody listens
    resumed = tune(capsys, "tune", "--out", str(out), "--resume", "--jobs", jobs)
    assert [each["number"] for each in resumed["trials"]] == list(range(4))
    assert {(each["state"], each["steps"]) for each in resumed["trials"]} == {("complete", 30)}
    assert sorted(path.name for path in (out / "trials").iterdir()) == [f"{n:04d}" for n in range(4)]
    if jobs == "1":
        whole = tune(capsys, *words, "--out", str(tmp_path / "whole"))
        assert outline(resumed) == outline(whole)


@pytest.mark.slow
def test_a_signal_saves_the_trials_and_several_processes_share_the_work(tmp_path: Path) -> None:
    out = tmp_path / "study"
    words = [*STUDY, "--rounds", "2000", "--trials", "4", "--jobs", "2", "--out", str(out)]
    process = subprocess.Popen([sys.executable, "-m", "offbeat", *words], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not all((out / "trials" / f"000{n}" / "checkpoint").exists() for n in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "--resume" in said
    assert not (out / "trials" / "0003").exists()


def test_the_best_so_far_is_drawn_in_steps() -> None:
    """A better trial counts from its end on, not before."""
    curve = [(1, 10, None), (2, 20, 0.5), (3, 30, 0.5), (4, 40, 0.8)]
    figure = tuning_figure("fedbuff", "accuracy", curve, ("cadence", 50, 0.7))
    assert figure is not None
    tuned, untuned = (list(zip(line.xs, line.ys, strict=True)) for line in figure.lines)
    assert tuned == [(20, 0.5), (30, 0.5), (40, 0.5), (40, 0.8), (50, 0.8)]
    assert untuned == [(50, 0.7), (50, 0.7)]


@pytest.mark.parametrize("kept", [0, 25, -3])
def test_a_line_of_the_journal_that_was_not_written_to_its_end_is_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: int
) -> None:
    """The last one, or even the first: what a trial tries is found again, and its folder has its values."""
    folder = tmp_path / "study"
    whole = tune(capsys, *STUDY, "--trials", "2", "--out", str(folder))
    journal = folder / "journal.log"
    journal.write_bytes(journal.read_bytes()[:kept])
    again = tune(capsys, "tune", "--out", str(folder), "--resume", "--trials", "2")
    assert outline(again) == outline(whole)


def test_values_that_are_not_numbers_can_be_searched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "tune weight-prediction --rounds 2 --trials 2 --sampler grid --baseline none --clients 20"
    found = tune(capsys, *words.split(), "--search", "rule=fedavgm,fedadam", "--out", str(tmp_path / "study"))
    assert [each["parameters"] for each in found["trials"]] == [{"rule": "fedavgm"}, {"rule": "fedadam"}]


def test_the_best_the_cost_and_the_untuned_method_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tune", "fedbuff", *SMALL.split(), "--search", "local_lr=0.001,0.01,0.3", "--sampler", "grid"]
    out = tmp_path / "grid"
    assert main([*words, "--pruner", "none", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "cadence, untuned, has" in said
    assert "after 3 trials and 72 client updates" in said
    found = tune(capsys, "tune", "--out", str(out), "--resume")
    assert [each["parameters"] for each in found["trials"]] == [{"local_lr": x} for x in (0.001, 0.01, 0.3)]
    assert found["best"]["parameters"] == {"local_lr": 0.3}
    assert found["best"]["value"] == max(each["value"] for each in found["trials"])
    assert [each[1] for each in found["curve"]] == [24, 48, 72]
    assert found["baseline"]["algorithm"] == "cadence"
    assert found["baseline"]["client_updates"] >= 24
    assert "tuned" in (out / "cost.svg").read_text()
    assert (out / "cost.csv").read_text().count("\n") > 3
    settings = json.loads((out / "trials" / "0002" / "settings.json").read_text())
    assert settings["parameters"] == {"local_lr": 0.3}


def test_trials_that_diverge_are_counted_and_the_others_win(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tune(
        capsys, *STUDY, "--search", "local_lr=1e38,0.1", "--sampler", "grid", "--out", str(tmp_path / "a")
    )
    assert [each["state"] for each in found["trials"]] == ["diverged", "complete"]
    assert found["best"]["number"] == 1


def test_successive_halving_stops_most_trials_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*STUDY, "--pruner", "halving", "--sampler", "random", "--trials", "8"]
    found = tune(capsys, *words, "--out", str(tmp_path / "a"))
    assert sum(each["state"] == "pruned" for each in found["trials"]) >= 3
    assert found["client_updates"] < found["full_client_updates"]


@pytest.mark.parametrize("higher", [True, False])
def test_only_complete_trials_are_compared_and_all_are_paid_for(tmp_path: Path, higher: bool) -> None:
    """A pruned trial has a value of fewer server steps, and one that was resumed may have cost more."""
    rows = [("complete", 0.5, 100), ("pruned", 0.99 if higher else 0.01, 30), ("complete", 0.4, 90)]
    rows += [("diverged", None, 20), ("pruned", 0.3, 120), ("complete", 0.45, 100)]
    trials = tuple(
        TrialResult(number, {}, state, value, 12, updates, 2.0, "")
        for number, (state, value, updates) in enumerate(rows)
    )
    study = StudyResult(tmp_path, None, "accuracy", higher, trials)  # type: ignore[arg-type]
    assert study.best == trials[0 if higher else 2]
    assert study.client_updates == 460
    assert study.full_client_updates == 5 * 100 + 120
    assert study.seconds == 12.0
    found = [0.5, 0.5, 0.5, 0.5, 0.5, 0.5] if higher else [0.5, 0.5, 0.4, 0.4, 0.4, 0.4]
    spent = [100, 130, 220, 240, 360, 460]
    assert list(study.curve()) == list(zip(range(1, 7), spent, found, strict=True))


def test_a_task_of_ones_own_can_be_tuned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_task.py").write_text(
        """
import torch
from offbeat import ClientData, LearningTask

def make():
    generator = torch.Generator().manual_seed(0)
    def part():
        x = torch.randn(12, 3, generator=generator)
        return x, (x[:, 0] > 0).long()
    data = ClientData.from_dict({f"c{n}": part() for n in range(6)})
    return LearningTask(module=torch.nn.Linear(3, 2), data=data, test=part())

def untested():
    import dataclasses
    return dataclasses.replace(make(), test=None)
"""
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    words = "--task own_task:make --rounds 6 --buffer 2 --concurrency 3 --trials 2 --baseline none"
    found = tune(capsys, "tune", "fedbuff", *words.split(), "--out", str(tmp_path / "a"))
    assert [each["state"] for each in found["trials"]] == ["complete", "complete"]
    more = tune(capsys, "tune", "--resume", "--trials", "3", "--out", str(tmp_path / "a"))
    assert outline(more)[:2] == outline(found)
    capsys.readouterr()
    assert (
        main(["tune", "fedbuff", "--task", "own_task:untested", "--buffer", "2", "--concurrency", "3"]) == 2
    )
    assert "no test data" in capsys.readouterr().err


def test_ranges_are_around_the_defaults_of_the_rates() -> None:
    local, server = search_space("fadas", (), {})
    assert (local.name, local.low, local.high) == ("local_lr", pytest.approx(0.1 / 30), pytest.approx(1.0))
    assert (server.name, server.log) == ("server_lr", True)
    assert server.low < 0.0003 < server.high
    assert [each.name for each in search_space("fadas", (), {"local_lr": 0.1})] == ["server_lr"]
    assert parse_search("fedavgm", ["beta=0:0.9", "averaged=true,false", "local_lr=1e-3:1"]) == [
        SearchRange("beta", 0.0, 0.9),
        SearchRange("averaged", values=(True, False)),
        SearchRange("local_lr", 0.001, 1.0),
    ]


@pytest.mark.parametrize(
    ("algorithm", "texts", "parameters", "sentence"),
    [
        ("cadence", [], {}, "there is nothing to search: cadence has no learning rate"),
        ("fedbuff", [], {"local_lr": 0.1, "server_lr": 1.0}, "there is nothing to search"),
        ("fedbuff", ["local_lr=1:1"], {}, "is empty"),
        ("fedbuff", ["local_lr=1:0.1"], {}, "is empty"),
        ("fedbuff", ["local_lr="], {}, "takes NAME=LOW:HIGH"),
        ("fedbuff", ["local_lr=1:2:3"], {}, "takes NAME=LOW:HIGH"),
        ("fedbuff", ["local_lr"], {}, "takes NAME=LOW:HIGH"),
        ("fedbuff", ["lokal_lr=0.1:1"], {}, "unknown parameter of fedbuff 'lokal_lr'"),
        ("fedbuff", ["local_lr=a:1"], {}, "must be a finite number"),
        ("fedbuff", ["local_lr=-1:1"], {}, "must lie in"),
        ("fedbuff", ["local_lr=0.1:1", "local_lr=0.1,1"], {}, "searched twice"),
        ("fedbuff", ["local_lr=0.1:1"], {"local_lr": 0.3}, "both set and searched"),
        ("fedavgm", ["averaged=false:true"], {}, "takes NAME=LOW:HIGH"),
    ],
)
def test_a_search_that_cannot_be_is_refused_in_a_sentence(
    algorithm: str, texts: list[str], parameters: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        search_space(algorithm, parse_search(algorithm, texts), parameters)


def test_bad_input_is_one_sentence_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def refused(*words: str) -> str:
        capsys.readouterr()
        assert main(["tune", *words]) == 2
        said = capsys.readouterr().err.strip()
        assert said.count("\n") == 0
        return said

    assert "needs the name of a method" in refused()
    assert "there is nothing to search" in refused("cadence")
    assert "unknown sampler" in refused("fedbuff", "--sampler", "x")
    assert "unknown pruner" in refused("fedbuff", "--pruner", "x")
    assert "a grid needs the values" in refused("fedbuff", "--sampler", "grid")
    assert "unknown algorithm" in refused("fedbuff", "--baseline", "x")
    assert "--trials must be at least 1" in refused("fedbuff", "--trials", "0")
    assert "exceeds" in refused("fedbuff", "--clients", "3")
    assert "contains no study" in refused("--resume", "--out", "nowhere")
    assert "--resume needs --out" in refused("--resume")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "optuna", None)
        assert "offbeat[tune]" in refused("fedbuff")
    assert not list(tmp_path.iterdir())
    assert main([*STUDY, "--trials", "1", "--out", "study"]) == 0
    assert "is of fedbuff, not of fedadam" in refused("fedadam", "--resume", "--out", "study")
    assert "another --rounds" in refused("fedbuff", "--resume", "--out", "study", "--rounds", "7")
    assert "another --search" in refused("--resume", "--out", "study", "--search", "local_lr=0.1:0.2")
    searched = refused("--resume", "--out", "study", "--search", "local_lr=0.1:0.2")
    assert "not local_lr=0.1:0.2): leave it out" in searched
    assert "another --set (none, not local_lr=0.3)" in refused(
        "--resume", "--out", "study", "--set", "local_lr=0.3"
    )
    assert "another --seed (0, not 4)" in refused("--resume", "--out", "study", "--seed", "4")
    assert "already contains a study" in refused(*STUDY[1:], "--out", "study")
    assert "--jobs is 1,000,000,000, and each is a process" in refused("fedbuff", "--jobs", "1e9")
    before = sorted(tmp_path.rglob("*"))
    assert main(["run", "fedbuff", "--rounds", "2", "--out", "study"]) == 2
    assert "already contains a study" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
    records = tmp_path / "study" / "trials" / "0000" / "records.jsonl"
    records.rename(tmp_path / "away")
    assert "0000, a trial of the study, has no records" in refused("--resume", "--out", "study")
    (tmp_path / "away").rename(records)
    journal = tmp_path / "study" / "journal.log"
    known = journal.read_bytes()
    journal.write_bytes(known + b"garbage\n")
    assert "journal.log is damaged" in refused("--resume", "--out", "study")
    journal.write_bytes(known)
    (tmp_path / "study" / "study.json").write_text("{}")
    assert "is damaged" in refused("--resume", "--out", "study")


TASK = """
import torch
from offbeat import ClientData, LearningTask

def make():
    generator = torch.Generator().manual_seed(0)
    def part():
        x = torch.randn(12, 3, generator=generator)
        return x, (x[:, 0] > 0).long()
    data = ClientData.from_dict({f"c{n}": part() for n in range(6)})
    return LearningTask(module=torch.nn.Linear(3, 2), data=data, test=part())
"""


def own_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LearningTask:
    (tmp_path / "own_task.py").write_text(TASK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_task", raising=False)
    torch.manual_seed(0)  # as the command does
    task: LearningTask = importlib.import_module("own_task").make()
    return task


def test_a_study_from_python_is_that_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same trials, killed by an interrupt and resumed by either of them."""
    task = own_task(tmp_path, monkeypatch)
    words = "--task own_task:make --rounds 6 --buffer 2 --concurrency 3 --trials 4 --eval-every 2"
    searched = ["--search", "local_lr=0.01:1", "--set", "server_lr=0.5"]
    command = tune(capsys, "tune", "fedbuff", *words.split(), *searched, "--out", str(tmp_path / "a"))
    given: dict[str, Any] = {"rounds": 6, "buffer": 2, "concurrency": 3, "eval_every": 2}
    given |= {"search": {"local_lr": (0.01, 1)}, "parameters": {"server_lr": 0.5}}
    python = offbeat.tune("own_task:make", "fedbuff", **given, trials=4, out=tmp_path / "b")
    assert outline(python.as_dict()) == outline(command)
    assert python.best is not None
    assert python.best.parameters == command["best"]["parameters"]
    assert python.baseline is not None
    assert python.baseline.value == command["baseline"]["value"]
    assert (tmp_path / "b" / "cost.svg").read_bytes() == (tmp_path / "a" / "cost.svg").read_bytes()
    with monkeypatch.context() as patched:
        kill_at(patched, "_finish", 2, after=False)
        with pytest.raises(Killed):
            offbeat.tune("own_task:make", "fedbuff", **given, trials=4, out=tmp_path / "c")
    more = offbeat.tune("own_task:make", "fedbuff", trials=3, out=tmp_path / "c", resume=True)
    assert outline(more.as_dict()) == outline(command)[:3]
    last = tune(capsys, "tune", "--out", str(tmp_path / "c"), "--resume")
    assert outline(last) == outline(command)
    own = offbeat.tune(task, "fedbuff", **given, trials=2, out=tmp_path / "d")
    assert outline(own.as_dict()) == outline(command)[:2]
    assert (
        outline(offbeat.tune(task, "fedbuff", trials=3, out=tmp_path / "d", resume=True).as_dict())
        == (outline(command)[:3])
    )
    assert main(["tune", "--out", str(tmp_path / "d"), "--resume"]) == 2
    assert "started from Python with the task 'task'" in capsys.readouterr().err


def test_bad_input_from_python_is_one_sentence_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = own_task(tmp_path, monkeypatch)
    there = tmp_path / "empty"
    there.mkdir()
    monkeypatch.chdir(there)
    small: dict[str, Any] = {"rounds": 2, "buffer": 2, "concurrency": 3}
    for algorithm, given, sentence in (
        ("fedbuff", {"search": {}}, "search takes a dictionary of at least one hyperparameter of fedbuff"),
        ("fedbuff", {"search": ["local_lr"]}, "search takes a dictionary"),
        ("fedbuff", {"search": {"local_lr": []}}, r"takes a tuple \(low, high\) of two numbers or a list"),
        ("fedbuff", {"search": {"local_lr": 0.1}}, "takes a tuple"),
        ("fedbuff", {"search": {"local_lr": ("a", "b")}}, "takes a tuple"),
        ("fedbuff", {"search": {"local_lr": [[1]]}}, "takes a tuple"),
        ("fedbuff", {"search": {"local_lr": (1, 0.1)}}, "is empty"),
        ("fedbuff", {"search": {"local_lr": (0.1, float("nan"))}}, "is empty"),
        ("fedbuff", {"search": {"local_lr": ["x"]}}, "must be a number"),
        ("fedbuff", {"search": {"lokal_lr": (0.1, 1)}}, "unknown parameter of fedbuff 'lokal_lr'"),
        ("fedbuff", {"search": {"local_lr": (0.1, 1)}, "sampler": "grid"}, "a grid needs the values"),
        ("fedbuff", {"parameters": {"local_lr": 0.1, "server_lr": 1.0}}, "there is nothing to search"),
        ("cadence", {}, "there is nothing to search"),
        ("fedbuff", {"trials": 0}, "trials must be at least 1"),
        ("fedbuff", {"trials": "many"}, "trials must be a whole number"),
        ("fedbuff", {"jobs": 0}, "jobs must be at least 1"),
        ("fedbuff", {"pruner": "x"}, "unknown pruner"),
        ("fedbuff", {"baseline": "x"}, "unknown algorithm"),
        ("fedbuff", {"model": "mlp"}, "brings its own data and model"),
        ("fedbuff", {"resume": True}, "resume needs out"),
        ("fedbuff", {"resume": True, "out": "nowhere"}, "contains no study to resume: leave out resume"),
        ("fedbuff", {"clients": 2}, "exceed|clients"),
    ):
        with pytest.raises(InputError, match=sentence) as raised:
            offbeat.tune(task, algorithm, **small | given)
        assert "\n" not in str(raised.value)
    with pytest.raises(InputError, match=r"tune needs an offbeat\.LearningTask, not a int"):
        offbeat.tune(3, "fedbuff")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="task 'digits' does not name a function"):
        offbeat.tune("digits", "fedbuff")
    with pytest.raises(InputError, match="seed must be a whole number, not 'x'"):
        offbeat.tune("own_task:make", "fedbuff", **small, seed="x")
    with pytest.raises(InputError, match="need a task that is given by its name"):
        offbeat.tune(task, "fedbuff", **small, jobs=2, out=there / "b")
    assert not list(there.iterdir())
    offbeat.tune(task, "fedbuff", **small, trials=1, out=there / "a", baseline="none")
    with pytest.raises(InputError, match="is of the task 'task', not of 'other'"):
        offbeat.tune(replace(task, name="other"), "fedbuff", out=there / "a", resume=True)
    with pytest.raises(InputError, match=r"another rounds \(2, not 3\)"):
        offbeat.tune(task, "fedbuff", rounds=3, out=there / "a", resume=True)


def test_a_resumed_study_loads_its_task_with_its_own_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_task(tmp_path, monkeypatch)  # whose module draws its weights
    small: dict[str, Any] = {"rounds": 2, "buffer": 2, "concurrency": 3, "baseline": "none", "seed": 5}
    whole = offbeat.tune("own_task:make", "fedbuff", **small, trials=2, out=tmp_path / "whole")
    offbeat.tune("own_task:make", "fedbuff", **small, trials=1, out=tmp_path / "parts")
    parts = offbeat.tune("own_task:make", "fedbuff", trials=2, out=tmp_path / "parts", resume=True)
    assert outline(parts.as_dict()) == outline(whole.as_dict())


def test_the_command_resumes_a_study_of_a_method_that_its_task_registers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    registers = """
def make_and_register():
    import offbeat
    offbeat.register("own", lambda *, local_lr=0.1: offbeat.FedOpt(local_lr, 1.0))
    return make()
"""
    (tmp_path / "own_method.py").write_text(TASK + registers)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = "--task own_method:make_and_register --rounds 2 --buffer 2 --concurrency 3 --baseline none"
    out = ["--out", str(tmp_path / "study")]
    monkeypatch.setattr(offbeat.CATALOGUE, "_added", {})
    tune(capsys, "tune", "own", *words.split(), "--trials", "1", *out)
    monkeypatch.setattr(offbeat.CATALOGUE, "_added", {})  # as in a new process
    assert len(tune(capsys, "tune", "--resume", "--trials", "2", *out)["trials"]) == 2


@pytest.mark.slow
def test_trials_that_share_a_ray_cluster_are_those_of_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ray = pytest.importorskip("ray", reason="Ray is an extra, and not installed")
    words = [*STUDY, "--rounds", "4", "--eval-every", "2", "--trials", "2", "--sampler", "random"]
    plain = tune(capsys, *words, "--out", str(tmp_path / "plain"))
    assert ray_cluster.connect(None, 2)
    try:
        cluster = ["--engine", "ray", "--workers", "1", "--jobs", "2", "--ray-address"]
        cluster.append(ray.get_runtime_context().gcs_address)
        shared = tune(capsys, *words, *cluster, "--out", str(tmp_path / "shared"))
    finally:
        ray_cluster.disconnect(ray)
    for ours, theirs in zip(shared["trials"], plain["trials"], strict=True):
        assert ours["parameters"] == theirs["parameters"]
        assert (ours["state"], ours["steps"]) == ("complete", 4)
        assert ours["value"] == pytest.approx(theirs["value"], abs=1e-3)
        settings = json.loads((Path(ours["folder"]) / "settings.json").read_text())
        assert settings["resolved"]["engine"] == "ray"
