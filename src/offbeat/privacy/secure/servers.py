"""The two servers: the leader collects shares, and the helper adds the shares that it has seeds for.

The helper adds each report at most once, and only sums over enough distinct clients.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from offbeat.core import Task
from offbeat.privacy.mechanism import discrete_gaussian
from offbeat.privacy.secure.encoding import SEALED_BYTES, Report, Residues, expand_seed, unseal
from offbeat.privacy.secure.terms import (
    HelperNoise,
    LengthError,
    LongBatchError,
    MalformedError,
    OverlapError,
    ReplayError,
    RunError,
    SecureTerms,
    ShortBatchError,
    report_name,
)


class SeenReports(Protocol):
    """A growing set of reports, by (client, visit)."""

    def __contains__(self, task: Task, /) -> bool: ...

    def add(self, task: Task) -> None: ...


class SeenReportRanges:
    """Seen reports in memory: for each client its visits as ranges."""

    def __init__(self) -> None:
        self._bounds: dict[int, list[int]] = {}  # first, one past the last, first, ... in order

    def __contains__(self, task: Task) -> bool:
        return bisect_right(self._bounds.get(task.client, []), task.visit) % 2 == 1

    def add(self, task: Task) -> None:
        self._cover(task.client, task.visit, task.visit + 1)

    def save(self) -> dict[str, Any]:
        """As JSON."""
        clients = sorted(self._bounds)
        bounds = [self._bounds[client] for client in clients]
        return {
            "clients": clients,
            "sizes": [len(one) for one in bounds],
            "bounds": list(chain.from_iterable(bounds)),
        }

    def load(self, data: dict[str, Any]) -> None:
        """Add the reports that `save` returned; nothing is removed."""
        bounds = iter(data["bounds"])
        for client, size in zip(data["clients"], data["sizes"], strict=True):
            own = list(islice(bounds, size))
            for first, end in zip(own[::2], own[1::2], strict=True):
                self._cover(client, first, end)

    def _cover(self, client: int, first: int, end: int) -> None:
        bounds = self._bounds.setdefault(client, [])
        left, right = bisect_left(bounds, first), bisect_right(bounds, end)
        bounds[left:right] = [first] * (left % 2 == 0) + [end] * (right % 2 == 0)


class SealedSeed(NamedTuple):
    """The helper's half of a report."""

    task: Task
    seed: bytes


class SumRequest(NamedTuple):
    """The leader's request for the weighted sum of the helper's shares of these reports, at a version."""

    run: bytes
    version: int
    length: int
    reports: tuple[SealedSeed, ...]
    signatures: tuple[bytes, ...] = ()  # one for each report, where they are asked for


class Helper:
    """The helper of one run; it answers one request at a time.

    A report is a client's visit. Each is added at most once, so any two sums have disjoint reports; each
    sum has an effective cohort (`effective_cohort`) of at least `minimum` clients. Reports are counted
    before their sum is returned, so a sum that is lost in transit cannot be requested again.
    """

    def __init__(self, terms: SecureTerms, key: X25519PrivateKey, noise_key: bytes = b"") -> None:
        self.terms = terms  # those of the next sum: clipping and noise may change
        self.noise_key, self.noise_label = noise_key, b""
        self._key = key
        self._counted = SeenReportRanges()

    @property
    def public_key(self) -> X25519PublicKey:
        """The key to which clients seal their seeds."""
        return self._key.public_key()

    def add(self, request: SumRequest) -> Residues:
        """The sum; a refused request raises an error and changes nothing."""
        total = add_shares(request, self.terms, self._key, self._counted)
        return add_noise(total, self.terms.noise, self.noise_key, self.noise_label)

    def save(self) -> dict[str, Any]:
        """The counted reports, as JSON; the key is not included."""
        return self._counted.save()

    def load(self, data: dict[str, Any]) -> None:
        """Add the reports that `save` returned; no report is removed."""
        self._counted.load(data)


def add_shares(
    request: SumRequest, terms: SecureTerms, key: X25519PrivateKey, counted: SeenReports
) -> Residues:
    """The sum of reports, which are then counted; a refused request counts nothing."""
    if request.run != terms.run:
        raise RunError("the helper was asked about another run: ask the helper of that run.")
    if request.length != terms.length:
        raise LengthError(
            f"the helper was asked for {request.length} numbers, not the {terms.length} agreed on."
        )
    check_request(request)
    tasks = [task for task, _ in request.reports]
    _check_batch(tasks, terms, counted)
    weights = [terms.weight(task, request.version) for task in tasks]
    _check_effective_cohort(tasks, weights, terms)
    seeds = [unseal(seed, task, terms, key) for task, seed in request.reports]
    for task in tasks:
        counted.add(task)
    total = np.zeros(terms.length, np.uint32)
    for seed, weight in zip(seeds, weights, strict=True):
        for piece, numbers in expand_seed(seed, terms.length):
            numbers *= np.uint32(weight)
            total[piece] += numbers
    return total


def add_noise(total: Residues, noise: HelperNoise | None, key: bytes, label: bytes) -> Residues:
    """The helper's part of a sum with noise, which is a function of key and label: one label for each sum."""
    if noise is not None:
        start = 0
        for number, (count, deviation) in enumerate(noise.fields):
            drawn = discrete_gaussian(key, number.to_bytes(4, "little") + label, deviation, count)
            total[start : start + count] += (drawn & 0xFFFFFFFF).astype(np.uint32)
            start += count
    return total


