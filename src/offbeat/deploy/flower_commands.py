"""Flower's `flwr` command, for what is asked of a SuperLink: run, list, stop, register."""

import json
import subprocess
from pathlib import Path
from typing import Any

from offbeat.deploy.flower_home import CONNECTION, command, environment
from offbeat.errors import InputError

_LIMIT = 120.0  # seconds for one command
_KNOWN = "already in use"  # what Flower says of a key that it has


class FlowerError(Exception):
    """Flower could not do it; its own words."""


def submit(home: Path, app: Path, told: Path) -> str:
    """Start a run; its number."""
    said = _ask(home, "run", str(app), CONNECTION, "--run-config", str(told))
    return str(said["run-id"])


def is_over(home: Path, run: str) -> bool:
    """Whether a run has finished, however it did."""
    runs = _ask(home, "ls", CONNECTION, "--run-id", run).get("runs") or [{}]
    return str(runs[0].get("status", "")).startswith("finished")


def stop(home: Path, run: str) -> None:
    """End a run, if it is still there."""
    _ask(home, "stop", run, CONNECTION)


def register(home: Path, key: Path) -> None:
    """Let the SuperNode with this public key in."""
    try:
        _ask(home, "supernode", "register", str(key), CONNECTION)
    except FlowerError as error:
        if _KNOWN not in str(error):
            raise InputError(f"the key {key} cannot be registered ({error}): check the file.") from None


def _ask(home: Path, *words: str) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [command("flwr"), *words, "--format", "json"],
            env=environment(home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT,
            check=False,
            start_new_session=True,  # Ctrl-C is ours to hear
        )
    except subprocess.TimeoutExpired:
        raise FlowerError(f"no answer in {_LIMIT:.0f} s") from None
    try:
        said = json.loads(done.stdout)
    except ValueError:
        said = {}
    if done.returncode != 0 or not isinstance(said, dict) or not said.get("success"):
        words_of = said.get("error-message") if isinstance(said, dict) else None
        raise FlowerError(_line(words_of or done.stderr.strip() or done.stdout))
    return said


def _line(text: str) -> str:
    """The last line that says anything, which in Flower's output is the reason."""
    lines = [line.strip(" │╭╮╰╯─") for line in text.splitlines()]
    return next((line for line in reversed(lines) if line), "no reason given")
