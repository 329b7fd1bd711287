"""`offbeat.run` and `offbeat.tune`: train or tune a task, with a folder, checkpoints, trackers and progress.

The commands `offbeat run` and `offbeat tune` use the same functions.
"""

import dataclasses
import logging
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from offbeat.aggregate.compression import Compressed, parse_compression
from offbeat.aggregate.mean import PrivacyCost
from offbeat.algorithms import Setting, build, find
from offbeat.data.client_store import Anywhere, make_client_store
from offbeat.engines.local import ClientMemory
from offbeat.engines.process_pool import check_process_count
from offbeat.errors import DivergedError, InputError, describe, setting_name, unknown_name
from offbeat.files import replace_file
from offbeat.nn.problem import Problem, Statistics
from offbeat.renamed import check_name
from offbeat.report.chart import figure_csv
from offbeat.report.figures import tuning_figure
from offbeat.report.svg import draw, standalone
from offbeat.trackers import (
    TrackerGroup,
    TrackerOptions,
    check_trackers,
    load_tracked_runs,
    open_trackers,
    save_tracked_runs,
)
from offbeat.training import checkpoint, settings_file
from offbeat.training.build import (
    RunSpec,
    build_run,
    check_extension,
    describe_run,
    personal_arguments,
    with_computed_noise,
)
from offbeat.training.experiment import Experiment
from offbeat.training.folder import RunFolder, check_free, claim_folder, read_jsonl
from offbeat.training.progress import StopRequest, bar, limited_threads, stop_signals
from offbeat.training.runner import RunOutcome, resumed_outcome, run_experiment, saved_model
from offbeat.training.schema import settings_of
from offbeat.training.standardise import Scaling
from offbeat.training.stopping import SETTINGS as STOP_SETTINGS
from offbeat.training.task import LearningTask, function_name, load_task, named_task
from offbeat.tuning import Study, StudyResult, check_trials, load_optuna
from offbeat.tuning_plan import SearchRange, StudyPlan, new_plan, resumed_plan

_log = logging.getLogger("offbeat")
_STOPPING_STUDY = b"\noffbeat: saving the trials that are running; interrupt again to stop at once.\n"
_NOT_FOR_TASKS = ("algorithm", "parameters", "task", "data", "data_dir", "model")


@dataclass(frozen=True)
class RunOptions:
    """How a run is saved and reported; none of these options changes its result."""

    save_every: int | None = None
    trackers: TrackerOptions = TrackerOptions(None, None, None)
    progress: bool = True
    notify: Callable[[str], None] = _log.info  # receives sentences about the run

    def __post_init__(self) -> None:
        if self.save_every is not None and self.save_every < 1:
            raise InputError(f"{setting_name('save_every')} must be at least 1, not {self.save_every}.")
        check_trackers(self.trackers)


@dataclass(frozen=True)
class RunResult:
    """How a run ended, and what is in its folder.

    Attributes:
        experiment: Every setting.
        folder: The folder of the run.
        version: Server steps up to the last checkpoint; None if there is none.
        records: The records so far: one dictionary for each evaluation.
        ended: Why the run ended before its last round, if it did: at a target, a budget, or for privacy.
        privacy: The privacy cost of a private run.
        error: Why training diverged, if it did.
        stopped: The exit code of a run that a signal stopped.
        task: What was trained.
    """

    experiment: Experiment
    folder: Path
    version: int | None
    records: tuple[dict[str, Any], ...]
    ended: str | None
    privacy: PrivacyCost | None
    error: str | None = None
    stopped: int | None = None
    task: LearningTask | None = dataclasses.field(default=None, repr=False)

    @property
    def finished(self) -> bool:
        """Whether the run took all its server steps."""
        return self.version == self.experiment.rounds

    @property
    def metric(self) -> str:
        """The metric by which runs are compared."""
        return settings_file.main_metric(settings_file.read(self.folder))[0]

    @property
    def best(self) -> float | None:
        """The best recorded value of that metric."""
        name, higher = settings_file.main_metric(settings_file.read(self.folder))
        values = [record[name] for record in self.records if record.get(name) is not None]
        return (max if higher else min)(values, default=None)

    def module(self, client: str | int | None = None) -> nn.Module:
        """The module of the last checkpoint; the moving average of the models if `ema_decay` was given.

        Args:
            client: The name or number of the client whose personal layers the module gets. None: the module
                has its initial personal layers, if the run has any.
        """
        task = self.task or named_task(self.experiment)
        return trained_module(self.experiment, task, self.folder, client)

    @property
    def resume(self) -> str | None:
        """The command that resumes the run, if it is not over."""
        if self.finished or self.ended or self.error:
            return None
        return f"offbeat run --out {shlex.quote(str(self.folder))} --resume"

    def summary(self) -> dict[str, Any]:
        """The run in one object, for JSON and for trackers."""
        return {
            "algorithm": self.experiment.algorithm,
            "finished": self.finished,
            "ended": self.ended,
            "version": self.version,
            "last": self.records[-1] if self.records else None,
            f"best_{self.metric}": self.best,
            "privacy": self.privacy.as_json() if self.privacy else None,
            "out": str(self.folder),
            "settings": self.experiment.settings(),
            "error": self.error,
            "resume": self.resume,
        }

    @property
    def saved(self) -> str:
        """Which version is saved, in words."""
        return "no version was saved yet" if self.version is None else f"version {self.version} is saved"