def _check_batch(tasks: Sequence[Task], terms: SecureTerms, counted: SeenReports) -> None:
    seen: set[tuple[int, int]] = set()
    for task in tasks:
        if (task.client, task.visit) in seen:
            raise ReplayError(f"{report_name(task)} is named twice in one batch: name it once.", [task])
        seen.add((task.client, task.visit))
    before = [task for task in tasks if task in counted]
    if before and len(before) == len(tasks):
        raise ReplayError("all of this batch was added before: a report is added once.", before)
    if before:
        some = f" and {len(before) - 1} more" if len(before) > 1 else ""
        raise OverlapError(
            f"{report_name(before[0])}{some} of this batch was added before: leave out what was.", before
        )
    if len(tasks) > terms.max_reports:
        raise LongBatchError(
            f"a sum of {len(tasks)} reports might overflow: ask for at most {terms.max_reports} at a time."
        )
    clients = len({task.client for task in tasks})
    if clients < terms.minimum:
        raise ShortBatchError(
            f"the helper adds the reports of at least {terms.minimum} distinct clients, not {clients}: "
            "wait for more, raise the buffer, or agree on a lower minimum."
        )


def effective_cohort(tasks: Sequence[Task], weights: Sequence[int]) -> Fraction:
    """The number of clients of equal weight that would hide each other as well: (sum w)^2 / sum w^2.

    The weight w of a client is that of all its reports. With equal weights this is the number of distinct
    clients; it is near 1 if one of them has almost all the weight.
    """
    of_client: Counter[int] = Counter()
    for task, weight in zip(tasks, weights, strict=True):
        of_client[task.client] += weight
    return Fraction(sum(weights) ** 2, sum(weight**2 for weight in of_client.values()))


def _check_effective_cohort(tasks: Sequence[Task], weights: Sequence[int], terms: SecureTerms) -> None:
    """Reject very unequal weights, which a leader could otherwise cause by the version that it names."""
    cohort = effective_cohort(tasks, weights)
    if cohort < terms.minimum:
        raise ShortBatchError(
            f"the clients of this batch have weights so unequal that they hide each other like "
            f"{float(cohort):.3g} clients of equal weight, and the helper wants {terms.minimum}: use weights "
            "that fade less, a limit of staleness, or a larger buffer."
        )


def check_request(request: SumRequest) -> None:
    """Reject a malformed request before anything is looked up or decrypted."""
    for task, seed in request.reports:
        if not all(0 <= number < 1 << 62 for number in task):
            raise MalformedError(f"{task} does not name a report: give whole numbers from 0.", [task])
        if len(seed) != SEALED_BYTES:
            raise MalformedError(
                f"the seed given for {report_name(task)} is not {SEALED_BYTES} sealed bytes.", [task]
            )


class AggregationHelper(Protocol):
    """A helper, in this process or remote."""

    def add(self, request: SumRequest) -> Residues: ...


class Leader:
    """The leader of one run."""

    def __init__(self, terms: SecureTerms, helper: AggregationHelper) -> None:
        self._terms = terms
        self._helper = helper
        self._reports: dict[Task, Report] = {}

    def take(self, report: Report) -> None:
        """Store a report until it is summed or forgotten."""
        terms, task = self._terms, report.task
        if report.share.shape != (terms.length,):
            raise LengthError(
                f"the share of {report_name(task)} has shape {report.share.shape}, not ({terms.length},).",
                [task],
            )
        if report.share.dtype != np.uint32:
            raise MalformedError(
                f"the share of {report_name(task)} is {report.share.dtype}, not uint32.", [task]
            )
        check_request(SumRequest(terms.run, 0, terms.length, (SealedSeed(task, report.sealed),)))
        if task in self._reports:
            raise ReplayError(f"{report_name(task)} has reported already.", [task])
        self._reports[task] = report

    def forget(self, tasks: Iterable[Task]) -> None:
        """Drop reports that arrived too late or were refused."""
        for task in tasks:
            self._reports.pop(task, None)

    def total(self, tasks: Sequence[Task], version: int) -> Residues:
        """The weighted sum of these uploads in fixed point; if the helper refuses, they are all kept."""
        terms = self._terms
        missing = [task for task in tasks if task not in self._reports]
        if missing:
            raise MalformedError(
                f"{report_name(missing[0])} has not reported, so it cannot be summed.", missing
            )
        reports = [self._reports[task] for task in tasks]
        sealed = tuple(SealedSeed(task, report.sealed) for task, report in zip(tasks, reports, strict=True))
        signatures = tuple(report.signature for report in reports)
        total = self._helper.add(SumRequest(terms.run, version, terms.length, sealed, signatures))
        for report in reports:
            add_weighted_share(total, report.share, terms.weight(report.task, version))
        self.forget(tasks)
        return total


def add_weighted_share(total: Residues, share: Residues, weight: int) -> None:
    """Add a weighted share in place, mod 2^32; torch needs one pass over memory where NumPy needs two."""
    writable = share if share.flags.writeable else share.copy()  # torch has no read-only tensors
    sums, parts = (torch.from_numpy(numbers.view(np.int32)) for numbers in (total, writable))
    sums.add_(parts, alpha=weight)  # signed numbers wrap around to the same bits
