"""All settings of a run as one frozen value, each described in one place.

Importing this module does not load PyTorch: the command line is built from it.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from offbeat.errors import InputError, setting_name
from offbeat.renamed import present_names
from offbeat.training.schema import COUNT, ValueKind, check_settings, setting, settings_of

if TYPE_CHECKING:
    from offbeat.schedule.clock import Deadline, TaskLimits
    from offbeat.schedule.dispatch import Dispatch

DATASETS = ("cifar10", "digits", "fashion-mnist", "mnist", "mrpc", "rte", "shakespeare", "sst2")
MODELS = ("bert-base", "bert-tiny", "charformer", "cnn", "logistic", "mlp", "resnet18", "resnet18-bn")
ENGINES = ("auto", "sequential", "vectorised", "workers", "ray")
EXECUTIONS = ("auto", "mapped", "mapped-compiled", "streamed", "streamed-compiled")
PRECISIONS = ("auto", "float32", "tf32", "bfloat16")
NOISE_SOURCES = ("server", "helper", "both")
STORES = ("auto", "ram", "device", "mapped")

# Settings by the group of options and the table of a deployment's settings file that have them; those
# without a table are for simulations only.
_data = partial(setting, group="data")
_schedule = partial(setting, group="schedule", table="training")
_simulated_schedule = partial(setting, group="schedule")
_training = partial(setting, group="training", table="training")
_stopping = partial(setting, group="training", table="training", revisable=True)
_compute = partial(setting, group="training")
_privacy = partial(setting, group="privacy", table="privacy", private=True)
_simulated_privacy = partial(setting, group="privacy", private=True)


@dataclass(frozen=True)
class Experiment:
    """Every setting of a run."""

    algorithm: str = setting("cadence", "NAME", "the method; see 'offbeat algorithms'", table="training")
    parameters: tuple[tuple[str, Any], ...] = setting(
        (), "NAME=VALUE", "hyperparameters of the method", table="training", kind=ValueKind.TABLE
    )
    task: str | None = _data(
        None,
        "PACKAGE.MODULE:FUNCTION",
        "a function that returns an offbeat.LearningTask, with your own model and data",
    )
    data: str | None = _data("digits", "NAME", "data set: {choices}", choices=DATASETS, noun="data set")
    data_dir: str | None = _data(
        None, "DIR", "folder of the data; without it all but GLUE is downloaded, and digits needs none"
    )
    model: str | None = _data(
        None, "NAME", "model: {choices}", choices=MODELS, noun="model", default_text="by data"
    )
    augment: str = _data(
        "none",
        "NAME",
        "augmentation of training images: {choices} (pad by 4, crop at random, mirror every second one)",
        choices=("none", "crop-flip"),
        noun="augmentation",
    )
    standardise: bool = setting(
        False,
        "",
        "before training, agree on the mean and the standard deviation of each feature over all clients, and "
        "scale inputs by them",
        group="data",
        table="prepare",
    )
    clients: int = _schedule(100, "N", "number of clients", within=COUNT)
    partition: str = _data(
        "dirichlet:0.5",
        "SPEC",
        "how examples are divided: iid, dirichlet:ALPHA[:MIN], quantity:ALPHA[:MIN], shards[:N], natural or "
        "fadas-script:ALPHA (the split of that paper's scripts); "
        "MIN examples or more for each client, 1 by default (0 may leave clients empty, which a run rejects)",
    )
    dispatch: str = _schedule(
        "asynchronous",
        "NAME",
        "protocol: synchronous, asynchronous, round-refill, poisson, phases, queues or open-slots; by a "
        "clock: allocation or timed-poisson",
        default_text="the method's own",
    )
    hand_out: str = _schedule(
        "before",
        "WHEN",
        "before or after the server step: when the client that fills the buffer is replaced",
    )
    buffer: int = _schedule(
        10,
        "S",
        "updates per server step; by a clock, the nominal cohort",
        within=COUNT,
        default_text="10, or the method's own",
    )
    release_period: float | None = _schedule(
        None, "SECONDS", "time between two releases by a clock", within="(0, inf)"
    )
    lead: int | None = _schedule(
        None,
        "N",
        "by a clock: a client starts at most N releases ahead of its own; 1 by default",
        within=COUNT,
    )
    concurrency: int = _schedule(20, "N", "clients that work at the same time", within=COUNT)
    open_slots: int | None = _schedule(
        None,
        "N",
        "open-slots dispatch: new tasks start once N of the concurrency are free; 1 by default",
        within=COUNT,
    )
    delays: str = _simulated_schedule(
        "tiers:mild",
        "SPEC",
        "duration of tasks: constant:S, uniform:A:B, half-normal:S, exponential:S, log-normal:M:S, "
        "tiers:KIND[:GAMMA] or recorded:FILE; KIND is mild or large, a GAMMA below 1 makes more clients "
        "slow; by steps and bytes: phones:SECONDS[:JITTER], of a step on a medium phone, or devices:FILE",
    )
    availability: str = _simulated_schedule(
        "always",
        "SPEC",
        "when clients are available: always, cycle:PERIOD:SHARE, recorded:FOLDER (of links in Mahimahi's "
        "format), by-examples:PERIOD[:LEAST] or by-classes:PERIOD[:LEAST] (of a client)",
    )
    deadline: str | float | None = _simulated_schedule(
        None,
        "SECONDS",
        "time limit of a task: a number, or quantile:Q[:FACTOR] of the durations seen so far; tasks beyond "
        "it are lost",
        kind=ValueKind.DEADLINE,
    )
    partial_work: bool = _simulated_schedule(
        False, "", "at the time limit a client returns the local steps that it has done"
    )
    recall_stale: bool = _simulated_schedule(
        False, "", "a client whose update is about to be too stale returns the steps that it has done"
    )
    dropout: float = _simulated_schedule(0.0, "P", "probability that a task is lost", within="[0, 1)")
    weights: str = _training(
        "constant",
        "SPEC",
        "weights of stale updates: constant, polynomial:A or hinge:A:B",
        default_text="the method's own",
    )
    aggregate: str = _training(
        "mean",
        "SPEC",
        "how updates are aggregated: mean, or, against a few malicious clients, trimmed-mean:SHARE, median, "
        "geometric-median or norm-bound[:BOUND]; SHARE is left out on each side",
    )
    compress: str | None = _training(
        None,
        "SPEC",
        "compression of uploads: 8bit, or topk:SHARE for the largest SHARE of the numbers, where the rest is "
        "added to the client's next upload",
    )
    max_staleness: int | None = _schedule(
        None, "N", "discard updates that are staler than this", within="[0, inf]"
    )
    local_steps: int = _training(10, "K", "minibatches per task", within=COUNT)
    local_epochs: int | None = _training(
        None, "E", "epochs per task, in place of a number of minibatches", within=COUNT
    )
    batch_size: int = _training(20, "N", "examples per minibatch", within=COUNT)
    personal: str | None = _training(
        None,
        "LAYERS",
        "layers that stay at the client, as names or patterns of the model, such as head or head,*.norm.*",
    )
    personal_lr: float | None = _training(
        None,
        "RATE",
        "local rate of the personal layers",
        within="[0, inf)",
        default_text="the method's local rate, or 0.1",
    )
    weight_decay: float = _training(0.0, "W", "added to the loss as W/2 |x|^2", within="[0, inf)")
    local_optimizer: str = _training(
        "sgd",
        "SPEC",
        "optimiser of local steps, whose state is reset for each task: sgd, momentum[:BETA], "
        "nesterov[:BETA], adam[:BETA1[:BETA2[:EPS]]] or adamw[:DECAY[:BETA1[:BETA2[:EPS]]]]",
    )
    clip_grad_norm: float | None = _training(
        None, "NORM", "scale the gradient of a local step down to this norm", within="(0, inf)"
    )
    local_lr_schedule: str = _training(
        "constant",
        "SPEC",
        "factor of local_lr by server step: constant, cosine[:END[:STEPS]], linear[:END[:STEPS]], "
        "step:EVERY[:FACTOR], warmup:STEPS, warmup:STEPS,SPEC or a function PACKAGE.MODULE:FUNCTION of the "
        "version",
    )
    server_lr_schedule: str = _training("constant", "SPEC", "the same for server_lr")
    rounds: int = _schedule(200, "T", "number of server steps", within=COUNT)
    ema_decay: float | None = _training(
        None, "DECAY", "evaluate the exponential moving average of the models, such as 0.99", within="(0, 1)"
    )
    eval_every: int = _training(
        10, "N", "evaluate every N server steps", within=COUNT, default_text="20 times in a run"
    )
    stop_at: str | None = _stopping(
        None, "METRIC:VALUE", "end once an evaluation has this value or a better one, such as accuracy:0.9"
    )
    patience: int | None = _stopping(
        None, "N", "end after N evaluations in a row without a better one", within=COUNT
    )
    max_time: float | None = _stopping(
        None, "SECONDS", "end with the server step that reaches this time", within="(0, inf)"
    )
    max_bytes: float | None = _stopping(
        None, "BYTES", "end with the server step by which this much was sent, down and up", within="(0, inf)"
    )
    max_client_updates: int | None = _stopping(
        None, "N", "end with the server step by which N client updates have arrived", within=COUNT
    )
    engine: str = _compute(
        "auto",
        "NAME",
        "{choices}; workers are processes on this machine, ray is a cluster",
        choices=ENGINES,
        noun="engine",
    )
    device: str = _training("cpu", "NAME", "cpu or cuda")
    execution: str = _compute(
        "auto",
        "NAME",
        "how a GPU runs many clients: {choices}; auto measures which ends the run first",
        choices=EXECUTIONS,
        noun="execution",
    )
    precision: str = _training(
        "auto",
        "NAME",
        "of products and convolutions on a GPU: {choices}; auto is tf32 where the GPU has it",
        choices=PRECISIONS,
        noun="precision",
    )
    memory: str = _compute(
        "auto",
        "NAME",
        "where clients' state is stored: {choices}; mapped is a file, auto decides by size",
        choices=STORES,
        noun="memory",
    )
    workers: int | None = _compute(
        None,
        "N",
        "number of workers of the engines workers and ray; default: one for each core",
        within=COUNT,
        placement=True,
    )
    ray_address: str | None = _compute(
        None, "HOST:PORT", "a running Ray cluster, or auto to find it", placement=True
    )
    seed: int = _schedule(0, "N", "seed of all random draws", within="[0, 2^32)")
    clip: str | None = setting(
        None,
        "[FIELD=]BOUND",
        "the largest norm of an upload, or of one field of it; may be repeated",
        table="privacy",
        kind=ValueKind.CLIP,
    )
    noise: float | None = _privacy(
        None,
        "SIGMA",
        "noise multiplier of sums; default: computed from the epsilon",
        within="[0, inf)",
    )
    epsilon: float | None = _privacy(
        None, "E", "privacy budget: training ends before it would be exceeded", within="(0, inf)"
    )
    delta: float | None = _privacy(None, "D", "probability beside epsilon, such as 1e-6", within="(0, 1)")
    max_participations: int | None = _privacy(
        None, "N", "the largest number of contributions of a client; needed for a guarantee", within=COUNT
    )
    min_separation: int | None = _privacy(
        None,
        "N",
        "the least number of server steps between two contributions of a client; default: 1, or as the noise "
        "needs",
        within=COUNT,
    )
    simulate_amplification: bool = _simulated_privacy(
        False, "", "compute epsilon as if poisson dispatch amplified privacy, which is not a guarantee"
    )
    noise_correlation: str = _privacy(
        "independent", "SPEC", "correlation over server steps: independent, tree, banded:B or blt[:STEPS]"
    )
    noise_source: str = _privacy(
        "server",
        "NAME",
        "who adds the noise to secure sums: {choices}; with helper or both, the server sees only noisy sums",
        choices=NOISE_SOURCES,
        noun="source of noise",
    )
    accountant: str = _privacy("pld", "NAME", "privacy accountant: pld or rdp")
    adaptive_clip: float | None = _privacy(
        None, "QUANTILE", "let the bounds follow this quantile of the clients' norms", within="(0, 1)"
    )
    nominal_cohort: int | None = _simulated_privacy(
        None, "N", "simulations only: scale the noise as for a buffer of this size", within=COUNT
    )
    noise_seed: int | None = _simulated_privacy(
        None, "N", "simulations only: seed of noise that can be reproduced", within="[0, 2^32)"
    )
    secure: bool = setting(False, "", "secure aggregation by two servers", group="privacy")
    amplified: InitVar[bool] = False  # rejected: it does not hold for a buffer of fixed size

    @classmethod
    def of(cls, **given: Any) -> Self:
        """An experiment with these settings; the others have the defaults of the method or follow from these.

        A private run without `clip` uses the method's parameters for private runs, unless they were given,
        and the bounds of a method that bounds all its uploads.
        """
        from offbeat.algorithms import find  # these load PyTorch, which the command line's help does without
        from offbeat.nn.models import default_model

        algorithm = given.get("algorithm", cls.algorithm)
        method = find(algorithm)
        own = {
            "dispatch": method.dispatch,
            "buffer": method.buffer or cls.buffer,
            "weights": method.weights,
            "max_staleness": method.max_staleness,
            "data": None if given.get("task") else cls.data,
            "model": None if given.get("task") else default_model(given.get("data") or "digits"),
            "eval_every": max(1, given.get("rounds", cls.rounds) // 20),
        }
        if given.get("noise_source", cls.noise_source) != cls.noise_source:
            own["accountant"] = "rdp"  # the discrete Gaussian has no other
        values = own | given
        if _private_settings(values):
            unclipped = values.get("clip") is None
            chosen = (
                (*method.private_defaults, *method.unclipped_defaults)
                if unclipped
                else method.private_defaults
            )
            parameters = dict(chosen) | dict(values.get("parameters", ()))
            values["parameters"] = tuple(sorted(parameters.items()))
            if unclipped:
                values["clip"] = clip_of(algorithm, values["parameters"])
        return cls(**values)

    def __post_init__(self, amplified: bool) -> None:
        if amplified:
            from offbeat.privacy.ledger import amplification_refused

            raise amplification_refused(
                setting_name("max_participations"), setting_name("simulate_amplification")
            )
        check_settings(self)
        self._check_privacy()
        self._check_aggregate()
        name = setting_name
        if self.workers is not None and self.engine in ("sequential", "vectorised"):
            raise InputError(f"the engine '{self.engine}' has no {name('workers')}: use workers or ray.")
        if self.ray_address is not None and self.engine != "ray":
            raise InputError(f"{name('ray_address')} is for {name('engine')} ray: give that, too.")
        for part in ("data", "data_dir", "model") if self.task is not None else ():
            if getattr(self, part) is not None:
                raise InputError(f"{name('task')} brings its own data and model: leave out {name(part)}.")
        if self.task is not None and self.augment != "none":
            raise InputError(f"{name('augment')} is for named data sets: leave it out with {name('task')}.")
        if self.standardise and self.augment != "none":
            raise InputError(
                f"{name('augment')} pads images that are not scaled yet: leave out {name('standardise')}."
            )
        if self.task is None and self.data is None:
            raise InputError(f"there is nothing to train on: give {name('data')} or {name('task')}.")
        if self.partial_work and self.deadline is None:
            raise InputError(
                f"{name('partial_work')} is for tasks beyond a time limit: give {name('deadline')}, too."
            )
        if self.recall_stale and self.max_staleness is None:
            raise InputError(
                f"{name('recall_stale')} is for updates that would be discarded: give "
                f"{name('max_staleness')}, too."
            )
        if self.personal is not None and not personal_layers(self.personal):
            raise InputError(f"{name('personal')} names no layer: name one, or leave it out.")
        if self.personal is None and self.personal_lr is not None:
            raise InputError(f"{name('personal_lr')} is for personal layers: give {name('personal')}, too.")
        if self.data == "digits" and self.data_dir is not None:
            raise InputError(f"digits ships with scikit-learn and needs no {name('data_dir')}: leave it out.")

    def _check_aggregate(self) -> None:
        """Reject a robust aggregation or a compression that is incompatible with secure or private sums."""
        given = f"{setting_name('aggregate')} {self.aggregate}"
        if self.compress is not None and self.secure:
            from offbeat.aggregate.compression import parse_compression, secure_refused

            raise secure_refused(
                parse_compression(self.compress), f"{setting_name('compress')} {self.compress}"
            )
        if self.aggregate == "mean":
            return
        if self.secure:
            raise InputError(
                f"{given} compares the updates of single clients, which secure aggregation hides from the "
                "server: use one of the two."
            )
        if self.clip is not None:
            raise InputError(
                f"{given} is not a sum, and the noise of differential privacy is computed for the most that "
                f"a client can add to a sum: use one of the two; {setting_name('clip')} bounds norms as well."
            )

    def _check_privacy(self) -> None:
        """Reject settings that contradict each other or that would have no effect."""
        name = setting_name
        if self.clip is None:
            for unused in _private_settings(vars(self)):
                raise InputError(
                    f"{name(unused)} needs {name('clip')}, the most that a client may add to a sum: give it, "
                    "or nothing is private."
                )
            return
        if self.standardise:
            raise InputError(
                f"{name('standardise')} releases sums of the features without noise, which no epsilon would "
                "count: leave it out, and scale features by constants that are public."
            )
        if self.noise is None and self.epsilon is None:
            raise InputError(
                f"privacy needs noise: give {name('noise')}, or {name('epsilon')} to have it computed."
            )
        if self.noise_source != "server" and not self.secure:
            raise InputError(
                f"{name('noise_source')} {self.noise_source} needs secure aggregation, which has a helper: "
                f"give {name('secure')}, too."
            )
        if self.delta is None:
            raise InputError(
                f"privacy needs {name('delta')}, well below one in the number of clients, such as 1e-6."
            )
        if self.simulate_amplification and self.dispatch != "poisson":
            raise InputError(
                f"{name('simulate_amplification')} is for clients that are drawn by {name('dispatch')} "
                f"poisson, not {self.dispatch}: give that, or {name('max_participations')} in its place."
            )
        timed = self.dispatch in ("allocation", "timed-poisson")
        if timed:
            for unused in ("max_participations", "min_separation"):
                if getattr(self, unused) is not None:
                    raise InputError(
                        f"{self.dispatch} dispatch itself draws how often a client contributes: leave "
                        f"{name(unused)} out."
                    )
        elif not self.simulate_amplification and self.max_participations is None:
            raise InputError(
                f"privacy rests on how often a client contributes: give {name('max_participations')}, or "
                f"{name('dispatch')} allocation and {name('release_period')} for releases by a clock, or "
                f"{name('dispatch')} poisson and {name('simulate_amplification')} for a figure that is not a "
                "guarantee."
            )

    @property
    def subject(self) -> str:
        """What is learned, for titles: the data set or the task."""
        return self.data or str(self.task).rpartition(":")[2]

    def settings(self) -> dict[str, Any]:
        """The settings as values for JSON."""
        return dataclasses.asdict(self) | {"parameters": dict(self.parameters)}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """The experiment that `settings` was called on, also of an earlier version."""
        known = settings_of(cls)
        values = {name: value for name, value in present_settings(settings).items() if name in known}
        if is_deployment(settings):
            values.pop("task", None)  # names functions of the server
        for name, value in values.items():
            if name != "parameters" and not known[name].accepts(value):
                raise InputError(
                    f"the settings of this run are damaged ({name} is {value!r}): restore a good copy."
                )
        try:
            return cls(**values | {"parameters": tuple(settings["parameters"].items())})
        except (KeyError, AttributeError, TypeError):
            raise InputError(
                "these are not the settings of a run: start it again in another folder."
            ) from None


def personal_layers(text: str | None) -> tuple[str, ...]:
    """The patterns of a list that is separated by commas."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def is_deployment(settings: Mapping[str, Any]) -> bool:
    """Whether the settings of a run are those of a deployment, whose data are at its sites."""
    return "secure_sums" in settings or isinstance(settings.get("task"), dict)


