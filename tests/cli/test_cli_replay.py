"""`offbeat replay`: of simulated runs, and of sites and a server with a post in one process between them."""

import json
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offbeat import draws
from offbeat.cli import main
from offbeat.deploy.config import load_examples
from offbeat.deploy.protocol.transport import Reply
from offbeat.deploy.server.run import ServeRequest, serve
from offbeat.deploy.site.site import Site
from offbeat.training import checkpoint
from oracle_replay import Settings, oracle_replay

SMALL = "--clients 12 --buffer 3 --concurrency 5 --local-steps 2 --batch-size 4 --rounds 8"
SMALL += " --max-staleness 2 --dropout 0.2"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Each test has a folder of its own to run in, and what it imports from there is forgotten."""
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("local_"):
            del sys.modules[name]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def replayed(text: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["replay", "--json", *shlex.split(text)])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("method", ["adamasfl", "ma-fedadam --set span=4"])
def test_a_simulated_run_is_replayed_bit_for_bit(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *shlex.split(f"{method} {SMALL} --engine sequential --out run --json")]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])["last"]
    before = files(Path("run"))
    code, found = replayed("run --compare", capsys)
    assert code == 0
    assert found["difference"] == found["largest"] == 0
    assert found["same"] is True
    assert (found["version"], found["engine"]) == (8, "sequential")
    assert found["accuracy"] == record["accuracy"]
    code, other = replayed("run/trace.jsonl --compare --engine vectorised", capsys)
    assert code == 0
    assert other["engine"] == "vectorised"
    assert other["difference"] < 1e-5
    assert files(Path("run")) == before


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "run"
    assert main(["run", *shlex.split(f"fedbuff {SMALL} --out {folder}")]) == 0
    return folder


@pytest.fixture
def run(made: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    shutil.copytree(made, here / "run")
    capsys.readouterr()
    return here / "run"


def test_what_a_person_sees(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "run", "--until", "3"]) == 0
    said = capsys.readouterr()
    assert "fedbuff replayed from run/trace.jsonl" in said.out
    assert "difference" not in said.out
    assert not said.err
    assert main(["replay", "run", "--compare"]) == 0
    assert "difference from the saved model, relative to its norm" in capsys.readouterr().out


def test_a_model_that_differs_is_told_by_the_exit_code(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = json.loads((run / "settings.json").read_text())
    (run / "settings.json").write_text(json.dumps(settings | {"batch_size": 5}))
    code, found = replayed("run --compare", capsys)
    assert code == 1
    assert found["same"] is False
    assert found["difference"] > 1e-5
    assert main(["replay", "run", "--compare"]) == 1
    assert "differs from the run's by" in capsys.readouterr().err


def test_a_trace_that_runs_ahead_of_the_checkpoint_is_compared_where_that_is(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a kill."""
    (run / "trace.jsonl").write_bytes((run / "trace.jsonl").read_bytes() + b'{"version": 9, "ti')
    assert replayed("run --compare", capsys)[0] == 0
    lines = (run / "trace.jsonl").read_bytes().splitlines(keepends=True)
    (run / "trace.jsonl").write_bytes(b"".join(lines[:8]) + b"not JSON\n")
    code, found = replayed("run --compare", capsys)
    assert (code, found["version"]) == (0, 8)


