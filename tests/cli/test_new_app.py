"""A new app is complete: its task learns by its own settings, and Flower takes it as an app."""

import importlib
import io
import os
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import offbeat
from offbeat.cli.new_app import NewApp, create_app
from offbeat.deploy.config import ServeConfig
from offbeat.deploy.server.setup import set_up
from offbeat.errors import InputError

FILES = {
    "pyproject.toml",
    "serve.toml",
    "README.md",
    ".gitignore",
    *(f"first_try/{name}.py" for name in ("__init__", "task", "server", "client")),
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
    assert torch.equal(task.load("site-5").inputs, parts[2].inputs)
    assert torch.equal(task.load("hospital").inputs, task.load("hospital").inputs)
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
    setting = {"dispatch": stage.dispatch, "weights": stage.weights, "max_staleness": stage.limit}
    setting |= {"buffer": asked.buffer, "rounds": asked.rounds, "seed": asked.seed}
    for shot in offbeat.train(stage.algorithm, engine, **setting):
        if shot.version == 20:
            break
    assert torch.equal(stage.test.inputs, task.test().inputs)
    scores = offbeat.evaluate(stage.problem, shot.x, stage.test, {"accuracy": offbeat.accuracy})
    assert scores["accuracy"] > 0.7  # ten classes: chance is 0.1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Flower imports
def test_flower_takes_it_as_an_app(app: NewApp) -> None:
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate

    config, warnings = load_and_validate(app.folder / "pyproject.toml")
    assert warnings == ['Recommended property "license" missing in [project]']  # the user's to choose
    assert config["tool"]["flwr"]["app"]["config"] == {
        "settings": "serve.toml",
        "folder": "",
        "resume": False,
    }
    for secret in ("keys/sites/a/notes.json", "runs/one/records.jsonl"):
        (app.folder / secret).parent.mkdir(parents=True)
        (app.folder / secret).write_text("{}\n")
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app.folder))) as bundle:
        sent = set(bundle.namelist())
    assert sent == FILES - {".gitignore"} | {".info/CONTENT"}


def test_nothing_is_installed_on_the_way(app: NewApp) -> None:
    """Flower would ask a package index for dependencies and for a build system."""
    project = tomllib.loads((app.folder / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == []
    assert "build-system" not in project


def test_the_site_imports_its_task_late(app: NewApp) -> None:
    """A process is started for each message: torch would cost it seconds."""
    code = (app.folder / "first_try" / "client.py").read_text()
    assert "from offbeat.deploy.flower.client import client_app\n" in code
    assert all(line.startswith("    ") for line in code.splitlines() if "import task" in line)


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
def test_a_name_that_flower_would_not_take_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be the name of an app"):
        create_app(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["json", "lambda", "torch", "offbeat", "flwr", "lib", "parts", "venv"])
def test_a_name_that_is_taken_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"'{name}' has another meaning"):
        create_app(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Flower imports
@given(name=st.from_regex(r"\A[a-zA-Z0-9_-]{0,34}\Z"))
def test_no_name_is_taken_that_flower_refuses(name: str) -> None:
    from flwr.cli.utils import validate_project_name

    try:
        create_app(name, Path("/dev/null"))  # where nothing can be written
    except InputError as error:
        if "cannot be made" in str(error):
            validate_project_name(name, "name")
