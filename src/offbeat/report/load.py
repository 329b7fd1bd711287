"""Reads the folder of a run: settings, records, a summary of the trace, how it ended, accuracies by client.

Only the outcome and the tasks in flight are read from a checkpoint, since other parts of it are secret; on
request, the accuracy of the last model on each client's training examples is computed from it as well.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.data.datasets import Source
from offbeat.errors import InputError
from offbeat.files import last_line
from offbeat.privacy.accountant import Releases
from offbeat.privacy.ledger import correct_statement, corrected_end, is_simulated
from offbeat.renamed import present_record
from offbeat.report.trace import (
    DamagedFileError,
    Floats,
    PendingTask,
    TraceSummary,
    damaged_error,
    no_run_sentence,
    parse_line,
    read_lines,
    summarise_trace,
    trace_end,
)
from offbeat.training import checkpoint, settings_file
from offbeat.training.build import AnySimulatedEngine, RunSpec, build_run
from offbeat.training.evaluate import accuracy, evaluate
from offbeat.training.experiment import Experiment, hides_sample, is_deployment
from offbeat.training.folder import FAILURE_FILE
from offbeat.training.runner import saved_model
from offbeat.training.standardise import Scaling
from offbeat.training.task import named_task

RECORD_COLUMNS = (
    "version",
    "time",
    "client_updates",
    "epsilon",
    "bytes",
    "dropped",
    "lost",
    "elapsed",
)
_EARLIER_METRICS = {"accuracy": "max", "loss": "min"}  # of runs whose settings do not name their metrics
CLIENT_SUMMARIES = {"mean": "mean", "worst_tenth": "worst tenth", "spread": "spread"}
_REQUIRED_COLUMNS = ("version", "time", "client_updates")
CLIENTS_FILE = "clients.json"
_MAX_NUMBER = 1e150  # larger numbers mean that the file is damaged

Records = Mapping[str, Floats]  # NaN: not recorded


def metric_columns(metric: str) -> tuple[str, ...]:
    """The columns of a metric: over all test examples, and summaries over clients."""
    return (metric, *(f"{metric}_{kind}" for kind in CLIENT_SUMMARIES))


def read_columns(lines: Iterable[Any], metrics: Iterable[str] = tuple(_EARLIER_METRICS)) -> Records:
    """All records as columns; raises `DamagedFileError` for a value that no run writes."""
    columns = (*RECORD_COLUMNS, *(column for name in metrics for column in metric_columns(name)))
    rows = []
    last = -1.0
    for line in lines:
        if not isinstance(line, Mapping):
            raise DamagedFileError("a line is not a record")
        line = present_record(line)
        if "simulated_epsilon" in line:
            line["epsilon"] = line["simulated_epsilon"]
        row = [_number(line.get(name), name) for name in columns]
        if any(math.isnan(row[columns.index(name)]) for name in _REQUIRED_COLUMNS) or row[0] <= last:
            raise DamagedFileError("a line is not a record, or is out of order")
        last = row[0]
        rows.append(row)
    table = np.array(rows, dtype=np.float64).reshape(len(rows), len(columns))
    return {name: table[:, index] for index, name in enumerate(columns)}


def _number(value: Any, name: str) -> float:
    if value is None:
        return math.nan
    if type(value) not in (int, float) or not abs(value) < _MAX_NUMBER:
        raise DamagedFileError(f"a {name} is {str(value)[:40]!r}")
    return float(value)


@dataclass(frozen=True)
class PrivacySpent:
    """The privacy loss of any one client."""

    epsilon: float | None  # None: the run has not ended
    delta: float
    releases: int
    terms: str
    unamplified: float | None = None  # epsilon against those who see who contributed when; None: the same


@dataclass(frozen=True)
class RunEnding:
    """How far a run got, and why it ended."""

    version: int | None = None  # the version of the checkpoint
    ended: str | None = None  # why it ended before its last server step
    privacy: PrivacySpent | None = None
    flights: tuple[PendingTask, ...] | None = None  # tasks in flight; None: unknown
    unread: str | None = None  # why the checkpoint could not be read
    diverged: str | None = None  # the message of a run that diverged


def read_ending(folder: Path) -> RunEnding:
    """The ending of a run; its checkpoint may be missing or unreadable."""
    path, diverged = folder / "checkpoint" / "state.safetensors", _diverged(folder / FAILURE_FILE)
    if not path.exists():
        return RunEnding(unread="the run has no checkpoint", diverged=diverged)
    try:
        facts = checkpoint.load_facts(path)
    except InputError:
        return RunEnding(unread="the run's checkpoint cannot be read", diverged=diverged)
    version = facts.get("version")
    return RunEnding(
        version if isinstance(version, int) else None,
        *_outcome(facts),
        _pending_tasks(facts),
        diverged=diverged,
    )


def _diverged(path: Path) -> str | None:
    try:
        return str(json.loads(path.read_bytes())["diverged"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _outcome(facts: Mapping[str, Any]) -> tuple[str | None, PrivacySpent | None]:
    try:
        ended, spent = facts["running"].get("outcome", (None, None))
        ended = None if ended is None else str(ended)
        if spent is not None:
            epsilon, delta, releases, terms, *rest = spent  # earlier versions wrote four values
            ended = corrected_end(ended, str(terms))
            unamplified = None if not rest or rest[0] is None else float(rest[0])
            return ended, PrivacySpent(
                float(epsilon), float(delta), int(releases), correct_statement(str(terms)), unamplified
            )
        ledger = facts["aggregate"].get("spent")
        if ledger is None:
            return ended, None
        terms = correct_statement(
            str(ledger["terms"]), [Releases(*each) for each in ledger.get("releases", ())]
        )
        return ended, PrivacySpent(None, float(ledger["delta"]), int(ledger["made"]), terms)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None, None


def _pending_tasks(facts: Mapping[str, Any]) -> tuple[PendingTask, ...] | None:
    try:
        flights = facts["session"]["clock"]["flights"]
        return tuple(PendingTask(float(started), float(due)) for due, *_, started in flights)
    except (KeyError, TypeError, ValueError):
        return None


@dataclass(frozen=True)
class Run:
    """One run, as a report needs it."""

    label: str
    folder: Path
    settings: Mapping[str, Any]
    records: Records
    trace: TraceSummary | None  # None: no trace, or no server step yet
    whole: bool  # whether the tasks in flight at the end of the trace are known
    ending: RunEnding
    clients: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # metric -> client -> value

    @property
    def metrics(self) -> dict[str, bool]:
        """The metrics in order of importance, and whether higher values are better."""
        return {name: goal == "max" for name, goal in _metrics(self.settings).items()}

    @property
    def deployed(self) -> bool:
        """Whether the run was a deployment over sites and not a simulation."""
        return is_deployment(self.settings)

    @property
    def hides_sample(self) -> bool:
        """Whether its epsilon assumes that the participating clients stay secret."""
        return hides_sample(self.settings)

    @property
    def simulated(self) -> bool:
        """Whether its epsilon assumes amplification that is simulated only, and so is not a guarantee."""
        privacy = self.ending.privacy
        simulated = bool(self.settings.get("simulate_amplification"))
        return simulated or (privacy is not None and is_simulated(privacy.terms))


def has_values(run: Run, column: str) -> bool:
    """Whether any record of a run has a value in a column."""
    return column in run.records and not np.isnan(run.records[column]).all()


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """All runs, each with a distinct label."""
    resolved = [folder.resolve() for folder in folders]
    for index, folder in enumerate(resolved):
        if folder in resolved[:index]:
            raise InputError(f"{folders[index]} is named twice: name each run once.")
    return [_read(*each) for each in zip(folders, _labels(resolved), strict=True)]


def _labels(folders: Sequence[Path]) -> list[str]:
    """The last part of each path; more parts where labels would be equal."""
    length = 1
    while True:
        names = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
        length += 1


def _read(folder: Path, label: str) -> Run:
    if not (folder / "settings.json").is_file():
        raise InputError(no_run_sentence(folder))
    known = settings_file.read(folder)
    clients, buffer = known.get("clients"), known.get("buffer")
    if type(clients) is not int or type(buffer) is not int or not 0 < clients < 2**31 or buffer < 1:
        raise InputError(f"the settings in {folder} are not those of a run: name the folder of a run.")
    if not (folder / "records.jsonl").is_file():
        raise _no_records_error(folder)
    try:
        records = read_columns(read_lines(folder / "records.jsonl"), _metrics(known))
    except DamagedFileError as error:
        raise damaged_error(folder / "records.jsonl", error) from None
    if not len(records["version"]):
        raise _no_records_error(folder)
    ending = read_ending(folder)
    trace, whole = _trace(folder / "trace.jsonl", clients, buffer, ending, int(records["version"][-1]))
    return Run(label, folder, known, records, trace, whole, ending, _read_clients(folder / CLIENTS_FILE))


def _metrics(settings: Mapping[str, Any]) -> dict[str, str]:
    """The names and goals of a run's metrics, the main one first."""
    given = settings.get("metrics")
    valid = isinstance(given, dict) and given and all(goal in ("max", "min") for goal in given.values())
    return dict(given) if valid else _EARLIER_METRICS  # type: ignore[arg-type]


