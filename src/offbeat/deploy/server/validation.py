"""How long uploads have been in this run, and which are longer than any client could come to.

What an upload must be before it touches anything of the server's.

Uploads that their sites hid: what can still be checked of them, and what becomes of a buffer.
"""

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from offbeat import trees
from offbeat.aggregate.mean import SecureEncoding
from offbeat.aggregate.uploads import SecretShares, probe_upload
from offbeat.core import AnyAlgorithm, Bounded, Task, Vector
from offbeat.deploy.keys import SIGNATURE_BYTES
from offbeat.deploy.protocol import messages
from offbeat.deploy.protocol.strict_json import Reason, Rejected, quote
from offbeat.deploy.protocol.wire import TensorSpecs, describe_difference, is_finite, specs_of, unpack
from offbeat.engines.engine import ClientUpdates
from offbeat.nn.problem import Statistics, mean_statistics
from offbeat.privacy import clipping
from offbeat.privacy.secure.encoding import SEALED_BYTES
from offbeat.privacy.secure.terms import BindingError, SignatureError

_MIN_HISTORY = 10  # accepted ones, before they say anything
_MAX_HISTORY = 100  # that are looked at
_MEDIAN_FACTOR = (
    100.0  # their median: honest updates differ by what a site has and by how far training is, not so much
)
_INITIAL_FACTOR = 1e6  # times the model, before enough are known: more is no step from it, whatever the rates
_MIN_FACTOR = 1e-2  # times the model: where most are next to nothing, what is a little more does no harm


class UploadNorms(NamedTuple):
    """Of one upload that was not hidden: of its fields without a bound, and of its running statistics."""

    kind: str  # uploads of different kinds are not compared
    fields: dict[str, float]
    statistics: dict[str, float]


class NormGuard:
    """`most` is the longest that a field may be; None: found out; 0: nobody looks.

    Without any such limit one upload of huge numbers, each of them finite, ends the run or ruins its model.
    """

    def __init__(self, most: float | None, model: float) -> None:
        self._most = most
        self._unit = 1 + model  # a model may begin as zeros
        self._known: dict[str, deque[float]] = {}

    def check(self, norms: UploadNorms) -> None:
        """Reject an upload that is too long."""
        if self._most == 0:
            return
        for name, norm in norms.fields.items():
            bound = self._usual(f"{norms.kind}.{name}", _MIN_FACTOR) if self._most is None else self._most
            if not norm <= bound:
                raise Rejected(
                    Reason.NORM,
                    f"the upload's {name} has norm {norm:.4g}, above {bound:.4g}: "
                    "if that is right, set most_norm of [network].",
                )
        for name, norm in norms.statistics.items():
            bound = self._usual(f"{norms.kind}/{name}", 1.0)
            if not norm <= bound:
                raise Rejected(
                    Reason.NORM,
                    f"the running statistic {name} has norm {norm:.4g}, above {bound:.4g}: "
                    "if that is right, set most_norm of [network] to 0.",
                )

    def add(self, norms: UploadNorms) -> None:
        """These were accepted."""
        if self._most == 0:
            return
        for name, norm in norms.fields.items():
            self._add(f"{norms.kind}.{name}", [norm])
        for name, norm in norms.statistics.items():
            self._add(f"{norms.kind}/{name}", [norm])

    def save(self) -> dict[str, list[float]]:
        """As JSON."""
        return {name: list(known) for name, known in self._known.items()}

    def load(self, saved: Mapping[str, list[float]]) -> None:
        """Go on from what `save` gave; what was accepted since this began comes after it."""
        since, self._known = self._known, {}
        for known in (saved, since):
            for name, norms in known.items():
                self._add(name, norms)

    def _add(self, name: str, norms: list[float] | deque[float]) -> None:
        self._known.setdefault(name, deque(maxlen=_MAX_HISTORY)).extend(norms)

    def _usual(self, name: str, least: float) -> float:
        known = self._known.get(name, ())
        if len(known) < _MIN_HISTORY:
            return _INITIAL_FACTOR * self._unit
        return max(_MEDIAN_FACTOR * statistics.median(known), least * self._unit)


