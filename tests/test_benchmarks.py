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


def facts(*words: str, limit: float = 300) -> dict[str, Any]:
    """What a benchmark prints on its last line."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(FOLDER / words[0]), *words[1:]]
    done = subprocess.run(
        program, capture_output=True, text=True, env=environment, timeout=limit, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def fine(*numbers: float) -> bool:
    return all(math.isfinite(number) and number > 0 for number in numbers)


def load(name: str) -> ModuleType:
    """A benchmark as a module."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pfl_cifar() -> Iterator[ModuleType]:
    """The benchmark as a module, its folder of peers importable."""
    before = list(sys.path)
    yield load("pfl_cifar")
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


@pytest.mark.slow
def test_all_that_is_to_be_shown_on_a_gpu_runs_at_a_tiny_size(tmp_path: Path) -> None:
    words = ("gpu_speed.py", "--all", str(tmp_path), "--quick", "--device", "cpu")
    found = facts(*words, limit=700)
    assert set(found["parts"].values()) == {"done"}, found["parts"]
    models = {"cnn", "resnet18", "resnet18-bn", "charformer", "bert-tiny", "mlp"}
    assert models | {"pfl", "pfl-compiled", "pfl-again", "memory", "tests"} <= found["parts"].keys()
    measured = {row["what"] for row in found["rows"] if row["met"] is not None}
    for suffix in ("", ", second run"):
        assert {f"{name}: `auto` of the best by hand{suffix}" for name in models} <= measured
    assert {
        "pfl: a server step",
        "pfl-compiled: accuracy",
        "resnet18-bfloat16: `auto` of the limit",
    } <= measured
    missing = {row["what"] for row in found["rows"]} - measured
    peers = {
        "times pfl, 1 process",
        "times pfl at its best",
        "resnet18-bn-bfloat16: `auto` of the best by hand",
        "resnet18-bn-bfloat16: `auto` of the best by hand, second run",
    }
    if not torch.cuda.is_available():
        peers |= {"memory of streamed, groups that vary", "tests/engines/test_gpu.py"}
    assert missing == peers
    for row in found["rows"]:
        assert f"| {row['what']} | {row['aim']} | {row['found']} |" in (tmp_path / "table.md").read_text()
    (tmp_path / "parts.json").write_text(json.dumps(found["parts"] | {"mlp": "failed: by hand"}))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.log")}
    assert facts(*words)["parts"] == found["parts"]
    again = [path.stem for path, made in before.items() if path.stat().st_mtime_ns != made]
    assert again == ["mlp"]


def test_a_part_that_fails_or_takes_too_long_keeps_what_it_found(tmp_path: Path) -> None:
    speed = load("gpu_speed")

    def outcome(name: str, code: str, limit: float) -> str:
        part = speed.Part(name, [sys.executable, "-c", code], limit)
        return str(speed.run_part(part, tmp_path, 60.0))

    assert outcome("good", "print('well'); print('{\"peers\": {}}')", 60.0) == "done"
    assert (
        outcome("bad", "import sys; print('began'); sys.exit('no such GPU')", 60.0) == "failed: no such GPU"
    )
    assert outcome("silent", "import os; os._exit(3)", 60.0) == "failed: exit code 3"
    assert outcome("slow", "import time; print('{}', flush=True); time.sleep(60)", 1.5) == "stopped after 2 s"
    assert speed.read_json(tmp_path / "good.json") == {"peers": {}}
    assert speed.read_json(tmp_path / "bad.json") == {}
    assert (tmp_path / "slow.json").read_text() == "{}"
    (tmp_path / "memory.json").write_text('{"memory": {"mapped": [1048576, 1048576, 3145728]}}')
    case = {"mapped": {"steps/s": 8.0, "of limit": 0.8, "run": 99.0}, "streamed": {"error": "no"}}
    case["mapped-compiled"] = {"steps/s": 9.0, "of limit": 0.9, "run": 102.0}  # a fast one that starts late
    case["streamed-compiled"] = {"steps/s": 9.0, "of limit": 0.9}  # of a version that told no run
    case["auto"] = {"steps/s": 7.9, "of limit": 0.79, "run": 100.0, "first": 6.0, "chosen": "mapped-compiled"}
    (tmp_path / "cnn.json").write_text(json.dumps({"cases": [{"model": "cnn", "limit": 10.0} | case]}))
    rows = {row.what: row for row in speed.all_rows(tmp_path)}
    assert rows["memory of mapped, groups that vary"].found == "1.0 MiB, +2.0"
    assert rows["memory of mapped, groups that vary"].met is False
    assert rows["cnn: `auto` of the best by hand"].found == (
        "0.99 (mapped-compiled 100.0; mapped 99.0 s a run)"
    )
    assert rows["cnn: `auto` of the limit"].met
    assert rows["cnn: first server step of `auto`"].aim == "none: the compiler pays"
    assert {row.found for name, row in rows.items() if name.startswith("resnet")} == {"not measured"}
    assert rows["tests/engines/test_gpu.py"].found == "not run"
