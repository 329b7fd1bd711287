"""The terms that clients and both servers agree on before a run, and the errors of refused requests."""

import json
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.core import Task
from offbeat.errors import InputError


class RefusedError(InputError):
    """A request was refused, and nothing was added or counted; `tasks` are the reports at fault, if any."""

    def __init__(self, sentence: str, tasks: Sequence[Task] = ()) -> None:
        super().__init__(sentence)
        self.tasks = tuple(tasks)


class RunError(RefusedError):
    """The request is of another run."""


class LengthError(RefusedError):
    """The uploads have another length than was agreed."""


class MalformedError(RefusedError):
    """A request is malformed; nothing was decrypted."""


class ReplayError(RefusedError):
    """A report is named twice, or all of a batch was added before."""


class OverlapError(RefusedError):
    """Some of a batch was added before."""


class ShortBatchError(RefusedError):
    """Too few distinct clients, or weights so unequal that they hide each other like too few."""


class LongBatchError(RefusedError):
    """More reports than can be added without a possible overflow."""


class WeightError(RefusedError):
    """A report's weight is not in (0, 1]."""


class BindingError(RefusedError):
    """A seed was sealed for another report or key, or was changed since."""


class MessageError(RefusedError):
    """A report answers another message than the others of its version, or one of another run."""


class ParticipationError(RefusedError):
    """A client or its site has contributed as often as it may, or too recently."""


class SignatureError(RefusedError):
    """A report is not signed by a known site, or not by the site that its client was before."""


def report_name(task: Task) -> str:
    """A report in words."""
    return f"visit {task.visit} of client {task.client}"


DEFAULT_MINIMUM = 5  # clients in a sum, unless another number is set
SIGN_BIT = 1 << 31  # residues from here on stand for negative numbers


def equal_weight(staleness: int) -> float:
    """Weight 1 for every staleness."""
    return 1.0


NOISE_ROOM = 12  # standard deviations of the helper's noise that must fit into a sum


class HelperNoise(NamedTuple):
    """Discrete Gaussian noise that the helper adds to each sum, and the participation that it covers."""

    fields: tuple[tuple[int, float], ...]  # how many numbers, and the standard deviation in units of the sum
    max_participations: int  # of a client in a run
    min_separation: int  # server steps between two contributions of a client

    def text(self) -> str:
        """The text that is part of what reports are bound to."""
        fields = [[count, float(deviation).hex()] for count, deviation in self.fields]
        return json.dumps([fields, self.max_participations, self.min_separation])


@dataclass(frozen=True)
class SecureTerms:
    """The terms of secure aggregation, which are public and, except `clipping` and `noise`, fixed for a run.

    A weight is rounded to a multiple of 2^-weight_bits, but not to 0. Both servers compute it from the
    version that a report is bound to, so that the leader cannot choose it.
    """

    run: bytes
    length: int
    max_reports: int  # in one sum
    minimum: int = DEFAULT_MINIMUM  # clients in one sum, as an effective cohort
    bits: int = 16  # fractional
    weight_bits: int = 0
    weigh: Callable[[int], float] = equal_weight  # from staleness to a weight in (0, 1]
    rule: str = ""  # the same as text, where it is sent to the parties
    clipping: str = ""  # a digest of the clipping bounds; the same for all reports of a sum
    noise: HelperNoise | None = None  # that the helper adds; None: none

    def __post_init__(self) -> None:
        if not 1 <= len(self.run) <= 255:
            raise InputError(f"a run needs a name of 1 to 255 bytes, not {len(self.run)}.")
        if self.length < 1:
            raise InputError(f"there is nothing to sum in uploads of {self.length} numbers.")
        if self.minimum < 2:
            raise InputError(
                f"a secure sum of {self.minimum} clients hides nobody: give a minimum of at least 2."
            )
        if self.max_reports < self.minimum:
            raise InputError(
                f"at most {self.max_reports} reports in a sum can never be {self.minimum} clients: "
                "raise the buffer or lower the minimum."
            )
        if not 1 <= self.bits <= 30:
            raise InputError(f"fixed point needs 1 to 30 fractional bits, not {self.bits}.")
        if not 0 <= self.weight_bits <= 16:
            raise InputError(f"weights need 0 to 16 bits, not {self.weight_bits}.")
        if self.noise is not None:
            self._check_noise(self.noise)
        if self.max_units < 1:
            raise InputError(
                f"{self.max_reports} reports with weights of {self.weight_bits} bits leave no room in 32 "
                "bits: lower the buffer or the bits of weights."
            )

    def _check_noise(self, noise: HelperNoise) -> None:
        if sum(count for count, _ in noise.fields) != self.length or min(noise.fields)[0] < 1:
            raise InputError(f"the helper's noise is not for sums of {self.length} numbers.")
        if not all(0 < deviation < SIGN_BIT / NOISE_ROOM for _, deviation in noise.fields):
            raise InputError(
                "the helper's noise needs standard deviations above 0 that fit into 32 bits: lower the "
                "clipping bounds, the noise or the bits."
            )
        if noise.max_participations < 1 or noise.min_separation < 1:
            raise InputError("the helper's noise covers no participation: give at least 1.")

    @property
    def max_units(self) -> int:
        """The largest coordinate, in units of 2^-bits, with which no sum can overflow."""
        room = 0 if self.noise is None else max(deviation for _, deviation in self.noise.fields)
        return (SIGN_BIT - 1 - math.ceil(NOISE_ROOM * room)) // (self.max_reports << self.weight_bits)

    @property
    def largest(self) -> float:
        """The largest coordinate with which no sum can overflow."""
        return self.max_units / (1 << self.bits)

    @property
    def unit(self) -> float:
        """The value of one unit of a weighted sum."""
        return 2.0 ** -(self.bits + self.weight_bits)

    def weight(self, task: Task, version: int) -> int:
        """The integer weight of a report in a sum at a version."""
        if task.version > version:
            raise WeightError(
                f"{report_name(task)} started from version {task.version}, which is after version {version}: "
                "sum it at a later version.",
                [task],
            )
        weight = self.weigh(version - task.version)
        if not 0 < weight <= 1:
            raise WeightError(
                f"{report_name(task)} has weight {weight:g}: secure aggregation needs weights above 0 and "
                "at most 1.",
                [task],
            )
        return max(1, round(weight * (1 << self.weight_bits)))

    def binding(self, task: Task) -> bytes:
        """The context to which a sealed seed is bound: this report, under these terms."""
        numbers = (*task, self.length, self.max_reports, self.minimum, self.bits, self.weight_bits)
        head = b"offbeat secure sum" + struct.pack(f"<B{len(numbers)}q", len(self.run), *numbers)
        noise = "" if self.noise is None else self.noise.text()
        return head + self.run + f"{self.rule}\0{self.clipping}\0{noise}".encode()