def run(
    task: LearningTask,
    algorithm: str = Experiment.algorithm,
    *,
    parameters: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    save_every: int | None = None,
    progress: bool = True,
    tensorboard: str | None = None,
    wandb: str | None = None,
    mlflow: str | None = None,
    **settings: Any,
) -> RunResult:
    """Train a task, and write records, trace and checkpoints into a folder.

    Args:
        task: What to train, on whose data, and how to evaluate it.
        algorithm: The name of a method in `offbeat.CATALOGUE`; `offbeat.register` adds methods.
        parameters: Hyperparameters of the method; those left out have their defaults.
        out: The folder of the run; None: the next free folder in `runs/`.
        resume: Continue the run in `out` from its last checkpoint. A larger number of rounds extends it.
        save_every: The number of server steps between checkpoints; None: from time to time.
        progress: Show a progress bar if standard error is a terminal.
        tensorboard: A folder for event files of TensorBoard.
        wandb: A project of Weights & Biases.
        mlflow: An MLflow server, or `sqlite:///FILE`.
        **settings: Any other setting of `Experiment`, such as `rounds`, `buffer`, `local_steps` or `seed`. A
            rate schedule may also be an importable function from the version to a factor.

    Returns:
        The records and the folder. An interrupt saves the current step and raises `KeyboardInterrupt`.
    """
    _check_task("run", task)
    settings = _checked_settings(algorithm, settings)
    if parameters is not None:
        settings["parameters"] = _checked_parameters(algorithm, parameters)
    options = RunOptions(save_every, TrackerOptions(tensorboard, wandb, mlflow), progress)
    if resume:
        if out is None:
            raise InputError("resume needs out, the folder of the run to resume.")
        given = settings | ({} if algorithm == Experiment.algorithm else {"algorithm": algorithm})
        result = resume_run(Path(out), given, options, task)
    else:
        defaults = task.defaults(algorithm)
        experiment = Experiment.of(**{"algorithm": algorithm, "task": task.name} | defaults | settings)
        result = start_run(experiment, options, None if out is None else Path(out), task)
    if result.error:
        raise DivergedError(result.error)
    if result.stopped is not None:
        raise KeyboardInterrupt(f"{result.saved} in {result.folder}; resume it with resume=True")
    return result


def _check_task(what: str, task: object) -> None:
    if not isinstance(task, LearningTask):
        raise InputError(f"{what} needs an offbeat.LearningTask, not a {type(task).__name__}.")


