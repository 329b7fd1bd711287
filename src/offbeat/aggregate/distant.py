"""Secure sums in a deployment: clients hide their own uploads, and the helper is on another machine."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch

from offbeat import trees
from offbeat.aggregate.aggregation import Hiding, Opening
from offbeat.aggregate.agreed import clipping_of, rule_of, write_terms
from offbeat.aggregate.payload import Clip, Payload, Shares
from offbeat.aggregate.secure import Layout, Secure, agree, check_weights, spread
from offbeat.aggregate.uploads import upload_from
from offbeat.core import AnyAlgorithm, Cohort, Saved, Task
from offbeat.errors import InputError
from offbeat.privacy.secure.client import Report
from offbeat.privacy.secure.fixed import Residues
from offbeat.privacy.secure.leader import Adds, Leader
from offbeat.privacy.secure.refusals import BindingError, SignatureError
from offbeat.privacy.secure.terms import Terms
from offbeat.schedule.dispatch import Synchronous
from offbeat.trees import Tree

_LOG = logging.getLogger(__name__)


class Known(NamedTuple):
    """What a helper says of itself."""

    key: bytes  # that clients seal to
    signed: bool  # whether it adds only what sites have signed
    minimum: int = 2  # distinct clients in a sum, below which it serves no run


class Asked(Adds, Protocol):
    """A helper that is elsewhere, for one run; it is waited for while it is down."""

    def examine(self, task: Task, sealed: bytes, signature: bytes) -> None:
        """Refuse a report that could not be added; nothing is counted."""
        ...


class Reached(Protocol):
    """A way to a helper."""

    def known(self) -> Known: ...

    def under(self, terms: Terms) -> Asked: ...


@dataclass(frozen=True)
class Distant:
    """Secure sums as `secure` has them, with a helper that is reached over a network.

    The run's name is what the helper counts under: a new one for each run, and the same for ever after.
    """

    secure: Secure
    run: bytes = field(repr=False)
    helper: Reached = field(repr=False)
    signed: bool = False  # refuse a helper that would add what no known site has signed

    @property
    def secret(self) -> bool:
        return True

    @property
    def rounding(self) -> float:
        return self.secure.rounding

    def open(self, opening: Opening) -> "DistantSum":
        self.secure.check(opening)
        dispatch = opening.dispatch
        together = isinstance(dispatch, Synchronous) and dispatch.cohort == opening.buffer
        if opening.answers and not together and opening.limit > 0:
            raise InputError(
                "clients clip by themselves here, so a bound that moves would be another one for stale "
                "updates: fix the bounds, use a limit of 0, or a synchronous cohort as large as the buffer."
            )
        methods = (opening.algorithm, opening.algorithm.warmup())
        layouts = {
            _layout(method, opening, version)
            for method in methods
            if method is not None
            for version in (0, 1)
        }
        if len(layouts) > 1:
            raise InputError(
                f"secure sums need uploads of one form, and {type(opening.algorithm).__name__} has "
                f"{len(layouts)}: use another method."
            )
        return DistantSum(self, opening, layouts.pop())


class DistantSum:
    """One run's."""

    def __init__(self, distant: Distant, opening: Opening, layout: Layout) -> None:
        self._distant = distant
        self._weights = opening.weights
        self._layout = layout
        length = sum(leaf.shape.numel() for leaf in layout.leaves)
        self._terms = agree(distant.secure, opening, distant.run, length, rule_of(opening.weights))
        self._known: Known | None = None  # until somebody asks
        self._before: str | None = None  # the key that earlier reports were sealed to

    @property
    def largest(self) -> float:
        return self._terms.largest

    def hiding(self, clip: Clip | None = None) -> Hiding:
        """What clients are told of these sums."""
        known = self._meet()
        bounds = None if clip is None else clip.bounds.items()
        facts = write_terms(self._terms) | {
            "stochastic": self._distant.secure.stochastic,
            "key": known.key.hex(),
            "signed": known.signed,
            "bounds": bounds and {name: None if math.isinf(bound) else bound for name, bound in bounds},
            "moving": [] if clip is None else list(clip.moving),
        }
        return Hiding(facts, self._distant.helper.under(self._clipped(clip)).examine)

    def total(self, payload: Tree, tasks: Sequence[Task], cohort: Cohort) -> Tree:
        if not isinstance(payload, Shares):
            raise InputError(
                "these sums are of what clients hid by themselves: use an engine of a deployment."
            )
        check_weights(self._weights, tasks, cohort)
        self._meet()
        terms = self._clipped(payload.clip)
        leader = Leader(terms, self._distant.helper.under(terms))
        for row, task in enumerate(tasks):
            leader.take(_report(payload, row, task))
        residues = _add(leader, list(tasks), cohort.version)
        return spread(residues, self._terms.unit, self._layout)

    def save(self) -> Saved:
        key = self._known.key.hex() if self._known else self._before
        return Saved({"run": self._terms.run.hex(), "length": self._terms.length, "key": key}, {})

    def load(self, saved: Saved) -> None:
        facts = saved.facts
        if (facts["run"], facts["length"]) != (self._terms.run.hex(), self._terms.length):
            raise InputError(
                "the checkpoint's secure sums are of another run or of uploads of another length: "
                "go on in the folder that the run was begun in."
            )
        self._before, self._known = facts["key"], None

    def _meet(self) -> Known:
        if self._known is None:
            known = self._distant.helper.known()
            if self._before not in (None, known.key.hex()):
                raise InputError(
                    "the helper has another key than before, so it cannot open what clients sent: "
                    "start it with the key and the store that it had."
                )
            if self._distant.signed and not known.signed:
                raise InputError(
                    "the helper does not ask for signatures: start it with the sites' public keys, "
                    "or say that reports need not be signed."
                )
            if self._terms.minimum < known.minimum:
                raise InputError(
                    f"the helper adds the reports of at least {known.minimum} clients, and these sums may be "
                    f"of {self._terms.minimum}: raise the minimum."
                )
            self._known = known
        return self._known

    def _clipped(self, clip: Clip | None) -> Terms:
        """The terms of reports that were clipped so: no others can be opened under them."""
        return self._terms if clip is None else replace(self._terms, clipping=clipping_of(*clip))


def _add(leader: Leader, tasks: list[Task], version: int) -> Residues:
    """Of the reports that can be added; one that cannot counts as a report of zeros.

    Reports are examined when they come in, so that this is for a helper whose keys have changed since.
    """
    while True:
        try:
            return leader.total(tasks, version)
        except (BindingError, SignatureError) as refusal:
            rest = [task for task in tasks if task not in refusal.tasks]
            if len(rest) == len(tasks):
                raise
            _LOG.warning("a report is left out of a secure sum: %s", refusal)
            tasks = rest


def _report(shares: Shares, row: int, task: Task) -> Report:
    sealed, signature = (
        b"" if part is None else part[row].cpu().numpy().tobytes()
        for part in (shares.sealed, shares.signature)
    )
    return Report(task, shares.share[row].cpu().contiguous().numpy().view("uint32"), sealed, signature)


def _layout(algorithm: AnyAlgorithm, opening: Opening, version: int) -> Layout:
    """Of one client's payload, found by trying the algorithm."""
    payload = upload = upload_from(algorithm, opening.x, version)
    if opening.answers is not None:
        first = trees.leaves(upload)[0]
        payload = Payload(upload, torch.zeros(opening.answers).to(first) if opening.answers else ())
    return Layout.of(payload)
