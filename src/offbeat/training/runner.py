"""Runs an experiment step by step: evaluates, writes records and trace, and saves checkpoints."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from offbeat import trees
from offbeat.aggregate.mean import PrivacyCost, client_names
from offbeat.aggregate.private import Private
from offbeat.core import AnyAlgorithm, Vector
from offbeat.errors import DivergedError
from offbeat.nn.problem import Problem
from offbeat.privacy.ledger import correct_statement, corrected_end
from offbeat.training.build import RunSpec, with_run_folder
from offbeat.training.checkpoint import Checkpoint
from offbeat.training.evaluate import ClientMetrics, ema
from offbeat.training.experiment import Experiment
from offbeat.training.folder import RunFolder, read_jsonl
from offbeat.training.loop import Snapshot, StartProgress, train
from offbeat.training.stopping import BestRecord, StopRules

_MIN_PAUSE = 5.0  # seconds between checkpoints
_MAX_SHARE = 0.05  # of the time that saving may take
_EPSILON_RECORDS = 20  # records with epsilon in a run, roughly; computing it can take a second


class Progress(NamedTuple):
    """The progress of a run; `record` is the record of this version, if it was evaluated."""

    version: int
    time: float
    client_updates: int
    staleness: float  # mean over the last buffer
    record: dict[str, Any] | None
    outcome: "RunOutcome | None" = None  # of the last version
    ages: tuple[int, ...] = ()  # the staleness of each update of the last buffer


class RunOutcome(NamedTuple):
    """How a run ended."""

    ended: str | None  # why it ended before the last version
    spent: PrivacyCost | None  # where privacy is counted


def saved_outcome(resumed: Checkpoint | None) -> RunOutcome:
    """The outcome in a run's last checkpoint."""
    ended, spent = resumed.facts["running"].get("outcome", (None, None)) if resumed else (None, None)
    if spent is None:
        return RunOutcome(ended, None)
    known = PrivacyCost(*spent)
    return RunOutcome(corrected_end(ended, known.terms), known._replace(terms=correct_statement(known.terms)))


def saved_model(
    saved: Checkpoint, algorithm: AnyAlgorithm, problem: Problem
) -> tuple[Vector, dict[str, Tensor]]:
    """The model of a checkpoint and its running statistics; if models are averaged, the average.

    Raises `KeyError` or `ValueError` if the checkpoint is of another model or method.
    """
    x, statistics = problem.initial()
    shape = trees.structure(algorithm.init(x))
    state = trees.unflatten(shape, [saved.tensors[f"state.{n}"] for n in range(shape.num_leaves)])
    model = saved.tensors.get("average", state.x)
    if model.shape != x.shape:
        raise ValueError(f"the model has {len(model)} parameters in place of {len(x)}")
    return model, {name: saved.tensors[f"statistics.{name}"] for name in statistics}


def resumed_outcome(
    folder: RunFolder, experiment: Experiment, goals: Mapping[str, str], *, evaluated: bool = True
) -> RunOutcome:
    """The outcome of a run that is resumed; one that a stopping rule ended continues under other settings."""
    outcome = saved_outcome(folder.resumed)
    if folder.resumed is None or not folder.resumed.facts["running"].get("stopped"):
        return outcome
    rules = StopRules.of(experiment, goals, evaluated=evaluated)
    *_, record = read_jsonl(folder.path, "records")
    best = BestRecord(*folder.resumed.facts["running"]["best"])
    return outcome._replace(ended=rules.last_reason(record, best))


def run_experiment(
    experiment: Experiment,
    spec: RunSpec,
    folder: RunFolder | None = None,
    *,
    save_every: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    observe_start: Callable[[int, int], None] = lambda done, clients: None,
) -> Iterator[Progress]:
    """Train, and yield after every server step; if `stop` returns true, save a checkpoint and end.

    A checkpoint is saved at the start, and then every `save_every` versions or, by default, so rarely that
    saving takes at most a twentieth of the time. If training diverges, the reason is written to the folder.
    `observe_start` is called during the full-participation start with the numbers of finished and of all
    clients.
    """
    try:
        yield from _run_steps(experiment, spec, folder, save_every, stop, observe_start)
    except DivergedError as error:
        if folder:
            folder.fail(str(error))
        raise


