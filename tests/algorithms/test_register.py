"""Methods of one's own in the catalogue, and what `offbeat check` finds in them."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import offbeat
from offbeat import CATALOGUE, InputError
from offbeat.algorithms import registry
from offbeat.cli.main import main
from offbeat.core import Batches, Cohort, Gradient, Vector, Visit, sgd
from offbeat.training.method_check import check_method


class State(NamedTuple):
    x: Vector


@dataclass(frozen=True)
class Plain:
    """Local SGD and a plain mean."""

    local_lr: float = 0.1

    def init(self, x: Vector) -> State:
        return State(x)

    def memory(self, x: Vector) -> Any:
        return ()

    def broadcast(self, state: State, version: int) -> Vector:
        return state.x

    def local(
        self, x: Vector, memory: Any, batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Vector, Any]:
        return x - sgd(x, batches, grad, self.local_lr), memory

    def step(self, state: State, mean: Vector, cohort: Cohort) -> State:
        return State(state.x - mean)

    def warmup(self) -> None:
        return None


class InPlace(Plain):
    def step(self, state: State, mean: Vector, cohort: Cohort) -> State:
        return State(state.x.sub_(mean))


class Branches(Plain):
    def local(
        self, x: Vector, memory: Any, batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Vector, Any]:
        moved = x - sgd(x, batches, grad, self.local_lr)
        return (moved if float(moved.norm()) > 0.05 else 2 * moved), memory


class Remembers(Plain):
    seen: list[Vector] = []  # noqa: RUF012

    def step(self, state: State, mean: Vector, cohort: Cohort) -> State:
        if cohort.version == 3:
            return State(state.x - 0.5 * len(self.seen) * mean)
        if cohort.version:
            self.seen.append(mean)
        return State(state.x - mean)


class Draws(Plain):
    def broadcast(self, state: State, version: int) -> Vector:
        return state.x + 0.01 * torch.randn(state.x.shape, dtype=state.x.dtype)


class Explodes(Plain):
    def step(self, state: State, mean: Vector, cohort: Cohort) -> State:
        return State(state.x + torch.inf * mean.abs())


class Stands(Plain):
    def step(self, state: State, mean: Vector, cohort: Cohort) -> State:
        return state


class Remembering(Plain):
    def memory(self, x: Vector) -> Vector:
        return torch.zeros_like(x)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    before = dict(CATALOGUE._added)
    yield
    CATALOGUE._added.clear()
    CATALOGUE._added.update(before)


def problems(method: type, **facts: Any) -> dict[str, str]:
    offbeat.register("mine", method, **facts)
    return {each.check: each.problem for each in check_method("mine") if each.problem is not None}


def test_a_hyperparameter_that_is_an_object_is_recorded_by_its_repr_and_not_taken_as_a_setting(
    tmp_path: Path,
) -> None:
    offbeat.register("mine", offbeat.FedOpt)  # whose momentum is an object
    x = torch.randn(12, 3)
    part = x, (x[:, 0] > 0).long()
    task = offbeat.LearningTask(module=torch.nn.Linear(3, 2), data={"a": part, "b": part})
    settings: dict[str, Any] = {"rounds": 2, "buffer": 2, "concurrency": 2, "local_steps": 1}
    rates: dict[str, Any] = {"local_lr": 0.1, "server_lr": 1.0}
    momentum = offbeat.FedOpt(**rates).momentum
    given = rates | {"momentum": momentum}
    with pytest.raises(InputError, match="the parameter momentum of mine is a value of type Plain, which"):
        offbeat.run(task, "mine", parameters=given, out=tmp_path / "refused", **settings)
    assert not (tmp_path / "refused").exists()
    done = offbeat.run(task, "mine", parameters=rates, out=tmp_path / "run", **settings)
    assert done.finished
    resolved = json.loads((done.folder / "settings.json").read_text())["resolved"]["hyperparameters"]
    assert resolved["local_lr"] == 0.1
    assert resolved["momentum"] == repr(momentum)


def test_a_method_that_keeps_the_contract_passes() -> None:
    assert problems(Plain, dispatch="synchronous") == {}


@pytest.mark.parametrize(
    ("method", "check", "words"),
    [
        (InPlace, "its functions are pure", "`step`"),
        (Draws, "its functions are pure", "`broadcast` gives another result"),
        (Branches, "its local work runs under vmap", "use torch.where in place of branches"),
        (Remembers, "a resumed run gives the same model", "all state has to be in what `init`"),
        (Explodes, "a run with its own protocol stays finite", "NaN or infinite"),
        (Stands, "a run with its own protocol stays finite", "the model does not change"),
        (
            Remembering,
            "it sends and stores what its entry says",
            "cost=offbeat.Cost(down=1, up=1, client=1",
        ),
    ],
)
@pytest.mark.slow
def test_a_method_that_breaks_the_contract_is_found_out(method: type, check: str, words: str) -> None:
    Remembers.seen.clear()
    found = problems(method, dispatch="synchronous")
    assert check in found
    assert words in found[check]
    assert all(text.count("\n") == 0 and text.endswith(".") for text in found.values())


@pytest.mark.slow
def test_the_command_lists_what_fails(capsys: pytest.CaptureFixture[str]) -> None:
    offbeat.register("mine", Stands)
    assert main(["check", "mine"]) == 1
    shown = capsys.readouterr().out
    assert "ok      builds with its default parameters" in shown
    assert "FAILED  a run with its own protocol stays finite" in shown
    assert main(["check", "mine", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == "mine"
    assert [each["problem"] is None for each in found["checks"]].count(False) == 1
    assert main(["check", "minee"]) == 2
    assert "unknown algorithm 'minee': did you mean mine" in capsys.readouterr().err


def test_a_registered_method_is_used_by_name() -> None:
    offbeat.register("mine", Plain, summary="a mean", cost=offbeat.Cost())
    entry = CATALOGUE["mine"]
    assert (entry.summary, entry.dispatch) == ("a mean", "asynchronous")
    assert entry.parameters()["local_lr"].default == 0.1
    assert offbeat.build("mine", offbeat.Setting(1, 1, 1), {"local_lr": 0.5}) == Plain(0.5)
    assert "mine" in list(CATALOGUE)
    offbeat.register("mine", Plain)  # again, as when a module is loaded twice


@pytest.mark.parametrize(
    ("name", "method", "facts", "sentence"),
    [
        ("fedavg", Plain, {}, "there is a method 'fedavg' already: choose another name."),
        ("fedavg-m", Plain, {}, "belonged to 'fedcm': choose another name."),
        ("My Method", Plain, {}, "a method cannot be called 'My Method'"),
        ("mine", Plain(), {}, "register the class, not an instance of it."),
        ("mine", Plain, {"protocol": "x"}, "unknown fact about the method mine 'protocol'"),
    ],
)
def test_a_registration_that_cannot_work_is_one_sentence(
    name: str, method: Any, facts: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError) as caught:
        offbeat.register(name, method, **facts)
    assert sentence in str(caught.value)


def test_two_methods_of_one_name_are_refused() -> None:
    offbeat.register("mine", Plain)
    with pytest.raises(InputError, match="there is a method 'mine' already"):
        offbeat.register("mine", Stands)


def test_a_package_that_cannot_be_loaded_is_worth_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    points = [
        EntryPoint("broken", "no_such_package:Method", "offbeat.algorithms"),
        EntryPoint("fedavg", "no_such_package:Other", "offbeat.algorithms"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    monkeypatch.setattr(CATALOGUE, "_plugins", None)
    with caplog.at_level(logging.WARNING):
        assert "broken" not in list(CATALOGUE)
    assert "the method 'broken' (no_such_package:Method) cannot be loaded" in caplog.text
    assert "defines a method 'fedavg', a name that cannot be used" in caplog.text
    monkeypatch.setattr(CATALOGUE, "_plugins", {})
