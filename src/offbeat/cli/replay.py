"""`offbeat replay`: compute a run again from its trace, and compare the model with the saved one."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat import trees
from offbeat.cli import terminal
from offbeat.cli.options import whole_number
from offbeat.errors import InputError, unknown_name
from offbeat.nn.problem import Problem
from offbeat.training import checkpoint, settings_file
from offbeat.training.build import RunSpec, build_run
from offbeat.training.experiment import Experiment, is_deployment
from offbeat.training.loop import Snapshot
from offbeat.training.progress import bar as progress_bar
from offbeat.training.replay import read_trace_lines, replay, secret_noise_error
from offbeat.training.runner import Progress
from offbeat.training.standardise import Scaling
from offbeat.training.task import load_task

REPLAY_ENGINES = ("sequential", "vectorised")
_TOLERANCE = 1e-5  # of the model's norm: what float32 may round differently


class SavedModel(NamedTuple):
    """The model that a run saved: in a checkpoint, or as weights by name."""

    version: int
    tensors: dict[str, Tensor]
    named: bool


def add_replay_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `offbeat replay`."""
    command.add_argument("trace", metavar="TRACE", help="a run's folder, or the trace.jsonl in it")
    command.add_argument(
        "--task",
        metavar="MODULE:FUNCTION",
        help="returns the task, where the run does not name it: of a deployment, or of a run from Python",
    )
    command.add_argument("--engine", metavar="NAME", help="sequential or vectorised; default: the run's own")
    command.add_argument(
        "--until", type=whole_number, metavar="VERSION", help="end there; default: at its end"
    )
    command.add_argument(
        "--compare",
        action="store_true",
        help="with the model that the run saved; the exit code is 1 where they differ",
    )


def replay_command(given: argparse.Namespace) -> int:
    """Replay, print the result, and compare it with the saved model if requested."""
    folder, path = _find_trace(Path(given.trace))
    known = settings_file.read(folder)
    if given.until is not None and given.until < 0:
        raise InputError(f"--until must be at least 0, not {given.until}.")
    if given.engine is not None and given.engine not in REPLAY_ENGINES:
        raise unknown_name("engine", given.engine, REPLAY_ENGINES)
    experiment = Experiment.from_settings(known)
    if experiment.clip is not None and experiment.noise != 0 and experiment.noise_seed is None:
        raise secret_noise_error()
    saved = _load_saved_model(folder, experiment, given.until) if given.compare else None
    spec = _build_spec(given, experiment, known, folder)
    snapshot = _replay_trace(experiment, spec, path, given.until if saved is None else saved.version)
    found: dict[str, Any] = {"version": snapshot.version, "engine": type(spec.engine).__name__.lower()}
    if spec.test is not None:
        assert spec.task is not None
        found |= spec.task.evaluate(
            spec.problem, snapshot.x, spec.test, snapshot.statistics, snapshot.personal
        )[0]
    found["norm"] = float(snapshot.x.norm())
    if saved is not None:
        found |= _differences(snapshot, spec.problem, saved)
    same = saved is None or found["difference"] <= _TOLERANCE
    if given.json:
        print(
            json.dumps(found | {"algorithm": experiment.algorithm, "same": None if saved is None else same})
        )
    else:
        _print_result(experiment, path, found)
    if not same:
        print(
            f"offbeat: the replayed model differs from the run's by {found['difference']:.3g} of its norm, "
            f"more than {_TOLERANCE:g}: the data, model or state of its clients differed.",
            file=sys.stderr,
        )
    return 0 if same else 1


def _find_trace(given: Path) -> tuple[Path, Path]:
    """The folder of a run, and its trace."""
    folder, path = (given, given / "trace.jsonl") if given.is_dir() else (given.parent, given)
    if not path.is_file():
        raise InputError(f"there is no trace {path}: name the folder of a run, or the trace in it.")
    if not (folder / "settings.json").is_file():
        raise InputError(
            f"there is no settings.json beside {path}: move the trace back to the folder of its run."
        )
    return folder, path


