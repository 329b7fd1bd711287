"""What an upload must satisfy before the server uses it, and how the uploads of a buffer are joined.

`NormGuard` learns which norms are usual in a run. A `PlainUploadValidator` checks uploads that the server can
read; a `SecureUploadValidator` checks as much as can be checked of secret shares.
"""

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from offbeat import trees
from offbeat.aggregate.compression import decode, invalid_code
from offbeat.aggregate.mean import SecureEncoding
from offbeat.aggregate.uploads import SecretShares, probe_upload
from offbeat.core import AnyAlgorithm, Task, Vector, traits_of
from offbeat.deploy.keys import SIGNATURE_BYTES
from offbeat.deploy.protocol.messages import (
    TensorSpecs,
    UploadMessage,
    decode_message,
    describe_difference,
    is_finite,
    specs_of,
    unpack,
)
from offbeat.deploy.protocol.strict_json import Reason, Rejected, quote
from offbeat.engines.engine import ClientUpdates
from offbeat.nn.problem import Statistics
from offbeat.privacy import clipping
from offbeat.privacy.secure.encoding import SEALED_BYTES, answered_message
from offbeat.privacy.secure.terms import BindingError, MessageError, ParticipationError, SignatureError

_MIN_HISTORY = 10  # accepted norms before their median alone counts
_MAX_HISTORY = 100  # recent norms that are kept
_MEDIAN_FACTOR = 100.0  # honest updates differ by data and training progress, but not by this much
_INITIAL_FACTOR = 1e6  # times the model's norm, before any is known: no learning rate leads further
_EARLY_MEDIAN_FACTOR = 1e3  # while few are known: the first may be of sites with very little data
_EARLY_MIN_FACTOR = 100.0  # times the model's norm: a first site that sends zeros does not keep others out
_MIN_FACTOR = 1e-2  # times the model's norm: a norm below this does no harm, however small the others are
_NORM_TOLERANCE = 1e-3  # relative, for rounding at a site
_LONG_VECTOR = 2**20  # beyond so many numbers, single-precision norms are less exact: 0.8 % at 11 million
_NON_NEGATIVE = ("var", "num_batches_tracked")  # suffixes of running statistics that are never negative


class UploadNorms(NamedTuple):
    """The norms of one plain upload: of its fields without a bound, and of its running statistics."""

    kind: str  # uploads of different kinds are not compared
    fields: dict[str, float]
    statistics: dict[str, float]


class NormGuard:
    """Rejects uploads with excessive norms.

    `max_norm` limits every field; None means a limit relative to the norms that were accepted before, and 0
    no limit. Without a limit one upload of huge but finite numbers could ruin the model.
    """

    def __init__(self, max_norm: float | None, model_norm: float) -> None:
        self._max_norm = max_norm
        self._unit = 1 + model_norm  # a model may be initialised with zeros
        self._history: dict[str, deque[float]] = {}

    def check(self, norms: UploadNorms) -> None:
        """Reject an upload with an excessive norm."""
        if self._max_norm == 0:
            return
        most = self._max_norm
        for name, norm in norms.fields.items():
            bound = self._limit(f"{norms.kind}.{name}", _MIN_FACTOR) if most is None else most
            _check_norm(f"the upload's {name}", norm, bound, "set max_update_norm of [network]")
        for name, norm in norms.statistics.items():
            bound = self._limit(f"{norms.kind}/{name}", 1.0)
            _check_norm(f"the running statistic {name}", norm, bound, "set max_update_norm of [network] to 0")

    def add(self, norms: UploadNorms) -> None:
        """Remember the norms of an accepted upload."""
        if self._max_norm == 0:
            return
        for name, norm in norms.fields.items():
            self._add(f"{norms.kind}.{name}", [norm])
        for name, norm in norms.statistics.items():
            self._add(f"{norms.kind}/{name}", [norm])

    def save(self) -> dict[str, list[float]]:
        """The history, as JSON."""
        return {name: list(norms) for name, norms in self._history.items()}

    def load(self, saved: Mapping[str, list[float]]) -> None:
        """Continue from what `save` returned; norms that were added since then come after it."""
        recent, self._history = self._history, {}
        for history in (saved, recent):
            for name, norms in history.items():
                self._add(name, norms)

    def _add(self, name: str, norms: list[float] | deque[float]) -> None:
        self._history.setdefault(name, deque(maxlen=_MAX_HISTORY)).extend(norms)

    def _limit(self, name: str, min_factor: float) -> float:
        history = self._history.get(name, ())
        if len(history) >= _MIN_HISTORY:
            return max(_MEDIAN_FACTOR * statistics.median(history), min_factor * self._unit)
        highest = _INITIAL_FACTOR * self._unit
        if not history:
            return highest
        early = _EARLY_MEDIAN_FACTOR * statistics.median_low(history)  # of two, the smaller
        return min(highest, max(early, _EARLY_MIN_FACTOR * self._unit))


