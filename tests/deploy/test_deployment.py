"""Real processes on this machine, with TLS and node keys: three sites, and one run per method.

The sites are started once: after each run they wait for the next one at the same address.
"""

import dataclasses
import importlib.util
import itertools
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from offbeat import Exponential, LogNormal, Sequential
from offbeat.cli import main
from offbeat.data.population import Steps
from offbeat.deploy.config import ServeConfig, load_examples
from offbeat.deploy.network import free_port
from offbeat.deploy.server.setup import pool_site_data, set_up
from offbeat.training import checkpoint
from offbeat.training.runner import run_experiment
from offbeat.training.task import seeded_module
from oracle_replay import Settings, oracle_replay

pytestmark = pytest.mark.slow

FAULTS = Path(__file__).parent.parent.parent / "experiments" / "faults"
LIMIT = 400.0  # seconds for a run, which takes a quarter of that on two idle cores
SITES = ("north", "south", "east")
ROUNDS, STEPS, SIZE = 6, 60, 20
TASK = f"""
import offbeat
from torch import nn

SITES = {SITES}

def module():
    return nn.Linear(64, 10)

def load(site):
    train = offbeat.load("digits").train
    part = SITES.index(site) if site in SITES else 0
    return offbeat.Examples(train.inputs[part::3], train.targets[part::3])

def test():
    return offbeat.load("digits").test

def task():
    return offbeat.LearningTask(module=module, data=load, test=test)

def other():
    return offbeat.LearningTask(module=lambda: nn.Linear(64, 9), data=load)
"""
SERVE = f"""
[task]
function = "digits_sites:task"

[training]
algorithm = "{{method}}"
parameters = {{{{ {{parameters}} }}}}
clients = {{clients}}
buffer = 2
rounds = {ROUNDS}
max_staleness = 4
local_steps = {STEPS}
batch_size = {SIZE}
eval_every = 2
"""
PREPARE = """
[prepare]
standardise = true
"""
METHODS = {
    "adamasfl": "local_lr = 0.1, server_lr = 1.0, beta = 0.8",
    "cadence": "",
    "fadas": "local_lr = 0.3, server_lr = 0.1",
    "fedbuff": "local_lr = 0.3, server_lr = 1.0",
    "ma-fedavgm": "local_lr = 0.3, server_lr = 1.0, span = 6",
}
PREPARED = "fedbuff"  # its run scales features, so it is not compared with simulations that do not
# Which updates meet in a buffer, and how stale, differs between schedules: over eight simulated ones the
# last accuracy of a method varied by 0.08 at most. A deployment's is one more of them.
SEEDS, SPREAD = 8, 0.05
DELAYS = (Exponential(1.0), LogNormal(0.0, 2.0))


