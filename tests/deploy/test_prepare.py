"""Sites agree on the scales of features before training, in the clear or by secure sums."""

import itertools
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_server_run import AtOnce, ask, serve
from torch import nn

from offbeat import Examples, InputError, Population, Problem, Steps, trees
from offbeat.cli.main import main
from offbeat.deploy.config import ServeConfig
from offbeat.deploy.server.run import STOP_FILE, ServeOutcome
from offbeat.deploy.site.site import Site
from offbeat.nn.problem import cross_entropies
from offbeat.training.standardise import measure_scaling
from secure_world import KEY, TOKEN, new_desk, served

TASK = """
import torch
from offbeat import Examples, LearningTask

def module():
    return torch.nn.Linear(3, 2)

def task():
    return LearningTask(module=module, data=data, test=test)

def untested():
    return LearningTask(module=module, data=data)

def data(name):
    draws = torch.Generator().manual_seed(sum(map(ord, name)))
    inputs = torch.rand(10 + len(name), 3, generator=draws) * torch.tensor([150.0, 1e6, 0.0])
    inputs = inputs + torch.tensor([0.0, 1e6, 2.0])
    return Examples(inputs, (inputs[:, 0] > 75).long())

def test():
    return data("test")
"""
SETTINGS = """
[task]
function = "wide_task:task"
[prepare]
standardise = true
[training]
algorithm = "fedbuff"
weights = "constant"
clients = 3
buffer = 2
rounds = 4
local_steps = 2
batch_size = 4
"""
NAMES = ("one", "three", "seven")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    (tmp_path / "wide_task.py").write_text(TASK)
    (tmp_path / "serve.toml").write_text(SETTINGS)
    sys.modules.pop("wide_task", None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(name: str) -> Examples:
    import wide_task

    examples: Examples = wide_task.data(name)
    return examples


@pytest.fixture
def sites(home: Path) -> Iterator[dict[int, Site]]:
    with ExitStack() as stack:
        yield {n: stack.enter_context(closing(new_site(home, name))) for n, name in enumerate(NAMES, 11)}


def new_site(home: Path, name: str, **more: Any) -> Site:
    return Site(name, home / name, load, lambda: nn.Linear(3, 2), **more)


def pooled(names: tuple[str, ...] = NAMES) -> torch.Tensor:
    return torch.cat([load(name).inputs for name in names]).double()


def resolved(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "settings.json").read_text())["resolved"]["standardise"]
    return found


def check_model(folder: Path, names: tuple[str, ...] = NAMES) -> None:
    model, data = load_file(folder / "model.safetensors"), pooled(names)
    assert torch.allclose(model["standardise.mean"], data.mean(0), rtol=1e-9)
    expected = torch.where(data.amax(0) > data.amin(0), data.std(0, correction=0), 1.0)
    assert torch.allclose(model["standardise.scale"], expected, rtol=1e-9)
    assert model["module.weight"].shape == (2, 3)


def test_deployed_statistics_are_the_simulated_ones_to_the_bit(home: Path, sites: dict[int, Site]) -> None:
    folder = home / "run"
    assert serve(ask(home / "serve.toml", folder), lambda limit: AtOnce(sites)) == ServeOutcome(4)
    check_model(folder)
    examples = [load(name) for name in NAMES]
    ends = np.cumsum([0, *(each.total for each in examples)])
    parts = [np.arange(*pair) for pair in itertools.pairwise(ends)]
    together: Examples = trees.map(lambda *leaves: torch.cat(leaves), *examples)
    problem = Problem(nn.Linear(3, 2), cross_entropies)
    simulated = measure_scaling(problem, Population(together, parts, Steps(1, 1)))
    assert resolved(folder) == simulated.as_json()
    assert simulated.classes is not None
    assert sum(simulated.classes) == simulated.examples == len(pooled())
    assert not (folder / "prepare").exists()


