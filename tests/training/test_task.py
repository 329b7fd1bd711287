"""A learning task as a value, trained from Python and from the command line alike."""

import json
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offbeat
from offbeat import Examples, InputError, LearningTask
from offbeat.cli.main import main
from offbeat.training.evaluate import evaluate
from offbeat.training.experiment import Experiment
from offbeat.training.folder import read_jsonl
from offbeat.training.runner import run_experiment
from offbeat.training.task import load_task

HOSPITALS = tuple(f"hospital-{number}" for number in range(6))
QUICK: dict[str, Any] = {"rounds": 6, "local_steps": 2, "batch_size": 8, "eval_every": 2}
MODULE = """
import dataclasses, torch, offbeat
from torch import nn

def examples(size, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 5, generator=generator)
    return inputs, (inputs.sum(1) > 0).long()

def task():
    data = {f"hospital-{number}": examples(20 + number, number) for number in range(6)}
    return offbeat.LearningTask(module=lambda: nn.Linear(5, 2), data=data, test=examples(50, 9), name="ward")

class Gate(nn.Linear):
    def forward(self, inputs):
        raise KeyError("gate")

def narrow():
    return dataclasses.replace(task(), module=lambda: nn.Linear(4, 2))

def gated():
    return dataclasses.replace(task(), module=lambda: Gate(5, 2))

def number():
    return 3

def broken():
    return {}["hospital"]
"""


def examples(size: int, seed: int) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 5, generator=generator)
    return Examples(inputs, (inputs.sum(1) > 0).long())


def make(**changed: Any) -> LearningTask:
    data = {name: examples(20 + number, number) for number, name in enumerate(HOSPITALS)}
    given = {"module": lambda: nn.Linear(5, 2), "data": data, "test": examples(50, 9), "name": "ward"}
    return LearningTask(**given | changed)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"ward_{tmp_path.name.replace('-', '_')}"  # modules stay imported, so each test has its own
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.setenv("WARD", name)
    return tmp_path


def ward(function: str = "task") -> str:
    return f"{os.environ['WARD']}:{function}"


def without_elapsed(folder: Path) -> list[dict[str, Any]]:
    return [{**record, "elapsed": 0} for record in read_jsonl(folder, "records")]


def test_python_and_the_command_line_give_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    result = offbeat.run(make(), "fedbuff", out="python", **QUICK)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in QUICK.items()]
    assert main(["run", "fedbuff", "--task", ward(), "--out", "shell", *words]) == 0
    assert without_elapsed(Path("python")) == without_elapsed(Path("shell"))
    one, other = (json.loads(Path(run, "settings.json").read_text()) for run in ("python", "shell"))
    assert {name for name in one if one[name] != other[name]} == {"task", "checksum"}
    assert (one["task"], other["task"]) == ("ward", ward())
    assert one["client_names"] == list(HOSPITALS)
    assert one["metrics"] == {"accuracy": "max", "loss": "min"}
    assert result.finished
    assert [record["version"] for record in result.records] == [0, 2, 4, 6]
    assert "fedbuff on task: 6 clients" in capsys.readouterr().out


def test_the_trained_module_has_the_recorded_loss() -> None:
    task = make()
    result = offbeat.run(task, "scaffold", out="run", **QUICK)
    module, test = result.module(), task.test_data()
    assert isinstance(test, Examples)
    loss = nn.functional.cross_entropy(module(test.inputs), test.targets)
    assert loss.item() == pytest.approx(result.records[-1]["loss"], rel=1e-6)
    assert result.best == max(record["accuracy"] for record in result.records)


def test_clients_of_a_task_set_the_defaults_of_a_run() -> None:
    made = make()
    experiment = Experiment.of(task="ward", **made.defaults("fedbuff") | {"algorithm": "fedbuff"})
    assert (experiment.clients, experiment.buffer, experiment.concurrency) == (6, 3, 6)
    assert (experiment.data, experiment.model, experiment.partition) == (None, None, "task")
    assert "buffer" not in made.defaults("fedasync")  # which steps on every update


@pytest.mark.usefixtures("interruptible")
def test_a_run_is_resumed_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = offbeat.run(make(), "fedbuff", out="whole", **QUICK)

    def interrupted(*given: Any, **options: Any) -> Any:
        for step in run_experiment(*given, **options):
            yield step
            if step.version == 2:
                os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("offbeat.api.run_experiment", interrupted)
        with pytest.raises(KeyboardInterrupt, match="version 3 is saved in part; resume it with resume=True"):
            offbeat.run(make(), "fedbuff", out="part", **QUICK)
    again = offbeat.run(make(), out="part", resume=True)
    assert again.finished
    assert without_elapsed(Path("part")) == without_elapsed(Path("whole"))
    assert again.records[-1]["loss"] == whole.records[-1]["loss"]
    longer = offbeat.run(make(), out="part", resume=True, rounds=8)
    assert longer.version == 8


