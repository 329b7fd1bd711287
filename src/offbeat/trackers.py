"""Experiment trackers: TensorBoard, MLflow and Weights & Biases, and how a resumed run continues them.

A tracker that fails does not end the run. MLflow runs belong to the experiment `offbeat`, or to the one that
MLFLOW_EXPERIMENT_NAME names.
"""

import json
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from offbeat.errors import InputError, error_summary
from offbeat.training.experiment import SAMPLE_FIELDS, hides_sample
from offbeat.training.folder import claim_folder


class Tracker(Protocol):
    """Receives every record of a run and a summary at the end."""

    def record(self, record: Mapping[str, Any]) -> None:
        """Log a record; one that was logged before has no effect."""
        ...

    def close(self, summary: Mapping[str, Any]) -> None:
        """The run ended or was stopped; see `run_state`."""
        ...


@dataclass(frozen=True)
class TrackerGroup:
    """All trackers of a run as one; secret fields of records are not sent to them."""

    trackers: tuple[Tracker, ...] = ()
    secret: frozenset[str] = frozenset()

    def record(self, record: Mapping[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.record(self._public(record))

    def close(self, summary: Mapping[str, Any]) -> None:
        last = summary.get("last")
        public = summary if last is None else {**summary, "last": self._public(last)}
        for tracker in self.trackers:
            tracker.close(public)

    def _public(self, record: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in record.items() if name not in self.secret}


class SafeTracker:
    """A tracker that is disabled after its first error, so that the run continues."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker: Tracker | None = tracker

    def record(self, record: Mapping[str, Any]) -> None:
        if self._tracker is not None:
            try:
                self._tracker.record(record)
            except Exception as error:
                self._disable(error)

    def close(self, summary: Mapping[str, Any]) -> None:
        if self._tracker is not None:
            try:
                self._tracker.close(summary)
            except Exception as error:
                self._disable(error)

    def _disable(self, error: Exception) -> None:
        self._tracker = None
        logging.getLogger("offbeat").warning(
            "%s failed and receives no more records (%s); the run and its folder are not affected.",
            *(self._name, error_summary(error)),
        )


def finite_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a record except the version, which is the step."""
    return {
        name: float(value)
        for name, value in record.items()
        if name != "version"
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    }


def flatten(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested settings as one level, with names such as `resolved.engine`."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = value
    return found


def run_state(summary: Mapping[str, Any]) -> str:
    """The state of a run that is closed: `failed`, `stopped` (it can be resumed) or `finished`."""
    if summary.get("error"):
        return "failed"
    return "finished" if summary.get("finished") or summary.get("ended") else "stopped"


_TRACKERS_FILE = "trackers.json"


class TrackedRun(NamedTuple):
    """A folder, a project or an address, and the identity of the run there."""

    place: str
    run: str


@dataclass(frozen=True)
class TrackerOptions:
    """The destination of each tracker; None: the tracker is not used."""

    tensorboard: str | None = None  # a folder, in which each run gets its own
    wandb: str | None = None  # a project
    mlflow: str | None = None  # an address


class TrackedRuns(NamedTuple):
    """The tracked run of each tracker."""

    tensorboard: TrackedRun | None = None
    wandb: TrackedRun | None = None
    mlflow: TrackedRun | None = None


def save_tracked_runs(folder: Path, placed: TrackedRuns) -> None:
    """Write the tracked runs to a run's folder."""
    held = {name: list(place) for name, place in placed._asdict().items() if place is not None}
    if held:
        (folder / _TRACKERS_FILE).write_text(json.dumps(held, indent=1) + "\n")


def load_tracked_runs(folder: Path) -> TrackedRuns:
    """Read what `save_tracked_runs` wrote, if anything."""
    path = folder / _TRACKERS_FILE
    if not path.exists():
        return TrackedRuns()
    try:
        held: Mapping[str, list[str]] = json.loads(path.read_text())
        return TrackedRuns(**{name: TrackedRun(*place) for name, place in held.items()})
    except (ValueError, TypeError, AttributeError):
        raise InputError(
            f"{path} cannot be read: delete it, and trackers that are named again start new runs."
        ) from None


class TensorBoardTracker:
    """Writes event files; records up to the version `known` are in them already."""

    def __init__(self, writer: Any, known: int) -> None:
        self._writer = writer
        self._known = known

    def record(self, record: Mapping[str, Any]) -> None:
        version = int(record["version"])
        if version <= self._known:
            return
        for name, value in finite_numbers(record).items():
            self._writer.add_scalar(name, value, version)
        self._writer.flush()

    def close(self, summary: Mapping[str, Any]) -> None:
        self._writer.close()


def check_tensorboard(folder: str) -> None:
    """Raise `InputError` if TensorBoard is not installed or the path is not a folder."""
    if Path(folder).exists() and not Path(folder).is_dir():
        raise InputError(f"{folder} is a file: name a folder with --tensorboard.")
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        raise InputError("--tensorboard needs a package: pip install 'offbeat[tensorboard]'.") from None


def open_tensorboard(
    folder: str, name: str, settings: Mapping[str, Any], held: TrackedRun | None, since: int | None
) -> tuple[TensorBoardTracker, TrackedRun]:
    """A tracker in a new folder within `folder`; the run `held` is continued after version `since`."""
    from torch.utils.tensorboard import SummaryWriter

    resumes = held is not None and held.place == str(Path(folder).absolute())
    known = -1 if since is None or not resumes else since
    try:
        run = held.run if held and resumes else _new_folder(Path(folder).absolute(), name).name
        path = Path(folder).absolute() / run
        # what was written after the checkpoint is computed again, so TensorBoard has to drop it
        writer: Any = SummaryWriter(str(path), purge_step=known + 1 if resumes else None)
        if not resumes:
            writer.add_text("settings", f"```json\n{json.dumps(dict(settings), indent=1)}\n```")
    except OSError as error:
        reason = error_summary(error)
        raise InputError(f"{folder} cannot be written to ({reason}): name another --tensorboard.") from None
    return TensorBoardTracker(writer, known), TrackedRun(str(Path(folder).absolute()), run)


def _new_folder(folder: Path, name: str) -> Path:
    """A new folder of that name, with a number if the name is taken."""
    path = folder / name
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        return claim_folder(folder, name)
    return path


_STATUS = {"failed": "FAILED", "stopped": "KILLED", "finished": "FINISHED"}
_MAX_PARAMS = 100  # the limit of an MLflow request


class MlflowTracker:
    """Logs to a run; records up to the version `known` are in it already."""

    def __init__(self, client: Any, run: str, known: int) -> None:
        self._client = client
        self._run = run
        self._known = known

    def record(self, record: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        version = int(record["version"])
        if version <= self._known:
            return
        now = int(1000 * time.time())
        values = finite_numbers(record) | {"version": float(version)}
        metrics = [Metric(name, value, now, version) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self, summary: Mapping[str, Any]) -> None:
        best = summary.get("best_accuracy")
        if best is not None:
            self._client.set_tag(self._run, "best_accuracy", str(best))
        self._client.set_terminated(self._run, _STATUS[run_state(summary)])


def check_mlflow(uri: str) -> None:
    """Raise `InputError` if MLflow is not installed or the URI has a password, which would be stored."""
    if urlsplit(uri).password and not uri.startswith("sqlite:"):
        raise InputError(
            "--mlflow must not hold a password: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
        )
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # no telemetry unless the user asks for it
    try:
        import mlflow  # noqa: F401
    except ImportError:
        raise InputError("--mlflow needs a package: pip install 'offbeat[mlflow]'.") from None


def open_mlflow(
    uri: str, name: str, settings: Mapping[str, Any], held: TrackedRun | None, since: int | None
) -> tuple[MlflowTracker, TrackedRun]:
    """A tracker of a new run, or of the run `held`, which is continued."""
    from mlflow import MlflowClient
    from mlflow.entities import Param

    # with the defaults, an unreachable server would delay the run for minutes
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    resumes = held is not None and held.place == uri
    try:
        client = MlflowClient(tracking_uri=uri)
        if held and resumes:
            version = client.get_run(held.run).data.metrics.get("version", -1)
            client.update_run(held.run, status="RUNNING")
            return MlflowTracker(client, held.run, int(version)), held
        run = client.create_run(_experiment_id(client), run_name=name).info.run_id
        params = [Param(key, str(value)) for key, value in flatten(settings).items()]
        for start in range(0, len(params), _MAX_PARAMS):
            client.log_batch(run, params=params[start : start + _MAX_PARAMS])
    except Exception as error:
        raise InputError(
            f"the MLflow store {uri} could not be used ({error_summary(error)}): give the address of a "
            "server, or a file such as sqlite:///mlflow.db."
        ) from None
    return MlflowTracker(client, run, -1), TrackedRun(uri, run)


def _experiment_id(client: Any) -> str:
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "offbeat")
    found = client.get_experiment_by_name(name)
    identity: str = found.experiment_id if found else client.create_experiment(name)
    return identity


class WandbTracker:
    """Logs to a run; records up to the version `known` are in it already."""

    def __init__(self, run: Any, known: int) -> None:
        self._run = run
        self._known = known

    def record(self, record: Mapping[str, Any]) -> None:
        if record["version"] > self._known:
            self._run.log({"version": record["version"], **finite_numbers(record)})

    def close(self, summary: Mapping[str, Any]) -> None:
        best = summary.get("best_accuracy")
        if best is not None:
            self._run.summary["best_accuracy"] = best
        self._run.summary["state"] = run_state(summary)
        self._run.finish(exit_code=0 if run_state(summary) == "finished" else 1)


def check_wandb(project: str) -> None:
    """Raise `InputError` if wandb is not installed or the project has no name."""
    if not project.strip():
        raise InputError("--wandb needs the name of a project, such as offbeat.")
    try:
        import wandb  # noqa: F401
    except ImportError:
        raise InputError("--wandb needs a package: pip install 'offbeat[wandb]'.") from None


def open_wandb(
    project: str, name: str, settings: Mapping[str, Any], held: TrackedRun | None, since: int | None
) -> tuple[WandbTracker, TrackedRun]:
    """A tracker of a new run, or of the run `held`, which is continued."""
    import wandb

    resumes = held is not None and held.place == project
    place = held if held and resumes else TrackedRun(project, uuid.uuid4().hex[:12])
    try:
        run = wandb.init(
            project=project,
            id=place.run,
            name=name,
            config=flatten(settings),
            resume="allow",
            reinit="create_new",  # the caller's own active run is left alone
            settings=wandb.Settings(console="off"),
        )
        run.define_metric("version")
        run.define_metric("*", step_metric="version")
    except Exception as error:
        raise InputError(
            f"Weights & Biases could not be started ({error_summary(error)}): log in with 'wandb login', or "
            "set WANDB_MODE=offline."
        ) from None
    return WandbTracker(run, _last_version(run, since) if resumes else -1), place


def _last_version(run: Any, since: int | None) -> int:
    """The last version that the service has; offline, that of the checkpoint."""
    version = run.summary.get("version")
    if version is not None:
        return int(version)
    return -1 if since is None else since


class _Backend(NamedTuple):
    """One tracker: the destination that was given, the run to continue, and how to open it."""

    title: str
    wanted: str | None
    held: TrackedRun | None
    check: Callable[[str], None]
    open: Callable[[str, str, Mapping[str, Any], TrackedRun | None, int | None], tuple[Tracker, TrackedRun]]


def check_trackers(wanted: TrackerOptions) -> None:
    """Raise `InputError` for a tracker that cannot be used, before anything is written."""
    for kind in _backends(wanted, TrackedRuns()):
        if kind.wanted is not None:
            kind.check(kind.wanted)


def open_trackers(
    wanted: TrackerOptions,
    name: str,
    settings: Mapping[str, Any],
    held: TrackedRuns = TrackedRuns(),
    since: int | None = None,
) -> tuple[TrackerGroup, TrackedRuns]:
    """Open the trackers of a run, and return them with the identity of the run in each.

    `held` are the tracked runs of a resumed run, and `since` is the version of its checkpoint; they are
    continued unless another destination is given. One that is not available now is skipped with a warning.
    """
    found: list[SafeTracker] = []
    places: list[TrackedRun | None] = []
    for kind in _backends(wanted, held):
        place = kind.wanted if kind.wanted is not None else kind.held.place if kind.held else None
        if place is None:
            places.append(None)
            continue
        try:
            kind.check(place)
            tracker, at = kind.open(place, name, settings, kind.held, since)
        except InputError as error:
            if kind.wanted is not None:
                TrackerGroup(tuple(found)).close({"error": str(error)})
                raise
            logging.getLogger("offbeat").warning("%s receives no records this time: %s", kind.title, error)
            places.append(kind.held)
            continue
        found.append(SafeTracker(kind.title, tracker))
        places.append(at)
    secret = SAMPLE_FIELDS if hides_sample(settings) else frozenset()
    return TrackerGroup(tuple(found), secret), TrackedRuns(*places)


def _backends(wanted: TrackerOptions, held: TrackedRuns) -> tuple[_Backend, ...]:
    return (
        _Backend("TensorBoard", wanted.tensorboard, held.tensorboard, check_tensorboard, open_tensorboard),
        _Backend("Weights & Biases", wanted.wandb, held.wandb, check_wandb, open_wandb),
        _Backend("MLflow", wanted.mlflow, held.mlflow, check_mlflow, open_mlflow),
    )