def _checked_settings(algorithm: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were given beside a task; others than those of `Experiment` are rejected."""
    if not isinstance(algorithm, str):
        raise InputError(
            f"the algorithm must be the name of a method, not a {type(algorithm).__name__}: register it "
            "with offbeat.register(name, method) and give that name."
        )
    settings = dict(given)
    known = [name for name in settings_of(Experiment) if name not in _NOT_FOR_TASKS]
    for name, value in given.items():
        check_name(name)
        if name in _NOT_FOR_TASKS:
            raise InputError(f"the task brings its own data and model: leave out {name}.")
        if name not in known:
            raise unknown_name("setting", name, known)
        if name.endswith("_schedule") and callable(value):
            settings[name] = value = function_name(value, name)
        if not settings_of(Experiment)[name].accepts(value):
            kind = settings_of(Experiment)[name].kind.value
            raise InputError(f"{name} must be {kind}, not {value!r}.")
    return settings


def _checked_parameters(algorithm: str, given: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    _check_parameter_names(algorithm, given)
    for name, value in given.items():
        if not isinstance(value, bool | int | float | str | list | tuple | None):
            raise InputError(
                f"the parameter {name} of {algorithm} is {describe(value)}, which cannot be saved with the "
                "run: give a number or a text, or register a function that sets it."
            )
    return tuple(sorted(given.items()))


def _check_parameter_names(algorithm: str, names: Iterable[str]) -> None:
    known = find(algorithm).parameters()
    for name in names:
        if name not in known:
            raise unknown_name(f"parameter of {algorithm}", name, known)


def tune(
    task: LearningTask | str,
    algorithm: str,
    *,
    search: Mapping[str, tuple[float, float] | list[Any]] | None = None,
    parameters: Mapping[str, Any] | None = None,
    trials: int | None = None,
    sampler: str | None = None,
    pruner: str | None = None,
    baseline: str | None = None,
    jobs: int = 1,
    out: str | Path | None = None,
    resume: bool = False,
    **settings: Any,
) -> StudyResult:
    """Search for the best hyperparameters of a method with Optuna; bad trials are stopped early.

    Args:
        task: What to train, or the name of a function that returns it, `PACKAGE.MODULE:FUNCTION`. Its test
            data decide which trial is the best.
        algorithm: The name of the method to tune.
        search: For each hyperparameter a range as a tuple `(low, high)`, or the values to try as a list.
            None: the learning rates of the method, around their defaults.
        parameters: Hyperparameters of the method that are the same in all trials.
        trials: The number of trials of the study, including those before a resume. None: 20, or the grid.
        sampler: `tpe` learns from earlier trials, `random` does not, `grid` tries all values in order. None:
            `tpe`.
        pruner: What stops trials early: `median`, `halving` (successive halving) or `none`. None: `median`.
        baseline: A method to compare with, run once without tuning, or `none`. None: the default method.
        jobs: The number of trials that run at the same time, each in a process. More than one needs a task
            that is given by its name, so that other processes can load it.
        out: The folder of the study; None: the next free folder in `runs/`.
        resume: Continue the study in `out`; settings that are left out are those of the study.
        **settings: Any other setting of `Experiment`, as for `offbeat.run`.

    Returns:
        The trials, the best of them, and their cost. An interrupt saves the trials that are running and
        raises `KeyboardInterrupt`.
    """
    settings = _checked_settings(algorithm, settings)
    name = task if isinstance(task, str) else getattr(task, "name", None)
    if isinstance(task, str):
        own = StudyPlan.read(Path(out)).experiment.seed if resume and out is not None else Experiment.seed
        task = load_task(task, settings.get("seed", own))
    _check_task("tune", task)
    names = {"sampler": sampler, "pruner": pruner, "baseline": baseline}
    options = {name: value for name, value in names.items() if value is not None}
    ranges = None if search is None else _search_ranges(algorithm, search)
    fixed = None if parameters is None else dict(_checked_parameters(algorithm, parameters))
    if resume:
        if out is None:
            raise InputError("resume needs out, the folder of the study to resume.")
        plan = resumed_plan(Path(out), settings | {"algorithm": algorithm}, fixed, ranges, options)
        if plan.experiment.task != name:
            raise InputError(
                f"the study in {out} is of the task '{plan.experiment.task}', not of '{name}': give the "
                "same task, or name another folder with out."
            )
    else:
        defaults = {"algorithm": algorithm, "task": name} | task.defaults(algorithm)
        plan = new_plan(defaults | settings, fixed or {}, ranges or [], options, trials)
    result = run_study(plan, task, out, resume=resume, trials=trials, jobs=jobs)
    if result.stopped is not None:
        raise KeyboardInterrupt(f"the study in {result.folder} was stopped; resume it with resume=True")
    return result


def _search_ranges(algorithm: str, search: Any) -> list[SearchRange]:
    if not isinstance(search, Mapping) or not search:
        raise InputError(
            f"search takes a dictionary of at least one hyperparameter of {algorithm}, not {search!r}: leave "
            "it out to search the learning rates."
        )
    _check_parameter_names(algorithm, search)
    found = []
    for name, given in search.items():
        pair: Any = given if isinstance(given, tuple) and len(given) == 2 else ("", "")
        if isinstance(given, list) and given and all(isinstance(each, int | float | str) for each in given):
            found.append(SearchRange(name, values=tuple(dict.fromkeys(given))))
        elif all(isinstance(each, int | float) and not isinstance(each, bool) for each in pair):
            whole = all(isinstance(each, int) for each in pair) and _is_whole(algorithm, name)
            found.append(SearchRange(name, pair[0], pair[1], whole=whole))
        else:
            raise InputError(
                f"the search of {name} takes a tuple (low, high) of two numbers or a list of values, not "
                f"{given!r}."
            )
    return found


def _is_whole(algorithm: str, name: str) -> bool:
    """Whether a hyperparameter is a whole number."""
    default = find(algorithm).parameters()[name].default
    return isinstance(default, int) and not isinstance(default, bool)


def run_study(
    plan: StudyPlan,
    task: LearningTask,
    out: str | Path | None,
    *,
    resume: bool,
    trials: int | None,
    jobs: int,
    notify: Callable[[str], None] = _log.info,
) -> StudyResult:
    """Run the remaining trials of a study, and draw the cost of tuning."""
    for name, value in (("trials", trials), ("jobs", jobs)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise InputError(f"{name} must be a whole number, not {value!r}.")
        if value is not None and value < 1:
            raise InputError(f"{setting_name(name)} must be at least 1, not {value}.")
    check_process_count(setting_name("jobs"), jobs)
    if jobs > 1 and plan.experiment.task is not None and ":" not in plan.experiment.task:
        raise InputError(
            f"several {setting_name('jobs')} need a task that is given by its name: write "
            "PACKAGE.MODULE:FUNCTION."
        )
    load_optuna()
    check_trials(plan, task, Path(out or "runs"))
    name = f"tune-{plan.experiment.algorithm}-{plan.experiment.subject}"
    folder = claim_folder(Path("runs"), name) if out is None else Path(out)
    if plan.experiment.clip is not None:
        _log.warning(
            "every trial releases models of the same clients: the epsilon of this study is that of all its "
            "trials together, and each run states its own alone."
        )
    study = Study.open(folder, plan, task, resume=resume)
    with stop_signals(_STOPPING_STUDY) as stop:
        study.run(trials or plan.trials, jobs, stop, notify)
        if not stop():
            study.run_baseline(stop, notify)
        result = study.result(stop.code if stop() else None)
    untuned, line = result.baseline, None
    if untuned is not None and untuned.value is not None:
        line = str(plan.baseline), untuned.client_updates, untuned.value
    figure = tuning_figure(plan.experiment.algorithm, result.metric, list(result.curve()), line)
    if figure is not None:
        replace_file(folder / "cost.svg", standalone(draw(figure), dark=True).encode())
        replace_file(folder / "cost.csv", figure_csv(figure).encode())
    return result


def start_run(
    experiment: Experiment,
    options: RunOptions,
    out: Path | None = None,
    task: LearningTask | None = None,
    notices: Iterable[str] = (),
) -> RunResult:
    """Train an experiment in a new folder; `notices` are reported once the settings are checked."""
    if out is not None:
        check_free(out)
    spec = build_run(experiment, task, out or Path("runs"))
    for notice in notices:
        options.notify(notice)
    if spec.unscaled is not None:
        _log.warning("%s", spec.unscaled)
    if experiment.epsilon is not None and experiment.noise is None:
        experiment = with_computed_noise(experiment, spec)
        simulated = (
            ", as a simulation and not a privacy guarantee" if experiment.simulate_amplification else ""
        )
        options.notify(
            f"noise of multiplier {experiment.noise:g} keeps {experiment.rounds} server steps "
            f"below epsilon {experiment.epsilon:g}{simulated}."
        )
    folder = (
        claim_folder(Path("runs"), f"{experiment.algorithm}-{experiment.subject}") if out is None else out
    )
    warn_of_exhausted_clients(experiment)
    settings = describe_run(experiment, spec)
    try:
        tracker, tracked = open_trackers(options.trackers, folder.absolute().name, settings)
    except InputError:
        if out is None:
            folder.rmdir()  # leave no empty folder behind
        raise
    with RunFolder.begin(folder, settings) as opened:
        save_tracked_runs(folder, tracked)
        return _train(experiment, spec, opened, options, tracker)


def resume_run(
    out: Path, given: Mapping[str, Any], options: RunOptions, task: LearningTask | None = None
) -> RunResult:
    """Resume the run in a folder with its own settings; only the number of rounds may grow."""
    saved = settings_file.read(out)
    known = Experiment.from_settings(saved)
    if task is None and known.task is not None and ":" in known.task:
        task = named_task(known)  # which may register the method
    values = known.settings() | dict(given)
    parameters = known.settings()["parameters"] | dict(given.get("parameters", ()))
    experiment = Experiment.of(**values | {"parameters": tuple(sorted(parameters.items()))})
    if experiment.rounds > known.rounds:
        check_extension(known, experiment.rounds)
    with RunFolder.resume(
        out, experiment.settings() | {"rounds": min(known.rounds, experiment.rounds)}
    ) as folder:
        goals = saved.get("metrics", {"accuracy": "max", "loss": "min"})
        outcome = resumed_outcome(folder, experiment, goals)
        if folder.version == experiment.rounds or outcome.ended:
            if not outcome.ended:
                options.notify(f"the run in {out} had finished already.")
            return _result(experiment, task, folder, outcome)
        if task is None and experiment.task is not None:
            raise InputError(
                f"the run in {out} was started from Python with the task '{experiment.task}': resume it "
                "with offbeat.run(task, ..., resume=True)."
            )
        names = None if task is None or task.client_names is None else list(task.client_names)
        if names != saved.get("client_names"):
            raise InputError(
                f"the run in {out} was started with other clients than the task has now: give the same "
                f"task, or name another {setting_name('out')}."
            )
        spec = build_run(experiment, task, out, Scaling.from_settings(saved))
        settings_file.revise(out, **{name: getattr(experiment, name) for name in STOP_SETTINGS})
        if experiment.rounds > known.rounds:
            settings_file.revise(out, rounds=experiment.rounds)
            warn_of_exhausted_clients(experiment)
            options.notify(
                f"the run in {out} continues to {experiment.rounds} server steps instead of "
                f"{known.rounds}, evaluated every {experiment.eval_every} as before."
            )
        return _train(experiment, spec, folder, options, _resume_trackers(options.trackers, folder))


def _resume_trackers(wanted: TrackerOptions, folder: RunFolder) -> TrackerGroup:
    """Open the trackers of a resumed run, and send the records that they lack."""
    settings = settings_file.read(folder.path)
    saved = load_tracked_runs(folder.path)
    tracker, tracked = open_trackers(wanted, folder.path.absolute().name, settings, saved, folder.version)
    save_tracked_runs(folder.path, tracked)
    for record in _read_records(folder.path, simulated=bool(settings.get("simulate_amplification"))):
        tracker.record(record)
    return tracker


def _read_records(folder: Path, *, simulated: bool) -> Iterator[dict[str, Any]]:
    """The records of a run; a simulated epsilon, which earlier versions called epsilon, is renamed."""
    for record in read_jsonl(folder, "records"):
        if simulated and "epsilon" in record:
            yield {"simulated_epsilon" if name == "epsilon" else name: record[name] for name in record}
        else:
            yield record


def train_in_folder(
    experiment: Experiment,
    spec: RunSpec,
    folder: RunFolder,
    options: RunOptions,
    stop: StopRequest,
    tracker: TrackerGroup = TrackerGroup(),
) -> tuple[RunOutcome, str | None]:
    """Train with a progress bar; return the outcome, and the reason if training diverged."""
    outcome = RunOutcome(None, None)
    metric = next(iter(spec.task.goals)) if spec.task else "loss"
    try:
        with (
            limited_threads(experiment, spec),
            bar(
                experiment.algorithm, experiment.rounds, folder.version or 0, metric, shown=options.progress
            ) as shown,
        ):
            steps = run_experiment(
                experiment, spec, folder, save_every=options.save_every, stop=stop, observe_start=shown.start
            )
            for step in steps:
                shown.step(step)
                if step.record:
                    tracker.record(step.record)
                outcome = step.outcome or outcome
    except DivergedError as error:
        return outcome, str(error)
    except KeyboardInterrupt:
        pass
    return outcome, None


def _train(
    experiment: Experiment, spec: RunSpec, folder: RunFolder, options: RunOptions, tracker: TrackerGroup
) -> RunResult:
    with stop_signals() as stop:
        outcome, failure = train_in_folder(experiment, spec, folder, options, stop, tracker)
        result = _result(experiment, spec.task, folder, outcome, failure)
        if result.resume is not None:
            result = dataclasses.replace(result, stopped=stop.code)
        tracker.close(result.summary())
        return result


def _result(
    experiment: Experiment,
    task: LearningTask | None,
    folder: RunFolder,
    outcome: RunOutcome,
    failure: str | None = None,
) -> RunResult:
    folder.flush()
    records = tuple(_read_records(folder.path, simulated=experiment.simulate_amplification))
    result = RunResult(
        experiment, folder.path, folder.version, records, outcome.ended, outcome.spent, task=task
    )
    if failure is None:
        return result
    return dataclasses.replace(result, error=f"{failure.rstrip('.')}; {result.saved} in {folder.path}.")


def trained_module(
    experiment: Experiment, task: LearningTask, folder: Path, client: str | int | None = None
) -> nn.Module:
    """The module with the weights of a run's last checkpoint, and optionally a client's personal layers."""
    path = folder / "checkpoint" / "state.safetensors"
    if not path.is_file():
        raise InputError(f"the run in {folder} has saved no model yet: let it take a server step first.")
    module = task.make_module(experiment.seed)
    scaling = Scaling.from_settings(settings_file.read(folder))
    setting = Setting(experiment.buffer, experiment.local_steps, experiment.rounds)
    algorithm = build(experiment.algorithm, setting, dict(experiment.parameters))
    problem = Problem(
        module if scaling is None else scaling.wrap(module),
        task.loss,
        **personal_arguments(experiment, algorithm, scaled=scaling is not None),
    )
    saved = checkpoint.load(path)
    own: Statistics = {}
    if client is not None:
        names = task.client_names or tuple(map(str, range(experiment.clients)))
        number = names.index(client) if client in names else client
        if not isinstance(number, int) or not 0 <= number < len(names):
            raise unknown_name("client", str(client), names)
        session = saved.facts["session"]
        compression = parse_compression(experiment.compress)
        stored = algorithm if compression is None else Compressed(algorithm, compression, problem.size)
        store = make_client_store(
            Anywhere(folder),
            ClientMemory.initial(stored, problem),
            len(names),
            problem.device,
            mapped=session["mapped"],
        )
        columns = [saved.tensors[f"session.memory.{leaf}"] for leaf in range(session["columns"])]
        store.load(session["clients"], columns)
        own = store.read(number).personal
    try:
        x, statistics = saved_model(saved, algorithm, problem)
        return problem.module(x, statistics | own)
    except (KeyError, ValueError, RuntimeError):
        raise InputError(f"the checkpoint {path} is of another model: give the task of the run.") from None


def warn_of_exhausted_clients(experiment: Experiment) -> None:
    """Warn if the clients' bounded contributions do not suffice for all server steps."""
    if experiment.max_participations is None:
        return
    steps = experiment.clients * experiment.max_participations // experiment.buffer
    if steps < experiment.rounds:
        _log.warning(
            "%d clients that contribute %d times at most last for %d of the %d server steps: "
            "raise %s or %s, or lower %s.",
            *(experiment.clients, experiment.max_participations, steps, experiment.rounds),
            *(setting_name(name) for name in ("max_participations", "clients", "rounds")),
        )
