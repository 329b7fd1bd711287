"""The first server: it keeps shares until they are summed, and asks the helper for the rest."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch

from offbeat.core import Task
from offbeat.privacy.secure.client import Report
from offbeat.privacy.secure.fixed import Residues
from offbeat.privacy.secure.helper import Request, Sealed, check_form
from offbeat.privacy.secure.refusals import LengthError, MalformedError, ReplayError, name
from offbeat.privacy.secure.terms import Terms


class Adds(Protocol):
    """A helper, here or elsewhere."""

    def add(self, request: Request) -> Residues: ...


class Leader:
    """One run's."""

    def __init__(self, terms: Terms, helper: Adds) -> None:
        self._terms = terms
        self._helper = helper
        self._held: dict[Task, Report] = {}

    def take(self, report: Report) -> None:
        """Keep a report until it is summed or forgotten."""
        terms, task = self._terms, report.task
        if report.share.shape != (terms.length,):
            raise LengthError(
                f"the share of {name(task)} has shape {report.share.shape}, not ({terms.length},).", [task]
            )
        if report.share.dtype != np.uint32:
            raise MalformedError(f"the share of {name(task)} is {report.share.dtype}, not uint32.", [task])
        check_form(Request(terms.run, 0, terms.length, (Sealed(task, report.sealed),)))
        if task in self._held:
            raise ReplayError(f"{name(task)} has reported already.", [task])
        self._held[task] = report

    def forget(self, tasks: Iterable[Task]) -> None:
        """Drop what came too late, or what the helper refused."""
        for task in tasks:
            self._held.pop(task, None)

    def total(self, tasks: Sequence[Task], version: int) -> Residues:
        """The weighted sum of these uploads in fixed point; if the helper refuses, they are all kept."""
        terms = self._terms
        missing = [task for task in tasks if task not in self._held]
        if missing:
            raise MalformedError(f"{name(missing[0])} has not reported, so it cannot be summed.", missing)
        reports = [self._held[task] for task in tasks]
        sealed = tuple(Sealed(task, report.sealed) for task, report in zip(tasks, reports, strict=True))
        signatures = tuple(report.signature for report in reports)
        total = self._helper.add(Request(terms.run, version, terms.length, sealed, signatures))
        for report in reports:
            add_weighted(total, report.share, terms.weight(report.task, version))
        self.forget(tasks)
        return total


def add_weighted(total: Residues, share: Residues, weight: int) -> None:
    """In place, mod 2^32: torch does in one pass over memory what NumPy does in two."""
    mine = share if share.flags.writeable else share.copy()  # torch has no read-only tensors
    sums, parts = (torch.from_numpy(numbers.view(np.int32)) for numbers in (total, mine))
    sums.add_(parts, alpha=weight)  # signed numbers wrap around to the same bits
