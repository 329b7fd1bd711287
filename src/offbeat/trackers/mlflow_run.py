"""MLflow: a run in the experiment `offbeat`, or in the one that MLFLOW_EXPERIMENT_NAME names."""

import os
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from offbeat.errors import InputError
from offbeat.trackers.place import Place
from offbeat.trackers.tracker import first_line, flat, numbers, state

_STATUS = {"failed": "FAILED", "stopped": "KILLED", "finished": "FINISHED"}
_MOST = 100  # settings that the server takes at once


class MlflowRun:
    """A run there; records up to `known` are in it already."""

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
        values = numbers(record) | {"version": float(version)}
        metrics = [Metric(name, value, now, version) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self, summary: Mapping[str, Any]) -> None:
        best = summary.get("best_accuracy")
        if best is not None:
            self._client.set_tag(self._run, "best_accuracy", str(best))
        self._client.set_terminated(self._run, _STATUS[state(summary)])


def check_mlflow(uri: str) -> None:
    """Refuse where it is not installed, and a password that would be kept in the run's folder."""
    if urlsplit(uri).password and not uri.startswith("sqlite:"):
        raise InputError(
            "--mlflow must not hold a password: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
        )
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nobody is told of runs unasked
    try:
        import mlflow  # noqa: F401
    except ImportError:
        raise InputError("--mlflow needs a package: pip install 'offbeat[mlflow]'.") from None


def open_mlflow(
    uri: str, name: str, settings: Mapping[str, Any], held: Place | None, since: int | None
) -> tuple[MlflowRun, Place]:
    """A new run, or the one that is held, which goes on."""
    from mlflow import MlflowClient
    from mlflow.entities import Param

    # by default a server that is away would hold up the run for minutes
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    goes_on = held is not None and held.place == uri
    try:
        client = MlflowClient(tracking_uri=uri)
        if held and goes_on:
            version = client.get_run(held.run).data.metrics.get("version", -1)
            client.update_run(held.run, status="RUNNING")
            return MlflowRun(client, held.run, int(version)), held
        run = client.create_run(_experiment(client), run_name=name).info.run_id
        params = [Param(key, str(value)) for key, value in flat(settings).items()]
        for start in range(0, len(params), _MOST):
            client.log_batch(run, params=params[start : start + _MOST])
    except Exception as error:
        raise InputError(
            f"the MLflow store {uri} could not be used ({first_line(error)}): give the address of a server, "
            "or a file such as sqlite:///mlflow.db."
        ) from None
    return MlflowRun(client, run, -1), Place(uri, run)


def _experiment(client: Any) -> str:
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "offbeat")
    found = client.get_experiment_by_name(name)
    identity: str = found.experiment_id if found else client.create_experiment(name)
    return identity