def _run_steps(
    experiment: Experiment,
    spec: RunSpec,
    folder: RunFolder | None,
    save_every: int | None,
    stop: Callable[[], bool],
    observe_start: Callable[[int, int], None],
) -> Iterator[Progress]:
    if folder:
        _reopen_end(folder, experiment.rounds)
    state = _RunRecorder(folder.resumed if folder else None)
    goals = spec.task.goals if spec.task else {"loss": "min"}
    rules = StopRules.of(experiment, goals, evaluated=spec.test is not None)
    snapshots = train(
        spec.algorithm,
        with_run_folder(spec.engine, folder.path) if folder else spec.engine,
        **spec.loop_arguments(experiment),
        resume=folder.resumed if folder else None,
        observe_start=lambda starting: state.start(starting, folder, save_every, observe_start),
    )
    noted = False  # how the run computes
    if folder and folder.resumed is None and spec.engine_reason:
        folder.note(engine_reason=spec.engine_reason)
    for snapshot in snapshots:
        state.observe(snapshot, experiment.ema_decay)
        if folder and not noted and (report := snapshot.execution()) and report["seconds"]:
            folder.note(execution_report=report)
            noted = True
        if folder and snapshot.filled:
            folder.append("trace", _trace(snapshot))
        enough = rules.over_budget(snapshot.time, _bytes_sent(snapshot), snapshot.counts.client_updates)
        whole = snapshot.version == experiment.rounds or snapshot.ended is not None
        final = whole or enough is not None
        record = None
        due = snapshot.version % experiment.eval_every == 0
        if due or final:
            record = state.record(snapshot, spec, experiment.ema_decay, due)
            if due:
                state.best = rules.improve(state.best, record)
                enough = enough or rules.satisfied(record, state.best)
                final = whole or enough is not None
        last = final or stop()
        if record is not None:
            if isinstance(spec.aggregate, Private):
                counted = final or _epsilon_due(snapshot.version, experiment)
                name = "simulated_epsilon" if experiment.simulate_amplification else "epsilon"
                record[name] = _epsilon(snapshot) if counted else None
            if folder:
                folder.append("records", record)
                folder.flush()
            if folder and last and state.clients is not None:
                folder.write_clients(snapshot.version, state.clients.clients)
        early = None if whole else enough
        outcome = RunOutcome(snapshot.ended or early, snapshot.spent()) if last else None
        if folder and (last or state.due(snapshot.version, save_every)):
            state.save(snapshot, folder, outcome, stopped=early is not None)
        ages = snapshot.cohort.staleness if snapshot.cohort else ()
        mean = sum(ages) / len(ages) if ages else 0.0
        yield Progress(
            snapshot.version, snapshot.time, snapshot.counts.client_updates, mean, record, outcome, ages
        )
        if last:
            return