_NORM_TOLERANCE = 1e-3  # of a norm, for what rounding adds at a site
_LONG_VECTOR = (
    2**20
)  # numbers from which on a norm in single precision is further off: 0.8 % seen at 11 million
_NON_NEGATIVE = (
    "var",
    "num_batches_tracked",
)  # ends of the names of running statistics that cannot fall below 0


class UploadValidator(Protocol):
    """What uploads look like, what they must keep to, and what becomes of those of a buffer."""

    @property
    def form(self) -> TensorSpecs: ...

    def check(self, leaves: list[Tensor]) -> None:
        """Reject numbers that no client could have come to."""
        ...

    def norms(self, leaves: list[Tensor]) -> UploadNorms:
        """Of what has no bound, as far as it can be seen."""
        ...

    def join(self, uploads: Sequence[list[Tensor]]) -> ClientUpdates: ...


@dataclass(frozen=True)
class PlainUploadValidator:
    """Uploads in plain sight: leaves of (upload, statistics)."""

    form: TensorSpecs
    shape: trees.Structure
    bounds: tuple[tuple[str, tuple[int, ...], float], ...]  # field, the places of its leaves, norm at most
    free: tuple[tuple[str, tuple[int, ...]], ...]  # fields without a bound
    statistics: tuple[tuple[str, int], ...]  # those in floating point
    counted: tuple[tuple[str, int], ...]  # running statistics that cannot fall below 0
    kind: str  # of upload
    device: torch.device  # where the server's half is computed

    def check(self, leaves: list[Tensor]) -> None:
        for number, leaf in enumerate(leaves):
            if leaf.is_floating_point() and not is_finite(leaf):
                raise Rejected(Reason.INFINITE, f"tensor {number} of the upload holds NaN or infinity.")
        for field, places, bound in self.bounds:
            part = [leaves[place][None] for place in places]
            norm = float(clipping.norms(part))
            if norm > bound * (1 + _norm_tolerance(part)):
                raise Rejected(
                    Reason.NORM, f"the upload's {field} has norm {norm:.4g}, which cannot exceed {bound:g}."
                )
        for name, place in self.counted:
            if bool((leaves[place] < 0).any()):  # the root of a variance would be NaN
                raise Rejected(Reason.RANGE, f"the running statistic {name} has fallen below 0.")

    def norms(self, leaves: list[Tensor]) -> UploadNorms:
        fields = {
            field: float(clipping.norms([leaves[place][None] for place in places]))
            for field, places in self.free
        }
        statistics = {name: float(clipping.norms([leaves[place][None]])) for name, place in self.statistics}
        return UploadNorms(self.kind, fields, statistics)

    def join(self, uploads: Sequence[list[Tensor]]) -> ClientUpdates:
        stacked = [torch.stack(each).to(self.device) for each in zip(*uploads, strict=True)]
        joined, statistics = trees.unflatten(self.shape, stacked)
        return ClientUpdates(joined, mean_statistics(statistics))


def plain_validator(
    algorithm: AnyAlgorithm, x: Vector, statistics: Statistics, version: int = 0
) -> PlainUploadValidator:
    """For uploads of this algorithm; which version matters to one of `TwoTrips` alone."""
    upload = probe_upload(algorithm, x, version)
    tree = (upload, statistics)
    bounds = dict(algorithm.bounds) if isinstance(algorithm, Bounded) else {}
    shape, fields = trees.structure(tree), _fields(upload)
    _, numbered = trees.unflatten(shape, [torch.tensor(place) for place in range(shape.num_leaves)])
    places = {name: int(place) for name, place in numbered.items()}
    return PlainUploadValidator(
        specs_of(tree),
        shape,
        tuple((field, where, bounds[field]) for field, where in fields if field in bounds),
        tuple((field, where) for field, where in fields if field not in bounds),
        tuple((name, place) for name, place in places.items() if statistics[name].is_floating_point()),
        tuple((name, place) for name, place in places.items() if _is_non_negative(name, statistics[name])),
        type(upload).__name__,
        x.device,
    )


