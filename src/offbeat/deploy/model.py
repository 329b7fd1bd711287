"""The trained model as a file that any program with safetensors can read."""

from pathlib import Path

from offbeat import checkpoint, trees
from offbeat.checkpoint import Checkpoint
from offbeat.core import AnyAlgorithm
from offbeat.problem import Problem

NAME = "model.safetensors"


def write_model(folder: Path, algorithm: AnyAlgorithm, problem: Problem) -> None:
    """The module's weights by name, of the last checkpoint; their average where that was asked for."""
    saved = checkpoint.load(folder / "checkpoint" / "state.safetensors", problem.device)
    x, statistics = problem.initial()
    shape = trees.shape(algorithm.init(x))
    state = trees.rebuild(shape, [saved.tensors[f"state.{n}"] for n in range(shape.num_leaves)])
    known = {name: saved.tensors[f"statistics.{name}"] for name in statistics}
    module = problem.module(saved.tensors.get("average", state.x), known)
    facts = {"version": saved.facts["version"]}
    checkpoint.save(folder / NAME, Checkpoint(facts, dict(module.state_dict())))