def test_a_replay_has_the_same_model_to_the_bit(
    home: Path, sites: dict[int, Site], capsys: pytest.CaptureFixture[str]
) -> None:
    serve(ask(home / "serve.toml", home / "run"), lambda limit: AtOnce(sites))
    assert main(["replay", "run", "--task", "wide_task:task", "--compare", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["difference"] == 0.0


def test_secure_sums_give_the_same_statistics_to_the_bit(home: Path, sites: dict[int, Site]) -> None:
    serve(ask(home / "serve.toml", home / "plain"), lambda limit: AtOnce(sites))
    for site in sites.values():
        site.close()
    (home / "helper.token").write_text(TOKEN)
    (home / "helper.pub").write_text(KEY.public_key().public_bytes_raw().hex())
    trust = {"helper_key": home / "helper.pub", "minimum": 2}
    with served(new_desk(home / "store")) as url, ExitStack() as stack:
        secure = {
            n: stack.enter_context(closing(new_site(home, f"{name}", **trust)))
            for n, name in enumerate(NAMES, 11)
        }
        text = f'[secure]\nhelper = "{url}"\ntoken = "helper.token"\nminimum = 2\nsigned = false\n'
        (home / "serve.toml").write_text(SETTINGS + text)
        outcome = serve(ask(home / "serve.toml", home / "run"), lambda limit: AtOnce(secure))
    assert outcome == ServeOutcome(4)
    assert resolved(home / "run") == resolved(home / "plain")
    check_model(home / "run")


@pytest.mark.parametrize("tasks", [2, 6])
def test_a_run_that_was_stopped_continues_with_the_same_scales(
    home: Path, sites: dict[int, Site], tasks: int
) -> None:
    """Stopped among the preparation's three tasks, and after them."""
    folder = home / "run"

    def stop(count: int) -> None:
        if count >= tasks:
            (folder / STOP_FILE).touch()

    waiting = {11: sites[11], 12: sites[12]} if tasks == 2 else sites
    first = serve(ask(home / "serve.toml", folder), lambda limit: AtOnce(waiting, stop))
    assert first.stopped
    assert (folder / "settings.json").exists() == (tasks == 6)
    post = AtOnce(sites)
    again = serve(ask(home / "serve.toml", folder, resume=tasks == 6), lambda limit: post)
    assert again == ServeOutcome(4)
    check_model(folder)
    if tasks == 2:
        assert post.tasks == 1 + post_training_tasks(folder)


def post_training_tasks(folder: Path) -> int:
    """The tasks of training that were sent."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return sum(each["event"] == "sent" for each in events)


def test_a_site_that_joins_later_uses_the_stored_statistics(home: Path, sites: dict[int, Site]) -> None:
    (home / "serve.toml").write_text(SETTINGS.replace("standardise = true", "standardise = true\nsites = 2"))
    present = {11: sites[11], 12: sites[12]}

    def late(count: int) -> None:
        if count >= 2:  # the sites of the preparation have their tasks
            present[13] = sites[13]

    outcome = serve(ask(home / "serve.toml", home / "run"), lambda limit: AtOnce(present, late))
    assert outcome == ServeOutcome(4)
    check_model(home / "run", NAMES[:2])
    roster = json.loads((home / "run" / "roster.json").read_text())
    assert roster["2"]["name"] == "seven"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("standardise = true", "sites = 2"), "has no standardise = true"),
        (("standardise = true", "standardise = true\nsites = 4"), "at most the 3 clients"),
        (("standardise = true", "standardise = 1"), "must be true or false"),
        (("standardise = true", "standardize = true"), "standardise"),
    ],
)
def test_a_bad_table_is_one_sentence(home: Path, change: tuple[str, str], sentence: str) -> None:
    (home / "serve.toml").write_text(SETTINGS.replace(*change))
    with pytest.raises(InputError, match=sentence):
        ServeConfig.read(home / "serve.toml")


def test_privacy_refuses_it(home: Path) -> None:
    private = "[privacy]\nclip = 1.0\nnoise = 1.0\ndelta = 1e-3\nmax_participations = 3\n"
    (home / "serve.toml").write_text(SETTINGS + private)
    with pytest.raises(InputError, match="without noise"):
        ServeConfig.read(home / "serve.toml")


def test_without_test_examples_the_number_of_features_is_asked_for(
    home: Path, sites: dict[int, Site]
) -> None:
    text = SETTINGS.replace("wide_task:task", "wide_task:untested")
    (home / "serve.toml").write_text(text)
    outcome = serve(ask(home / "serve.toml", home / "run"), lambda limit: AtOnce(sites))
    assert outcome.error is not None
    assert "how many features" in outcome.error
    (home / "serve.toml").write_text(text.replace("standardise = true", "standardise = true\nfeatures = 3"))
    assert serve(ask(home / "serve.toml", home / "next"), lambda limit: AtOnce(sites)) == ServeOutcome(4)
    check_model(home / "next")


def test_a_site_whose_features_differ_says_so(home: Path, sites: dict[int, Site]) -> None:
    folder = home / "run"

    def stop(count: int) -> None:
        if count >= 3:
            (folder / STOP_FILE).touch()

    (home / "serve.toml").write_text(
        SETTINGS.replace("standardise = true", "standardise = true\nfeatures = 5")
    )
    assert serve(ask(home / "serve.toml", folder), lambda limit: AtOnce(sites, stop)).stopped
    assert "the examples have 3 features, and 5 are asked for" in (folder / "events.jsonl").read_text()


def test_a_site_says_in_its_own_terminal_that_features_are_unscaled(
    home: Path, sites: dict[int, Site], caplog: pytest.LogCaptureFixture
) -> None:
    def said(text: str) -> int:
        caplog.clear()
        (home / "serve.toml").write_text(text)
        folder = home / f"run{len(text)}"
        with caplog.at_level(logging.WARNING, "offbeat"):
            assert serve(ask(home / "serve.toml", folder), lambda limit: AtOnce(sites)) == ServeOutcome(4)
        assert "unit scale" not in (folder / "events.jsonl").read_text()
        return sum("far from unit scale" in record.message for record in caplog.records)

    assert said(SETTINGS) == 0
    assert said(SETTINGS.replace("[prepare]\nstandardise = true\n", "")) == len(NAMES)