def validate_upload(
    note: str, payload: bytes, expected: Task, run: str, intake: UploadValidator, limit: int
) -> list[Tensor]:
    """The leaves of the upload that answers a task, if nothing is wrong with it; sizes are checked first."""
    if len(payload) > limit:
        raise Rejected(Reason.SIZE, f"the payload has {len(payload)} bytes, more than the limit of {limit}.")
    told = messages.decode_upload(note)
    if told.error is not None:  # first, for a site that cannot read a task cannot name it either
        raise Rejected(Reason.FAILED, told.error)
    if told.run != run:
        raise Rejected(Reason.RUN, f"the upload is of another run, {quote(told.run)}.")
    if told.task._replace(version=expected.version) != expected:
        raise Rejected(
            Reason.TASK, f"the upload is of {_task_name(told.task)}, and was asked of {_task_name(expected)}."
        )
    if told.task.version != expected.version:
        late = told.task.version > expected.version
        raise Rejected(
            Reason.VERSION if late else Reason.TASK,
            f"the upload starts from version {told.task.version}, and version {expected.version} was sent.",
        )
    if told.form != intake.form:
        raise Rejected(
            Reason.FORM, f"the upload has another form: {describe_difference(told.form, intake.form)}."
        )
    leaves = unpack(payload, intake.form)
    intake.check(leaves)
    return leaves


def _fields(upload: trees.Tree) -> list[tuple[str, tuple[int, ...]]]:
    """Which leaves in floating point each field has; what is not a named tuple is one field."""
    names = getattr(upload, "_fields", None)
    parts = [("numbers", upload)] if names is None else zip(names, upload, strict=True)
    found, start = [], 0
    for field, part in parts:
        leaves = trees.leaves(part)
        places = [start + n for n, leaf in enumerate(leaves) if leaf.is_floating_point()]
        if places:
            found.append((field, tuple(places)))
        start += len(leaves)
    return found


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
    """Shares look random whatever they are of, so there is nothing to check in their numbers."""

    form: TensorSpecs
    ask: Callable[[Task, bytes, bytes], None]
    since: int = 0  # reports from before this version are of no use any more

    def check(self, leaves: list[Tensor]) -> None:
        pass

    def norms(self, leaves: list[Tensor]) -> UploadNorms:
        return UploadNorms("hidden", {}, {})

    def examine(self, task: Task, leaves: list[Tensor]) -> None:
        """Reject what the helper could not add, so that it spoils no sum; waits for a helper that is down."""
        if task.version < self.since:
            return
        sealed, signature = (leaf.numpy().tobytes() for leaf in leaves[1:])
        try:
            self.ask(task, sealed, signature)
        except (
            BindingError,
            SignatureError,
        ) as refusal:  # all else is not of the site's making: the run ends
            raise Rejected(Reason.MALFORMED, f"the helper cannot use this report: {refusal}") from None

    def join(self, uploads: Sequence[list[Tensor]]) -> ClientUpdates:
        share, sealed, signature = (torch.stack(each) for each in zip(*uploads, strict=True))
        return ClientUpdates(SecretShares(share, sealed, signature if signature.numel() else None), {})


def secure_validator(hiding: SecureEncoding, version: int = 0) -> SecureUploadValidator:
    """For the uploads of clients that hide them so, told from this version on."""
    facts = hiding.facts
    signature = SIGNATURE_BYTES if facts["signed"] else 0
    form = (("int32", (facts["length"],)), ("uint8", (SEALED_BYTES,)), ("uint8", (signature,)))
    # under bounds that move, stale reports were clipped to others: they open no more, and are not summed
    return SecureUploadValidator(form, hiding.examine, version if facts["moving"] else 0)
