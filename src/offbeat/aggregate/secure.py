"""Secure sums in a simulation: clients, leader and helper in one process, each with its own objects."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from offbeat import draws, trees
from offbeat.aggregate.aggregation import Opening
from offbeat.aggregate.payload import Clip
from offbeat.core import Cohort, Saved, Task
from offbeat.errors import InputError
from offbeat.privacy.secure.client import report
from offbeat.privacy.secure.fixed import Residues, decode
from offbeat.privacy.secure.helper import HEAVIEST, Helper
from offbeat.privacy.secure.leader import Leader
from offbeat.privacy.secure.terms import Terms
from offbeat.schedule.dispatch import Synchronous
from offbeat.schedule.staleness import Equal, Weights
from offbeat.trees import Tree

_STALE = 100  # versions, which a run without a limit should be prepared for
_START = 128  # more clients than the loop ever hands over at once in a full-participation start


@dataclass(frozen=True)
class Secure:
    """Two servers add shares; see `offbeat.privacy.secure` for what that hides and what not.

    A sum is exact in fixed point of `bits` fractional bits, and refused where it could overflow or
    would be of fewer than `minimum` distinct clients with weights within 16 times of each other; a
    client that is in a buffer twice is one of them, and adds both its reports. Weights that fade are
    rounded to multiples of 2^-weight_bits.
    """

    minimum: int = 5
    bits: int = 16
    stochastic: bool = False  # round up or down at random, so that errors cancel on average
    weight_bits: int = 8  # not used where all weights are 1

    def __post_init__(self) -> None:
        # All that can be wrong with these numbers alone, before there is a run.
        Terms(b"?", 1, self.minimum, self.minimum, self.bits, self.weight_bits)

    @property
    def secret(self) -> bool:
        return True

    @property
    def rounding(self) -> float:
        return 2.0**-self.bits if self.stochastic else 2.0 ** -(self.bits + 1)

    def check(self, opening: Opening) -> None:
        """Refuse a run whose buffers never have enough clients."""
        here = min(opening.buffer, opening.population)
        if here < self.minimum:
            raise InputError(
                f"secure sums need {self.minimum} distinct clients, and a buffer of {opening.buffer} from "
                f"{opening.population} clients never has them: raise the buffer or lower the minimum."
            )
        reach = int(min(opening.limit, _STALE))
        stale = not isinstance(opening.dispatch, Synchronous)
        if stale and here == self.minimum and opening.weights(reach) * HEAVIEST < 1:
            raise InputError(
                f"an update of staleness {reach} would have less than 1/{HEAVIEST} of a fresh one's weight "
                "and hide nobody, and a buffer as small as the minimum needs every client: raise the "
                "buffer, set a lower limit, or use weights that fade less."
            )

    def open(self, opening: Opening) -> "Shared":
        self.check(opening)
        shared = Shared(self, opening)
        shared.terms(1)
        return shared


class Shared:
    """One run's secure sums."""

    def __init__(self, secure: Secure, opening: Opening) -> None:
        self._secure = secure
        self._opening = opening
        self._run = secrets.token_bytes(16)
        self._servers: tuple[Terms, Leader, Helper] | None = None  # None until uploads have a length

    @property
    def largest(self) -> float:
        return self.terms(1).largest

    def terms(self, length: int) -> Terms:
        """For uploads of that many numbers."""
        return agree(self._secure, self._opening, self._run, length)

    def hiding(self, clip: Clip | None = None) -> None:
        """Here it is done for them."""

    def total(self, payload: Tree, tasks: Sequence[Task], cohort: Cohort) -> Tree:
        check_weights(self._opening.weights, tasks, cohort)
        stacks = [numbers(leaf).reshape(len(tasks), -1) for leaf in trees.leaves(payload)]
        length = sum(stack.shape[1] for stack in stacks)
        terms, leader, helper = self._servers or self._begin(length)
        key = helper.public_key
        try:
            for row, task in enumerate(tasks):
                parts = [stack[row] for stack in stacks]
                draw = rounding(self._opening.seed, task) if self._secure.stochastic else None
                leader.take(report(parts, task, terms, key, draw))
            residues = leader.total(tasks, cohort.version)
        finally:
            leader.forget(tasks)
        return spread(residues, terms.unit, Layout.of(trees.over(lambda leaf: leaf[0], payload)))

    def save(self) -> Saved:
        if self._servers is None:
            return Saved({}, {})
        terms, _, helper = self._servers
        return Saved({"run": terms.run.hex(), "length": terms.length, "counted": helper.save()}, {})

    def load(self, saved: Saved) -> None:
        if saved.facts:
            self._run = bytes.fromhex(saved.facts["run"])
            _, _, helper = self._begin(saved.facts["length"])
            helper.load(saved.facts["counted"])

    def _begin(self, length: int) -> tuple[Terms, Leader, Helper]:
        """The key is new each time: here no sealed seed outlives a sum."""
        terms = self.terms(length)
        helper = Helper(terms, X25519PrivateKey.generate())
        self._servers = (terms, Leader(terms, helper), helper)
        return self._servers


class Place(NamedTuple):
    """Where a sum goes."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Layout(NamedTuple):
    """One client's payload without its numbers."""

    tree: trees.Shape
    leaves: tuple[Place, ...]

    @classmethod
    def of(cls, payload: Tree) -> Self:
        leaves = trees.leaves(payload)
        return cls(trees.shape(payload), tuple(Place(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves))


def agree(secure: Secure, opening: Opening, run: bytes, length: int, rule: str = "") -> Terms:
    """What clients and both servers keep to in a run, for uploads of that many numbers."""
    start = 0 if opening.algorithm.warmup() is None else min(opening.population, _START)
    weight_bits = 0 if isinstance(opening.weights, Equal) else secure.weight_bits
    most = max(opening.buffer, start)
    return Terms(run, length, most, secure.minimum, secure.bits, weight_bits, opening.weights, rule)


def check_weights(weights: Weights, tasks: Sequence[Task], cohort: Cohort) -> None:
    """Refuse a cohort that is weighed in another way than was agreed on."""
    if list(cohort.weights) != [weights(cohort.version - task.version) for task in tasks]:
        raise InputError("secure sums weigh reports by the run's own staleness weights alone.")


def spread(residues: Residues, unit: float, layout: Layout) -> Tree:
    """A sum of flat payloads as the tree that they were."""
    sums = []
    start = 0
    for shape, dtype, device in layout.leaves:
        part = decode(residues[start : start + shape.numel()], unit)
        wide = dtype if dtype.is_floating_point else torch.get_default_dtype()
        sums.append(part.to(device, wide).view(shape))
        start += shape.numel()
    return trees.rebuild(layout.tree, sums)


def rounding(seed: int, task: Task) -> torch.Generator:
    """The draws that round one report up or down."""
    own = draws.torch_seed(seed, "secure rounding", task.client, task.visit)
    return torch.Generator().manual_seed(own)


def numbers(leaf: Tensor) -> Tensor:
    """On the CPU, in a dtype that fixed point is exact in."""
    wide = torch.float64 if leaf.dtype == torch.float64 or not leaf.is_floating_point() else torch.float32
    return leaf.detach().to("cpu", wide)