def _check_norm(what: str, norm: float, bound: float, remedy: str) -> None:
    if not norm <= bound:
        sentence = f"{what} has norm {norm:.4g}, above {bound:.4g}: if that is correct, {remedy}."
        raise Rejected(Reason.NORM, sentence)


def _stack(uploads: Iterable[list[Tensor]], count: int) -> list[Tensor]:
    """Each leaf of all uploads, stacked as they come, so that they are not in memory twice."""
    stacks: list[Tensor] = []
    for number, leaves in enumerate(uploads):
        stacks = stacks or [leaf.new_empty((count, *leaf.shape)) for leaf in leaves]
        for stack, leaf in zip(stacks, leaves, strict=True):
            stack[number] = leaf
    return stacks


@dataclass(frozen=True)
class PlainUploadValidator:
    """For uploads that the server can read: leaves of (upload, statistics)."""

    form: TensorSpecs  # as it is sent, perhaps compressed
    structure: trees.Structure  # as it is sent
    compressed: bool
    private: bool  # whether norms are neither checked nor reported
    bounds: Mapping[str, float]  # the largest norms of fields that have one
    non_negative: tuple[str, ...]  # running statistics that are never negative
    device: torch.device  # where the server's step is computed
    length: int  # of the model

    def check(self, leaves: list[Tensor]) -> None:
        """Reject numbers that no honest client could have computed."""
        for number, leaf in enumerate(leaves):
            if leaf.is_floating_point() and not is_finite(leaf):
                raise Rejected(Reason.INFINITE, f"tensor {number} of the upload holds NaN or infinity.")
        if self.compressed and (wrong := invalid_code(trees.unflatten(self.structure, leaves), self.length)):
            raise Rejected(Reason.RANGE, f"the compressed upload cannot be decoded: {wrong}.")
        upload, statistics = self._decoded(leaves)
        if self.compressed and not all(map(is_finite, trees.leaves(upload))):
            # A level times its scale may overflow.
            raise Rejected(Reason.INFINITE, "the decoded upload holds NaN or infinity.")
        for field, part in [] if self.private else _fields(upload):
            bound = self.bounds.get(field)
            if bound is not None and (norm := _norm(part)) > bound * (1 + _norm_tolerance(part)):
                raise Rejected(
                    Reason.NORM, f"the upload's {field} has norm {norm:.4g}, which cannot exceed {bound:g}."
                )
        for name in self.non_negative:
            if bool((statistics[name] < 0).any()):  # the square root of a variance would be NaN
                raise Rejected(Reason.RANGE, f"the running statistic {name} is negative.")

    def norms(self, leaves: list[Tensor]) -> UploadNorms:
        """The norms of fields without a bound."""
        upload, statistics = self._decoded(leaves)
        fields = [] if self.private else _fields(upload)
        return UploadNorms(
            type(upload).__name__,
            {field: _norm(part) for field, part in fields if field not in self.bounds},
            {name: _norm([each]) for name, each in statistics.items() if each.is_floating_point()},
        )

    def join(self, uploads: Iterable[list[Tensor]], count: int) -> ClientUpdates:
        """So many uploads as one value; no more than one is held beside it."""
        stacked = [stack.to(self.device) for stack in _stack(uploads, count)]
        return ClientUpdates(*trees.unflatten(self.structure, stacked))

    def _decoded(self, leaves: list[Tensor]) -> tuple[trees.Tree, Statistics]:
        upload, statistics = trees.unflatten(self.structure, leaves)
        return decode(upload, self.length) if self.compressed else upload, statistics


def plain_validator(
    algorithm: AnyAlgorithm, x: Vector, statistics: Statistics, version: int = 0, *, private: bool = False
) -> PlainUploadValidator:
    """For uploads of this algorithm; the version matters for algorithms with two phases only.

    In a `private` run norms are neither checked nor reported: uploads are clipped when they are summed.
    """
    sent = probe_upload(algorithm, x, version)
    return PlainUploadValidator(
        specs_of((sent, statistics)),
        trees.structure((sent, statistics)),
        trees.structure(sent) != trees.structure(decode(sent, len(x))),
        private,
        dict(traits_of(algorithm).bounds),
        tuple(name for name, initial in statistics.items() if _is_non_negative(name, initial)),
        x.device,
        len(x),
    )