def _build_spec(
    given: argparse.Namespace, experiment: Experiment, known: dict[str, Any], folder: Path
) -> RunSpec:
    """Build the run again on an engine of this process."""
    if is_deployment(known):
        if given.task is None:
            raise InputError(
                "the data of a deployment are at its sites: give --task package.module:function, "
                "which returns the task with the data of all sites."
            )
        from offbeat.deploy.server.setup import set_up_replay  # needs what a deployment needs

        return set_up_replay(known, folder, given.task, together=given.engine == "vectorised")
    task = None
    if experiment.task is not None and ":" not in experiment.task:
        if given.task is None:
            raise InputError(
                f"the run in {folder} was started from Python with the task '{experiment.task}': give --task "
                "package.module:function, which returns that task."
            )
        task = load_task(given.task, experiment.seed, "--task")
    elif given.task is not None:
        raise InputError(
            f"the run in {folder} is a simulation, whose settings name its task: leave out --task."
        )
    engine = given.engine or known.get("resolved", {}).get("engine")
    return build_run(_on_local_engine(experiment, engine), task, scaling=Scaling.from_settings(known))


def _on_local_engine(experiment: Experiment, engine: str | None) -> Experiment:
    """The same experiment on an engine of this process; the trace provides the times."""
    name = engine if engine in REPLAY_ENGINES else "sequential"
    return dataclasses.replace(
        experiment,
        engine=name,
        execution=experiment.execution if name == "vectorised" else "auto",
        workers=None,
        ray_address=None,
        delays="constant:1",
        availability="always",
        dropout=0.0,
    )


def _replay_trace(experiment: Experiment, spec: RunSpec, path: Path, until: int | None) -> Snapshot:
    with progress_bar(experiment.algorithm, experiment.rounds if until is None else until) as bar:
        snapshots = replay(
            spec.algorithm,
            spec.engine,
            read_trace_lines(path),
            **spec.loop_arguments(experiment),
            until=until,
            observe_start=lambda starting: bar.start(starting.done, starting.clients),
        )
        for snapshot in snapshots:
            ages = snapshot.cohort.staleness if snapshot.cohort else (0,)
            bar.step(
                Progress(
                    snapshot.version,
                    snapshot.time,
                    snapshot.counts.client_updates,
                    sum(ages) / len(ages),
                    None,
                )
            )
    return snapshot


def _load_saved_model(folder: Path, experiment: Experiment, until: int | None) -> SavedModel:
    state, named = folder / "checkpoint" / "state.safetensors", folder / "model.safetensors"
    path = state if state.is_file() else named
    if not path.is_file():
        raise InputError(f"the run in {folder} has saved no model yet: leave out --compare.")
    if path == named and experiment.ema_decay is not None:
        raise InputError(f"{named} is an average of models, not the last model: leave out --compare.")
    facts, tensors = checkpoint.load(path)
    if facts.get("start"):
        raise InputError(f"the run in {folder} was saved in its start, without a model: leave out --compare.")
    version = facts["version"]
    if until not in (None, version):
        raise InputError(f"the saved model is of version {version}: leave out --until to compare with it.")
    return SavedModel(version, tensors, path == named)


def _differences(snapshot: Snapshot, problem: Problem, saved: SavedModel) -> dict[str, float]:
    """The relative differences of model and running statistics, in norm and in the largest entry."""
    if saved.named:
        ours: dict[str, Tensor] = problem.module(snapshot.x, snapshot.statistics).state_dict()
    else:
        index = next(number for number, leaf in enumerate(trees.leaves(snapshot.state)) if leaf is snapshot.x)
        ours = {f"state.{index}": snapshot.x}
        ours |= {f"statistics.{name}": value for name, value in snapshot.statistics.items()}
    pairs = [(value, saved.tensors.get(name)) for name, value in ours.items() if value.numel()]
    gaps = []
    for mine, kept in pairs:
        if kept is None or kept.shape != mine.shape:
            raise InputError("the saved model is of another module: give the task of the run with --task.")
        gaps.append((mine.double().cpu() - kept.double(), kept.double()))
    tiny = torch.finfo(torch.float64).tiny  # avoids 0 / 0
    return {
        "difference": max(float(gap.norm() / kept.norm().clamp_min(tiny)) for gap, kept in gaps),
        "largest": max(float(gap.abs().max() / kept.abs().max().clamp_min(tiny)) for gap, kept in gaps),
    }


def _print_result(experiment: Experiment, path: Path, found: dict[str, Any]) -> None:
    words = {
        "norm": "norm of the model",
        "difference": "difference from the saved model, relative to its norm",
        "largest": "largest difference of an entry, relative to the largest entry",
    }
    terminal.print_pairs(
        f"{experiment.algorithm} replayed from {path}",
        {words.get(name, name): value for name, value in found.items()},
    )
