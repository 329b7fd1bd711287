"""What a deployment is given: `serve.toml`, read and checked, and the user's functions for data and model."""

import dataclasses
import hashlib
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Self, TypeAlias, TypeVar, get_args

import torch
from torch import nn

from offbeat.algorithms import Setting, find
from offbeat.data.population import Examples, check_examples
from offbeat.errors import InputError, naming_settings, unknown_name
from offbeat.privacy.secure.terms import DEFAULT_MINIMUM
from offbeat.renamed import check_name, check_part_of_task
from offbeat.schedule.clock import parse_deadline
from offbeat.schedule.dispatch import TIMED_DISPATCH_NAMES
from offbeat.training.experiment import Experiment, check_limits_private
from offbeat.training.schema import (
    COUNT,
    KINDS,
    NamedSetting,
    ValueKind,
    check_settings,
    keys_of,
    setting,
    settings_of,
)
from offbeat.training.task import MakeModule, first_line, load_task, seeded_module

_MAX_FILE_BYTES = 1 << 20
_MAX_DEFAULT_BUFFER = 10  # where none is given

_task = partial(setting, table="task")
_secure = partial(setting, table="secure")
_network = partial(setting, table="network")
_watch = partial(setting, table="watch")
_prepare = partial(setting, table="prepare")


@dataclass(frozen=True)
class CodeConfig:
    """The code of the server, as `package.module:function`."""

    function: str = _task(MISSING, "FUNCTION", "which returns the task, an offbeat.LearningTask")


@dataclass(frozen=True)
class SecureConfig:
    """Secure aggregation with a helper that somebody else runs."""

    helper: str = _secure(MISSING, "URL", "the helper's address, such as https://host:port")
    token: str = _secure(MISSING, "FILE", "the token by which the helper knows the server")
    certificate: str | None = _secure(None, "FILE", "the certificate by which the server knows the helper")
    minimum: int = _secure(DEFAULT_MINIMUM, "N", "the fewest sites in a sum")
    signed: bool = _secure(True, "", "accept only reports that sites have signed")


@dataclass(frozen=True)
class NetworkConfig:
    """What to expect of the sites and of the network."""

    deadline: float | str = _network(
        600.0,
        "SECONDS",
        "time limit of a task: a number, or quantile:Q[:FACTOR] of the durations seen so far",
        kind=ValueKind.DEADLINE,
    )
    partial_work: bool = _network(
        False, "", "before the time limit a site sends the local steps that it has done"
    )
    recall_stale: bool = _network(
        False, "", "a site whose update is about to be too stale is asked for the steps that it has done"
    )
    patience: float = _network(
        600.0, "SECONDS", "without a network before the run ends, saved", within="(0, inf]", unit="seconds"
    )
    max_upload_bytes: int | None = _network(
        None,
        "BYTES",
        "the largest upload to accept",
        within="[1, inf]",
        default_text="four times the expected size",
    )
    max_update_norm: float | None = _network(
        None,
        "NORM",
        "the largest norm of an update to accept; 0: any",
        within="[0, inf]",
        default_text="by the norms in the run",
    )
    bind_names: bool | None = _network(
        None, "", "bind the name of a site to its key", default_text="if sites have keys"
    )

    def __post_init__(self) -> None:
        check_settings(self)
        parse_deadline(self.deadline)


