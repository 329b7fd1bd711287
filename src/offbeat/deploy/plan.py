"""What a deployment is to do: its settings file, read and checked."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from offbeat.algorithms import Setting, find
from offbeat.deploy import tables, vocabulary
from offbeat.deploy.hyperparameters import check_parameters
from offbeat.deploy.tables import Kind
from offbeat.errors import InputError
from offbeat.experiment import Experiment

_BUFFER = 10  # at most, where none is given

_Table = TypeVar("_Table", bound=NamedTuple)


class Code(NamedTuple):
    """Functions of the server's own, as `package.module:function`."""

    module: str
    losses: str | None = None
    test: str | None = None


class Secure(NamedTuple):
    """Sums in secret, with a helper that somebody else runs."""

    helper: str
    token: str
    certificate: str | None = None
    minimum: int = 5
    signed: bool = True


class Network(NamedTuple):
    """What to expect of sites and of the network between."""

    deadline: float = 600.0  # seconds for a task
    poll: float = 0.5  # seconds between two looks
    patience: float = 600.0  # seconds without the network before the run ends, saved
    most_bytes: int | None = None  # of an upload; None: four times what it should be
    most_norm: float | None = None  # of an upload's field; None: by what is usual in the run; 0: any
    bound: bool | None = None  # a site to its node's key; None: where nodes have one


class Page(NamedTuple):
    """Where the live page is; port 0: nowhere."""

    port: int = 0
    host: str = "127.0.0.1"


@dataclass(frozen=True)
class Plan:
    """A settings file, checked as far as can be without the code it names."""

    folder: Path  # of the settings file: modules and files are looked for here
    code: Code
    experiment: Experiment
    examples: int | None  # about how many a site has, where local work is counted in epochs
    secure: Secure | None = None
    network: Network = Network()
    page: Page = Page()

    @classmethod
    def read(cls, path: Path) -> Self:
        """The plan that a settings file holds."""
        try:
            return cls.of(tables.read(path), path.absolute().parent)
        except InputError as error:
            sentence = str(error)
            raise InputError(sentence if str(path) in sentence else f"{path}: {sentence}") from None

    @classmethod
    def of(cls, given: Mapping[str, Any], folder: Path) -> Self:
        """The plan that tables hold."""
        tables.check("the settings", given, vocabulary.TABLES, {})
        task, training = (
            _table(given, "task", vocabulary.TASK),
            _table(given, "training", vocabulary.TRAINING, vocabulary.NOT_TRAINING),
        )
        if "module" not in task:
            raise InputError("[task] has no module: give module = 'package.module:function'.")
        secure = _made(Secure, given, "secure", vocabulary.SECURE, ("helper", "token"))
        network = _made(Network, given, "network", vocabulary.NETWORK) or Network()
        page = _made(Page, given, "watch", vocabulary.WATCH) or Page()
        _check_network(network, page)
        examples = training.pop("examples", None)
        experiment = _experiment(training, _privacy(given), secure is not None)
        _check_work(training, examples)
        if secure is not None:
            _check_secure(secure, experiment)
        return cls(folder, Code(**task), experiment, examples, secure, network, page)

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
            name: value for name, value in self.experiment.settings().items() if name not in vocabulary.ABSENT
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
    given: Mapping[str, Any], name: str, known: Mapping[str, Kind], refused: Mapping[str, str] | None = None
) -> dict[str, Any]:
    table = dict(given.get(name, {}))
    tables.check(f"[{name}]", table, known, refused or {})
    return table


def _made(
    make: Callable[..., _Table],
    given: Mapping[str, Any],
    name: str,
    known: Mapping[str, Kind],
    needed: tuple[str, ...] = (),
) -> _Table | None:
    if name not in given:
        return None
    table = _table(given, name, known)
    for key in needed:
        if key not in table:
            raise InputError(f"[{name}] has no {key}: give it.")
    return make(**table)


def _privacy(given: Mapping[str, Any]) -> dict[str, Any]:
    table = _table(given, "privacy", vocabulary.PRIVACY, vocabulary.NOT_PRIVACY)
    if not table:
        return table
    if "most" not in table:
        raise InputError("[privacy] has no most, how often a client may contribute: give it.")
    clip = table.get("clip")
    if isinstance(clip, dict):
        clip = ",".join(f"{name}={bound}" for name, bound in clip.items())
    return table if clip is None else table | {"clip": str(clip)}


def _experiment(training: dict[str, Any], privacy: dict[str, Any], secure: bool) -> Experiment:
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
    given["parameters"] = check_parameters(algorithm, given.get("parameters", {}))
    given.setdefault("concurrency", clients)
    if find(algorithm).buffer is None:
        given.setdefault("buffer", max(1, min(_BUFFER, clients // 2)))
    try:
        return Experiment.of(**given | privacy | {"secure": secure, "model": None})
    except InputError as error:
        raise InputError(in_keys(str(error))) from None


def in_keys(sentence: str) -> str:
    """The same with a settings file's words in place of a command line's."""
    return re.sub(r"--([a-z][a-z-]*)", lambda word: word[1].replace("-", "_"), sentence)


def _check_work(training: Mapping[str, Any], examples: int | None) -> None:
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


def _check_secure(secure: Secure, experiment: Experiment) -> None:
    if not 2 <= secure.minimum <= experiment.buffer:
        raise InputError(
            f"minimum of [secure] must be at least 2 and at most the buffer of {experiment.buffer}, "
            f"not {secure.minimum}."
        )
    if not re.fullmatch(r"https?://[^/\s]+/?", secure.helper):
        raise InputError(f"helper of [secure] must be such as https://host:port, not '{secure.helper}'.")


def _check_network(network: Network, page: Page) -> None:
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
