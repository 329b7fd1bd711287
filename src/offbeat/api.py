"""`offbeat.run` and `offbeat.tune`: train a task with progress, checkpoints, trackers and a run's folder.

The commands `offbeat run` and `offbeat tune` start and resume runs and studies by the same functions.
"""

import dataclasses
import json
import logging
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from offbeat import trees
from offbeat.aggregate.compression import Compressed, parse_compression
from offbeat.aggregate.mean import PrivacyCost
from offbeat.algorithms import Setting, build, find
from offbeat.data.client_store import Anywhere, make_client_store
from offbeat.engines.local import ClientMemory
from offbeat.engines.process_pool import check_process_count
from offbeat.errors import DivergedError, InputError, setting_name, unknown_name
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
from offbeat.training.runner import RunOutcome, resumed_outcome, run_experiment
from offbeat.training.schema import settings_of
from offbeat.training.standardise import Scaling
from offbeat.training.stopping import SETTINGS as STOP_SETTINGS
from offbeat.training.task import LearningTask, function_name, load_task, named_task
from offbeat.tuning import (
    SearchRange,
    Study,
    StudyPlan,
    StudyResult,
    check_trials,
    load_optuna,
    search_space,
)

_log = logging.getLogger("offbeat")
_STOPPING_STUDY = b"\noffbeat: saving the trials that are running; interrupt again to stop at once.\n"
_NOT_FOR_TASKS = ("algorithm", "parameters", "task", "data", "data_dir", "model")


@dataclass(frozen=True)
class RunOptions:
    """How a run is watched and saved, none of which changes its result."""

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
    """How a run ended, and what it left in its folder.

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
    stopped: int | None = None  # the exit code of a run that a signal stopped
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
        """The trained module: of the last checkpoint, averaged over server steps if `ema_decay` was given.

        Args:
            client: The client, by name or number, whose personal layers the module has. None: the initial
                ones, where the run has personal layers.
        """
        task = self.task or named_task(self.experiment)
        return trained_module(self.experiment, task, self.folder, client)

    @property
    def resume(self) -> str | None:
        """The command that resumes the run, if there is something left."""
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
        algorithm: The name of a method; see `offbeat.CATALOGUE`, and `offbeat.register` for one's own.
        parameters: Hyperparameters of the method; those left out have their defaults.
        out: The folder of the run; None: the next free folder in `runs/`.
        resume: Continue the run in `out` from its last checkpoint. A larger number of rounds extends it.
        save_every: Save a checkpoint every so many server steps; None: from time to time.
        progress: Show a progress bar if standard error is a terminal.
        tensorboard: A folder for event files of TensorBoard.
        wandb: A project of Weights & Biases.
        mlflow: An MLflow server, or `sqlite:///FILE`.
        **settings: Any other setting of `Experiment`, such as `rounds`, `buffer`, `local_steps` or `seed`. A
            schedule of rates may also be a function that can be imported, from the version to a factor.

    Returns:
        The records and the folder. An interrupt saves the current step and raises `KeyboardInterrupt`.
    """
    settings = _checked_settings("run", task, algorithm, settings)
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