# The fields of a record that reveal something about who was drawn; elapsed does by the time of updates.
SAMPLE_FIELDS = frozenset(
    {
        "client_updates",
        "staleness_mean",
        "staleness_max",
        "dropped",
        "lost",
        "floats_down",
        "floats_up",
        "bytes",
        "elapsed",
    }
)


def hides_sample(settings: Mapping[str, Any]) -> bool:
    """Whether the epsilon of a run assumes that the participating clients stay secret."""
    from offbeat.schedule.dispatch import TIMED_DISPATCH_NAMES

    timed = settings.get("dispatch") in TIMED_DISPATCH_NAMES and settings.get("clip") is not None
    return timed or bool(settings.get("simulate_amplification"))


def _private_settings(values: Mapping[str, Any]) -> list[str]:
    """The settings for private runs that differ from their defaults."""
    return [
        name
        for name, each in settings_of(Experiment).items()
        if each.info.private and values.get(name, each.default) != each.default
    ]


def clip_of(algorithm: str, parameters: Iterable[tuple[str, Any]]) -> str | None:
    """The `clip` of a method that bounds every field of its uploads; None if it does not."""
    from offbeat.aggregate.private import own_bounds
    from offbeat.algorithms import Setting, build

    bounds = own_bounds(build(algorithm, Setting(1, 1, 1), dict(parameters)))
    if bounds is None:
        return None
    return ",".join(f"{name}={str(bound).removesuffix('.0')}" for name, bound in bounds.items())


