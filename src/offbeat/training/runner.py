"""Runs an experiment step by step: evaluates, writes records and trace, and saves checkpoints."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from offbeat.aggregate.mean import PrivacyCost
from offbeat.aggregate.private import Private
from offbeat.errors import DivergedError
from offbeat.privacy.ledger import correct_statement, corrected_end
from offbeat.training.build import RunSpec, with_run_folder
from offbeat.training.checkpoint import Checkpoint
from offbeat.training.evaluate import accuracy, ema, evaluate
from offbeat.training.experiment import Experiment
from offbeat.training.folder import RunFolder
from offbeat.training.loop import Snapshot, StartProgress, train

_MIN_PAUSE = 5.0  # seconds between checkpoints
_MAX_SHARE = 0.05  # of the time that saving may take
_EPSILON_RECORDS = 20  # records with epsilon in a run, roughly; computing it can take a second


class Progress(NamedTuple):
    """The progress of a run; `record` is the record of this version, if it was evaluated."""

    version: int
    time: float
    trips: int
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


def run_experiment(
    experiment: Experiment,
    trial: RunSpec,
    folder: RunFolder | None = None,
    *,
    save_every: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    observe_start: Callable[[int, int], None] = lambda done, clients: None,
) -> Iterator[Progress]:
    """Train, and yield after every server step; when `stop` says so, save and end early.

    A checkpoint is taken at once, and then every `save_every` versions or so rarely that they cost little.
    Where training diverges, the folder keeps why.
    `observe_start` is told how many clients of the full-participation start are done, and of how many.
    """
    try:
        yield from _run_steps(experiment, trial, folder, save_every, stop, observe_start)
    except DivergedError as error:
        if folder:
            folder.fail(str(error))
        raise


def _run_steps(
    experiment: Experiment,
    trial: RunSpec,
    folder: RunFolder | None,
    save_every: int | None,
    stop: Callable[[], bool],
    observe_start: Callable[[int, int], None],
) -> Iterator[Progress]:
    if folder:
        _reopen_end(folder, experiment.rounds)
    state = _RunRecorder(folder.resumed if folder else None)
    shots = train(
        trial.algorithm,
        with_run_folder(trial.engine, folder.path) if folder else trial.engine,
        dispatch=trial.dispatch,
        buffer=experiment.buffer,
        rounds=experiment.rounds,
        weights=trial.weights,
        max_staleness=trial.limit,
        aggregate=trial.aggregate,
        seed=experiment.seed,
        resume=folder.resumed if folder else None,
        observe_start=lambda starting: state.start(starting, folder, save_every, observe_start),
    )
    for shot in shots:
        state.see(shot, experiment.ema_decay)
        if folder and shot.filled:
            folder.append("trace", _trace(shot))
        final = shot.version == experiment.rounds or shot.ended is not None
        last = final or stop()
        record = None
        due = shot.version % experiment.eval_every == 0
        if due or final:
            record = state.record(shot, trial, experiment.ema_decay, due)
            if isinstance(trial.aggregate, Private):
                counted = final or _epsilon_due(shot.version, experiment)
                name = "simulated_epsilon" if experiment.simulate_amplification else "epsilon"
                record[name] = _epsilon(shot) if counted else None
            if folder:
                folder.append("records", record)
                folder.flush()
        outcome = RunOutcome(shot.ended, shot.spent()) if last else None
        if folder and (last or state.due(shot.version, save_every)):
            state.save(shot, folder, outcome)
        ages = shot.cohort.staleness if shot.cohort else ()
        mean = sum(ages) / len(ages) if ages else 0.0
        yield Progress(shot.version, shot.time, shot.counts.client_updates, mean, record, outcome, ages)
        if last:
            return


class _RunRecorder:
    """What is kept beyond the loop: the averaged model, staleness since the last record, elapsed time."""

    def __init__(self, resumed: Checkpoint | None) -> None:
        facts: dict[str, Any] = resumed.facts["running"] if resumed else {"ages": [0, 0, 0], "elapsed": 0.0}
        self._average: Tensor | None = resumed.tensors.get("average") if resumed else None
        self._total, self._count, self._worst = facts["ages"]
        self._early: list[int] | None = None  # staleness before a record at the end only
        self._before: float = facts["elapsed"]
        self._begun = time.monotonic()
        self._saved = self._begun if resumed else -math.inf
        self._cost = 0.0

    @property
    def elapsed(self) -> float:
        return self._before + time.monotonic() - self._begun

    def see(self, shot: Snapshot, decay: float | None) -> None:
        if decay is not None:
            self._average = shot.x if self._average is None else ema(self._average, shot.x, decay)
        for age in shot.cohort.staleness if shot.cohort else ():
            self._total += age
            self._count += 1
            self._worst = max(self._worst, age)

    def record(self, shot: Snapshot, trial: RunSpec, decay: float | None, due: bool) -> dict[str, Any]:
        x = shot.x if decay is None or self._average is None else self._average
        metrics = {"accuracy": accuracy}
        scores = (
            evaluate(trial.problem, x, trial.test, metrics, statistics=shot.statistics) if trial.test else {}
        )
        if not all(math.isfinite(value) for value in scores.values()):
            raise DivergedError(f"the loss became NaN or infinite {_diverged_where(shot)}.")
        record = {
            "version": shot.version,
            "time": shot.time,
            "client_updates": shot.counts.client_updates,
            **scores,
            "staleness_mean": self._total / self._count if self._count else 0.0,
            "staleness_max": self._worst,
            "dropped": shot.counts.dropped,
            "lost": shot.counts.lost,
            "floats_down": shot.sent.down,
            "floats_up": shot.sent.up,
            "bytes": sum(shot.sent) * shot.x.element_size(),
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
        self, shot: Snapshot | StartProgress, folder: RunFolder, outcome: RunOutcome | None = None
    ) -> None:
        begun = time.monotonic()
        facts, tensors = shot.checkpoint()
        running = {
            "ages": [self._total, self._count, self._worst],
            "early": self._early,
            "elapsed": self.elapsed,
            "outcome": outcome or (None, None),
        }
        average = {} if self._average is None else {"average": self._average}
        folder.save(Checkpoint(facts | {"running": running}, tensors | average))
        shot.confirm()
        self._saved = time.monotonic()
        self._cost = self._saved - begun


def _reopen_end(folder: RunFolder, rounds: int) -> None:
    """Remove the record that was only written because the run ended, if the run is now longer."""
    if folder.resumed is None or folder.resumed.facts["version"] >= rounds:
        return
    facts, tensors = folder.resumed
    early, (ended, _) = facts["running"].get("early"), facts["running"].get("outcome", (None, None))
    if early is not None and ended is None:
        running = facts["running"] | {"ages": early, "early": None}
        folder.take_back("records", Checkpoint(facts | {"running": running}, tensors))


def _epsilon_due(version: int, experiment: Experiment) -> bool:
    """Whether epsilon is due again with this record."""
    span = max(1, experiment.rounds // _EPSILON_RECORDS)
    return version // span > (version - experiment.eval_every) // span


def _epsilon(shot: Snapshot) -> float | None:
    """Epsilon so far; None where it is infinite, which JSON cannot express."""
    spent = shot.spent()
    return spent.epsilon if spent and math.isfinite(spent.epsilon) else None


def _diverged_where(shot: Snapshot) -> str:
    """At which step, from which clients' updates, and what to do."""
    if not shot.version or not shot.filled:
        return "before the first server step: check the model and the data"
    clients = sorted({task.client for task in shot.filled.tasks})
    names = f"client{'s' if len(clients) > 1 else ''} {', '.join(map(str, clients))}"
    return f"at server step {shot.version} (its updates came from {names}): lower the rates"


def _trace(shot: Snapshot) -> dict[str, Any]:
    """The tasks of a server step with client, version, visit and times; the start is version 0."""
    filled = shot.filled
    assert filled
    times = zip(filled.tasks, filled.started, filled.arrived, strict=True)
    return {
        "version": shot.version,
        "time": shot.time,
        "tasks": [[*task, started, arrived] for task, started, arrived in times],
        "dropped": [list(task) for task in filled.dropped],
        "lost": [list(task) for task in filled.lost],
    }