def load_processes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("faults_processes", FAULTS / "processes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


processes = load_processes()
wait_for = processes.wait_for


class Deployment:
    """A folder with an app, keys and runs, and the processes that were started in it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.trial = processes.Trial(place)
        self.link = f"127.0.0.1:{free_port()}"
        self.sites: list[Any] = []
        (place / "digits_sites.py").write_text(TASK)
        for method, parameters in METHODS.items():
            text = SERVE.format(method=method, parameters=parameters, clients=3)
            (place / f"{method}.toml").write_text(text + PREPARE * (method == PREPARED))
        # waits for a fourth site, which never comes
        (place / "last.toml").write_text(SERVE.format(method="adamasfl", parameters="", clients=4))

    def serve(self, name: str) -> Any:
        given = (f"{name}.toml", "--out", name, "--certificates", "keys", "--json")
        return self.trial.offbeat(name, "serve", *given, "--port", self.link.split(":")[1])

    def join(self, site: str, *words: str, task: str = "digits_sites:task") -> Any:
        given = ("--superlink", self.link, "--task", task, "--name", site)
        trust = ("--certificate", "keys/ca.crt", "--folder", f"site-{site}")
        return self.trial.offbeat(site, "join", *given, *trust, *words)

    def lines(self, run: str, name: str) -> list[dict[str, Any]]:
        path = self.place / run / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The sites, which wait for a server; nothing is left of them in the end, whatever happens."""
    if not sys.platform.startswith("linux"):
        pytest.skip("what processes leave behind is found in /proc, which Linux alone has")
    place = tmp_path_factory.mktemp("deployment")
    names = ",".join((*SITES, "late"))
    for folder in ("keys", "elsewhere"):
        made = ["keys", "--hosts", "127.0.0.1", "--sites", names, "--out", str(place / folder)]
        assert main(made) == 0
    path = list(sys.path)
    sys.path.insert(0, str(place))
    deployment = Deployment(place)
    try:
        deployment.sites = [deployment.join(site, "--key", f"keys/sites/{site}/key") for site in SITES]
        yield deployment
    finally:
        deployment.trial.end()
        sys.path[:] = path
        sys.modules.pop("digits_sites", None)


def simulated(settings: Path) -> list[float]:
    """The last accuracy over some schedules, with the sites' examples as clients of the simulator."""
    import digits_sites

    plan = ServeConfig.read(settings)
    stage = set_up(plan)
    population = pool_site_data(digits_sites.load, SITES, Steps(STEPS, SIZE))
    found = []
    for seed, delays in itertools.product(range(SEEDS), DELAYS):
        trial = stage.run_spec(Sequential(stage.problem, population, delays))
        *_, last = run_experiment(dataclasses.replace(plan.experiment, seed=seed), trial)
        assert last.record is not None
        found.append(last.record["accuracy"])
    return found


def model(deployment: Deployment, name: str) -> np.ndarray:
    saved = checkpoint.load(deployment.place / name / "checkpoint" / "state.safetensors")
    assert saved.facts["version"] == ROUNDS
    return saved.tensors["state.0"].double().numpy()


def check_it_trains_as_in_the_simulator(deployment: Deployment, method: str) -> None:
    process = deployment.serve(method)
    assert process.wait(LIMIT) == 0, process.said
    told = json.loads(process.said.splitlines()[-1])
    assert told["finished"]
    assert told["version"] == ROUNDS
    assert (deployment.place / method / "model.safetensors").exists()
    if method == PREPARED:
        assert told["last"]["accuracy"] > 0.6
    else:
        expected = simulated(deployment.place / f"{method}.toml")
        assert min(expected) - SPREAD <= told["last"]["accuracy"] <= max(expected) + SPREAD
    events = deployment.lines(method, "events")
    assert {event["name"] for event in events if event["event"] == "joined"} == set(SITES)
    assert [event for event in events if event["event"] in ("rejected", "lost")] == []


def check_its_trace_is_replayed_to_its_model(
    deployment: Deployment, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    words = ["replay", str(deployment.place / method), "--task", "digits_sites:task"]
    assert main([*words, "--compare", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["version"] == ROUNDS
    assert found["difference"] < 1e-5


def check_its_features_are_scaled_by_the_statistics_of_all_sites(deployment: Deployment) -> None:
    import digits_sites

    found = load_file(deployment.place / PREPARED / "model.safetensors")
    data = torch.cat([digits_sites.load(site).inputs for site in SITES]).double()
    spread = torch.where(data.amax(0) > data.amin(0), data.std(0, correction=0), 1.0)
    assert torch.allclose(found["standardise.mean"], data.mean(0), rtol=1e-9)
    assert torch.allclose(found["standardise.scale"], spread, rtol=1e-9)


def check_its_trace_through_the_oracle_is_its_model(deployment: Deployment, method: str) -> None:
    import digits_sites

    folder = deployment.place / method
    settings = json.loads((folder / "settings.json").read_text())
    roster = json.loads((folder / "roster.json").read_text())
    data = [load_examples(digits_sites.load, roster[str(client)]["name"]) for client in range(3)]
    parameters = seeded_module(digits_sites.module, settings["seed"]).parameters()
    x0 = torch.cat([each.detach().reshape(-1) for each in parameters]).double().numpy()
    inputs = [each.inputs for each in data]
    if method == PREPARED:
        saved = load_file(folder / "model.safetensors")
        inputs = [(each.double() - saved["standardise.mean"]) / saved["standardise.scale"] for each in inputs]
    pairs = [(own.numpy(), each.targets.numpy()) for own, each in zip(inputs, data, strict=True)]
    trace = deployment.lines(method, "trace")
    expected = oracle_replay(trace, pairs, Settings.of(settings, x0))
    found = model(deployment, method)
    # the oracle is in float64 and the sites in float32
    assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected)
    assert np.linalg.norm(found - x0) > 0.1 * np.linalg.norm(x0)


def check_a_key_that_is_not_registered_is_one_sentence_and_is_tried_again(deployment: Deployment) -> None:
    stranger = deployment.join("late", "--key", "elsewhere/sites/late/key")
    sentence = (
        f"offbeat: the SuperLink at {deployment.link} refuses this site (HTTP status 401, the server does "
        "not know this key: ask its operator to add it); next attempt in"
    )
    assert wait_for(lambda: sentence in stranger.said or stranger.code is not None, 60), stranger.said
    assert stranger.code is None  # the key may be registered later
    stranger.signal(signal.SIGTERM)
    assert stranger.wait(60) == 0


def check_a_site_with_another_model_is_told_apart(deployment: Deployment, server: Any) -> None:
    site = deployment.join("late", "--key", "keys/sites/late/key", task="digits_sites:other")
    reasons = lambda: [  # noqa: E731
        event["sentence"] for event in deployment.lines("last", "events") if event["event"] == "rejected"
    ]
    assert wait_for(lambda: bool(reasons()) or site.code is not None, 120), site.said
    assert reasons()[0].startswith("late has another model than the server: ")
    assert server.code is None


def check_all_of_them_end_and_leave_nothing_behind(deployment: Deployment, server: Any) -> None:
    for process in deployment.sites:
        process.signal(signal.SIGTERM)
    assert [process.wait(60) for process in deployment.sites] == [0, 0, 0]
    server.signal(signal.SIGTERM)
    assert server.wait(120) == 128 + signal.SIGTERM
    told = json.loads(server.said.splitlines()[-1])
    assert told["stopped"]
    assert "--resume" in told["resume"]
    assert deployment.trial.end() == []


def test_methods_train_over_real_sites_and_traces_give_their_models(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    """One test, since pytest may deal several out to processes that would each start a deployment."""
    for method in METHODS:
        check_it_trains_as_in_the_simulator(deployment, method)
        check_its_trace_is_replayed_to_its_model(deployment, method, capsys)
        check_its_trace_through_the_oracle_is_its_model(deployment, method)
    check_its_features_are_scaled_by_the_statistics_of_all_sites(deployment)
    server = deployment.serve("last")
    check_a_key_that_is_not_registered_is_one_sentence_and_is_tried_again(deployment)
    check_a_site_with_another_model_is_told_apart(deployment, server)
    check_all_of_them_end_and_leave_nothing_behind(deployment, server)