def validate_upload(
    header: str, payload: bytes, task: Task, run: str, validator: "UploadValidator", limit: int
) -> tuple[UploadMessage, list[Tensor]]:
    """The header and the leaves of the upload that answers a task, or `Rejected`; sizes are checked first."""
    if len(payload) > limit:
        raise Rejected(Reason.SIZE, f"the payload has {len(payload)} bytes, more than the limit of {limit}.")
    message = decode_message(header, UploadMessage)
    given = message.task
    if message.error is not None:  # first, because a site that cannot read a task cannot name it either
        raise Rejected(Reason.FAILED, message.error)
    if message.run != run:
        raise Rejected(Reason.RUN, f"the upload belongs to another run, {quote(message.run)}.")
    if given._replace(version=task.version) != task:
        raise Rejected(Reason.TASK, f"the upload is for {_task_name(given)}, not for {_task_name(task)}.")
    if given.version != task.version:
        raise Rejected(
            Reason.VERSION if given.version > task.version else Reason.TASK,
            f"the upload starts from version {given.version}, but version {task.version} was sent.",
        )
    if difference := describe_difference(message.form, validator.form):
        raise Rejected(Reason.FORM, f"the upload has other tensors than expected: {difference}.")
    leaves = unpack(payload, validator.form)
    validator.check(leaves)
    return message, leaves


def _fields(upload: trees.Tree) -> list[tuple[str, list[Tensor]]]:
    """The floating-point leaves of each field; an upload that is no named tuple is one field."""
    names = getattr(upload, "_fields", None)
    parts = [("numbers", upload)] if names is None else zip(names, upload, strict=True)
    found = [
        (field, [leaf for leaf in trees.leaves(part) if leaf.is_floating_point()]) for field, part in parts
    ]
    return [(field, leaves) for field, leaves in found if leaves]


def _norm(part: list[Tensor]) -> float:
    return float(clipping.norms([leaf[None] for leaf in part]))


def _is_non_negative(name: str, initial: Tensor) -> bool:
    return name.endswith(_NON_NEGATIVE) and bool((initial >= 0).all())


def _norm_tolerance(part: list[Tensor]) -> float:
    coarsest = max(torch.finfo(leaf.dtype).eps for leaf in part)
    if coarsest <= torch.finfo(torch.float64).eps:
        return _NORM_TOLERANCE
    return max(_NORM_TOLERANCE * max(1.0, sum(leaf.numel() for leaf in part) / _LONG_VECTOR), 4 * coarsest)


def _task_name(task: Task) -> str:
    return f"visit {task.visit} of client {task.client}"


@dataclass(frozen=True)
class SecureUploadValidator:
    """For secret shares, which look random whatever they encode, so their values are not checked."""

    form: TensorSpecs
    ask: Callable[[Task, bytes, bytes], None]
    since: int = 0  # reports from before this version are not summed any more

    def check(self, leaves: list[Tensor]) -> None:
        pass

    def norms(self, leaves: list[Tensor]) -> UploadNorms:
        return UploadNorms("hidden", {}, {})

    def examine(self, task: Task, leaves: list[Tensor], message: bytes) -> None:
        """Reject what does not answer this message, or what the helper could not add.

        Waits while the helper is down.
        """
        sealed, signature = (leaf.numpy().tobytes() for leaf in leaves[1:])
        if answered_message(sealed) != message:
            raise Rejected(Reason.MALFORMED, "the report answers another message than the site was sent.")
        if task.version < self.since:
            return
        try:
            self.ask(task, sealed, signature)
        except (
            BindingError,
            MessageError,
            ParticipationError,
            SignatureError,
        ) as refusal:  # else it is not the site's fault: the run ends
            raise Rejected(Reason.MALFORMED, f"the helper cannot use this report: {refusal}") from None

    def join(self, uploads: Iterable[list[Tensor]], count: int) -> ClientUpdates:
        share, sealed, signature = _stack(uploads, count)
        return ClientUpdates(SecretShares(share, sealed, signature if signature.numel() else None), {})


UploadValidator: TypeAlias = PlainUploadValidator | SecureUploadValidator


def secure_validator(encoding: SecureEncoding, version: int = 0) -> SecureUploadValidator:
    """For uploads of clients that use this encoding from this version on."""
    facts = encoding.facts
    signature = SIGNATURE_BYTES if facts["signed"] else 0
    form = (("int32", (facts["length"],)), ("uint8", (SEALED_BYTES,)), ("uint8", (signature,)))
    # Under adaptive clipping, stale reports were clipped to other bounds: they cannot be opened or summed.
    return SecureUploadValidator(form, encoding.examine, version if facts["moving"] else 0)
