"""What an upload must be before it touches anything of the server's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offbeat import trees
from offbeat.aggregate.uploads import upload_from
from offbeat.core import AnyAlgorithm, Bounded, Task, Vector
from offbeat.deploy import notes
from offbeat.deploy.lengths import Norms
from offbeat.deploy.rejections import Reason, Rejected, quote
from offbeat.deploy.wire import Form, differs, finite, form_of, unpack
from offbeat.engines.engine import Gathered
from offbeat.means import over_clients
from offbeat.privacy import clipping
from offbeat.problem import Statistics

_SLACK = 1e-3  # of a norm, for what rounding adds at a site
_LONG = 2**20  # numbers from which on a norm in single precision is further off: 0.8 % seen at 11 million
_COUNTED = ("var", "num_batches_tracked")  # ends of the names of running statistics that cannot fall below 0


class Intake(Protocol):
    """What uploads look like, what they must keep to, and what becomes of those of a buffer."""

    @property
    def form(self) -> Form: ...

    def check(self, leaves: list[Tensor]) -> None:
        """Reject numbers that no client could have come to."""
        ...

    def norms(self, leaves: list[Tensor]) -> Norms:
        """Of what has no bound, as far as it can be seen."""
        ...

    def join(self, uploads: Sequence[list[Tensor]]) -> Gathered: ...


@dataclass(frozen=True)
class PlainIntake:
    """Uploads in plain sight: leaves of (upload, statistics)."""

    form: Form
    shape: trees.Shape
    bounds: tuple[tuple[str, tuple[int, ...], float], ...]  # field, the places of its leaves, norm at most
    free: tuple[tuple[str, tuple[int, ...]], ...]  # fields without a bound
    statistics: tuple[tuple[str, int], ...]  # those in floating point
    counted: tuple[tuple[str, int], ...]  # running statistics that cannot fall below 0
    kind: str  # of upload
    device: torch.device  # where the server's half is computed

    def check(self, leaves: list[Tensor]) -> None:
        for number, leaf in enumerate(leaves):
            if leaf.is_floating_point() and not finite(leaf):
                raise Rejected(Reason.INFINITE, f"tensor {number} of the upload holds NaN or infinity.")
        for field, places, bound in self.bounds:
            part = [leaves[place][None] for place in places]
            norm = float(clipping.norms(part))
            if norm > bound * (1 + _slack(part)):
                raise Rejected(
                    Reason.NORM, f"the upload's {field} has norm {norm:.4g}, which cannot exceed {bound:g}."
                )
        for name, place in self.counted:
            if bool((leaves[place] < 0).any()):  # the root of a variance would be NaN
                raise Rejected(Reason.RANGE, f"the running statistic {name} has fallen below 0.")

    def norms(self, leaves: list[Tensor]) -> Norms:
        fields = {
            field: float(clipping.norms([leaves[place][None] for place in places]))
            for field, places in self.free
        }
        statistics = {name: float(clipping.norms([leaves[place][None]])) for name, place in self.statistics}
        return Norms(self.kind, fields, statistics)

    def join(self, uploads: Sequence[list[Tensor]]) -> Gathered:
        stacked = [torch.stack(each).to(self.device) for each in zip(*uploads, strict=True)]
        joined, statistics = trees.rebuild(self.shape, stacked)
        return Gathered(joined, over_clients(statistics))


def plain_intake(algorithm: AnyAlgorithm, x: Vector, statistics: Statistics, version: int = 0) -> PlainIntake:
    """For uploads of this algorithm; which version matters to one of `TwoTrips` alone."""
    upload = upload_from(algorithm, x, version)
    tree = (upload, statistics)
    bounds = dict(algorithm.bounds) if isinstance(algorithm, Bounded) else {}
    shape, fields = trees.shape(tree), _fields(upload)
    _, numbered = trees.rebuild(shape, [torch.tensor(place) for place in range(shape.num_leaves)])
    places = {name: int(place) for name, place in numbered.items()}
    return PlainIntake(
        form_of(tree),
        shape,
        tuple((field, where, bounds[field]) for field, where in fields if field in bounds),
        tuple((field, where) for field, where in fields if field not in bounds),
        tuple((name, place) for name, place in places.items() if statistics[name].is_floating_point()),
        tuple((name, place) for name, place in places.items() if _is_counted(name, statistics[name])),
        type(upload).__name__,
        x.device,
    )


def read_upload_bytes(
    note: str, payload: bytes, expected: Task, run: str, intake: Intake, limit: int
) -> list[Tensor]:
    """The leaves of the upload that answers a task, if nothing is wrong with it; sizes are checked first."""
    if len(payload) > limit:
        raise Rejected(Reason.SIZE, f"the payload has {len(payload)} bytes, more than the limit of {limit}.")
    told = notes.read_upload(note)
    if told.error is not None:  # first, for a site that cannot read a task cannot name it either
        raise Rejected(Reason.FAILED, told.error)
    if told.run != run:
        raise Rejected(Reason.RUN, f"the upload is of another run, {quote(told.run)}.")
    if told.task._replace(version=expected.version) != expected:
        raise Rejected(
            Reason.TASK, f"the upload is of {_name(told.task)}, and was asked of {_name(expected)}."
        )
    if told.task.version != expected.version:
        late = told.task.version > expected.version
        raise Rejected(
            Reason.VERSION if late else Reason.TASK,
            f"the upload starts from version {told.task.version}, and version {expected.version} was sent.",
        )
    if told.form != intake.form:
        raise Rejected(Reason.FORM, f"the upload has another form: {differs(told.form, intake.form)}.")
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


def _is_counted(name: str, initial: Tensor) -> bool:
    return name.endswith(_COUNTED) and bool((initial >= 0).all())


def _slack(part: list[Tensor]) -> float:
    coarsest = max(torch.finfo(leaf.dtype).eps for leaf in part)
    if coarsest <= torch.finfo(torch.float64).eps:
        return _SLACK
    return max(_SLACK * max(1.0, sum(leaf.numel() for leaf in part) / _LONG), 4 * coarsest)


def _name(task: Task) -> str:
    return f"visit {task.visit} of client {task.client}"