def present_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an earlier version under the present names of settings, methods and protocols."""
    from offbeat import algorithms
    from offbeat.schedule import dispatch

    found = present_names(settings)
    for name, current_name in (("algorithm", algorithms.current_name), ("dispatch", dispatch.current_name)):
        if isinstance(found.get(name), str):
            found[name] = current_name(found[name])
    return found


def build_dispatch(experiment: Experiment) -> "Dispatch":
    """The protocol of an experiment."""
    from offbeat.schedule.dispatch import parse_dispatch

    return parse_dispatch(
        experiment.dispatch,
        concurrency=experiment.concurrency,
        buffer=experiment.buffer,
        population=experiment.clients,
        hand_out=experiment.hand_out,
        release_period=experiment.release_period,
        lead=experiment.lead,
        open_slots=experiment.open_slots,
    )


def build_limits(experiment: Experiment) -> "TaskLimits":
    """When simulated tasks of an experiment end early."""
    from offbeat.schedule.clock import TaskLimits, parse_deadline

    return TaskLimits(parse_deadline(experiment.deadline), experiment.partial_work, experiment.recall_stale)


def check_limits_private(experiment: Experiment, deadline: "Deadline", *, varying: bool = False) -> None:
    """Reject limits by which a client's part in an amplified sum would depend on other clients or on data."""
    from offbeat.schedule.clock import FixedDeadline
    from offbeat.schedule.dispatch import TIMED_DISPATCH_NAMES

    timed = experiment.dispatch in TIMED_DISPATCH_NAMES
    if experiment.clip is None or not (timed or experiment.simulate_amplification):
        return
    if not isinstance(deadline, FixedDeadline):
        raise InputError(
            f"{setting_name('deadline')} by a quantile lets other clients decide whether a client is late, "
            "which the amplification does not cover: give a number of seconds."
        )
    if varying and experiment.local_epochs is not None:
        raise InputError(
            f"with {setting_name('local_epochs')} the time on a device tells how many examples a client has, "
            f"which the amplification does not cover: give {setting_name('local_steps')}."
        )