class _RunRecorder:
    """The state of a run outside the loop: averaged model, staleness since the last record, elapsed time."""

    def __init__(self, resumed: Checkpoint | None) -> None:
        facts: dict[str, Any] = resumed.facts["running"] if resumed else {"ages": [0, 0, 0], "elapsed": 0.0}
        self._average: Tensor | None = resumed.tensors.get("average") if resumed else None
        self._total, self._count, self._worst = facts["ages"]
        self._early: list[int] | None = None  # staleness before a record at the end only
        self._before: float = facts["elapsed"]
        self._begun = time.monotonic()
        self._saved = self._begun if resumed else -math.inf
        self.clients: ClientMetrics | None = None  # the metrics of each client in the last record
        self.best = BestRecord(*facts.get("best", ()))
        self._cost = 0.0

    @property
    def elapsed(self) -> float:
        return self._before + time.monotonic() - self._begun

    def observe(self, snapshot: Snapshot, decay: float | None) -> None:
        if decay is not None:
            self._average = snapshot.x if self._average is None else ema(self._average, snapshot.x, decay)
        for age in snapshot.cohort.staleness if snapshot.cohort else ():
            self._total += age
            self._count += 1
            self._worst = max(self._worst, age)

    def record(self, snapshot: Snapshot, spec: RunSpec, decay: float | None, due: bool) -> dict[str, Any]:
        x = snapshot.x if decay is None or self._average is None else self._average
        scores: dict[str, float] = {}
        if spec.test is not None:
            assert spec.task is not None
            scores, self.clients = spec.task.evaluate(
                spec.problem, x, spec.test, snapshot.statistics, snapshot.personal
            )
            if not math.isfinite(scores["loss"]):
                raise DivergedError(f"the loss became NaN or infinite {_diverged_where(snapshot)}.")
        record = {
            "version": snapshot.version,
            "time": snapshot.time,
            "client_updates": snapshot.counts.client_updates,
            **{name: value if math.isfinite(value) else None for name, value in scores.items()},
            "staleness_mean": self._total / self._count if self._count else 0.0,
            "staleness_max": self._worst,
            "dropped": snapshot.counts.dropped,
            "lost": snapshot.counts.lost,
            "floats_down": snapshot.sent.down,
            "floats_up": snapshot.sent.up,
            "bytes": _bytes_sent(snapshot),
            "elapsed": round(self.elapsed, 3),
        }
        self._early = None if due else [self._total, self._count, self._worst]
        self._total = self._count = self._worst = 0
        return record

    def due(self, version: int, save_every: int | None) -> bool:
        if save_every is not None:
            return version % save_every == 0
        return time.monotonic() - self._saved > max(_MIN_PAUSE, self._cost / _MAX_SHARE)

    def start(
        self,
        starting: StartProgress,
        folder: RunFolder | None,
        save_every: int | None,
        observe: Callable[[int, int], None],
    ) -> None:
        observe(starting.done, starting.clients)
        if folder and self.due(0, save_every):
            self.save(starting, folder)

    def save(
        self,
        snapshot: Snapshot | StartProgress,
        folder: RunFolder,
        outcome: RunOutcome | None = None,
        stopped: bool = False,
    ) -> None:
        begun = time.monotonic()
        facts, tensors = snapshot.checkpoint()
        running = {
            "ages": [self._total, self._count, self._worst],
            "early": self._early,
            "elapsed": self.elapsed,
            "outcome": outcome or (None, None),
            "stopped": stopped,  # by a rule that may change
            "best": self.best,
        }
        average = {} if self._average is None else {"average": self._average}
        folder.save(Checkpoint(facts | {"running": running}, tensors | average))
        snapshot.confirm()
        self._saved = time.monotonic()
        self._cost = self._saved - begun


def _reopen_end(folder: RunFolder, rounds: int) -> None:
    """Remove the record that was only written because the run ended, if the run is now longer."""
    if folder.resumed is None or folder.resumed.facts["version"] >= rounds:
        return
    facts, tensors = folder.resumed
    early, (ended, _) = facts["running"].get("early"), facts["running"].get("outcome", (None, None))
    if early is not None and (ended is None or facts["running"].get("stopped")):
        running = facts["running"] | {"ages": early, "early": None}
        folder.take_back("records", Checkpoint(facts | {"running": running}, tensors))


def _bytes_sent(snapshot: Snapshot) -> int:
    size: int = snapshot.state.x.element_size()
    return sum(snapshot.sent) * size


def _epsilon_due(version: int, experiment: Experiment) -> bool:
    """Whether epsilon is computed for this record."""
    span = max(1, experiment.rounds // _EPSILON_RECORDS)
    return version // span > (version - experiment.eval_every) // span


def _epsilon(snapshot: Snapshot) -> float | None:
    """Epsilon so far; None where it is infinite, which JSON cannot express."""
    spent = snapshot.spent()
    return spent.epsilon if spent and math.isfinite(spent.epsilon) else None


def _diverged_where(snapshot: Snapshot) -> str:
    """The server step, the clients whose updates it used, and what to do."""
    if not snapshot.version or not snapshot.filled:
        return "before the first server step: check the model and the data"
    names = client_names(snapshot.filled.tasks)
    return f"at server step {snapshot.version} (its updates came from {names}): lower the rates"


def _trace(snapshot: Snapshot) -> dict[str, Any]:
    """The tasks of a server step with client, version, visit and times; the start is version 0."""
    filled = snapshot.filled
    assert filled
    times = zip(filled.tasks, filled.started, filled.arrived, strict=True)
    return {
        "version": snapshot.version,
        "time": snapshot.time,
        "tasks": [[*task, started, arrived] for task, started, arrived in times],
        "dropped": [list(task) for task in filled.dropped],
        "lost": [list(task) for task in filled.lost],
        **({"steps": filled.steps} if filled.steps else {}),  # of tasks that ended early
    }
