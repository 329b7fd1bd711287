"""Tuning: a search over a method's hyperparameters with Optuna, which prunes trials by their evaluations.

A study is a folder: `study.json` has its plan, Optuna's journal has every trial, and each trial is the folder
of a run. The hyperparameters of a trial are a function of the seed, its number and the trials before it, and
are in the journal before the trial starts. A study that was killed therefore continues the trials that it had
begun, and one that runs its trials one after another ends as if it had not been killed.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from offbeat.algorithms import find
from offbeat.draws import randbelow
from offbeat.errors import DivergedError, InputError, setting_name
from offbeat.files import drop_partial_line
from offbeat.training.build import build_run, describe_run
from offbeat.training.experiment import Experiment
from offbeat.training.folder import RunFolder, check_free, read_jsonl
from offbeat.training.progress import limited_threads
from offbeat.training.runner import run_experiment, saved_outcome
from offbeat.training.task import LearningTask, named_task
from offbeat.tuning_plan import StudyPlan

if TYPE_CHECKING:
    import optuna

_JOURNAL, _TRIALS = "journal.log", "trials"
_STARTUP_TRIALS = 5  # trials that are drawn at random, and that the median does not prune
_UNPRUNED_SHARE = 0.2  # of a run's server steps, before which the median prunes nothing
_HALVING_SHARE, _HALVING_FACTOR = 1 / 9, 3  # the first rung as a share of the steps; the reduction factor
_JOIN_SECONDS, _POLL_SECONDS = 10.0, 0.5  # for worker processes


class TrialResult(NamedTuple):
    """The result of one trial so far.

    Attributes:
        number: The number of the trial, from 0, in the order in which trials began.
        parameters: The hyperparameters that it tries.
        state: `complete`, `pruned`, `diverged` or `running`.
        value: The metric of the study at the last evaluation; None before the first.
        steps: Server steps up to that evaluation.
        client_updates: Client updates that it used.
        seconds: How long its process ran.
        folder: The folder of its run.
    """

    number: int
    parameters: dict[str, Any]
    state: str
    value: float | None
    steps: int
    client_updates: int
    seconds: float
    folder: str


@dataclass(frozen=True)
class StudyResult:
    """The result of a study: its trials in order, the best of them, and the method that was not tuned.

    Attributes:
        folder: The folder of the study.
        plan: Everything that determines which hyperparameters it tries.
        metric: The metric by which trials are compared.
        higher_is_better: Whether higher values of the metric are better.
        trials: All trials so far.
        baseline: The run of the method that was not tuned; None if there is none.
        stopped: The exit code, if a signal stopped the study.
    """

    folder: Path
    plan: StudyPlan
    metric: str
    higher_is_better: bool
    trials: tuple[TrialResult, ...]
    baseline: TrialResult | None = None
    stopped: int | None = None

    @property
    def best(self) -> TrialResult | None:
        """The best of the trials that took all their server steps."""
        done = [each for each in self.trials if each.state == "complete" and each.value is not None]
        return min(done, key=lambda each: self._loss(each.value), default=None)

    @property
    def client_updates(self) -> int:
        """The client updates of all trials together."""
        return sum(each.client_updates for each in self.trials)

    @property
    def seconds(self) -> float:
        """The computing time of all trials together, in seconds."""
        return sum(each.seconds for each in self.trials)

    @property
    def full_client_updates(self) -> int:
        """The client updates that these trials would have used without pruning."""
        full = max((each.client_updates for each in self.trials if each.state == "complete"), default=0)
        return sum(max(full, each.client_updates) for each in self.trials)

    def curve(self) -> Iterator[tuple[int, int, float | None]]:
        """After each trial: its number from 1, client updates spent so far, and the best value so far."""
        spent, best = 0, None
        for count, each in enumerate(self.trials, 1):
            spent += each.client_updates
            if each.state == "complete" and each.value is not None:
                better = best is None or self._loss(each.value) < self._loss(best)
                best = each.value if better else best
            yield count, spent, best

    def as_dict(self) -> dict[str, Any]:
        """The result as values for JSON."""
        best = self.best
        return {
            "algorithm": self.plan.experiment.algorithm,
            "search": {each.name: str(each).partition("=")[2] for each in self.plan.space},
            "sampler": self.plan.sampler,
            "pruner": self.plan.pruner,
            "metric": self.metric,
            "trials": [each._asdict() for each in self.trials],
            "best": best and best._asdict(),
            "baseline": self.baseline and self.baseline._asdict() | {"algorithm": self.plan.baseline},
            "curve": [list(each) for each in self.curve()],
            "client_updates": self.client_updates,
            "full_client_updates": self.full_client_updates,
            "seconds": round(self.seconds, 3),
            "out": str(self.folder),
        }

    def _loss(self, value: float | None) -> float:
        """The metric with the sign for which lower is better."""
        assert value is not None
        return -value if self.higher_is_better else value


Report = Callable[[int, float], bool]  # server steps and metric -> whether to continue


class TrialEnd(NamedTuple):
    """How a trial ended."""

    state: str  # complete, pruned, diverged or stopped
    records: list[dict[str, Any]]


def run_trial(
    experiment: Experiment, task: LearningTask, folder: Path, report: Report, stop: Callable[[], bool]
) -> TrialEnd:
    """Train one trial in its folder, or continue it; `report` is called after each evaluation."""
    metric = next(iter(task.goals))
    spec = build_run(experiment, task, folder)
    begun = (folder / "settings.json").exists()
    with (
        RunFolder.resume(folder, experiment.settings())
        if begun
        else RunFolder.begin(folder, describe_run(experiment, spec))
    ) as opened:
        ended = opened.version == experiment.rounds or saved_outcome(opened.resumed).ended is not None
        before = list(read_jsonl(folder, "records")) if begun else []
        pruned = any(not report(each["version"], each[metric]) for each in before if _has(each, metric))
        try:
            with limited_threads(experiment, spec):
                steps = run_experiment(experiment, spec, opened, stop=lambda: pruned or stop())
                for step in () if ended or pruned else steps:
                    if step.record and _has(step.record, metric):
                        pruned = not report(step.version, step.record[metric]) or pruned
                    ended = step.version == experiment.rounds or bool(step.outcome and step.outcome.ended)
        except DivergedError:
            opened.flush()
            return TrialEnd("diverged", list(read_jsonl(folder, "records")))
        opened.flush()
        records = list(read_jsonl(folder, "records"))
    return TrialEnd("complete" if ended else "pruned" if pruned else "stopped", records)


def _has(record: Mapping[str, Any], metric: str) -> bool:
    return record.get(metric) is not None


class Study:
    """A study in its folder, with Optuna's storage open."""

    def __init__(self, folder: Path, plan: StudyPlan, task: LearningTask) -> None:
        optuna = load_optuna()
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        self.folder, self.plan, self.task = folder, plan, task
        self.metric, goal = next(iter(task.goals.items()))
        self.higher_is_better = goal == "max"
        self._direction = "maximize" if self.higher_is_better else "minimize"
        journal = folder / _JOURNAL
        drop_partial_line(journal)
        try:
            self._study = optuna.create_study(
                study_name=plan.experiment.algorithm,
                storage=JournalStorage(JournalFileBackend(str(journal))),
                direction=self._direction,
                pruner=_pruner(plan),
                load_if_exists=True,
            )
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError):  # of what Optuna reads
            raise InputError(f"{journal} is damaged or was edited: restore it from a backup.") from None

    @classmethod
    def open(cls, folder: Path, plan: StudyPlan, task: LearningTask, *, resume: bool) -> "Study":
        """Start a study in a folder, or open the one to resume."""
        load_optuna()
        if not resume:
            check_free(folder)
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(
                    f"{folder} cannot be written to ({error.strerror}): name another {setting_name('out')}."
                ) from None
            plan.write(folder)
        return cls(folder, plan, task)

    def run(self, trials: int, jobs: int, stop: Callable[[], bool], notify: Callable[[str], None]) -> None:
        """Run trials until there are `trials` of them, beginning with those that have not ended yet."""
        if self.plan.sampler == "grid":
            trials = min(trials, len(self.plan.grid))
        unfinished = [each.number for each in self._study.trials if not each.state.is_finished()]

        def next_trial() -> int | None:
            if stop():
                return None
            if unfinished:
                return int(unfinished.pop(0))
            return self._add_trial() if len(self._study.trials) < trials else None

        if jobs == 1:
            while (number := next_trial()) is not None:
                self._finish(number, self._train(number, stop), notify)
        else:
            with _Workers(self, min(jobs, trials)) as workers:
                workers.run(next_trial, stop, lambda number, end: self._finish(number, end, notify))

    def run_baseline(self, stop: Callable[[], bool], notify: Callable[[str], None]) -> None:
        """Train the method that is not tuned, once."""
        try:
            experiment = self.baseline
            if experiment is not None:
                run_trial(experiment, self.task, self._baseline_folder, lambda version, value: True, stop)
        except InputError as error:
            notify(f"{self.plan.baseline} cannot be compared with: {error}")

    @property
    def baseline(self) -> Experiment | None:
        """The experiment of the method that is not tuned; None if there is none."""
        name, own = self.plan.baseline, self.plan.experiment
        if name is None or name == own.algorithm:
            return None
        settings = ("dispatch", "weights", "max_staleness")
        tuned, other = find(own.algorithm), find(name)
        changed = {
            each: getattr(other, each)
            for each in settings
            if getattr(own, each) == getattr(tuned, each)  # it was not given
        }
        return replace(own, algorithm=name, parameters=(), **changed)

    def result(self, stopped: int | None = None) -> StudyResult:
        """The results of all trials so far."""
        found = tuple(self._result(each) for each in self._study.trials)
        baseline = None
        folder = self._baseline_folder
        records = _records(folder)
        if records and records[-1]["version"] == self.plan.experiment.rounds:
            baseline = _trial_result(-1, {}, "complete", records, folder, self.metric)
        return StudyResult(
            self.folder, self.plan, self.metric, self.higher_is_better, found, baseline, stopped
        )

    def report(self, number: int, version: int, value: float) -> bool:
        """Record an evaluation; return whether the trial is to continue."""
        optuna = load_optuna()
        frozen = self._study.trials[number]
        trial = optuna.trial.Trial(self._study, frozen._trial_id)
        if version not in frozen.intermediate_values:
            trial.report(value, version)
        if version == self.plan.experiment.rounds:
            return True
        if not frozen.user_attrs.get("pruned") and trial.should_prune():
            trial.set_user_attr("pruned", True)  # before the run stops, in case the process is killed
            return False
        return not frozen.user_attrs.get("pruned")

    def trial_folder(self, number: int) -> Path:
        """The folder of a trial."""
        return self.folder / _TRIALS / f"{number:04d}"

    def parameters(self, number: int) -> dict[str, Any]:
        """The hyperparameters of a trial."""
        return dict(self._study.trials[number].params)

    @property
    def _baseline_folder(self) -> Path:
        return self.folder / "baseline"

    def _add_trial(self) -> int:
        """Choose the hyperparameters of the next trial, write them to the journal, and return its number."""
        optuna = load_optuna()
        from optuna.trial import TrialState, create_trial

        known = self._study.trials
        number = len(known)
        distributions = {each.name: each.distribution() for each in self.plan.space}
        if self.plan.sampler == "grid":
            parameters = self.plan.grid[number]
        else:
            seed = randbelow(2**32, self.plan.experiment.seed, "tuning", number)
            sampler = (
                optuna.samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP_TRIALS)
                if self.plan.sampler == "tpe"
                else optuna.samplers.RandomSampler(seed=seed)
            )
            seen = optuna.create_study(direction=self._direction, sampler=sampler)
            seen.add_trials([each for each in known if each.state.is_finished()])
            parameters = seen.ask(distributions).params
        self._study.add_trial(
            create_trial(state=TrialState.RUNNING, params=parameters, distributions=distributions)
        )
        return number

    def _train(self, number: int, stop: Callable[[], bool]) -> TrialEnd:
        return run_trial(
            self.plan.of_trial(self.parameters(number)),
            self.task,
            self.trial_folder(number),
            lambda version, value: self.report(number, version, value),
            stop,
        )

    def _finish(self, number: int, end: TrialEnd, notify: Callable[[str], None]) -> None:
        """Tell Optuna how a trial ended; one that was stopped stays open."""
        from optuna.trial import TrialState

        if end.state == "stopped":
            return
        if end.state == "diverged":
            frozen = self._study.trials[number]
            load_optuna().trial.Trial(self._study, frozen._trial_id).set_user_attr("diverged", True)
        values = [each[self.metric] for each in end.records if _has(each, self.metric)]
        if end.state == "complete" and values:
            self._study.tell(number, values[-1])
        else:
            self._study.tell(number, state=TrialState.PRUNED)
        found = self._result(self._study.trials[number])
        words = ", ".join(f"{name}={_short(value)}" for name, value in found.parameters.items())
        value = "" if found.value is None else f", {self.metric} {found.value:.4f}"
        notify(f"trial {number}: {words}: {found.state} at server step {found.steps}{value}.")

    def _result(self, trial: "optuna.trial.FrozenTrial") -> TrialResult:
        state = trial.state.name.lower()
        if trial.user_attrs.get("diverged"):
            state = "diverged"
        folder = self.trial_folder(trial.number)
        if trial.state.is_finished() and not (folder / "records.jsonl").exists():
            raise InputError(f"{folder}, a trial of the study, has no records: restore it from a backup.")
        return _trial_result(trial.number, dict(trial.params), state, _records(folder), folder, self.metric)


