"""Weights & Biases: a run of a project."""

import uuid
from collections.abc import Mapping
from typing import Any

from offbeat.errors import InputError
from offbeat.trackers.place import Place
from offbeat.trackers.tracker import first_line, flat, numbers, state


class WandbRun:
    """A run there; records up to `known` are in it already."""

    def __init__(self, run: Any, known: int) -> None:
        self._run = run
        self._known = known

    def record(self, record: Mapping[str, Any]) -> None:
        if record["version"] > self._known:
            self._run.log({"version": record["version"], **numbers(record)})

    def close(self, summary: Mapping[str, Any]) -> None:
        best = summary.get("best_accuracy")
        if best is not None:
            self._run.summary["best_accuracy"] = best
        self._run.summary["state"] = state(summary)
        self._run.finish(exit_code=0 if state(summary) == "finished" else 1)


def check_wandb(project: str) -> None:
    """Refuse where it is not installed, and a project without a name."""
    if not project.strip():
        raise InputError("--wandb needs the name of a project, such as offbeat.")
    try:
        import wandb  # noqa: F401
    except ImportError:
        raise InputError("--wandb needs a package: pip install 'offbeat[wandb]'.") from None


def open_wandb(
    project: str, name: str, settings: Mapping[str, Any], held: Place | None, since: int | None
) -> tuple[WandbRun, Place]:
    """A new run, or the one that is held, which goes on."""
    import wandb

    goes_on = held is not None and held.place == project
    place = held if held and goes_on else Place(project, uuid.uuid4().hex[:12])
    try:
        run = wandb.init(
            project=project,
            id=place.run,
            name=name,
            config=flat(settings),
            resume="allow",
            reinit="create_new",  # a run of the caller's own stays untouched
            settings=wandb.Settings(console="off"),
        )
        run.define_metric("version")
        run.define_metric("*", step_metric="version")
    except Exception as error:
        raise InputError(
            f"Weights & Biases could not be started ({first_line(error)}): log in by 'wandb login', or set "
            "WANDB_MODE=offline."
        ) from None
    return WandbRun(run, _known(run, since) if goes_on else -1), place


def _known(run: Any, since: int | None) -> int:
    """The last version that the service has; without a line to it, that of the checkpoint."""
    version = run.summary.get("version")
    if version is not None:
        return int(version)
    return -1 if since is None else since