def _read_clients(path: Path) -> dict[str, dict[str, float]]:
    """The metrics of each client at the end of a run, if it has test data by client; null is NaN."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())["clients"]
        return {
            str(metric): {str(client): _number(value, metric) for client, value in values.items()}
            for metric, values in found.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged_error(path, DamagedFileError(str(error)[:80])) from None


def _trace(
    path: Path, clients: int, buffer: int, ending: RunEnding, recorded: int
) -> tuple[TraceSummary | None, bool]:
    last, size = last_line(path) if path.is_file() else (b"", 0)
    if not last:
        return None, False
    try:
        end = trace_end(parse_line(last))
        if end.version < recorded:
            raise DamagedFileError(
                f"it ends at server step {end.version}, and there is a record of {recorded}"
            )
        if end.version == 0:
            return None, False
        known = ending.flights is not None and ending.version == end.version
        flights = ending.flights or () if known else ()
        return summarise_trace(read_lines(path, size), end, clients, buffer, flights), known
    except DamagedFileError as error:
        raise damaged_error(path, error) from None


def _no_records_error(folder: Path) -> InputError:
    return InputError(f"the run in {folder} has no records yet: wait for its first one.")


@dataclass(frozen=True)
class ClientAccuracies:
    """The accuracies of all clients."""

    version: int  # of the model
    accuracies: Floats


def client_accuracies(runs: Sequence[Run]) -> dict[str, ClientAccuracies | str]:
    """Accuracies by run label, or the reason why there are none. Data that runs share are loaded once."""
    loaded: dict[tuple[str | None, str | None], Source | None] = {}
    found: dict[str, ClientAccuracies | str] = {}
    for run in runs:
        if run.deployed:
            found[run.label] = (
                "its examples are at its sites, so the accuracy of each client is not known here."
            )
            continue
        try:
            experiment = Experiment.from_settings(dict(run.settings))
            data = (experiment.data, experiment.data_dir)
            experiment = _on_this_machine(experiment)
            scaling = Scaling.from_settings(run.settings)
            spec = build_run(experiment, named_task(experiment, loaded.get(data)), scaling=scaling)
            loaded[data] = spec.task.data if spec.task and isinstance(spec.task.data, Source) else None
            found[run.label] = _evaluate_clients(spec, run.folder / "checkpoint" / "state.safetensors")
        except InputError as error:
            found[run.label] = f"the accuracy of each client could not be computed: {error}"
    return found


def _on_this_machine(experiment: Experiment) -> Experiment:
    """The same clients and model, computed in this process on the CPU."""
    return dataclasses.replace(
        experiment,
        engine="sequential",
        device="cpu",
        execution="auto",
        precision="auto",
        workers=None,
        ray_address=None,
    )


def _evaluate_clients(spec: RunSpec, path: Path) -> ClientAccuracies:
    saved = checkpoint.load(path)
    try:
        model, statistics = saved_model(saved, spec.algorithm, spec.problem)
    except (KeyError, ValueError):
        raise InputError(f"the checkpoint {path} is of another model: restore the run's own.") from None
    assert isinstance(spec.engine, AnySimulatedEngine)
    population = spec.engine.population
    each = [
        evaluate(
            spec.problem,
            model,
            population.data.gather(population.parts[client]),
            {"accuracy": accuracy},
            statistics=statistics,
        )["accuracy"]
        for client in range(len(population))
    ]
    return ClientAccuracies(saved.facts["version"], np.array(each))
