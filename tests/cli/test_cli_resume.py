"""Training until told to stop, as a user of `offbeat run` meets it."""

import json
import os
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.cli import main
from offbeat.training import checkpoint
from offbeat.training.folder import read_jsonl
from offbeat.training.runner import Progress, run_experiment
from offbeat.training.settings_file import read

SMALL = "--clients 12 --buffer 3 --concurrency 5 --local-steps 2 --batch-size 4"
ENDLESS = f"run cadence {SMALL}"
LAST = "checkpoint/state.safetensors"
HIDDEN = "--noise 1 --delta 1e-5"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has a folder of its own to run in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(line: str) -> int:
    return main(shlex.split(line))


def records(out: str) -> list[dict[str, Any]]:
    lines = read_jsonl(Path(out), "records")
    return [{key: value for key, value in line.items() if key != "elapsed"} for line in lines]


def check_same(one: str, other: str) -> None:
    """The same records, trace and state, to the bit; where a file holds what clients keep may differ."""
    assert records(one) == records(other)
    assert Path(one, "trace.jsonl").read_bytes() == Path(other, "trace.jsonl").read_bytes()
    tensors = [checkpoint.load(Path(out, LAST)).tensors for out in (one, other)]
    assert tensors[0].keys() == tensors[1].keys()
    named = [name for name in tensors[0] if name.startswith(("state.", "average", "aggregate."))]
    assert named
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in named)


@pytest.mark.parametrize(
    "method",
    [
        "cadence",
        "cadence --set variates=false --ema-decay 0.9",
        "fedbuff --memory mapped --dropout 0.2",
        "scaffold --memory mapped",
        "ma-light-fedadam --max-staleness 3",
        "adamasfl --set local_lr=0.1 --set server_lr=0.1 --set beta=0.1",
    ],
)
@pytest.mark.parametrize("every", [2, 4])
def test_a_run_goes_past_its_end_as_if_it_had_been_asked_for_more_at_once(
    method: str, every: int, capsys: pytest.CaptureFixture[str]
) -> None:
    common = f"run {method} {SMALL} --eval-every {every}"
    assert call(f"{common} --rounds 6 --out a") == 0
    capsys.readouterr()
    assert call("run --out a --resume --rounds 9 --json") == 0
    out, err = capsys.readouterr()
    assert f"the run in a continues to 9 server steps instead of 6, evaluated every {every} as before." in err
    assert json.loads(out.splitlines()[-1])["finished"]
    assert read(Path("a"))["rounds"] == 9
    assert call(f"{common} --rounds 9 --out b") == 0
    check_same("a", "b")
    assert call("run --out a --resume") == 0
    assert "had finished already" in capsys.readouterr().err


def test_how_often_it_is_evaluated_stays_as_it_was_begun() -> None:
    assert call(f"{ENDLESS} --rounds 20 --out a") == 0
    assert call("run --out a --resume --rounds 41") == 0
    assert call(f"{ENDLESS} --rounds 41 --eval-every 1 --out b") == 0
    check_same("a", "b")


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_without_an_end_is_told_to_stop_and_goes_on(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pressing(*words: Any, **more: Any) -> Iterator[Progress]:
        for step in run_experiment(*words, **more):
            yield step
            if step.version == 6:
                os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr("offbeat.api.run_experiment", pressing)
        assert call(f"{ENDLESS} --rounds 1000000 --eval-every 3 --out a") == code
    assert "offbeat: stopped; version 7 is saved; resume with:\n" in capsys.readouterr().err
    assert checkpoint.load(Path("a", LAST)).facts["version"] == 7
    assert [record["version"] for record in records("a")] == [0, 3, 6]
    with monkeypatch.context() as patch:
        patch.setattr("offbeat.api.run_experiment", lambda *words, **more: iter(()))
        assert (
            call("run --out a --resume --rounds 2000000") == 130
        )  # a larger end for one that is not reached
    assert read(Path("a"))["rounds"] == 2_000_000


def test_a_private_run_goes_past_its_end_where_that_is_what_it_would_have_been(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = f"{ENDLESS} --eval-every 2 {HIDDEN} --noise-seed 1 --max-participations 4"
    assert call(f"{words} --rounds 5 --out a") == 0
    assert call("run --out a --resume --rounds 9") == 0
    assert call(f"{words} --rounds 9 --out b") == 0
    check_same("a", "b")
    words = f"{ENDLESS} --eval-every 2 --epsilon 8 --delta 1e-5 --noise-seed 1 --max-participations 3"
    assert call(f"{words} --rounds 5 --out c") == 0
    assert call("run --out c --resume --rounds 9") == 0
    assert call(f"{words} --rounds 9 --out d") == 0
    check_same("c", "d")


@pytest.mark.parametrize(
    ("begun", "said"),
    [
        (
            "run adamasfl",
            "adamasfl sets its rates by --rounds, so 9 in place of 6 is another run: name another",
        ),
        ("run adamasfl --set local_lr=0.1", "adamasfl sets its rates by --rounds"),
        ("run masfl", "masfl sets its rates by --rounds"),
        (
            f"{ENDLESS} --epsilon 8 --delta 1e-5 --max-participations 7",
            "noise and epsilon of this run are for 6 server steps",
        ),
        (
            f"{ENDLESS} --epsilon 8 --delta 1e-5 --max-participations 3 --noise-correlation tree",
            "are for 6 server steps",
        ),
        (
            "run fedbuff --weights constant --clip 1 --epsilon 8 --delta 1e-5 --dispatch poisson "
            "--simulate-amplification",
            "are for 6 server steps, and more would reveal more about its clients",
        ),
    ],
)
def test_a_later_end_that_would_be_another_run_is_refused_and_nothing_changes(
    begun: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(f"{begun} {SMALL} --rounds 6 --out a") == 0
    before = {path: path.read_bytes() for path in (here / "a").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert call("run --out a --resume --rounds 9") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err
    assert before == {path: path.read_bytes() for path in (here / "a").rglob("*") if path.is_file()}


def test_a_later_end_that_the_method_cannot_have_is_refused_before_the_settings_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(f"run mime {SMALL} --rounds 6 --out a") == 0
    assert call("run --out a --resume --rounds 9") == 2
    assert "give an even number of rounds, not 9." in capsys.readouterr().err
    assert read(Path("a"))["rounds"] == 6
