"""One site: a client's data, model and memory, and the tasks that it does for a server."""

import json
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from msgspec import Meta, Struct, structs
from numpy.typing import NDArray
from torch import Tensor

from offbeat import trees
from offbeat.aggregate.compression import Compressed, parse_compression
from offbeat.algorithms import Setting, build
from offbeat.algorithms.rates import ConstantRate, LocallyOptimized, Scheduled, local_optimizer
from offbeat.core import AnyAlgorithm, Task, Visit
from offbeat.data.population import Epochs, Examples, Population, Steps
from offbeat.deploy.config import (
    LoadData,
    load_examples,
    prepare_module,
)
from offbeat.deploy.keys import read_signer
from offbeat.deploy.protocol import messages
from offbeat.deploy.protocol.messages import (
    HelloReply,
    RecallMessage,
    TaskMessage,
    TensorSpecs,
    UploadMessage,
    byte_size,
    describe_difference,
    is_finite,
    pack,
    specs_of,
    unpack,
)
from offbeat.deploy.protocol.strict_json import Rejected, convert, malformed, quote
from offbeat.deploy.site.secure_encode import read_helper_key, read_secure_request, secure_encode
from offbeat.deploy.site.storage import SiteStorage
from offbeat.engines.local import (
    ClientMemory,
    SequentialExecutor,
    TaskStart,
    check_module,
    task_key,
)
from offbeat.errors import DivergedError, InputError
from offbeat.nn.layers import below_scaling, standardised
from offbeat.nn.problem import Loss, Precision, Problem, Statistics, cross_entropies
from offbeat.training.evaluate import Metric, evaluate
from offbeat.training.method import parse_local_optimizer
from offbeat.training.standardise import Moments, count_features, describe_unscaled
from offbeat.training.task import MakeModule, make_module

_UNKNOWN_TASK = UploadMessage("unknown", Task(0, 0, 0), (), "none", 0.0, None)  # if a task cannot be read
_OWN_ERRORS = (Rejected, InputError, DivergedError)  # their messages are written here, and quote no data
_MIN_MESSAGE_LIMIT = 64 * 1024  # bytes
_MESSAGE_LIMIT_FACTOR = 16  # times the size of the model; methods send a few vectors of its size
_LOOKED_AT = 1000  # examples whose scale is looked at
_LOG = logging.getLogger("offbeat")
_PositiveInt = Annotated[int, Meta(ge=1, lt=2**31)]
_Pattern = Annotated[str, Meta(min_length=1, max_length=200)]


class SiteOptions(NamedTuple):
    """The options of `offbeat join`."""

    name: str
    folder: Path
    task: str
    key: Path | None = None
    helper_key: Path | None = None
    minimum: int | None = None
    once: bool = False  # whether the site ends with the run


def site_folder(name: str) -> Path:
    """Return the default folder of a site of this user."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "offbeat" / "sites" / name


class SitePlan(Struct, frozen=True):
    """The method, the local work, and the numbers that random draws are keyed by."""

    algorithm: Annotated[str, Meta(min_length=1, max_length=100)]
    parameters: dict[str, Any]
    setting: tuple[_PositiveInt, _PositiveInt, _PositiveInt]
    work: tuple[Literal["steps", "epochs"], _PositiveInt, _PositiveInt]
    weight_decay: float
    precision: str
    seed: int
    clients: _PositiveInt
    frozen: Annotated[str, Meta(min_length=1, max_length=64)] | None = None  # a digest of frozen weights
    standardise: bool = False  # whether inputs are scaled by what the server sends
    prepare: tuple[_PositiveInt, Annotated[int, Meta(ge=0, lt=2**20)]] | None = None  # features and classes
    local_optimizer: Annotated[str, Meta(min_length=1, max_length=100)] | None = None
    clip_grad_norm: float | None = None
    sends_local_lr: bool = False  # whether messages have it, as of a run with a schedule
    personal: Annotated[tuple[_Pattern, ...], Meta(max_length=1000)] = ()  # layers that stay here
    personal_lr: Annotated[float, Meta(ge=0)] | None = None
    compress: Annotated[str, Meta(min_length=1, max_length=64)] | None = None


def read_plan(plan: dict[str, Any]) -> SitePlan:
    """Decode the plan in a task's header; nothing in it names code except methods of the catalogue."""
    for name in sorted(plan.keys() - set(SitePlan.__struct_fields__)):
        raise InputError(
            f"the server's plan has '{name[:40]}', which this site does not know: "
            "install the same version of offbeat on both."
        )
    fields = convert(plan, SitePlan)
    if fields.precision.upper() not in Precision.__members__:
        raise malformed(f"the server's plan has the unknown precision {quote(fields.precision)}.")
    parse_compression(fields.compress)  # or raises
    return fields


