"""One site: a client's data, model and memory, and the work that a server asks of it."""

import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat import trees
from offbeat.core import AnyAlgorithm, Task, Visit
from offbeat.deploy import assignment, notes
from offbeat.deploy.keepsake import Keepsakes
from offbeat.deploy.loading import Load, Make, cross_entropies, load_examples, make_module, settled
from offbeat.deploy.notes import HelloNote, TaskNote, UploadNote
from offbeat.deploy.rejections import Rejected
from offbeat.deploy.signing import read_signer
from offbeat.deploy.veil import read as read_secure
from offbeat.deploy.veil import read_pinned, veil
from offbeat.deploy.wire import Form, differs, finite, form_of, pack, unpack
from offbeat.engines.work import OneByOne, Results, Start, check_module
from offbeat.errors import DivergedError, InputError
from offbeat.population.population import Population
from offbeat.problem import Loss, Problem, Statistics
from offbeat.trees import Tree

_NOBODY = UploadNote("unknown", Task(0, 0, 0), (), "none", 0.0, None)  # where a note cannot be read

_OURS = (Rejected, InputError, DivergedError)  # their words are ours


class _Job(NamedTuple):
    """What one plan comes to here."""

    algorithm: AnyAlgorithm
    problem: Problem
    work: OneByOne
    seed: int
    clients: int


class _Computed(NamedTuple):
    """What goes up of a task."""

    upload: list[Tensor]
    remembered: str  # of the client's memory, as an upload's note says it


@dataclass(frozen=True)
class Everything:
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
        load: Load,
        module: Make,
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
        self._helper = read_pinned(helper_key) if helper_key else None
        self._least = minimum
        self._losses = losses or cross_entropies
        self._keepsakes = Keepsakes(folder)
        try:
            self._examples = load_examples(load, name)
            self._make, self._module = module, make_module(module)
            x, statistics = Problem(self._module, self._losses).initial()
            self._form = form_of((x, statistics))
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
        known = _NOBODY
        try:
            if kind != "task":
                raise InputError("a site answers hello and task alone: install the server's version of it.")
            asked = notes.read_task(note)
            known = known._replace(run=asked.run, task=asked.task)
            began = time.perf_counter()
            computed = self._do(asked, payload)
            upload = known._replace(
                form=form_of(computed.upload),
                memory=computed.remembered,
                seconds=time.perf_counter() - began,
            )
            return notes.write(upload), pack(computed.upload)
        except Exception as error:
            sentence = _sentence(error)
            logging.getLogger("offbeat").warning(
                "%s of run %s: %s", known.task, known.run, sentence, exc_info=not isinstance(error, _OURS)
            )
            return notes.write(known._replace(error=sentence)), b""

    def close(self) -> None:
        """Let go of the folder."""
        self._keepsakes.close()

    def _hear(self, greeting: str) -> None:
        try:
            refused = notes.read_greeting(greeting)
        except Rejected:  # from another version of a server: a hello is answered all the same
            refused = None
        if refused is not None and refused != self.refused:
            logging.getLogger("offbeat").warning("the server turned this site away: %s", refused)
        self.refused = refused

    def _hello(self) -> str:
        hello = HelloNote(self.name, self.site, self.examples, self._form, None, self._public)
        return notes.write(hello)

    def _do(self, note: TaskNote, payload: bytes) -> _Computed:
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
        _check_model(note.form, form_of(like))
        leaves = [leaf.to(job.problem.device) for leaf in unpack(payload, note.form)]
        message, statistics = trees.rebuild(trees.shape(like), leaves)
        memory, remembered = self._remember(job, note, algorithm.memory(x))
        version = torch.tensor(task.version)
        # how stale the task will be is not known before it arrives
        start = Start(message, statistics, memory, Visit(version, torch.zeros_like(version)))
        stacked = job.work(algorithm, [task], [start], job.seed)
        done: Results = trees.over(lambda leaf: leaf[0], stacked)
        _check_finite(done)
        leaves = self._veiled(done, statistics, note)
        memories = trees.leaves(done.memories)
        if memories:
            self._keepsakes.keep(note.run, task.client, task.visit, memories)
        return _Computed(leaves, remembered)

    def _remember(self, job: _Job, note: TaskNote, initial: Tree) -> tuple[Tree, str]:
        """The client's memory, and whether it is one that was kept."""
        if not trees.leaves(initial):
            return initial, "none"
        kept = self._keepsakes.begin(note.run, note.task.client, note.committed)
        if kept is None:
            return initial, "new"
        difference = differs(form_of(kept), form_of(initial))
        if difference:
            raise InputError(
                f"what this site kept of this run is of another model ({difference}): "
                "give the site the module that the run began with."
            )
        return trees.rebuild(trees.shape(initial), [leaf.to(job.problem.device) for leaf in kept]), "kept"

    def _veiled(self, done: Results, before: Statistics, note: TaskNote) -> list[Tensor]:
        """The leaves to send up: as they are, or split and sealed for a secure sum."""
        if note.secure is None:
            return trees.leaves((done.uploads, done.statistics))
        own = self._sign, before, self._helper, self._least
        return veil(done.uploads, done.statistics, note.task, note.secure, note.plan, *own)

    def _job(self, plan: dict[str, Any]) -> _Job:
        key = json.dumps(plan, sort_keys=True)
        if key not in self._jobs:
            given = assignment.read(plan)
            self._module = settled(self._module, self._make, given.seed, given.frozen)
            problem = Problem(self._module, self._losses, given.weight_decay, given.precision)
            parts = Everything(given.clients, self.examples)
            population = Population(self._examples, parts, given.work)
            check_module(given.algorithm, problem, population, given.seed)
            job = _Job(given.algorithm, problem, OneByOne(problem, population), given.seed, given.clients)
            self._jobs = {key: job}
        return self._jobs[key]


def _check_model(given: Form, own: Form) -> None:
    if given == own:
        return
    ours, theirs = (form[0][1] if form else () for form in (own, given))
    if len(ours) == len(theirs) == 1 and ours != theirs:
        what = f"the model here has {ours[0]} parameters, the server's {theirs[0]}"
    else:
        what = f"the server's message does not fit the model here ({differs(given, own)})"
    raise InputError(f"{what}: give both the same module and the same version of offbeat.")


def _check_finite(tree: Tree) -> None:
    if not all(map(finite, trees.leaves(tree))):
        raise DivergedError(
            "the update became NaN or infinite: check the model, the data and the step sizes."
        )


def _sentence(error: Exception) -> str:
    """What the server may hear of it."""
    if isinstance(error, _OURS):
        return str(error)
    return f"the site's own work failed with {type(error).__name__}: its log says more."
