"""Small runs for reports: made for real, in a second."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.training.build import build_run, resolved_settings
from offbeat.training.experiment import Experiment
from offbeat.training.folder import RunFolder
from offbeat.training.runner import run_experiment

SMALL: dict[str, Any] = {
    "clients": 12,
    "buffer": 3,
    "concurrency": 5,
    "local_steps": 1,
    "batch_size": 4,
    "rounds": 8,
    "eval_every": 2,
    "model": "logistic",
    "engine": "sequential",
}


def make_run(folder: Path, **given: Any) -> Path:
    """The folder of a run that has finished."""
    experiment = Experiment.of(**{"algorithm": "fedbuff"} | SMALL | given)
    trial = build_run(experiment)
    asked = experiment.settings() | {"resolved": resolved_settings(experiment, trial)}
    with RunFolder.begin(folder, asked) as held:
        for _ in run_experiment(experiment, trial, held):
            pass
    return folder


def make_unfinished_run(folder: Path, after: int, **given: Any) -> Path:
    """The folder of a run whose last checkpoint is of that version, and that has no end."""
    experiment = Experiment.of(**{"algorithm": "fedbuff"} | SMALL | given)
    with RunFolder.begin(folder, experiment.settings()) as held:
        for step in run_experiment(experiment, build_run(experiment), held, save_every=1):
            if step.version == after:
                break
    return folder


def change_settings(folder: Path, **values: Any) -> None:
    path = folder / "settings.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def write_lines(folder: Path, name: str, values: list[Mapping[str, Any]]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(value)}\n" for value in values))


def found(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
