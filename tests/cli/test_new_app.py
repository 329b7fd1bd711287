"""A new app is complete: its task learns by its own settings."""

import configparser
import importlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import offbeat
from offbeat.cli.main import parser
from offbeat.cli.new_app import NewApp, create_app
from offbeat.deploy.config import ServeConfig
from offbeat.deploy.server.setup import set_up
from offbeat.errors import InputError

FILES = {
    "serve.toml",
    "README.md",
    ".gitignore",
    *(f"first_try/{name}.py" for name in ("__init__", "task")),
}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> NewApp:
    return create_app("first-try", tmp_path_factory.mktemp("apps"))


@pytest.fixture
def task(app: NewApp, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(app.folder)
    yield importlib.import_module(f"{app.package}.task")
    for name in [name for name in sys.modules if name.partition(".")[0] == app.package]:
        del sys.modules[name]


def test_an_app_has_all_its_files_and_nothing_is_left_open(app: NewApp) -> None:
    assert set(app.files) == FILES
    assert {str(path.relative_to(app.folder)) for path in app.folder.rglob("*") if path.is_file()} >= FILES
    for name in FILES:
        assert "$" not in (app.folder / name).read_text().replace(r'r"\d+$"', "")
    assert os.access(app.folder / "first_try", os.X_OK)
    assert app.folder.stat().st_mode & 0o777 == 0o755


def test_sites_have_parts_of_the_data_that_do_not_overlap(task: ModuleType) -> None:
    source = offbeat.load("digits")
    parts = [task.load(f"site-{number}") for number in range(3)]
    assert sum(len(part.targets) for part in parts) == len(source.train.targets)
    rows = torch.cat([part.inputs for part in parts]).numpy()
    assert {row.tobytes() for row in rows} == {row.tobytes() for row in source.train.inputs.numpy()}
    assert min(len(part.targets.unique()) for part in parts) == 10
    made = task.task()
    assert made.client_names == ("site-0", "site-1", "site-2")
    assert torch.equal(made.site_examples("site-2").inputs, parts[2].inputs)
    with pytest.raises(offbeat.InputError, match="unknown client 'site-5'"):
        made.site_examples("site-5")
    assert torch.equal(task.test().inputs, source.test.inputs)


def test_the_task_learns_in_the_simulator_by_its_own_settings(app: NewApp, task: ModuleType) -> None:
    stage = set_up(ServeConfig.read(app.folder / "serve.toml"))
    asked = stage.experiment
    parts = [task.load(f"site-{number}") for number in range(asked.clients)]
    ends = np.cumsum([0, *(len(part.targets) for part in parts)])
    clients = offbeat.Population(
        offbeat.Examples(*(torch.cat(leaves) for leaves in zip(*parts, strict=True))),
        [np.arange(start, end) for start, end in pairwise(ends)],
        offbeat.Steps(asked.local_steps, asked.batch_size),
    )
    engine = offbeat.Sequential(stage.problem, clients, delays=offbeat.HalfNormal(1.0))
    setting = {"dispatch": stage.dispatch, "weights": stage.weights, "max_staleness": stage.max_staleness}
    setting |= {"buffer": asked.buffer, "rounds": asked.rounds, "seed": asked.seed}
    for shot in offbeat.train(stage.algorithm, engine, **setting):
        if shot.version == 20:
            break
    assert torch.equal(stage.test.inputs, task.test().inputs)
    scores = offbeat.evaluate(stage.problem, shot.x, stage.test, {"accuracy": offbeat.accuracy})
    assert scores["accuracy"] > 0.7  # ten classes: chance is 0.1


def test_the_commands_that_are_told_are_those_of_the_readme(app: NewApp) -> None:
    readme = (app.folder / "README.md").read_text()
    assert all(command in readme for command in app.commands[:2])


def test_an_app_is_written_once(tmp_path: Path) -> None:
    place = create_app("second-try", tmp_path).folder / "serve.toml"
    place.write_text("mine")
    with pytest.raises(InputError, match="already exists"):
        create_app("second-try", tmp_path)
    assert place.read_text() == "mine"


@pytest.mark.parametrize(
    "name", ["", "Big", "a_b", "a--b", "-a", "a-", "1a", "a.b", "a/b", "é", "a\n", "a" * 33]
)
def test_a_name_that_is_not_plain_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be the name of an app"):
        create_app(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["json", "lambda", "torch", "offbeat", "flwr", "lib", "venv"])
def test_a_name_that_is_taken_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"'{name}' has another meaning"):
        create_app(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


UNITS = ("offbeat-serve", "offbeat-join", "offbeat-helper")


def test_units_and_a_container_file_are_written_on_request(tmp_path: Path) -> None:
    app = create_app("first-try", tmp_path, service=True)
    assert set(app.files) == FILES | {f"service/{name}.service" for name in UNITS} | {"service/Containerfile"}
    container = (app.folder / "service" / "Containerfile").read_text()
    assert "COPY --chown=offbeat first_try ./first_try" in container


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_starts_a_command_with_options_that_exist(tmp_path: Path, name: str) -> None:
    app = create_app("first-try", tmp_path, service=True)
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(app.folder / "service" / f"{name}.service")
    command = unit["Service"]["ExecStart"]
    words = shlex.split(command)
    if words[0] == "/bin/sh":
        assert "$$resume" in words[2]  # systemd passes one dollar on to the shell
        script = words[2].replace("$$", "$")
        assert subprocess.run(["/bin/sh", "-n", "-c", script], check=False).returncode == 0
        words = script.partition("exec ")[2].removesuffix(" $resume").split()
    assert words[0].endswith("venv/bin/offbeat")
    given = parser().parse_args(words[1:])
    assert given.command == words[1]
    writable = unit["Service"]["ReadWritePaths"].removeprefix("/srv/first-try/")
    assert any(word.startswith(writable) for word in words)


def test_a_unit_resumes_a_run_that_was_begun(tmp_path: Path) -> None:
    app = create_app("first-try", tmp_path, service=True)
    (line,) = [
        line.removeprefix("ExecStart=")
        for line in (app.folder / "service" / "offbeat-serve.service").read_text().splitlines()
        if line.startswith("ExecStart=")
    ]
    script = shlex.split(line)[2].replace("$$", "$").replace("exec venv/bin/offbeat", "echo")

    def started() -> str:
        return subprocess.run(
            ["/bin/sh", "-c", script], cwd=app.folder, capture_output=True, text=True, check=True
        ).stdout

    assert "--resume" not in started()
    (app.folder / "runs" / "first-try").mkdir(parents=True)
    (app.folder / "runs" / "first-try" / "settings.json").touch()
    assert started().endswith("--resume\n")