def spoil(run: Path, line: int, name: str, value: object) -> None:
    lines = (run / "trace.jsonl").read_text().splitlines()
    lines[line] = json.dumps(json.loads(lines[line]) | {name: value})
    (run / "trace.jsonl").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("nowhere", "there is no trace nowhere: name the folder of a run, or the trace in it."),
        ("bare", "there is no settings.json beside bare/trace.jsonl: move the trace back"),
        ("run --task local_task:task", "is a simulation, whose settings name its task: leave out --task."),
        ("run --module local_task:module", "--module is now a part of the task: give --task"),
        ("run --engine ray", "unknown engine 'ray': choose from sequential, vectorised."),
        ("run --until -1", "--until must be at least 0, not -1."),
        ("run --until 9", "this trace ends at version 8: replay up to there at most."),
        ("run --until 3 --compare", "the saved model is of version 8: leave out --until to compare with it."),
        ("run --until x", "--until: 'x' is not a whole number"),
        ("run more", "unexpected argument 'more'"),
        ("unsaved --compare", "has saved no model yet: leave out --compare."),
        ("spoilt", "line 4 of the trace is of version 5 where 4 comes next: replay an undamaged copy"),
        ("sites", "the data of a deployment are at its sites: give --task package.module:function"),
        ("sites --task local_none:task", "there is no module 'local_none' for --task"),
        ("private", "the noise of this run is secret and drawn only once"),
    ],
)
def test_bad_input_is_one_sentence(
    words: str, says: str, run: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, settings = (run / "trace.jsonl").read_text(), json.loads((run / "settings.json").read_text())
    others = {
        "unsaved": {},
        "spoilt": {},
        "sites": {"task": {"function": "local_task:task"}},
        "private": {"clip": "1", "noise": 0.5, "delta": 1e-5, "max_participations": 9},
    }
    for name, other in others.items():
        (here / name).mkdir()
        (here / name / "trace.jsonl").write_text(trace)
        (here / name / "settings.json").write_text(json.dumps(settings | other))
    spoil(here / "spoilt", 3, "version", 5)
    (here / "bare").mkdir()
    (here / "bare" / "trace.jsonl").write_text(trace)
    before = files(here)
    assert main(["replay", *shlex.split(words)]) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert not said.out
    assert files(here) == before


TASK = """
import numpy as np
import torch
from torch import nn

from offbeat import Examples, LearningTask

SIZES = {"north": 9, "south": 5, "east": 12, "west": 7}


def load(name):
    rng = np.random.default_rng(len(name) + ord(name[0]))
    size = SIZES[name]
    return Examples(
        torch.from_numpy(rng.normal(size=(size, 5))).to(DTYPE), torch.from_numpy(rng.integers(0, 3, size))
    )


def module():
    return nn.Linear(5, 3).to(DTYPE)


def task():
    return LearningTask(module=module, data=load)
"""
SERVE = """
[task]
function = "local_task:task"

[training]
algorithm = "{method}"
clients = 4
buffer = 2
concurrency = 3
rounds = 15
max_staleness = 3
local_steps = 3
batch_size = 4
seed = 5

[training.parameters]
{parameters}
"""


class Direct:
    """A post between a server and sites in one process; answers take a while that a seed says."""

    backlog: frozenset[str] = frozenset()

    def __init__(self, sites: Sequence[Site]) -> None:
        self._sites = sites
        self._waits: dict[str, tuple[int, Reply]] = {}

    def nodes(self) -> frozenset[int]:
        return frozenset(range(len(self._sites)))

    def key(self, node: int) -> bytes:
        return b""

    def push(self, node: int, kind: str, header: str, payload: bytes, timeout: float) -> str:
        number = str(len(self._waits))
        wait = 0 if kind == "hello" else draws.randbelow(6, 1, "wait", int(number))
        self._waits[number] = (
            wait,
            Reply(number, node, *self._sites[node].answer(kind, header, payload), None),
        )
        return number

    def pull(self, message_ids: Sequence[str]) -> list[Reply]:
        ready = []
        for number in message_ids:
            wait, reply = self._waits[number]
            self._waits[number] = wait - 1, reply
            if not wait:
                ready.append(reply)
        return ready


def deploy(folder: Path, method: str, parameters: str = "", dtype: str = "torch.float32") -> None:
    """Train over four sites, into `folder / "run"`."""
    (folder / "local_task.py").write_text(TASK.replace("DTYPE", dtype))
    settings = folder / "serve.toml"
    settings.write_text(SERVE.format(method=method, parameters=parameters))
    sys.path.insert(0, str(folder))
    import local_task

    sites = [
        Site(name, folder / "sites" / name, local_task.load, local_task.module) for name in local_task.SIZES
    ]
    try:
        request = ServeRequest(settings, folder / "run", False, False)
        outcome = serve(request, lambda size: Direct(sites), lambda seconds: time.sleep(0.0005))
    finally:
        for site in sites:
            site.close()
    assert outcome.error is None
    assert outcome.version == 15


METHODS = {
    "adamasfl": "",
    "fadas": "local_lr = 0.2\nserver_lr = 0.03",
    "fedbuff": "local_lr = 0.2\nserver_lr = 0.5",
    "ma-fedavgm": "local_lr = 0.2\nserver_lr = 0.5\nspan = 4",
}


@pytest.mark.parametrize("method", METHODS)
def test_a_deployments_trace_gives_the_deployed_model(
    method: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deploy(here, method, METHODS[method])
    lines = [json.loads(line) for line in (here / "run" / "trace.jsonl").read_text().splitlines()]
    ages = [line["version"] - 1 - task[1] for line in lines if line["version"] for task in line["tasks"]]
    assert max(ages) > 1
    before = files(here / "run")
    code, found = replayed("run --task local_task:task --compare", capsys)
    assert code == 0
    assert found["difference"] < 1e-6
    code, found = replayed("run --task local_task:task --compare --engine vectorised", capsys)
    assert code == 0
    assert files(here / "run") == before
    (here / "run" / "checkpoint" / "state.safetensors").unlink()  # the model alone is left
    code, found = replayed("run --task local_task:task --compare", capsys)
    assert code == 0
    assert found["difference"] < 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_a_deployments_trace_through_the_oracle_gives_the_deployed_model(method: str, here: Path) -> None:
    deploy(here, method, METHODS[method], "torch.float64")
    import local_task

    lines = [json.loads(line) for line in (here / "run" / "trace.jsonl").read_text().splitlines()]
    settings = json.loads((here / "run" / "settings.json").read_text())
    roster = json.loads((here / "run" / "roster.json").read_text())
    data = [load_examples(local_task.load, roster[str(client)]["name"]) for client in range(4)]
    torch.manual_seed(settings["seed"])
    x0 = torch.cat([parameter.detach().reshape(-1) for parameter in local_task.module().parameters()])
    pairs = [(each.inputs.numpy(), each.targets.numpy()) for each in data]
    model = oracle_replay(lines, pairs, Settings.of(settings, x0.numpy()))
    saved = checkpoint.load(here / "run" / "checkpoint" / "state.safetensors").tensors["state.0"]
    np.testing.assert_allclose(saved.numpy(), model, rtol=0, atol=1e-10)
    assert np.abs(model - x0.numpy()).max() > 1e-3


def test_sites_whose_data_are_not_those_of_the_run_are_told_apart(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deploy(here, "fedbuff", METHODS["fedbuff"])
    (here / "local_other.py").write_text(
        "from local_task import LearningTask, load as first, module\n"
        "def flipped(name):\n    data = first(name)\n    return data._replace(targets=data.targets.flip(0))\n"
        "def wider(name):\n    data = first(name)\n"
        "    return data if name == 'north' else data._replace(inputs=data.inputs[:, :4])\n"
        "def other():\n    return LearningTask(module=module, data=flipped)\n"
        "def uneven():\n    return LearningTask(module=module, data=wider)\n"
        "def failing():\n    return LearningTask(module=module, data=lambda name: 1 / 0)\n"
    )
    code, found = replayed("run --task local_other:other --compare", capsys)
    assert code == 1
    assert found["difference"] > 1e-3
    assert main(["replay", "run", "--task", "local_other:uneven"]) == 2
    assert "differ in dtype or shape: load what the sites loaded." in capsys.readouterr().err
    assert main(["replay", "run", "--task", "local_other:failing"]) == 2
    assert "could not be loaded" in capsys.readouterr().err
