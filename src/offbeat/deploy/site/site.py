"""What a server asks of every site of a run: the plan in a task's note, read with no trust in it.

One site: a client's data, model and memory, and the work that a server asks of it.
"""

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from msgspec import Meta, Struct, structs
from numpy.typing import NDArray
from torch import Tensor

from offbeat import trees
from offbeat.algorithms import Setting, build
from offbeat.core import AnyAlgorithm, Task, Visit
from offbeat.data.population import Epochs, Population, Steps
from offbeat.deploy.keys import read_signer
from offbeat.deploy.protocol import messages
from offbeat.deploy.protocol.messages import HelloReply, TaskMessage, UploadMessage
from offbeat.deploy.protocol.strict_json import Rejected, convert, malformed, quote
from offbeat.deploy.protocol.wire import TensorSpecs, describe_difference, is_finite, pack, specs_of, unpack
from offbeat.deploy.site.secure_encode import read_helper_key, secure_encode
from offbeat.deploy.site.secure_encode import read_secure_request as read_secure
from offbeat.deploy.site.storage import SiteStorage
from offbeat.deploy.user_code import (
    LoadData,
    MakeModule,
    cross_entropies,
    load_examples,
    make_module,
    prepare_module,
)
from offbeat.engines.local import SequentialExecutor, TaskResults, TaskStart, check_module
from offbeat.errors import DivergedError, InputError
from offbeat.nn.problem import Loss, Precision, Problem, Statistics
from offbeat.trees import Tree

_PositiveInt = Annotated[int, Meta(ge=1, lt=2**31)]


class SitePlan(NamedTuple):
    """The method, the local work, and the numbers that random draws are keyed by."""

    algorithm: AnyAlgorithm
    work: Steps | Epochs
    weight_decay: float
    precision: Precision
    seed: int
    clients: int
    frozen: str | None = None  # a digest of the server's frozen weights


class _PlanFields(Struct, frozen=True):
    """The keys of a plan; `bounds` and `moving` are read where uploads are encoded for secure aggregation."""

    algorithm: Annotated[str, Meta(min_length=1, max_length=100)]
    parameters: dict[str, Any]
    setting: tuple[_PositiveInt, _PositiveInt, _PositiveInt]
    work: tuple[Literal["steps", "epochs"], _PositiveInt, _PositiveInt]
    weight_decay: float
    precision: str
    seed: int
    clients: _PositiveInt
    frozen: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    bounds: Any = None
    moving: Any = None


def read_plan(plan: dict[str, Any]) -> SitePlan:
    """Decode the plan in a task's header; nothing in it names code except methods of the catalogue."""
    for name in sorted(plan.keys() - set(_PlanFields.__struct_fields__)):
        raise InputError(
            f"the server's plan has '{name[:40]}', which this site does not know: "
            "install the same version of offbeat on both."
        )
    fields = convert(plan, _PlanFields)
    if fields.precision.upper() not in Precision.__members__:
        raise malformed(f"the server's plan has the unknown precision {quote(fields.precision)}.")
    kind, count, size = fields.work
    return SitePlan(
        build(fields.algorithm, Setting(*fields.setting), fields.parameters),
        Steps(count, size) if kind == "steps" else Epochs(count, size),
        fields.weight_decay,
        Precision[fields.precision.upper()],
        fields.seed,
        fields.clients,
        fields.frozen,
    )


_UNKNOWN_TASK = UploadMessage("unknown", Task(0, 0, 0), (), "none", 0.0, None)  # where a note cannot be read

_OWN_ERRORS = (Rejected, InputError, DivergedError)  # their words are ours


class _Job(NamedTuple):
    """What one plan comes to here."""

    algorithm: AnyAlgorithm
    problem: Problem
    work: SequentialExecutor
    seed: int
    clients: int


class _TaskResult(NamedTuple):
    """What goes up of a task."""

    upload: list[Tensor]
    remembered: str  # of the client's memory, as an upload's note says it


