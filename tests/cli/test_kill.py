"""Runs that are killed or stopped, as real processes, end as if that had never happened.

Importing torch takes seconds, so kills are dealt out by a program (this file) that imports everything
once, forks a child for each life of a run, and kills it after a random part of the time a whole run takes.
"""

import contextlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from offbeat.cli import main
from offbeat.training import checkpoint

pytestmark = pytest.mark.slow

KILLS = 12  # for each method
PART = ".state.safetensors.part"  # where a checkpoint is before it is whole
SMALL = shlex.split(
    "--clients 12 --buffer 3 --concurrency 5 --local-steps 1 --batch-size 4 --eval-every 2 --seed 5"
)
RUNS = {
    "adamasfl": ["run", "adamasfl", *SMALL, "--rounds", "25"],  # clients have memory
    "fadas-da": ["run", "fadas-da", *SMALL, "--rounds", "25", "--ema-decay", "0.99", "--dropout", "0.1"],
}


def live(words: list[str], seconds: float | None = None) -> int | None:
    """One life of a run, its exit code; None if it was killed after so many seconds."""
    child = os.fork()
    if not child:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        real = checkpoint.save_file

        def slow(*tensors_and_place: object, **metadata: object) -> None:
            real(*tensors_and_place, **metadata)
            time.sleep(0.02)  # a slow disk, so that most kills find a save under way

        checkpoint.save_file = slow
        os._exit(main(words))
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    return None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def drive(folder: Path, name: str) -> list[dict[str, object]]:
    """Runs under random kills until there were enough of them: what each kill left behind."""
    words = [*RUNS[name], "--save-every", "1"]
    whole = folder / "whole"
    live([*words, "--out", str(folder / "warm")])  # the first life is slower than others
    begun = time.monotonic()
    assert live([*words, "--out", str(whole)]) == 0
    length = time.monotonic() - begun
    draws = random.Random(name)
    kills: list[dict[str, object]] = []
    while len(kills) < KILLS:
        run = folder / f"killed-{len(kills)}"
        code = None
        while code is None:
            begun_already = (run / "settings.json").exists()
            life = ["run", "--out", str(run), "--resume"] if begun_already else [*words, "--out", str(run)]
            code = live([*life, "--save-every", "1"], draws.uniform(0, 0.9 * length))
            if code is None:
                kills.append(_left(run))
        assert code == 0, (life, code)
    return kills


def _left(run: Path) -> dict[str, object]:
    saved = run / "checkpoint" / "state.safetensors"
    return {
        "version": checkpoint.load(saved).facts["version"] if saved.exists() else None,
        "saving": any((run / "checkpoint" / PART).glob("*")),
    }


def same(one: Path, other: Path) -> None:
    """Records but for the time they took, trace to the byte, checkpoint to the bit."""
    assert (one / "trace.jsonl").read_bytes() == (other / "trace.jsonl").read_bytes()
    assert _records(one) == _records(other)
    mine, yours = (checkpoint.load(each / "checkpoint" / "state.safetensors") for each in (one, other))
    for facts in (mine.facts, yours.facts):
        del facts["running"]["elapsed"], facts["lengths"]["records"], facts["checksums"]["records"]
    assert mine.facts == yours.facts
    assert mine.tensors.keys() == yours.tensors.keys()
    for key, tensor in mine.tensors.items():
        assert torch.equal(tensor, yours.tensors[key]), key


def _records(run: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    assert all(line.pop("elapsed") >= 0 for line in lines)
    return lines


@pytest.mark.parametrize("name", RUNS)
def test_a_run_killed_at_random_moments_ends_as_the_one_never_killed(name, tmp_path):
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), name],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    kills = json.loads(done.stdout)
    assert len(kills) >= KILLS
    assert len({kill["version"] for kill in kills}) >= KILLS // 3  # they hit all over the run
    assert any(kill["saving"] for kill in kills)  # some in the middle of a save
    killed = sorted(tmp_path.glob("killed-*"))
    assert killed
    for run in killed:
        same(run, tmp_path / "whole")
        names = sorted(each.name for each in (run / "checkpoint").iterdir())
        assert names == ["previous.safetensors", "state.safetensors"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.usefixtures("interruptible")
def test_a_run_asked_to_stop_saves_says_how_to_go_on_and_then_ends_the_same(number, code, tmp_path, capsys):
    words = [*RUNS["adamasfl"], "--rounds", "150"]
    stopped = tmp_path / "a folder's name"
    program = [sys.executable, "-m", "offbeat", *words, "--out", str(stopped), "--json"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        while child.poll() is None and not _begun(stopped):
            time.sleep(0.01)
        child.send_signal(number)
        out, err = child.communicate(timeout=120)
    assert child.returncode == code, err
    told = json.loads(out.splitlines()[-1])
    assert not told["finished"]
    assert told["error"] is None
    assert 0 <= told["version"] < 150
    assert err.strip().endswith(f"; resume with:\n{told['resume']}")
    command, *again = shlex.split(told["resume"])
    assert command == "offbeat"
    assert main(again) == 0
    assert main([*words, "--out", str(tmp_path / "whole")]) == 0
    same(stopped, tmp_path / "whole")


def _begun(run: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return (run / "records.jsonl").stat().st_size > 0
    return False


if __name__ == "__main__":
    import sklearn.datasets  # noqa: F401
    import torch._dynamo

    torch.set_num_threads(1)
    print(json.dumps(drive(Path(sys.argv[1]), sys.argv[2])))