def planned_method(plan: SitePlan) -> AnyAlgorithm:
    """The method of a plan, with which tasks are executed; it does not compress uploads."""
    algorithm = build(plan.algorithm, Setting(*plan.setting), plan.parameters)
    if plan.local_optimizer is not None or plan.clip_grad_norm is not None:
        optimizer = parse_local_optimizer(plan.local_optimizer or "sgd")
        algorithm = LocallyOptimized(algorithm, optimizer, plan.clip_grad_norm)
    if plan.sends_local_lr:
        algorithm = Scheduled(algorithm, local_schedule=ConstantRate())
    return algorithm if plan.prepare is None else Moments(*plan.prepare)


class _Job(NamedTuple):
    """A plan, ready to be executed with the site's model and data."""

    plan: SitePlan
    algorithm: AnyAlgorithm
    problem: Problem
    execute: SequentialExecutor


@dataclass(frozen=True)
class AllExamples:
    """A partition in which every client has all examples, because a site knows only its own."""

    clients: int
    examples: int

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: int) -> NDArray[np.int64]:
        if not 0 <= client < self.clients:
            raise IndexError(f"client {client} of {self.clients}")
        return np.arange(self.examples)


class Site:
    """Answers a server's messages; if it cannot do a task, its answer says why in one sentence.

    Details of an error in the user's own code go to the site's log only, because they may quote the data.
    Reports of secure aggregation are signed with the site's private `key`. With a `helper_key`, the site
    uploads only to secure aggregation with that helper, over at least `minimum` clients; the key is kept in
    the site's folder, so that this holds from then on. Without one, the site takes part in no secure
    aggregation, because whoever named the helper could read its uploads. If `personal` names layers, the site
    does only tasks in which exactly those stay here; with `test` examples of its own it evaluates its model
    with these layers before each task, and writes the `metrics` into its folder: they are not sent.
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
        personal: Collection[str] = (),
        clock: Callable[[], float] = time.perf_counter,
        test: Examples | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        if not 0 < len(name) <= 100 or not name.isprintable():
            raise InputError("a site's name must have 1 to 100 printable characters: choose another.")
        self.name = name
        signer = read_signer(key) if key else None
        self._public_key = signer[0] if signer else None
        self._sign = signer[1] if signer else None
        self._minimum = minimum
        self._losses = losses or cross_entropies
        self._personal = tuple(personal)
        self._test, self._metrics = test, metrics
        given = read_helper_key(helper_key) if helper_key else None
        self._storage = SiteStorage(folder)
        self.site_id = self._storage.site_id  # under which servers know the site
        try:
            self._helper = self._storage.pin_helper(given)
            self._examples = load_examples(load, name)
            self.examples = self._examples.total
            self._make_module, self._module = module, make_module(module)
            x, statistics = Problem(self._module, self._losses).initial()
            self._model_specs = specs_of((x, statistics))
        except BaseException:
            self.close()
            raise
        self._jobs: dict[str, _Job] = {}  # the job of the last plan
        self._said = False  # that features are far from unit scale
        self._clock = clock
        self._recalled: RecallMessage | None = None  # the task that was recalled last, in another thread
        self.refusal: str | None = None  # why the server refused this site when it last greeted it

    def answer(self, kind: str, header: str, payload: bytes) -> tuple[str, bytes]:
        """Return header and payload of the answer; an error is reported in the header."""
        if kind == "hello":
            self._read_greeting(header)
            hello = HelloReply(
                self.name, self.site_id, self.examples, self._model_specs, None, self._public_key
            )
            return messages.encode_message(hello), b""
        if kind == "recall":
            self._recall(header)
            return "", b""
        failed = _UNKNOWN_TASK
        try:
            if kind != "task":
                raise InputError(
                    "a site answers only hello, task and recall: install the same version of offbeat on both."
                )
            request = messages.decode_message(header, messages.TaskMessage)
            failed = structs.replace(failed, run=request.run, task=request.task)
            sent, leaves = self._run_task(request, payload)
            return messages.encode_message(sent), pack(leaves)
        except (Exception, SystemExit) as error:
            known = isinstance(error, _OWN_ERRORS)
            sentence = (
                str(error) if known else f"the task failed with {type(error).__name__}: see the site's log."
            )
            _LOG.warning("%s of run %s: %s", failed.task, failed.run, sentence, exc_info=not known)
            return messages.encode_message(structs.replace(failed, error=sentence)), b""

    def sign(self, statement: bytes) -> bytes:
        """Sign a statement with the site's key; empty without a key."""
        return b"" if self._sign is None else self._sign(statement)

    @property
    def max_message_bytes(self) -> int:
        """The most bytes that a message to this site may have."""
        return max(_MIN_MESSAGE_LIMIT, _MESSAGE_LIMIT_FACTOR * byte_size(self._model_specs))

    def close(self) -> None:
        """Release the site's folder."""
        self._storage.close()

    def _read_greeting(self, greeting: str) -> None:
        try:
            refusal = messages.decode_greeting(greeting)
        except Rejected:  # from a server of another version: it is answered nevertheless
            refusal = None
        if refusal is not None and refusal != self.refusal:
            _LOG.warning("the server refused this site: %s", refusal)
        self.refusal = refusal

    def _recall(self, header: str) -> None:
        try:
            self._recalled = messages.decode_message(header, messages.RecallMessage)
        except Rejected as rejected:
            _LOG.warning("a recall is ignored: %s", rejected)

    def _run_task(self, request: TaskMessage, payload: bytes) -> tuple[UploadMessage, list[Tensor]]:
        started, secure = self._clock(), None
        if (request.secure, self._helper, self._minimum) != (None, None, None):
            # Refused before any work is done.
            secure = read_secure_request(request.secure, self._helper, self._minimum)
        (plan, method, problem, execute), task = self._job(request.plan), request.task
        if plan.compress is not None and secure is not None:
            raise InputError("the server asks for compressed uploads to secure aggregation, which has none.")
        if task.client >= plan.clients:
            raise InputError(f"the server calls this site client {task.client}, of {plan.clients} clients.")
        algorithm = method.warmup() if request.start else method
        if algorithm is None:
            raise InputError(
                "the server asks for a full-participation start, which the method does not have."
            )
        x, statistics = problem.initial()
        expected = (algorithm.broadcast(method.init(x), task.version), statistics)
        _check_model(request.form, specs_of(expected))
        leaves = [leaf.to(problem.device) for leaf in unpack(payload, request.form)]
        message, statistics = trees.unflatten(trees.structure(expected), leaves)
        initial = ClientMemory(algorithm.memory(x), problem.personal)
        memory, origin = self._load_memory(request, initial, problem.device)
        if self._test is not None and problem.personal and not request.start:
            self._evaluate(problem, request, message, statistics | memory.personal)
        version = torch.tensor(task.version)
        # The staleness is not known before the upload arrives at the server.
        visit = Visit(version, torch.zeros_like(version), (), task_key(algorithm, task, plan.seed))
        start = TaskStart(message, statistics, memory, visit)

        def stop(steps: int) -> bool:
            """Whether there is no time for another step, or the server wants what there is."""
            if self._recalled == RecallMessage(request.run, task) and not request.start:
                return True
            elapsed = self._clock() - started
            return request.work is not None and elapsed * (steps + 1) / steps > request.work

        results, steps = execute.run_until(algorithm, task, start, plan.seed, stop)
        if not all(map(is_finite, trees.leaves(results))):
            raise DivergedError(
                "the update became NaN or infinite: check the model, the data and the step sizes."
            )
        if secure is None:
            upload = trees.leaves((results.uploads, results.statistics))
        else:
            digest = messages.message_digest(request, payload)
            upload = secure_encode(
                results.uploads, results.statistics, task, secure, plan.seed, self._sign, statistics, digest
            )
        if memories := trees.leaves(results.memories):
            self._storage.save(request.run, task.client, task.visit, memories)
        seconds = self._clock() - started
        return UploadMessage(request.run, task, specs_of(upload), origin, seconds, None, steps), upload

    def _evaluate(self, problem: Problem, request: TaskMessage, message: Any, statistics: Statistics) -> None:
        """Write down how well the model that was sent does with this site's own layers and test examples."""
        while hasattr(message, "inner"):  # of a message that also has a rate
            message = message.inner
        x = getattr(message, "x", None)
        if x is None or self._test is None:
            return
        found = evaluate(problem, x, self._test, self._metrics, statistics=statistics)
        line = {"run": request.run, "version": request.task.version, "examples": self._test.total} | found
        self._storage.note_evaluation(json.dumps(line))

    def _load_memory(
        self, request: TaskMessage, initial: ClientMemory, device: torch.device
    ) -> tuple[ClientMemory, Literal["none", "kept", "new"]]:
        """Return the client's memory, and whether it was loaded ("kept") or is new."""
        if not trees.leaves(initial):
            return initial, "none"
        leaves = self._storage.load(request.run, request.task.client, request.committed)
        if leaves is None:
            return initial, "new"
        difference = describe_difference(specs_of(leaves), specs_of(initial))
        if difference:
            raise InputError(
                f"this site's memory of this run belongs to another model ({difference}): "
                "give the site the module that the run began with."
            )
        return trees.unflatten(trees.structure(initial), [leaf.to(device) for leaf in leaves]), "kept"

    def _job(self, plan_fields: dict[str, Any]) -> _Job:
        key = json.dumps(plan_fields, sort_keys=True)
        if key not in self._jobs:
            plan = read_plan(plan_fields)
            algorithm, work = planned_method(plan), Steps if plan.work[0] == "steps" else Epochs
            prepares = isinstance(algorithm, Moments)
            if self._personal and not prepares and set(plan.personal) != set(self._personal):
                shared = f"asks for {', '.join(plan.personal)}" if plan.personal else "asks for none"
                raise InputError(
                    f"the task of this site keeps {', '.join(self._personal)} here, and the server {shared}: "
                    "give both the same task, or the server the same setting personal."
                )
            self._module = prepare_module(
                self._module, self._make_module, plan.seed, plan.frozen, bool(plan.personal)
            )
            module, personal = self._module, plan.personal
            if plan.standardise:  # the server sends the mean and the scale with each task
                count = count_features(self._examples.inputs)
                module = standardised(module, torch.zeros(count), torch.ones(count))
                personal = below_scaling(personal)
            elif not prepares:
                self._say_if_unscaled()
            problem = Problem(
                *(module, self._losses, plan.weight_decay, Precision[plan.precision.upper()]),
                *(personal, plan.personal_lr, local_optimizer(algorithm)),
            )
            parts = AllExamples(plan.clients, self.examples)
            population = Population(self._examples, parts, work(*plan.work[1:]))
            check_module(algorithm, problem, population, plan.seed)
            if (compression := parse_compression(plan.compress)) is not None:
                algorithm = Compressed(algorithm, compression, problem.size)
            self._jobs = {key: _Job(plan, algorithm, problem, SequentialExecutor(problem, population))}
        return self._jobs[key]

    def _say_if_unscaled(self) -> None:
        """Features that are far from unit scale are named here, and not to the server."""
        some = np.linspace(0, self.examples - 1, min(_LOOKED_AT, self.examples)).astype(np.int64)
        sentence = describe_unscaled([self._examples.gather(some)])
        if sentence is not None and not self._said:
            self._said = True
            _LOG.warning("%s", sentence)


def _check_model(given: TensorSpecs, expected: TensorSpecs) -> None:
    if given == expected:
        return
    here, there = (specs[0][1] if specs else () for specs in (expected, given))
    if len(here) == len(there) == 1 and here != there:
        problem = f"the model here has {here[0]} parameters, the server's {there[0]}"
    else:
        problem = f"the server's message does not fit the model here ({describe_difference(given, expected)})"
    raise InputError(f"{problem}: give both the same module and the same version of offbeat.")
