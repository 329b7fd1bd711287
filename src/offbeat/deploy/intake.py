"""What an upload must be before it touches anything of the server's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offbeat import trees
from offbeat.aggregate.uploads import upload_from
from offbeat.core import AnyAlgorithm, Bounded, Task, Vector
from offbeat.deploy import notes
from offbeat.deploy.rejections import Reason, Rejected, quote
from offbeat.deploy.wire import Form, differs, finite, form_of, unpack
from offbeat.engines.engine import Gathered
from offbeat.means import over_clients
from offbeat.privacy import clipping
from offbeat.problem import Statistics

_SLACK = 1e-3  # of a norm, for what rounding adds at a site
_LONG = 2**20  # numbers from which on a norm in single precision is further off: 0.8 % seen at 11 million


class Intake(Protocol):
    """What uploads look like, what they must keep to, and what becomes of those of a buffer."""

    @property
    def form(self) -> Form: ...

    def check(self, leaves: list[Tensor]) -> None:
        """Reject numbers that no client could have come to."""
        ...

    def join(self, uploads: Sequence[list[Tensor]]) -> Gathered: ...


@dataclass(frozen=True)
class PlainIntake:
    """Uploads in plain sight: leaves of (upload, statistics)."""

    form: Form
    shape: trees.Shape
    bounds: tuple[tuple[str, tuple[int, ...], float], ...]  # field, the places of its leaves, norm at most
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

    def join(self, uploads: Sequence[list[Tensor]]) -> Gathered:
        stacked = [torch.stack(each).to(self.device) for each in zip(*uploads, strict=True)]
        joined, statistics = trees.rebuild(self.shape, stacked)
        return Gathered(joined, over_clients(statistics))


def plain_intake(algorithm: AnyAlgorithm, x: Vector, statistics: Statistics, version: int = 0) -> PlainIntake:
    """For uploads of this algorithm; which version matters to one of `TwoTrips` alone."""
    upload = upload_from(algorithm, x, version)
    tree = (upload, statistics)
    bounds = dict(algorithm.bounds) if isinstance(algorithm, Bounded) else {}
    return PlainIntake(form_of(tree), trees.shape(tree), _places(upload, bounds), x.device)


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


def _places(
    upload: trees.Tree, bounds: Mapping[str, float]
) -> tuple[tuple[str, tuple[int, ...], float], ...]:
    """Which leaves each field with a bound has."""
    found, start = [], 0
    for field, part in zip(getattr(upload, "_fields", ()), upload, strict=False):
        end = start + len(trees.leaves(part))
        if field in bounds and end > start:
            found.append((field, tuple(range(start, end)), bounds[field]))
        start = end
    return tuple(found)


def _slack(part: list[Tensor]) -> float:
    coarsest = max(torch.finfo(leaf.dtype).eps for leaf in part)
    if coarsest <= torch.finfo(torch.float64).eps:
        return _SLACK
    return max(_SLACK * max(1.0, sum(leaf.numel() for leaf in part) / _LONG), 4 * coarsest)


def _name(task: Task) -> str:
    return f"visit {task.visit} of client {task.client}"