def _short(value: Any) -> str:
    """The value of a parameter, rounded if it is a number."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _records(folder: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(folder, "records")) if (folder / "records.jsonl").exists() else []


def _trial_result(
    number: int,
    parameters: dict[str, Any],
    state: str,
    records: Sequence[Mapping[str, Any]],
    folder: Path,
    metric: str,
) -> TrialResult:
    last = records[-1] if records else {}
    return TrialResult(
        number,
        parameters,
        state,
        last.get(metric),
        last.get("version", 0),
        last.get("client_updates", 0),
        last.get("elapsed", 0.0),
        str(folder),
    )


def check_trials(plan: StudyPlan, task: LearningTask, folder: Path) -> None:
    """Reject settings with which no trial could run, before anything is written."""
    first = {each.name: (each.values or (each.low,))[0] for each in plan.space}
    if build_run(plan.of_trial(first), task, folder).test is None:
        raise InputError("the task has no test data, so trials cannot be compared: give it some.")


def _pruner(plan: StudyPlan) -> "optuna.pruners.BasePruner":
    optuna = load_optuna()
    rounds = plan.experiment.rounds
    if plan.pruner == "median":
        return optuna.pruners.MedianPruner(
            n_startup_trials=_STARTUP_TRIALS, n_warmup_steps=int(_UNPRUNED_SHARE * rounds)
        )
    if plan.pruner == "halving":
        return optuna.pruners.SuccessiveHalvingPruner(
            min_resource=max(1, int(_HALVING_SHARE * rounds)), reduction_factor=_HALVING_FACTOR
        )
    return optuna.pruners.NopPruner()


def load_optuna() -> Any:
    """Import Optuna; raises `InputError` if it is not installed."""
    try:
        import optuna
    except ModuleNotFoundError:
        raise InputError("tuning needs Optuna: install it with pip install 'offbeat[tune]'.") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class _Workers:
    """Processes that run several trials at a time; only the parent process writes to the study."""

    def __init__(self, study: Study, jobs: int) -> None:
        self._study = study
        context = multiprocessing.get_context("spawn")
        self._processes: dict[Connection, Any] = {}
        for _ in range(jobs):
            parent_end, child_end = context.Pipe()
            process = context.Process(target=_worker, args=(child_end,), daemon=True)
            process.start()
            child_end.close()
            self._processes[parent_end] = process

    def __enter__(self) -> "_Workers":
        return self

    def __exit__(self, *details: object) -> None:
        for connection, process in self._processes.items():
            connection.close()  # upon which an idle worker exits
            process.join(_JOIN_SECONDS)
            if process.is_alive():
                process.terminate()

    def run(
        self,
        next_trial: Callable[[], int | None],
        stop: Callable[[], bool],
        finish: Callable[[int, TrialEnd], None],
    ) -> None:
        """Give each worker one trial after another until there are no more."""
        running: dict[Connection, int] = {}
        stopping = False
        for connection in self._processes:
            self._start(connection, next_trial(), running)
        while running:
            for ready in wait(list(running), timeout=_POLL_SECONDS):
                connection = cast(Connection, ready)
                number = running[connection]
                try:
                    kind, *facts = connection.recv()
                except (EOFError, OSError):
                    raise InputError(
                        f"the process of trial {number} ended unexpectedly: resume the study with fewer "
                        f"{setting_name('jobs')}."
                    ) from None
                if kind == "report":
                    connection.send(self._study.report(number, *facts))
                elif kind == "failed":
                    raise InputError(facts[0])
                else:
                    del running[connection]
                    finish(number, TrialEnd(*facts))
                    self._start(connection, next_trial(), running)
            if stop() and not stopping:
                stopping = True
                for connection, process in self._processes.items():
                    if connection in running:
                        os.kill(process.pid, signal.SIGTERM)

    def _start(self, connection: Connection, number: int | None, running: dict[Connection, int]) -> None:
        """Send a trial to a worker, if there is one."""
        if number is not None:
            study = self._study
            experiment = study.plan.of_trial(study.parameters(number))
            connection.send((experiment.settings(), str(study.trial_folder(number))))
            running[connection] = number


def _worker(connection: Connection) -> None:
    """Run the trials that arrive over a connection; SIGTERM stops the current one."""
    stopped = False

    def request_stop(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles the terminal's interrupts
    signal.signal(signal.SIGTERM, request_stop)
    task: LearningTask | None = None

    def report(version: int, value: float) -> bool:
        connection.send(("report", version, value))
        continues: bool = connection.recv()
        return continues

    try:
        while True:
            settings, folder = connection.recv()
            experiment = Experiment.from_settings(settings)
            try:
                task = task or named_task(experiment)
                end = run_trial(experiment, task, Path(folder), report, lambda: stopped)
            except InputError as error:
                connection.send(("failed", str(error)))
                continue
            connection.send(("ended", *end))
    except (EOFError, OSError):
        sys.exit(0)
