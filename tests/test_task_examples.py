"""The examples of one's own task and method work as their first lines say."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from sklearn.metrics import roc_auc_score

import offbeat
from offbeat.cli.main import main
from offbeat.training.folder import read_jsonl

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path in [*EXAMPLES.glob("*.py"), *(EXAMPLES / "own_method").iterdir()]:
        if path.is_file():
            shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def own_lines(path: Path) -> int:
    """Lines of code: without documentation, imports, blank lines and lines that only close brackets."""
    code = path.read_text().partition('"""\n\n')[2].splitlines()
    words = [line.strip() for line in code]
    return len([word for word in words if word and not word.startswith(("import ", "from ", '"""', ")"))])


def test_hospitals_are_compared_by_auc_and_reported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--rounds", "6", "--eval-every", "3", "--out", "runs/hospitals"]
    assert main(["compare", "fedavg", "fedbuff", "cadence", "--task", "hospitals:task", *short]) == 0
    assert "auc by server steps" in capsys.readouterr().out
    folders = [f"runs/hospitals/{name}" for name in ("fedavg", "fedbuff", "cadence")]
    assert main(["report", *folders]) == 0
    page = Path("report.html").read_text()
    assert "hospital-07" in page
    assert "auc" in page
    module = load(here / "hospitals.py")
    task = module.task()
    kept = json.loads(Path("runs/hospitals/cadence/clients.json").read_text())["clients"]["auc"]
    assert list(kept) == [f"hospital-{number:02}" for number in range(12)]
    last = list(read_jsonl(Path("runs/hospitals/cadence"), "records"))[-1]
    experiment = offbeat.Experiment.from_settings(
        json.loads(Path("runs/hospitals/cadence/settings.json").read_text())
    )
    from offbeat.api import trained_module

    trained = trained_module(experiment, task, Path("runs/hospitals/cadence"))
    own = task.test.examples("hospital-03")
    outputs = trained(own.inputs).detach()[:, 1].double()
    assert kept["hospital-03"] == pytest.approx(roc_auc_score(own.targets, outputs), abs=1e-9)
    assert last["auc_mean"] == pytest.approx(sum(kept.values()) / 12, abs=1e-12)
    assert own_lines(here / "hospitals.py") < 30


@pytest.mark.slow
def test_hospitals_that_were_killed_are_resumed_by_the_same_command(here: Path) -> None:
    program = (here / "hospitals.py").read_text().replace("rounds=40", "rounds=2000, save_every=5")
    (here / "long.py").write_text(program.replace('("fedavg", "fedbuff", "cadence")', '("fedbuff",)'))
    process = subprocess.Popen([sys.executable, "long.py"])
    saved = here / "runs" / "hospitals" / "fedbuff" / "checkpoint" / "state.safetensors"
    records = here / "runs" / "hospitals" / "fedbuff" / "records.jsonl"
    ended = time.monotonic() + 60
    while not (saved.exists() and records.exists() and records.stat().st_size) and time.monotonic() < ended:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    module = load(here / "hospitals.py")
    task, out = module.task(), here / "runs" / "hospitals" / "fedbuff"
    version = json.loads((out / "settings.json").read_text())["rounds"]
    assert version == 2000
    before = [record["version"] for record in read_jsonl(out, "records")]
    result = offbeat.run(task, "fedbuff", out=out, resume=True, save_every=5, rounds=2000)
    assert result.finished
    versions = [record["version"] for record in result.records]
    assert versions == sorted(set(versions))
    assert before[0] == versions[0] == 0


def test_a_method_of_ones_own_package_is_checked_and_compared(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = here / "my_fedsam-0.1.0.dist-info"  # as pip leaves it
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: my-fedsam\nVersion: 0.1.0\n")
    (folder / "entry_points.txt").write_text("[offbeat.algorithms]\nmy-fedsam = my_fedsam:FedSAM\n")
    monkeypatch.setattr(offbeat.CATALOGUE, "_plugins", None)
    assert "my-fedsam" in offbeat.CATALOGUE
    small = [
        "--clients",
        "8",
        "--concurrency",
        "5",
        "--buffer",
        "4",
        "--rounds",
        "4",
        "--local-steps",
        "3",
        "--out",
        "runs/compare",
    ]
    assert main(["compare", "fedavg", "my-fedsam", "--set", "my-fedsam.rho=0", *small]) == 0
    one, other = (
        list(read_jsonl(Path("runs/compare") / name, "records")) for name in ("fedavg", "my-fedsam")
    )
    settings = json.loads(Path("runs/compare/my-fedsam/settings.json").read_text())
    assert settings["parameters"] == {"rho": 0.0}
    assert settings["resolved"]["hyperparameters"] == {"local_lr": 0.1, "rho": 0.0}
    assert len(one) == len(other) > 1
    assert main(["check", "my-fedsam"]) == 0
    assert "FAILED" not in capsys.readouterr().out
    assert main(["algorithms", "my-fedsam"]) == 0
    monkeypatch.setattr(offbeat.CATALOGUE, "_plugins", {})
    assert own_lines(here / "my_fedsam.py") < 30


@pytest.mark.slow
def test_one_task_is_simulated_and_deployed_over_three_sites(here: Path) -> None:
    done = subprocess.run(
        [sys.executable, "three_sites.py"], capture_output=True, text=True, timeout=400, check=True
    )
    simulated, deployed = (float(line.split()[-1]) for line in done.stdout.splitlines() if "accuracy" in line)
    assert min(simulated, deployed) > 0.9
    assert abs(simulated - deployed) < 0.05
