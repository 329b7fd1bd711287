"""A settings file in TOML, table by table: known keys, each of its kind.

Which keys a settings file may have, of which kind, and which it may not have and why.

Hyperparameters from a settings file, checked against the method that takes them.

What a deployment is to do: its settings file, read and checked.
"""

import inspect
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from offbeat.algorithms import Setting, find
from offbeat.errors import InputError, unknown_name
from offbeat.training.experiment import Experiment

_MAX_FILE_BYTES = 1 << 20  # bytes of a settings file


class ValueKind(Enum):
    """What a key holds; the words are for the sentence that asks for it."""

    WORD = "a text, in quotes"
    WHOLE = "a whole number"
    NUMBER = "a finite number"
    SWITCH = "true or false"
    TABLE = "a table"
    BOUND = "a number, a text such as 'delta=1', or a table of numbers"


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a settings file."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise InputError(f"{path} is too large for a settings file: name another.")
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"there is no settings file {path}: name one, or write one by 'offbeat new'."
        ) from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder: name the settings file in it.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"the settings file {path} cannot be read ({_first_line(error)}): mend it."
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not TOML ({_first_line(error)}): mend it.") from None


def check_table(
    place: str, table: Mapping[str, Any], known: Mapping[str, ValueKind], refused: Mapping[str, str]
) -> None:
    """Refuse keys that nobody reads, keys that mean nothing here, and values of another kind."""
    for name, value in table.items():
        if name in refused:
            raise InputError(f"{place} has '{name}', {refused[name]}: leave it out.")
        if name not in known:
            raise unknown_name(f"key of {place}", name, known)
        if not is_kind(value, known[name]):
            raise InputError(f"{name} of {place} must be {known[name].value}, not {_shorten(value)}.")


def is_kind(value: Any, kind: ValueKind) -> bool:
    """Whether a value is of a kind; true and false are no numbers."""
    match kind:
        case ValueKind.WORD:
            return isinstance(value, str) and bool(value.strip())
        case ValueKind.WHOLE:
            return isinstance(value, int) and not isinstance(value, bool)
        case ValueKind.NUMBER:
            return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        case ValueKind.SWITCH:
            return isinstance(value, bool)
        case ValueKind.TABLE:
            return isinstance(value, dict)
        case ValueKind.BOUND:
            if isinstance(value, dict):
                return bool(value) and all(is_kind(each, ValueKind.NUMBER) for each in value.values())
            return is_kind(value, ValueKind.NUMBER) or is_kind(value, ValueKind.WORD)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


_SIMULATION_ONLY = "which is of simulations only"
TABLE_KEYS = dict.fromkeys(("task", "training", "privacy", "secure", "network", "watch"), ValueKind.TABLE)
TASK_KEYS = dict.fromkeys(("module", "losses", "test"), ValueKind.WORD)
TRAINING_KEYS = {
    "algorithm": ValueKind.WORD,
    "parameters": ValueKind.TABLE,
    "clients": ValueKind.WHOLE,
    "buffer": ValueKind.WHOLE,
    "concurrency": ValueKind.WHOLE,
    "dispatch": ValueKind.WORD,
    "hand_out": ValueKind.WORD,
    "weights": ValueKind.WORD,
    "limit": ValueKind.WHOLE,
    "rounds": ValueKind.WHOLE,
    "local_steps": ValueKind.WHOLE,
    "local_epochs": ValueKind.WHOLE,
    "examples": ValueKind.WHOLE,
    "batch_size": ValueKind.WHOLE,
    "weight_decay": ValueKind.NUMBER,
    "seed": ValueKind.WHOLE,
    "every": ValueKind.WHOLE,
    "average": ValueKind.NUMBER,
    "precision": ValueKind.WORD,
    "device": ValueKind.WORD,
}
REFUSED_TRAINING = dict.fromkeys(
    ("data", "data_dir", "model", "partition", "delays", "availability", "dropout", "engine", "how"),
    _SIMULATION_ONLY,
) | dict.fromkeys(("workers", "ray_address", "memory"), _SIMULATION_ONLY)
PRIVACY_KEYS = {
    "clip": ValueKind.BOUND,
    "noise": ValueKind.NUMBER,
    "epsilon": ValueKind.NUMBER,
    "delta": ValueKind.NUMBER,
    "most": ValueKind.WHOLE,
    "apart": ValueKind.WHOLE,
    "noise_shape": ValueKind.WORD,
    "accountant": ValueKind.WORD,
    "adaptive_clip": ValueKind.NUMBER,
}
REFUSED_PRIVACY = dict.fromkeys(
    ("nominal_cohort", "noise_seed", "simulate_amplification"), _SIMULATION_ONLY
) | {"amplified": "but sites come and go, so nothing is amplified"}
SECURE_KEYS = {
    "helper": ValueKind.WORD,
    "certificate": ValueKind.WORD,
    "token": ValueKind.WORD,
    "minimum": ValueKind.WHOLE,
    "signed": ValueKind.SWITCH,
}
NETWORK_KEYS = {
    "deadline": ValueKind.NUMBER,
    "poll": ValueKind.NUMBER,
    "patience": ValueKind.NUMBER,
    "most_bytes": ValueKind.WHOLE,
    "most_norm": ValueKind.NUMBER,
    "bound": ValueKind.SWITCH,
}
WATCH_KEYS = {"port": ValueKind.WHOLE, "host": ValueKind.WORD}
SIMULATION_SETTINGS = frozenset(
    {*REFUSED_TRAINING, *REFUSED_PRIVACY}
)  # of an experiment's settings that mean nothing here