@dataclass(frozen=True)
class AllExamples:
    """Parts in which whoever asks has all examples, in order: a site does not know the others'."""

    clients: int
    examples: int

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: int) -> NDArray[np.int64]:
        if not 0 <= client < self.clients:
            raise IndexError(f"client {client} of {self.clients}")
        return np.arange(self.examples)


class Site:
    """Answers a server's notes, and says in one sentence why it cannot.

    What goes wrong in the user's own code is told in full to the site's log alone: its words may
    quote the data. Reports of secure sums are signed with its own private `key`; where it is given a
    `helper_key`, uploads leave it for secure sums with that helper alone, and where it is given a
    `minimum`, for secure sums of at least as many clients alone.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        load: LoadData,
        module: MakeModule,
        losses: Loss | None = None,
        key: Path | None = None,
        helper_key: Path | None = None,
        minimum: int | None = None,
    ) -> None:
        if not 0 < len(name) <= 100 or not name.isprintable():
            raise InputError("the site's name must be printable and of 1 to 100 characters: give another.")
        self.name = name
        signer = read_signer(key) if key else None
        self._public = signer[0] if signer else None
        self._sign = signer[1] if signer else None
        self._helper = read_helper_key(helper_key) if helper_key else None
        self._least = minimum
        self._losses = losses or cross_entropies
        self._keepsakes = SiteStorage(folder)
        try:
            self._examples = load_examples(load, name)
            self._make, self._module = module, make_module(module)
            x, statistics = Problem(self._module, self._losses).initial()
            self._form = specs_of((x, statistics))
        except BaseException:
            self.close()
            raise
        self._jobs: dict[str, _Job] = {}  # of the last plan
        self.refused: str | None = None  # why the server turned it away last

    @property
    def site(self) -> str:
        """The number that it is known by."""
        return self._keepsakes.site

    @property
    def examples(self) -> int:
        """How many it has."""
        return self._examples.total

    def answer(self, kind: str, note: str, payload: bytes) -> tuple[str, bytes]:
        """The note and the payload to send back; whatever is wrong is said in the note."""
        if kind == "hello":
            self._hear(note)
            return self._hello(), b""
        known = _UNKNOWN_TASK
        try:
            if kind != "task":
                raise InputError("a site answers hello and task alone: install the server's version of it.")
            asked = messages.decode_task(note)
            known = structs.replace(known, run=asked.run, task=asked.task)
            began = time.perf_counter()
            computed = self._do(asked, payload)
            upload = structs.replace(
                known,
                form=specs_of(computed.upload),
                memory=computed.remembered,
                seconds=time.perf_counter() - began,
            )
            return messages.encode_message(upload), pack(computed.upload)
        except Exception as error:
            sentence = _error_sentence(error)
            logging.getLogger("offbeat").warning(
                "%s of run %s: %s",
                known.task,
                known.run,
                sentence,
                exc_info=not isinstance(error, _OWN_ERRORS),
            )
            return messages.encode_message(structs.replace(known, error=sentence)), b""

    def close(self) -> None:
        """Let go of the folder."""
        self._keepsakes.close()

    def _hear(self, greeting: str) -> None:
        try:
            refused = messages.decode_greeting(greeting)
        except Rejected:  # from another version of a server: a hello is answered all the same
            refused = None
        if refused is not None and refused != self.refused:
            logging.getLogger("offbeat").warning("the server turned this site away: %s", refused)
        self.refused = refused

    def _hello(self) -> str:
        hello = HelloReply(self.name, self.site, self.examples, self._form, None, self._public)
        return messages.encode_message(hello)

    def _do(self, note: TaskMessage, payload: bytes) -> _TaskResult:
        if (note.secure, self._helper, self._least) != (None, None, None):
            # or complains, before there is anything to hide
            read_secure(note.secure, self._helper, self._least)
        job, task = self._job(note.plan), note.task
        if task.client >= job.clients:
            raise InputError(f"the server calls this site client {task.client}, of {job.clients} clients.")
        algorithm = job.algorithm.warmup() if note.start else job.algorithm
        if algorithm is None:
            raise InputError("the server asks for a start with everybody, which the method does not have.")
        x, statistics = job.problem.initial()
        like = (algorithm.broadcast(job.algorithm.init(x), task.version), statistics)
        _check_model(note.form, specs_of(like))
        leaves = [leaf.to(job.problem.device) for leaf in unpack(payload, note.form)]
        message, statistics = trees.unflatten(trees.structure(like), leaves)
        memory, remembered = self._remember(job, note, algorithm.memory(x))
        version = torch.tensor(task.version)
        # how stale the task will be is not known before it arrives
        start = TaskStart(message, statistics, memory, Visit(version, torch.zeros_like(version)))
        stacked = job.work(algorithm, [task], [start], job.seed)
        done: TaskResults = trees.map(lambda leaf: leaf[0], stacked)
        _check_finite(done)
        leaves = self._veiled(done, statistics, note)
        memories = trees.leaves(done.memories)
        if memories:
            self._keepsakes.keep(note.run, task.client, task.visit, memories)
        return _TaskResult(leaves, remembered)

    def _remember(self, job: _Job, note: TaskMessage, initial: Tree) -> tuple[Tree, str]:
        """The client's memory, and whether it is one that was kept."""
        if not trees.leaves(initial):
            return initial, "none"
        kept = self._keepsakes.begin(note.run, note.task.client, note.committed)
        if kept is None:
            return initial, "new"
        difference = describe_difference(specs_of(kept), specs_of(initial))
        if difference:
            raise InputError(
                f"what this site kept of this run is of another model ({difference}): "
                "give the site the module that the run began with."
            )
        return trees.unflatten(
            trees.structure(initial), [leaf.to(job.problem.device) for leaf in kept]
        ), "kept"

    def _veiled(self, done: TaskResults, before: Statistics, note: TaskMessage) -> list[Tensor]:
        """The leaves to send up: as they are, or split and sealed for a secure sum."""
        if note.secure is None:
            return trees.leaves((done.uploads, done.statistics))
        own = self._sign, before, self._helper, self._least
        return secure_encode(done.uploads, done.statistics, note.task, note.secure, note.plan, *own)

    def _job(self, plan: dict[str, Any]) -> _Job:
        key = json.dumps(plan, sort_keys=True)
        if key not in self._jobs:
            given = read_plan(plan)
            self._module = prepare_module(self._module, self._make, given.seed, given.frozen)
            problem = Problem(self._module, self._losses, given.weight_decay, given.precision)
            parts = AllExamples(given.clients, self.examples)
            population = Population(self._examples, parts, given.work)
            check_module(given.algorithm, problem, population, given.seed)
            job = _Job(
                given.algorithm, problem, SequentialExecutor(problem, population), given.seed, given.clients
            )
            self._jobs = {key: job}
        return self._jobs[key]


def _check_model(given: TensorSpecs, own: TensorSpecs) -> None:
    if given == own:
        return
    ours, theirs = (form[0][1] if form else () for form in (own, given))
    if len(ours) == len(theirs) == 1 and ours != theirs:
        what = f"the model here has {ours[0]} parameters, the server's {theirs[0]}"
    else:
        what = f"the server's message does not fit the model here ({describe_difference(given, own)})"
    raise InputError(f"{what}: give both the same module and the same version of offbeat.")


def _check_finite(tree: Tree) -> None:
    if not all(map(is_finite, trees.leaves(tree))):
        raise DivergedError(
            "the update became NaN or infinite: check the model, the data and the step sizes."
        )


def _error_sentence(error: Exception) -> str:
    """What the server may hear of it."""
    if isinstance(error, _OWN_ERRORS):
        return str(error)
    return f"the site's own work failed with {type(error).__name__}: its log says more."