@dataclass(frozen=True)
class PrepareConfig:
    """What the sites agree on before training; `standardise` is a setting of the experiment."""

    features: int | None = _prepare(
        None,
        "N",
        "features of an example, or channels of an image",
        within=COUNT,
        default_text="those of the server's test examples",
    )
    sites: int | None = _prepare(
        None,
        "N",
        "sites whose examples count; those that join later use what these agreed on",
        within=COUNT,
        default_text="all clients",
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class PageConfig:
    """The live page."""

    port: int = _watch(0, "PORT", "port of the live page; 0: no page", within="[0, 65535]")
    host: str = _watch("127.0.0.1", "HOST", "address of the live page")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class ServeConfig:
    """A settings file, checked as far as possible without the code that it names."""

    folder: Path  # of the settings file: modules and files are looked for here
    code: CodeConfig
    experiment: Experiment
    examples: int | None = setting(
        None, "N", "examples of a site, about, for local_epochs", within=COUNT, table="training"
    )
    secure: SecureConfig | None = None
    network: NetworkConfig = NetworkConfig()
    page: PageConfig = PageConfig()
    prepare: PrepareConfig = PrepareConfig()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a settings file."""
        try:
            return cls.of(read_toml(path), path.absolute().parent)
        except InputError as error:
            sentence = str(error)
            raise InputError(sentence if str(path) in sentence else f"{path}: {sentence}") from None

    @classmethod
    def of(cls, given: Mapping[str, Any], folder: Path) -> Self:
        """The configuration that the tables of a settings file give."""
        for name, table in given.items():
            if name not in TABLES:
                raise unknown_name("key of the settings", name, TABLES)
            if not isinstance(table, dict):
                raise InputError(f"{name} of the settings must be a table, not {_shorten(table)}.")
        with naming_settings(str):
            code = _read_config(CodeConfig, given, "task")
            training = _read_table(given, "training")
            secure = _read_config(SecureConfig, given, "secure") if "secure" in given else None
            network = _read_config(NetworkConfig, given, "network")
            page = _read_config(PageConfig, given, "watch")
            examples = training.pop("examples", None)
            chosen = _read_table(given, "prepare")
            training["standardise"] = chosen.pop("standardise", False)
            with naming_settings(lambda name: f"{name} of [prepare]"):
                prepare = PrepareConfig(**chosen)
            experiment = _build_experiment(training, _read_privacy(given), secure is not None)
            _check_prepare(prepare, experiment)
            _check_local_work(training, examples)
            if secure is not None:
                _check_secure(secure, experiment)
            if experiment.clip is not None and network.max_update_norm:
                raise InputError(
                    "max_update_norm of [network] would reject uploads that [privacy] clips, and the noise "
                    "does not cover which ones: leave it out."
                )
            _check_recall(network, experiment)
            check_limits_private(experiment, parse_deadline(network.deadline), varying=True)
            return cls(folder, code, experiment, examples, secure, network, page, prepare)

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def steps(self) -> int:
        """Local steps of a task; an estimate if tasks are counted in epochs."""
        experiment = self.experiment
        if experiment.local_epochs is None:
            return experiment.local_steps
        return experiment.local_epochs * math.ceil((self.examples or 1) / experiment.batch_size)

    @property
    def setting(self) -> Setting:
        """S, K and T."""
        return Setting(self.experiment.buffer, self.steps, self.experiment.rounds)

    def near(self, name: str) -> Path:
        """A file that the settings name, relative to their folder."""
        return self.folder / Path(name).expanduser()

    def settings(self) -> dict[str, Any]:
        """The settings that may not change during the run, for JSON; the key `task` marks a deployment."""
        own = {
            name: value
            for name, value in self.experiment.settings().items()
            if name not in simulation_settings()
        }
        secure = (
            None if self.secure is None else {"minimum": self.secure.minimum, "signed": self.secure.signed}
        )
        return own | {"task": dataclasses.asdict(self.code), "examples": self.examples, "secure_sums": secure}

    def note(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """All that a site needs beyond its own code, for the message of a task."""
        experiment = self.experiment
        epochs = experiment.local_epochs
        work = ("steps", experiment.local_steps) if epochs is None else ("epochs", epochs)
        own_optimizer = experiment.local_optimizer != Experiment.local_optimizer
        optional = {  # what most runs do without
            "standardise": experiment.standardise,
            "local_optimizer": own_optimizer and experiment.local_optimizer,
            "clip_grad_norm": experiment.clip_grad_norm,
            "sends_local_lr": experiment.local_lr_schedule != Experiment.local_lr_schedule,
            "compress": experiment.compress,
        }
        return {name: value for name, value in optional.items() if value} | {
            "algorithm": experiment.algorithm,
            "parameters": dict(parameters),
            "setting": list(self.setting),
            "work": [*work, experiment.batch_size],
            "weight_decay": experiment.weight_decay,
            "precision": experiment.precision,
            "seed": experiment.seed,
            "clients": experiment.clients,
        }


TABLES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "task": (CodeConfig,),
        "training": (Experiment, ServeConfig),
        "prepare": (Experiment, PrepareConfig),
        "privacy": (Experiment,),
        "secure": (SecureConfig,),
        "network": (NetworkConfig,),
        "watch": (PageConfig,),
    }
)
_Config = TypeVar("_Config", CodeConfig, SecureConfig, NetworkConfig, PageConfig)


def table_keys(table: str) -> dict[str, NamedSetting]:
    """The keys of a table."""
    return {name: each for cls in TABLES[table] for name, each in keys_of(cls, table).items()}


def simulation_settings() -> set[str]:
    """The settings of an experiment that a deployment does not have."""
    return {name for name, each in settings_of(Experiment).items() if not each.info.table} - {"secure"}


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a settings file."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise InputError(f"{path} is too large for a settings file: name another.")
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"there is no settings file {path}: name one, or write one with 'offbeat new'."
        ) from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder: name the settings file in it.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the settings file {path} cannot be read ({_first_line(error)}): fix it.") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not TOML ({_first_line(error)}): fix it.") from None


def _read_table(given: Mapping[str, Any], table: str) -> dict[str, Any]:
    """The keys that are given in a table; each is known and has the right type, and none is missing."""
    values, known, place = dict(given.get(table, {})), table_keys(table), f"[{table}]"
    simulated = simulation_settings() if Experiment in TABLES[table] else set()
    for name, value in values.items():
        if name in simulated and name in table_keys("network"):
            raise InputError(f"{place} has '{name}', which belongs to [network]: move it there.")
        if name in simulated:
            raise InputError(f"{place} has '{name}', which is for simulations only: leave it out.")
        if name not in known:
            check_name(name, f" of {place}")
            if table == "task":
                check_part_of_task(name, f" of {place}", "function")
            raise unknown_name(f"key of {place}", name, known)
        if not known[name].kind.fits(value):
            raise InputError(f"{name} of {place} must be {known[name].kind.value}, not {_shorten(value)}.")
    for name, each in known.items():
        if each.required and name not in values:
            raise InputError(f"{place} has no {name}, {each.help}: give it.")
    return values


def _read_config(cls: type[_Config], given: Mapping[str, Any], table: str) -> _Config:
    values = _read_table(given, table)
    with naming_settings(lambda name: f"{name} of [{table}]"):
        return cls(**values)


def _read_privacy(given: Mapping[str, Any]) -> dict[str, Any]:
    values = _read_table(given, "privacy")
    if not values:
        return values
    if given.get("training", {}).get("dispatch") in TIMED_DISPATCH_NAMES:
        _check_timed(given)
    elif "max_participations" not in values:
        raise InputError("[privacy] has no max_participations, how often a client may contribute: give it.")
    clip = values.get("clip")
    if isinstance(clip, dict):
        clip = ",".join(f"{name}={bound}" for name, bound in clip.items())
    return values if clip is None else values | {"clip": str(clip)}


def _check_timed(given: Mapping[str, Any]) -> None:
    """Refuse what would make the draw of timed releases known."""
    if given.get("watch", {}).get("host", "127.0.0.1") not in ("127.0.0.1", "::1", "localhost"):
        raise InputError(
            "the live page tells who was drawn for a release, which must stay secret: leave host of [watch] "
            "out, and reach the page from the server itself."
        )


def _check_recall(network: NetworkConfig, experiment: Experiment) -> None:
    """Refuse to recall tasks where none is ever too stale."""
    if not network.recall_stale:
        return
    if experiment.dispatch in TIMED_DISPATCH_NAMES:
        raise InputError(
            "recall_stale of [network] follows what other sites have sent, and under timed releases nothing "
            "that a site is asked for may depend on others: leave it out, or use another dispatch."
        )
    if experiment.max_staleness is None:
        raise InputError(
            "recall_stale of [network] is for updates that would be discarded: give max_staleness of "
            "[training], too."
        )


def _build_experiment(training: dict[str, Any], privacy: dict[str, Any], secure: bool) -> Experiment:
    given = dict(training)
    clients = given.get("clients")
    if clients is None:
        raise InputError("[training] has no clients, how many sites there are: give it.")
    if given.get("dispatch") == "queues":
        raise InputError(
            "queues dispatch gives a client several tasks at once, which a site cannot take: use another."
        )
    if "local_steps" in given and "local_epochs" in given:
        raise InputError("local_steps and local_epochs exclude each other: give one of them.")
    algorithm = given.get("algorithm", Experiment.algorithm)
    given["parameters"] = check_hyperparameters(algorithm, given.get("parameters", {}))
    given.setdefault("concurrency", clients)
    if find(algorithm).buffer is None:
        given.setdefault("buffer", max(1, min(_MAX_DEFAULT_BUFFER, clients // 2)))
    return Experiment.of(**given | privacy | {"secure": secure, "model": None})


def check_hyperparameters(algorithm: str, given: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Hyperparameters by name, each of the type that the method declares."""
    known = find(algorithm).parameters()
    values = {}
    for name, value in sorted(given.items()):
        if name not in known:
            raise unknown_name(f"parameter of {algorithm}", name, known)
        annotation: Any = known[name].annotation
        if isinstance(annotation, UnionType):
            annotation = next(each for each in get_args(annotation) if each is not NoneType)
        kind = KINDS[annotation]
        if not kind.fits(value):
            raise InputError(f"the parameter {name} of {algorithm} must be {kind.value}, not {value!r}.")
        values[name] = float(value) if kind is ValueKind.NUMBER else value
    return tuple(values.items())


def _check_local_work(training: Mapping[str, Any], examples: int | None) -> None:
    epochs = "local_epochs" in training
    if epochs and examples is None:
        raise InputError(
            "local_epochs needs examples, about how many a site has, for rates that follow from the number "
            "of local steps: give it, or local_steps."
        )
    if examples is not None and not epochs:
        raise InputError("examples is for local_epochs alone: leave it out.")


def _check_prepare(prepare: PrepareConfig, experiment: Experiment) -> None:
    if not experiment.standardise and prepare != PrepareConfig():
        raise InputError("[prepare] has no standardise = true, so its other keys do nothing: leave them out.")
    if prepare.sites is not None and prepare.sites > experiment.clients:
        raise InputError(
            f"sites of [prepare] must be at most the {experiment.clients} clients of [training], "
            f"not {prepare.sites}."
        )


def _check_secure(secure: SecureConfig, experiment: Experiment) -> None:
    if not 2 <= secure.minimum <= experiment.buffer:
        raise InputError(
            f"minimum of [secure] must be at least 2 and at most the buffer of {experiment.buffer}, "
            f"not {secure.minimum}."
        )
    if not re.fullmatch(r"https?://[^/\s]+/?", secure.helper):
        raise InputError(f"helper of [secure] must be such as https://host:port, not '{secure.helper}'.")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


LoadData: TypeAlias = Callable[[str], Examples]  # from the site's name


def make_site_module(task: str) -> nn.Module:
    """The module of the task that the function `package.module:function` returns, after torch was seeded."""
    seed = torch.initial_seed()
    return load_task(task, seed, "--task").make_module(seed)


def load_examples(load: LoadData, name: str) -> Examples:
    """Load a site's examples; any problem is raised as an `InputError`."""
    try:
        given = load(name)
    except Exception as error:
        raise InputError(f"the data of site '{name}' could not be loaded: {first_line(error)}") from error
    data = check_examples(given)
    if not data.total:
        raise InputError(f"the data of site '{name}' is empty: a site needs at least one example.")
    return data


def frozen_weights_digest(module: nn.Module) -> str | None:
    """Return a digest of the frozen weights, which are not sent; None if all weights are trained."""
    frozen = [(name, weight) for name, weight in module.named_parameters() if not weight.requires_grad]
    digest = hashlib.sha256()
    for name, weight in frozen:
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest() if frozen else None


def prepare_module(
    module: nn.Module, make: MakeModule, seed: int, frozen: str | None, personal: bool = False
) -> nn.Module:
    """Return a site's model for a run; its frozen weights must have the digest `frozen` of the server's."""
    # frozen weights and personal layers are not sent, so they must follow from the seed
    if personal or frozen_weights_digest(module) is not None:
        module = seeded_module(make, seed)
    if frozen_weights_digest(module) != frozen:
        raise InputError(
            "the frozen weights differ from the server's: load them from copies of one file on both, "
            "or draw them from torch's generator."
        )
    return module
