"""The second server: it adds the shares that it has seeds for, and is hard to persuade."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from offbeat.core import Task
from offbeat.privacy.secure.fixed import Residues
from offbeat.privacy.secure.once import Counted, Counts
from offbeat.privacy.secure.refusals import (
    LengthError,
    LongBatchError,
    MalformedError,
    OverlapError,
    ReplayError,
    RunError,
    ShortBatchError,
    name,
)
from offbeat.privacy.secure.sealing import SEALED, stream, unseal
from offbeat.privacy.secure.terms import Terms

# An upload that counts 16 times as much as each of the others is all but alone in the sum. Weights that
# fade as polynomial:0.5 does come to a sixteenth at a staleness of 255.
HEAVIEST = 16


class Sealed(NamedTuple):
    """The helper's half of a report."""

    task: Task
    seed: bytes


class Request(NamedTuple):
    """What the leader asks: the sum of the helper's shares of these reports, weighted as of a version."""

    run: bytes
    version: int
    length: int
    reports: tuple[Sealed, ...]
    signatures: tuple[bytes, ...] = ()  # one for each report, where they are asked for


class Helper:
    """One run's; it answers one request at a time.

    A report is a client's visit. Each is added at most once ever, so any two sums are of disjoint
    reports; each is of at least `minimum` distinct clients, none of which counts for more than 16
    times another of them; so two sums differ by at least twice that many reports, and never by
    one. Reports count before their sum is given away: a sum that is lost on its way is lost.
    """

    def __init__(self, terms: Terms, key: X25519PrivateKey) -> None:
        self._terms = terms
        self._key = key
        self._counted = Counted()

    @property
    def public_key(self) -> X25519PublicKey:
        """What clients seal to."""
        return self._key.public_key()

    def add(self, request: Request) -> Residues:
        """The sum, or a refusal that changes nothing."""
        return add(request, self._terms, self._key, self._counted)

    def save(self) -> dict[str, Any]:
        """What was counted, as JSON; the key is kept elsewhere."""
        return self._counted.save()

    def load(self, data: dict[str, Any]) -> None:
        """Count what was counted there too; nothing is forgotten."""
        self._counted.load(data)


def add(request: Request, terms: Terms, key: X25519PrivateKey, counted: Counts) -> Residues:
    """The sum of what was not counted before, and now is; or a refusal before anything is."""
    if request.run != terms.run:
        raise RunError("the helper was asked about another run: ask the helper of that run.")
    if request.length != terms.length:
        raise LengthError(
            f"the helper was asked for {request.length} numbers, not the {terms.length} agreed on."
        )
    check_form(request)
    tasks = [task for task, _ in request.reports]
    _check_batch(tasks, terms, counted)
    weights = [terms.weight(task, request.version) for task in tasks]
    _check_weights(tasks, weights, terms)
    seeds = [unseal(seed, task, terms, key) for task, seed in request.reports]
    for task in tasks:
        counted.add(task)
    total = np.zeros(terms.length, np.uint32)
    for seed, weight in zip(seeds, weights, strict=True):
        for place, numbers in stream(seed, terms.length):
            numbers *= np.uint32(weight)
            total[place] += numbers
    return total


def _check_batch(tasks: Sequence[Task], terms: Terms, counted: Counts) -> None:
    seen: set[tuple[int, int]] = set()
    for task in tasks:
        if (task.client, task.visit) in seen:
            raise ReplayError(f"{name(task)} is named twice in one batch: name it once.", [task])
        seen.add((task.client, task.visit))
    before = [task for task in tasks if task in counted]
    if before and len(before) == len(tasks):
        raise ReplayError("all of this batch was added before: a report is added once.", before)
    if before:
        some = f" and {len(before) - 1} more" if len(before) > 1 else ""
        raise OverlapError(
            f"{name(before[0])}{some} of this batch was added before: leave out what was.", before
        )
    if len(tasks) > terms.most:
        raise LongBatchError(
            f"a sum of {len(tasks)} reports might overflow: ask for at most {terms.most} at a time."
        )
    clients = len({task.client for task in tasks})
    if clients < terms.minimum:
        raise ShortBatchError(
            f"the helper adds the reports of at least {terms.minimum} distinct clients, not {clients}: "
            "wait for more, raise the buffer, or agree on a lower minimum."
        )


def _check_weights(tasks: Sequence[Task], weights: Sequence[int], terms: Terms) -> None:
    """Versions are the leader's to name: without this it could let one report outweigh all others."""
    least = max(weights) / HEAVIEST
    hiding = len({task.client for task, weight in zip(tasks, weights, strict=True) if weight >= least})
    if hiding < terms.minimum:
        raise ShortBatchError(
            f"only {hiding} clients of this batch have at least 1/{HEAVIEST} of its largest weight, and the "
            f"helper wants {terms.minimum} that hide each other: use weights that fade less, a limit of "
            "staleness, or a larger buffer."
        )


def check_form(request: Request) -> None:
    """Refuse what nobody could have meant, before it is looked up or opened."""
    for task, seed in request.reports:
        if not all(0 <= number < 1 << 62 for number in task):
            raise MalformedError(f"{task} does not name a report: give whole numbers from 0.", [task])
        if len(seed) != SEALED:
            raise MalformedError(f"the seed given for {name(task)} is not {SEALED} sealed bytes.", [task])
