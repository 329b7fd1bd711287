"""Requests through Flower's command line, which here is a script with given output."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offbeat.deploy.flower import commands
from offbeat.deploy.flower.commands import FlowerError, is_run_finished, register_key, stop_run, submit_run
from offbeat.errors import InputError

Say = Callable[..., Path]


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Makes Flower say something; gives the file with the words it was asked."""
    script, asked = tmp_path / "flwr", tmp_path / "asked.json"

    def make(answer: Any, code: int = 0, error: str = "") -> Path:
        text = answer if isinstance(answer, str) else json.dumps(answer)
        script.write_text(
            f"#!{sys.executable}\nimport json, os, sys\n"
            f"json.dump([*sys.argv[1:], os.environ['FLWR_HOME']], open({str(asked)!r}, 'w'))\n"
            f"print({text!r})\nprint({error!r}, file=sys.stderr)\nsys.exit({code})\n"
        )
        script.chmod(0o755)
        return asked

    monkeypatch.setattr(commands, "find_command", lambda name: str(script))
    return make


def test_a_run_is_submitted_and_has_a_number(says: Say, tmp_path: Path) -> None:
    asked = says({"success": True, "run-id": "12"})
    assert submit_run(tmp_path, Path("app"), Path("run.toml")) == "12"
    words = ["run", "app", "serve", "--run-config", "run.toml", "--format", "json", str(tmp_path)]
    assert json.loads(asked.read_text()) == words


@pytest.mark.parametrize(
    ("status", "over"),
    [("running", False), ("pending", False), ("finished:failed", True), ("finished", True)],
)
def test_a_run_is_over_when_it_has_finished(says: Say, tmp_path: Path, status: str, over: bool) -> None:
    says({"success": True, "runs": [{"status": status}]})
    assert is_run_finished(tmp_path, "12") is over


def test_a_run_is_stopped(says: Say, tmp_path: Path) -> None:
    asked = says({"success": True})
    stop_run(tmp_path, "12")
    assert json.loads(asked.read_text())[:3] == ["stop", "12", "serve"]


@pytest.mark.parametrize(
    ("answer", "code", "error", "words"),
    [
        (
            {"success": False, "error-message": "Using SuperLink\nthe run is not there"},
            0,
            "",
            "the run is not there",
        ),
        ("", 1, "╭─ Error ─╮\n│ no connection │\n╰──────────╯", "no connection"),
        ("[]", 0, "", "[]"),
        ("", 2, "", "no reason given"),
    ],
)
def test_what_flower_cannot_do_is_told_in_its_own_words(
    says: Say, tmp_path: Path, answer: Any, code: int, error: str, words: str
) -> None:
    says(answer, code, error)
    with pytest.raises(FlowerError) as caught:
        stop_run(tmp_path, "12")
    assert str(caught.value) == words


def test_a_key_that_is_registered_already_is_fine(says: Say, tmp_path: Path) -> None:
    says({"success": False, "error-message": "[code: 14] Public key already in use."}, 1)
    register_key(tmp_path, Path("key.pub"))


def test_a_key_that_cannot_be_registered_is_one_sentence(says: Say, tmp_path: Path) -> None:
    says({"success": False, "error-message": "not a key"}, 1)
    with pytest.raises(
        InputError, match=r"the key key\.pub cannot be registered \(not a key\): check the file\."
    ):
        register_key(tmp_path, Path("key.pub"))