def test_a_run_from_python_is_resumed_from_python(capsys: pytest.CaptureFixture[str]) -> None:
    offbeat.run(make(), "fedbuff", out="run", **QUICK)
    assert main(["run", "--resume", "--out", "run", "--rounds", "9"]) == 2
    assert (
        "was started from Python with the task 'ward': resume it with offbeat.run" in capsys.readouterr().err
    )
    other = make(data={"elsewhere": examples(20, 0), "here": examples(20, 1)})
    with pytest.raises(InputError, match="was started with other clients than the task has now"):
        offbeat.run(other, out="run", resume=True, rounds=9)


def test_a_run_from_the_shell_is_resumed_from_either(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--local-steps", "2", "--batch-size", "8"]
    assert main(["run", "fedbuff", "--task", ward(), "--rounds", "2", "--out", "run", *words]) == 0
    assert main(["run", "--resume", "--out", "run", "--rounds", "4"]) == 0
    assert offbeat.run(make(), out="run", resume=True, rounds=6).version == 6
    assert main(["replay", "run", "--compare"]) == 0


def test_methods_are_compared_on_a_task(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rounds", "4", "--local-steps", "2", "--batch-size", "8", "--json"]
    assert main(["compare", "fedavg", "fedasync", "--task", ward(), *words]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["metric"] == "accuracy"
    assert {name: each[-1]["client_updates"] for name, each in found["records"].items()} == {
        "fedavg": 12,
        "fedasync": 12,
    }


def mean_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.squeeze(1) - targets).abs()


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.squeeze(1) - targets) ** 2


def test_a_metric_that_is_to_fall_is_best_where_it_is_least() -> None:
    each = {name: make().site_examples(name).inputs for name in HOSPITALS}
    numbers = {name: (inputs, inputs.sum(1)) for name, inputs in each.items()}
    task = make(
        module=lambda: nn.Linear(5, 1),
        data=numbers,
        test=(examples(50, 9).inputs, examples(50, 9).inputs.sum(1)),
        loss=squares,
        metrics={"error": mean_error},
        lower_is_better=["error"],
    )
    result = offbeat.run(task, "fedbuff", out="run", parameters={"local_lr": 0.05}, **QUICK)
    assert result.metric == "error"
    assert result.best == min(record["error"] for record in result.records)
    assert "accuracy" not in result.records[-1]


def test_without_metrics_a_loss_of_ones_own_is_all_there_is() -> None:
    assert make(loss=squares).goals == {"loss": "min"}
    assert make().goals == {"accuracy": "max", "loss": "min"}


def test_test_data_by_client_are_evaluated_for_each_client() -> None:
    own = {name: examples(10 + number, 50 + number) for number, name in enumerate(HOSPITALS)}
    task = make(test=own)
    result = offbeat.run(task, "fedbuff", out="run", **QUICK)
    kept = json.loads(Path("run/clients.json").read_text())
    assert kept["version"] == 6
    values = kept["clients"]["accuracy"]
    assert list(values) == list(HOSPITALS)
    problem = offbeat.Problem(result.module(), nn.functional.cross_entropy)
    x, _ = problem.initial()
    for name, test in own.items():
        expected = evaluate(problem, x, test, {"accuracy": offbeat.accuracy})["accuracy"]
        assert values[name] == expected
    last = result.records[-1]
    assert last["accuracy_mean"] == pytest.approx(sum(values.values()) / 6)
    assert last["accuracy_worst_tenth"] == min(values.values())


def test_a_metric_that_is_not_defined_is_null_and_training_goes_on() -> None:
    def undefined(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return math.nan

    result = offbeat.run(make(metrics={"auc": undefined}), "fedbuff", out="run", **QUICK)
    assert result.records[-1]["auc"] is None
    assert result.finished
    assert result.best is None


def test_weights_follow_from_the_seed_unless_the_module_is_given() -> None:
    task = make()
    assert torch.equal(task.make_module(1).weight, task.make_module(1).weight)
    assert not torch.equal(task.make_module(1).weight, task.make_module(2).weight)
    given = nn.Linear(5, 2)
    before = given.weight.detach().clone()
    assert make(module=given).make_module(3) is given
    offbeat.run(make(module=given), "fedbuff", out="run", **QUICK)
    assert torch.equal(given.weight, before)


def test_data_that_are_not_divided_are_given_to_clients_by_a_partition() -> None:
    task = make(data=examples(200, 0), partition="iid", delays=offbeat.Constant(2.0))
    result = offbeat.run(task, "fedavg", out="run", clients=8, buffer=4, **QUICK)
    assert (result.experiment.partition, result.experiment.delays) == ("iid", "task")
    assert result.records[-1]["time"] == 12.0  # six rounds of two seconds
    again = offbeat.run(task, "fedavg", out="more", clients=8, buffer=4, partition="shards", **QUICK)
    assert again.experiment.partition == "shards"


def test_a_data_set_with_a_name_is_a_task_as_well() -> None:
    task = LearningTask(module=lambda: nn.Linear(64, 10), data=offbeat.load("digits"), name="digits")
    result = offbeat.run(task, "fedbuff", out="run", clients=10, buffer=4, concurrency=5, **QUICK)
    assert 0 < result.records[-1]["accuracy"] < 1


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"module": 3}, "the module of a task must be a torch.nn.Module or a function that makes one"),
        ({"loss": "cross"}, "the loss of a task must be a function, not a value of type str"),
        ({"metrics": [offbeat.accuracy]}, "must be a dictionary of functions by name"),
        ({"metrics": {"auc": 0.5}}, "the metric auc of a task must be a function"),
        ({"metrics": {"time": offbeat.accuracy}}, "a metric cannot be called time"),
        ({"lower_is_better": ["errors"]}, "lower_is_better must list names of the metrics"),
        ({"lower_is_better": "loss"}, "lower_is_better must list names of the metrics"),
        ({"name": "my task"}, "a task cannot be called 'my task'"),
        ({"partition": "dirichlet"}, "dirichlet"),
        ({"delays": "tier"}, "did you mean tiers"),
    ],
)
def test_a_task_that_makes_no_sense_is_refused_in_one_sentence(
    changed: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError) as caught:
        make(**changed)
    assert sentence in str(caught.value)
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"round": 3}, "unknown setting 'round': did you mean rounds"),
        ({"rounds": "3"}, "rounds must be a whole number, not '3'."),
        ({"limit": 3}, "limit is now called max_staleness."),
        ({"data": "mnist"}, "the task brings its own data and model: leave out data."),
        ({"clients": 4}, "the task has 6 clients, not 4: leave out clients."),
        ({"parameters": {"lr": 1}}, "unknown parameter of fedbuff 'lr'"),
        ({"save_every": 0}, "save_every must be at least 1, not 0."),
        ({"resume": True}, "resume needs out, the folder of the run to resume."),
        ({"resume": True, "out": "nowhere"}, "nowhere contains no run to resume"),
        ({"augment": "crop-flip"}, "augment is for named data sets"),
        ({"delays": "task"}, "the task has no delays of its own"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        offbeat.run(make(), "fedbuff", **given)
    assert sentence in str(caught.value)
    assert not Path("runs").exists()


def test_what_is_not_a_task_or_a_method_is_refused() -> None:
    with pytest.raises(InputError, match=r"run needs an offbeat\.LearningTask, not a dict"):
        offbeat.run({}, "fedbuff")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"register it with offbeat\.register"):
        offbeat.run(make(), offbeat.FedAsync(0.1))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the names of the clients are not known"):
        offbeat.run(make(data=lambda name: examples(9, 0)), "fedbuff")
    with pytest.raises(InputError, match=r"hospital-2.* no examples"):
        offbeat.run(make(data={"hospital-1": examples(9, 0), "hospital-2": examples(0, 0)}), "fedavg")


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("number", "returned a value of type int: return an offbeat.LearningTask."),
        ("broken", "failed: KeyError: 'hospital' ("),
        ("nothing", "has no 'nothing'; define it, or name another function."),
    ],
)
def test_a_function_that_gives_no_task_is_refused_in_one_sentence(
    function: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--task", ward(function)]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.startswith(f"offbeat: --task '{ward(function)}' ")
    assert said.count("\n") == 1
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--task", "ward"], "--task 'ward' does not name a function: write package.module:function."),
        (["--task", "no_such_ward:task"], "there is no module 'no_such_ward' for --task"),
        (["--task", "{}", "--data", "mnist"], "--task brings its own data and model: leave out --data."),
        (["--task", "{}", "--clients", "9"], "the task has 6 clients, not 9: leave out --clients."),
    ],
)
def test_a_task_of_the_command_line_that_cannot_work_is_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *(word.format(ward()) for word in words)]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("narrow", r"RuntimeError: mat1 and mat2 shapes cannot be multiplied \(20x5 and 4x2\)\."),
        ("gated", r"KeyError: 'gate' \(ward_.*\.py, line \d+\)\."),
    ],
)
@pytest.mark.parametrize("more", ["", "--execution mapped-compiled", "--engine sequential"])
def test_a_module_that_fails_is_refused_in_one_sentence_before_anything_is_written(
    function: str, sentence: str, more: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--task", ward(function), *more.split()]) == 2
    start = "offbeat: the module or its loss fails on a minibatch of the data: "
    assert re.fullmatch(f"{start}{sentence}\n", capsys.readouterr().err)
    assert not Path("runs").exists()


def test_a_function_is_called_with_torch_seeded() -> None:
    first, second, other = (load_task(ward(), seed).make_module(seed) for seed in (1, 1, 2))
    assert torch.equal(first.weight, second.weight)
    assert not torch.equal(first.weight, other.weight)
