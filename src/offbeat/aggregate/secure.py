"""Secure sums in a simulation: clients, leader and helper in one process, each with its own objects."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from offbeat import draws, trees
from offbeat.aggregate.aggregation import Opening
from offbeat.core import Cohort, Saved, Task
from offbeat.errors import InputError
from offbeat.privacy.secure.client import report
from offbeat.privacy.secure.fixed import decode
from offbeat.privacy.secure.helper import Helper
from offbeat.privacy.secure.leader import Leader
from offbeat.privacy.secure.terms import Terms
from offbeat.schedule.staleness import Equal
from offbeat.trees import Tree

_START = 128  # more clients than the loop ever hands over at once in a full-participation start


@dataclass(frozen=True)
class Secure:
    """Two servers add shares; see `offbeat.privacy.secure` for what that hides and what not.

    A sum is exact in fixed point of `bits` fractional bits, and refused where it could overflow or
    would be of fewer than `minimum` distinct clients; a client that is in a buffer twice is one of
    them, and adds both its reports. Weights that fade are rounded to multiples of 2^-weight_bits.
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

    def open(self, opening: Opening) -> "Shared":
        here = min(opening.buffer, opening.population)
        if here < self.minimum:
            raise InputError(
                f"secure sums need {self.minimum} distinct clients, and a buffer of {opening.buffer} from "
                f"{opening.population} clients never has them: raise the buffer or lower the minimum."
            )
        shared = Shared(self, opening)
        shared.terms(1)
        return shared


class Shared:
    """One run's secure sums."""

    def __init__(self, secure: Secure, opening: Opening) -> None:
        self._secure = secure
        self._opening = opening
        start = 0 if opening.algorithm.warmup() is None else min(opening.population, _START)
        self._most = max(opening.buffer, start)
        self._run = secrets.token_bytes(16)
        self._servers: tuple[Terms, Leader, Helper] | None = None  # None until uploads have a length

    @property
    def largest(self) -> float:
        return self.terms(1).largest

    def terms(self, length: int) -> Terms:
        """For uploads of that many numbers."""
        secure, weights = self._secure, self._opening.weights
        weight_bits = 0 if isinstance(weights, Equal) else secure.weight_bits
        return Terms(self._run, length, self._most, secure.minimum, secure.bits, weight_bits, weights)

    def total(self, payload: Tree, tasks: Sequence[Task], cohort: Cohort) -> Tree:
        ages = [cohort.version - task.version for task in tasks]
        if list(cohort.weights) != [self._opening.weights(age) for age in ages]:
            raise InputError("secure sums weigh reports by the run's own staleness weights alone.")
        leaves = trees.leaves(payload)
        stacks = [_numbers(leaf).reshape(len(tasks), -1) for leaf in leaves]
        length = sum(stack.shape[1] for stack in stacks)
        terms, leader, helper = self._servers or self._begin(length)
        key = helper.public_key
        try:
            for row, task in enumerate(tasks):
                parts = [stack[row] for stack in stacks]
                leader.take(report(parts, task, terms, key, self._rounding(task)))
            residues = leader.total(tasks, cohort.version)
        finally:
            leader.forget(tasks)
        sums = []
        start = 0
        for leaf, stack in zip(leaves, stacks, strict=True):
            part = decode(residues[start : start + stack.shape[1]], terms.unit)
            dtype = leaf.dtype if leaf.is_floating_point() else torch.get_default_dtype()
            sums.append(part.to(leaf.device, dtype).view(leaf.shape[1:]))
            start += stack.shape[1]
        return trees.rebuild(trees.shape(payload), sums)

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

    def _rounding(self, task: Task) -> torch.Generator | None:
        if not self._secure.stochastic:
            return None
        seed = draws.torch_seed(self._opening.seed, "secure rounding", task.client, task.visit)
        return torch.Generator().manual_seed(seed)


def _numbers(leaf: Tensor) -> Tensor:
    """On the CPU, in a dtype that fixed point is exact in."""
    wide = torch.float64 if leaf.dtype == torch.float64 or not leaf.is_floating_point() else torch.float32
    return leaf.detach().to("cpu", wide)