def _checked_settings(what: str, task: Any, algorithm: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were given beside a task, if they can be given."""
    if not isinstance(task, LearningTask):
        raise InputError(f"{what} needs an offbeat.LearningTask, not a {type(task).__name__}.")
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
        if value is not None and not settings_of(Experiment)[name].accepts(value):
            kind = settings_of(Experiment)[name].kind.value
            raise InputError(f"{name} must be {kind}, not {value!r}.")
    return settings


def _checked_parameters(algorithm: str, given: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    known = find(algorithm).parameters()
    for name in given:
        if name not in known:
            raise unknown_name(f"parameter of {algorithm}", name, known)
    return tuple(sorted(given.items()))


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
    """Search for the hyperparameters of a method with Optuna, and stop trials early that are behind.

    Args:
        task: What to train, or `PACKAGE.MODULE:FUNCTION`, the name of a function that makes it. Its test
            data decide which trial is the best.
        algorithm: The name of the method to tune.
        search: For each hyperparameter a range as a tuple `(low, high)`, or the values to try as a list.
            None: the learning rates of the method, around their defaults.
        parameters: Hyperparameters of the method that are the same in all trials.
        trials: Trials of the whole study, those before a resume included. None: 20, or the whole grid.
        sampler: `tpe` learns from earlier trials, `random` does not, `grid` tries all values in order. None:
            `tpe`.
        pruner: What stops trials early: `median`, `halving` (successive halving) or `none`. None: `median`.
        baseline: A method to compare with, run once without tuning, or `none`. None: the default method.
        jobs: Trials at a time, each in a process. More than one need a task that is given by its name, so
            that other processes can make it.
        out: The folder of the study; None: the next free folder in `runs/`.
        resume: Continue the study in `out`; settings that are left out are those of the study.
        **settings: Any other setting of `Experiment`, as for `offbeat.run`.

    Returns:
        The trials, the best of them, and what they cost. An interrupt saves the trials that are running and
        raises `KeyboardInterrupt`.
    """
    name = task if isinstance(task, str) else getattr(task, "name", None)
    if isinstance(task, str):
        task = load_task(task, settings.get("seed", Experiment.seed))
    settings = _checked_settings("tune", task, algorithm, settings)
    names = {"sampler": sampler, "pruner": pruner, "baseline": baseline}
    options = {name: value for name, value in names.items() if value is not None}
    ranges = None if search is None else _search_ranges(algorithm, search)
    fixed = None if parameters is None else dict(_checked_parameters(algorithm, parameters))
    if resume:
        if out is None:
            raise InputError("resume needs out, the folder of the study to resume.")
        plan = resumed_study(Path(out), settings | {"algorithm": algorithm}, fixed, ranges, options)
        if plan.experiment.task != name:
            raise InputError(
                f"the study in {out} is of the task '{plan.experiment.task}', not of '{name}': give the "
                "same task, or name another folder with out."
            )
    else:
        defaults = {"algorithm": algorithm, "task": name} | task.defaults(algorithm)
        plan = planned_study(defaults | settings, fixed or {}, ranges or [], options, trials)
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
    _checked_parameters(algorithm, search)
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


def planned_study(
    settings: Mapping[str, Any],
    parameters: Mapping[str, Any],
    ranges: Sequence[SearchRange],
    options: Mapping[str, Any],
    trials: int | None,
) -> StudyPlan:
    """A new study; `options` are its sampler, pruner and baseline where they were given."""
    experiment = Experiment.of(**{**settings, "parameters": tuple(sorted(parameters.items()))})
    space = search_space(experiment.algorithm, ranges, parameters)
    plan = StudyPlan(experiment, space, **_named_baseline(options))
    if plan.baseline is not None:
        find(plan.baseline)
    usual = len(plan.grid) if plan.sampler == "grid" else plan.trials
    return dataclasses.replace(plan, trials=usual if trials is None else trials)


def resumed_study(
    out: Path,
    settings: Mapping[str, Any],
    parameters: Mapping[str, Any] | None,
    ranges: Sequence[SearchRange] | None,
    options: Mapping[str, Any],
) -> StudyPlan:
    """The study in a folder; what is given beside it must be the same."""
    known = StudyPlan.read(out)
    own = known.experiment
    asked = settings.get("algorithm", own.algorithm)
    if asked != own.algorithm:
        raise InputError(
            f"the study in {out} is of {own.algorithm}, not of {asked}: name another {setting_name('out')}."
        )
    fixed = dict(own.parameters) if parameters is None else dict(parameters)
    values = own.settings() | dict(settings) | {"parameters": tuple(sorted(fixed.items()))}
    space = known.space if ranges is None else search_space(asked, ranges, fixed)
    rest = {"sampler": known.sampler, "pruner": known.pruner, "baseline": known.baseline}
    given = StudyPlan(Experiment.of(**values), space, **rest | _named_baseline(options))
    _check_same_study(out, known, given)
    return known


def _check_same_study(folder: Path, known: StudyPlan, asked: StudyPlan) -> None:
    """Refuse to resume a study with other settings."""
    before, now = (json.loads(json.dumps(plan.as_dict())) for plan in (known, asked))
    before |= before.pop("experiment")
    now |= now.pop("experiment")
    for name in before.keys() - {"trials"}:
        if before[name] == now.get(name):
            continue
        was, given = before[name], now.get(name)
        if name == "search":
            was, given = (" ".join(map(str, plan.space)) for plan in (known, asked))
        elif name == "parameters":
            was, given = (
                ", ".join(f"{each}={value}" for each, value in values.items()) or "none"
                for values in (was, given)
            )
        raise InputError(
            f"the study in {folder} was started with another {setting_name(name)} ({was}, not {given}): "
            f"leave it out to resume the study, or name another {setting_name('out')}."
        )


def _named_baseline(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if (name, value) == ("baseline", "none") else value for name, value in options.items()}


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
    """Run the trials that are missing, and draw what they cost."""
    for name, value in (("trials", trials), ("jobs", jobs)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise InputError(f"{name} must be a whole number, not {value!r}.")
        if value is not None and value < 1:
            raise InputError(f"{setting_name(name)} must be at least 1, not {value}.")
    check_process_count(setting_name("jobs"), jobs)
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
    """Train an experiment in a new folder; the notices are passed on once the settings are checked."""
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
    asked = describe_run(experiment, spec)
    try:
        tracker, tracked = open_trackers(options.trackers, folder.absolute().name, asked)
    except InputError:
        if out is None:
            folder.rmdir()  # nothing of this run is left
        raise
    with RunFolder.begin(folder, asked) as opened:
        save_tracked_runs(folder, tracked)
        return _train(experiment, spec, opened, options, tracker)


def resume_run(
    out: Path, given: Mapping[str, Any], options: RunOptions, task: LearningTask | None = None
) -> RunResult:
    """Resume the run in a folder with its own settings; only the number of rounds may grow."""
    held = settings_file.read(out)
    known = Experiment.from_settings(held)
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
        goals = held.get("metrics", {"accuracy": "max", "loss": "min"})
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
        if names != held.get("client_names"):
            raise InputError(
                f"the run in {out} was started with other clients than the task has now: give the same "
                f"task, or name another {setting_name('out')}."
            )
        spec = build_run(experiment, task, out, Scaling.from_settings(held))
        settings_file.revise(out, **{name: getattr(experiment, name) for name in STOP_SETTINGS})
        if experiment.rounds > known.rounds:
            settings_file.revise(out, rounds=experiment.rounds)
            warn_of_exhausted_clients(experiment)
            options.notify(
                f"the run in {out} continues to {experiment.rounds} server steps instead of "
                f"{known.rounds}, evaluated every {experiment.eval_every} as before."
            )
        return _train(experiment, spec, folder, options, _resume_trackers(options.trackers, folder))


def _resume_trackers(asked: TrackerOptions, folder: RunFolder) -> TrackerGroup:
    """Open the trackers of a resumed run, and send the records that they lack."""
    settings = settings_file.read(folder.path)
    held = load_tracked_runs(folder.path)
    tracker, tracked = open_trackers(asked, folder.path.absolute().name, settings, held, folder.version)
    save_tracked_runs(folder.path, tracked)
    for record in named(read_jsonl(folder.path, "records"), bool(settings.get("simulate_amplification"))):
        tracker.record(record)
    return tracker


def named(records: Iterable[dict[str, Any]], simulated: bool) -> Iterator[dict[str, Any]]:
    """Rename epsilon in the records of earlier versions, if it was simulated."""
    for record in records:
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
    """Train with a progress bar; return the outcome, and why it diverged if it did."""
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
    records = tuple(named(read_jsonl(folder.path, "records"), experiment.simulate_amplification))
    result = RunResult(
        experiment, folder.path, folder.version, records, outcome.ended, outcome.spent, task=task
    )
    if failure is None:
        return result
    return dataclasses.replace(result, error=f"{failure.rstrip('.')}; {result.saved} in {folder.path}.")


def trained_module(
    experiment: Experiment, task: LearningTask, folder: Path, client: str | int | None = None
) -> nn.Module:
    """The module with the weights of a run's last checkpoint, and with the personal layers of a client."""
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
    x, statistics = problem.initial()
    shape = trees.structure(algorithm.init(x))
    facts, tensors = checkpoint.load(path)
    own: Statistics = {}
    if client is not None:
        names = task.client_names or tuple(map(str, range(experiment.clients)))
        number = names.index(client) if client in names else client
        if not isinstance(number, int) or not 0 <= number < len(names):
            raise unknown_name("client", str(client), names)
        compression = parse_compression(experiment.compress)
        keeper = algorithm if compression is None else Compressed(algorithm, compression, problem.size)
        store = make_client_store(
            Anywhere(folder),
            ClientMemory.initial(keeper, problem),
            len(names),
            problem.device,
            mapped=facts["session"]["mapped"],
        )
        columns = [tensors[f"session.memory.{leaf}"] for leaf in range(facts["session"]["columns"])]
        store.load(facts["session"]["clients"], columns)
        own = store.read(number).personal
    try:
        state = trees.unflatten(shape, [tensors[f"state.{n}"] for n in range(shape.num_leaves)])
        return problem.module(
            tensors.get("average", state.x),
            {name: tensors[f"statistics.{name}"] for name in statistics} | own,
        )
    except (KeyError, ValueError, RuntimeError):
        raise InputError(f"the checkpoint {path} is of another model: give the task of the run.") from None


def warn_of_exhausted_clients(experiment: Experiment) -> None:
    """Warn if bounded contributions cannot last for all server steps."""
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