_KINDS = {float: ValueKind.NUMBER, int: ValueKind.WHOLE, bool: ValueKind.SWITCH, str: ValueKind.WORD}


def check_hyperparameters(algorithm: str, given: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Sorted by name, each of the kind that the method declares."""
    known = find(algorithm).parameters()
    for name, value in given.items():
        if name not in known:
            raise unknown_name(f"parameter of {algorithm}", name, known)
        kind = _kind(known[name])
        if not is_kind(value, kind):
            raise InputError(f"the parameter {name} of {algorithm} must be {kind.value}, not {value!r}.")
    return tuple(
        (name, float(value) if _kind(known[name]) is ValueKind.NUMBER else value)
        for name, value in sorted(given.items())
    )


def _kind(parameter: inspect.Parameter) -> ValueKind:
    """Also where None is allowed."""
    annotation = parameter.annotation
    if isinstance(annotation, types.UnionType):
        annotation = next(kind for kind in typing.get_args(annotation) if kind is not types.NoneType)
    return _KINDS[annotation]


_MAX_DEFAULT_BUFFER = 10  # at most, where none is given

_TableT = TypeVar("_TableT", bound=NamedTuple)


class CodeConfig(NamedTuple):
    """Functions of the server's own, as `package.module:function`."""

    module: str
    losses: str | None = None
    test: str | None = None


class SecureConfig(NamedTuple):
    """Sums in secret, with a helper that somebody else runs."""

    helper: str
    token: str
    certificate: str | None = None
    minimum: int = 5
    signed: bool = True


class NetworkConfig(NamedTuple):
    """What to expect of sites and of the network between."""

    deadline: float = 600.0  # seconds for a task
    poll: float = 0.5  # seconds between two looks
    patience: float = 600.0  # seconds without the network before the run ends, saved
    most_bytes: int | None = None  # of an upload; None: four times what it should be
    most_norm: float | None = None  # of an upload's field; None: by what is usual in the run; 0: any
    bound: bool | None = None  # a site to its node's key; None: where nodes have one


class PageConfig(NamedTuple):
    """Where the live page is; port 0: nowhere."""

    port: int = 0
    host: str = "127.0.0.1"


@dataclass(frozen=True)
class ServeConfig:
    """A settings file, checked as far as can be without the code it names."""

    folder: Path  # of the settings file: modules and files are looked for here
    code: CodeConfig
    experiment: Experiment
    examples: int | None  # about how many a site has, where local work is counted in epochs
    secure: SecureConfig | None = None
    network: NetworkConfig = NetworkConfig()
    page: PageConfig = PageConfig()

    @classmethod
    def read(cls, path: Path) -> Self:
        """The plan that a settings file holds."""
        try:
            return cls.of(read_toml(path), path.absolute().parent)
        except InputError as error:
            sentence = str(error)
            raise InputError(sentence if str(path) in sentence else f"{path}: {sentence}") from None

    @classmethod
    def of(cls, given: Mapping[str, Any], folder: Path) -> Self:
        """The plan that tables hold."""
        check_table("the settings", given, TABLE_KEYS, {})
        task, training = (
            _table(given, "task", TASK_KEYS),
            _table(given, "training", TRAINING_KEYS, REFUSED_TRAINING),
        )
        if "module" not in task:
            raise InputError("[task] has no module: give module = 'package.module:function'.")
        secure = _read_table(SecureConfig, given, "secure", SECURE_KEYS, ("helper", "token"))
        network = _read_table(NetworkConfig, given, "network", NETWORK_KEYS) or NetworkConfig()
        page = _read_table(PageConfig, given, "watch", WATCH_KEYS) or PageConfig()
        _check_network(network, page)
        examples = training.pop("examples", None)
        experiment = _build_experiment(training, _privacy_table(given), secure is not None)
        _check_local_work(training, examples)
        if secure is not None:
            _check_secure(secure, experiment)
        return cls(folder, CodeConfig(**task), experiment, examples, secure, network, page)

    @property
    def steps(self) -> int:
        """Local steps of a task; about so many where it is epochs."""
        experiment = self.experiment
        if experiment.local_epochs is None:
            return experiment.local_steps
        return experiment.local_epochs * math.ceil((self.examples or 1) / experiment.batch_size)

    @property
    def setting(self) -> Setting:
        """S, K and T."""
        return Setting(self.experiment.buffer, self.steps, self.experiment.rounds)

    def near(self, name: str) -> Path:
        """A file that the settings name."""
        return self.folder / Path(name).expanduser()

    def settings(self) -> dict[str, Any]:
        """What may not change while the run lasts, as JSON-able values; a key `task` tells a deployment."""
        own = {
            name: value
            for name, value in self.experiment.settings().items()
            if name not in SIMULATION_SETTINGS
        }
        secure = (
            None if self.secure is None else {"minimum": self.secure.minimum, "signed": self.secure.signed}
        )
        return own | {"task": self.code._asdict(), "examples": self.examples, "secure_sums": secure}

    def note(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """All that a site needs beyond its own code, for the note of a task."""
        experiment = self.experiment
        epochs = experiment.local_epochs
        work = ("steps", experiment.local_steps) if epochs is None else ("epochs", epochs)
        return {
            "algorithm": experiment.algorithm,
            "parameters": dict(parameters),
            "setting": list(self.setting),
            "work": [*work, experiment.batch_size],
            "weight_decay": experiment.weight_decay,
            "precision": experiment.precision,
            "seed": experiment.seed,
            "clients": experiment.clients,
        }


def _table(
    given: Mapping[str, Any],
    name: str,
    known: Mapping[str, ValueKind],
    refused: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    table = dict(given.get(name, {}))
    check_table(f"[{name}]", table, known, refused or {})
    return table


def _read_table(
    make: Callable[..., _TableT],
    given: Mapping[str, Any],
    name: str,
    known: Mapping[str, ValueKind],
    needed: tuple[str, ...] = (),
) -> _TableT | None:
    if name not in given:
        return None
    table = _table(given, name, known)
    for key in needed:
        if key not in table:
            raise InputError(f"[{name}] has no {key}: give it.")
    return make(**table)


def _privacy_table(given: Mapping[str, Any]) -> dict[str, Any]:
    table = _table(given, "privacy", PRIVACY_KEYS, REFUSED_PRIVACY)
    if not table:
        return table
    if "most" not in table:
        raise InputError("[privacy] has no most, how often a client may contribute: give it.")
    clip = table.get("clip")
    if isinstance(clip, dict):
        clip = ",".join(f"{name}={bound}" for name, bound in clip.items())
    return table if clip is None else table | {"clip": str(clip)}


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
    try:
        return Experiment.of(**given | privacy | {"secure": secure, "model": None})
    except InputError as error:
        raise InputError(as_toml_keys(str(error))) from None


def as_toml_keys(sentence: str) -> str:
    """The same with a settings file's words in place of a command line's."""
    return re.sub(r"--([a-z][a-z-]*)", lambda word: word[1].replace("-", "_"), sentence)


def _check_local_work(training: Mapping[str, Any], examples: int | None) -> None:
    epochs = "local_epochs" in training
    if epochs and examples is None:
        raise InputError(
            "local_epochs needs examples, about how many a site has, for rates that follow from the number "
            "of local steps: give it, or local_steps."
        )
    if examples is not None and not epochs:
        raise InputError("examples is for local_epochs alone: leave it out.")
    if examples is not None and not 1 <= examples < 2**31:
        raise InputError(f"examples must be at least 1 and below 2^31, not {examples}.")


def _check_secure(secure: SecureConfig, experiment: Experiment) -> None:
    if not 2 <= secure.minimum <= experiment.buffer:
        raise InputError(
            f"minimum of [secure] must be at least 2 and at most the buffer of {experiment.buffer}, "
            f"not {secure.minimum}."
        )
    if not re.fullmatch(r"https?://[^/\s]+/?", secure.helper):
        raise InputError(f"helper of [secure] must be such as https://host:port, not '{secure.helper}'.")


def _check_network(network: NetworkConfig, page: PageConfig) -> None:
    for name in ("deadline", "poll", "patience"):
        if not getattr(network, name) > 0:
            raise InputError(f"{name} of [network] must be above 0 seconds, not {getattr(network, name)}.")
    if network.most_bytes is not None and network.most_bytes < 1:
        raise InputError(f"most_bytes of [network] must be at least 1, not {network.most_bytes}.")
    if network.most_norm is not None and network.most_norm < 0:
        raise InputError(
            f"most_norm of [network] must be above 0, or 0 for no limit, not {network.most_norm}."
        )
    if not 0 <= page.port < 65536:
        raise InputError(f"port of [watch] must be from 0, for none, to 65535, not {page.port}.")
