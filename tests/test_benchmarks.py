"""The benchmarks run and print JSON that makes sense; how fast they are is not for a test to say."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"


def facts(*words: str) -> dict[str, Any]:
    """What a benchmark prints on its last line."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(FOLDER / words[0]), *words[1:]]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def fine(*numbers: float) -> bool:
    return all(math.isfinite(number) and number > 0 for number in numbers)


@pytest.fixture(scope="module")
def pfl_cifar() -> Iterator[ModuleType]:
    """The benchmark as a module, its folder of peers importable."""
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("pfl_cifar", FOLDER / "pfl_cifar.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


@pytest.mark.slow
def test_the_comparison_with_peers_runs_without_them() -> None:
    found = facts("pfl_cifar.py", "--quick")
    eager = found["peers"]["eager"]
    assert fine(eager["ms"], eager["offbeat_ms"])
    assert eager["ratio"] == pytest.approx(eager["ms"] / eager["offbeat_ms"])
    assert 0 <= found["accuracy"] <= 1
    assert 0 <= eager["accuracy"] <= 1


@pytest.mark.slow
def test_the_populations_are_timed_and_weighed() -> None:
    found = facts("population_scale.py", "--quick")
    assert [row["clients"] for row in found["rows"]] == [100, 10_000]
    assert all(fine(row["ms"], row["ratio"]) and row["mib"] >= 0 for row in found["rows"])
    assert found["rows"][0]["ratio"] == 1
    assert found["ratio"] == found["rows"][-1]["ratio"]


@pytest.mark.slow
def test_the_servers_costs_are_measured() -> None:
    found = facts("server_costs.py", "--quick")
    assert fine(found["task_us"], *found["ns_a_number"].values())
    assert set(found["ns_a_number"]) == {"check", "sum", "fedbuff", "fadas"}


@pytest.mark.slow
def test_convolutions_of_a_cpu_are_as_exact_as_float32_allows() -> None:
    found = facts("grouped_convolutions.py", "--quick", "--device", "cpu")["found"]
    assert [(row["kernel"], row["groups"]) for row in found] == [(3, 1), (3, 1), (3, 2), (3, 2)]
    assert all(0 < error < 1e-5 for row in found for error in row["errors"])


def test_the_schedule_is_timed() -> None:
    found = facts("schedule_scale.py", "--rounds", "1")
    assert [row["tasks"] for row in found["rows"]] == [1_000] * 4


@pytest.mark.slow
def test_a_deployed_server_is_weighed() -> None:
    (found,) = facts("deployed.py", "--quick")["memory"]
    assert [count for count, _ in found["mib"]] == [*range(5, 51, 5)]
    assert fine(found["ms_an_update"], *(weight for _, weight in found["mib"]))
    assert math.isfinite(found["kib_an_update"])


@pytest.mark.slow
def test_the_memory_of_a_server_does_not_grow_with_its_buffer() -> None:
    """Six more uploads of 34 MiB each: large enough for memory that is given back to the system at once."""
    small, large = facts("deployed.py", "--buffers", "2", "8", "--sizes", "9000000")["peaks"]
    assert fine(small["peak_mib"], large["peak_mib"])
    assert large["peak_mib"] - small["peak_mib"] < 100


@pytest.mark.slow
def test_a_server_step_touches_few_files() -> None:
    found = facts("walk.py", "simulated")
    assert 10 < found["files"] <= 25
    assert found["files"] < found["functions"] < 250


@pytest.mark.slow
def test_a_deployed_upload_touches_few_files_at_the_server() -> None:
    found = facts("walk.py", "deployed")
    assert 5 < found["files"] <= 20
    assert found["files"] < found["functions"] < 250


@pytest.mark.slow
def test_client_memory_ends_the_same_for_a_run_that_is_cut_off_and_resumed() -> None:
    words = ("--clients", "50", "--parameters", "100", "--rounds", "4", "--save-every", "2", "--kills", "1")
    found = facts("client_memory.py", *words)
    assert found["same"]


def test_a_workload_is_the_same_in_another_process(pfl_cifar: ModuleType, tmp_path: Path) -> None:
    workload = pfl_cifar.workload
    weights = [weight.detach().numpy() for weight in workload.build(True).parameters()]
    assert sum(weight.size for weight in weights) == 1_626_442  # pfl-research's simple_cnn on 32 x 32 x 3
    shape = workload.Shape(clients=2, images=3, cohort=1)
    images, labels = np.random.default_rng(0).random((6, 32, 32, 3), np.float32), np.arange(6)
    workload.Workload(shape, images, labels, images, labels, weights).save(tmp_path)
    again = workload.load(tmp_path)
    assert again.shape == shape
    assert np.array_equal(again.inputs[again.part(1)], images[3:])
    module = again.module()
    pairs = zip(module.parameters(), weights, strict=True)
    assert all(torch.equal(mine, torch.from_numpy(theirs)) for mine, theirs in pairs)
    right = module.eval()(torch.from_numpy(images)).argmax(1) == torch.from_numpy(labels)
    assert again.accuracy(module) == pytest.approx(right.float().mean().item())


PEER = """
import sys
sys.path.insert(0, sys.argv[1])
import workload
print("something of its own")
workload.tell(ready=True)
while steps := workload.asked():
    workload.tell(seconds=steps / 2)
    workload.tell(accuracy=0.5)
"""


@pytest.mark.slow
def test_a_peer_takes_turns_and_ends_when_told(pfl_cifar: ModuleType, tmp_path: Path) -> None:
    program = [sys.executable, "-c", PEER, str(FOLDER / "peers")]
    peer = pfl_cifar.Peer(program, [{}], tmp_path / "log")
    assert [peer.turn(3), peer.accuracy(), peer.turn(1)] == [1.5, 0.5, 0.5]
    (child,) = peer.processes
    assert pfl_cifar.spent([child], []) > 0
    peer.close()
    assert not Path(f"/proc/{child}").exists()


def test_a_peer_that_fails_says_why(pfl_cifar: ModuleType, tmp_path: Path) -> None:
    program = [sys.executable, "-c", "raise ImportError('no such peer')"]
    with pytest.raises(SystemExit, match="no such peer"):
        pfl_cifar.Peer(program, [{}], tmp_path / "log")
