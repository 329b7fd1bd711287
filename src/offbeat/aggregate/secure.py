"""Secure aggregation of a run: its agreed terms, the sum in one process, and the sum with a remote helper.

In a simulation clients, leader and helper are objects of one process. In a deployment clients encode their
own uploads, and the helper runs on another machine.
"""

import hashlib
import json
import logging
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from offbeat import draws, trees
from offbeat.aggregate.mean import AggregationContext, SecureEncoding
from offbeat.aggregate.uploads import ClippingBounds, NoiseRequest, Payload, SecretShares, probe_upload
from offbeat.algorithms.rates import unwrapped
from offbeat.core import AnyAlgorithm, Cohort, SavedState, Task
from offbeat.errors import InputError, check_whole
from offbeat.privacy.mechanism import fingerprint
from offbeat.privacy.secure.encoding import Report, Residues, decode, make_report
from offbeat.privacy.secure.servers import AggregationHelper, Helper, Leader
from offbeat.privacy.secure.terms import (
    DEFAULT_MINIMUM,
    BindingError,
    HelperNoise,
    MessageError,
    ParticipationError,
    SecureTerms,
    SignatureError,
)
from offbeat.schedule.dispatch import Synchronous
from offbeat.schedule.staleness import Equal, StalenessWeights, parse_weights
from offbeat.trees import Tree

TERM_NUMBERS = ("length", "most", "minimum", "bits", "weight_bits")
TERM_NAMES = ("run", *TERM_NUMBERS, "weights")
_MAX_NUMBER = 1 << 62  # of a whole number
_MAX_FIELDS = 1000  # of the helper's noise
_RUN_PATTERN = re.compile(r"(?:[0-9a-f]{2}){1,255}")
_WEIGHTS_PATTERN = re.compile(r"[a-z]{1,20}(?::[0-9.e+-]{1,30}){0,2}")


def write_terms(terms: SecureTerms) -> dict[str, Any]:
    """The terms as JSON, for `read_terms`."""
    numbers = (terms.length, terms.max_reports, terms.minimum, terms.bits, terms.weight_bits)
    return {
        "run": terms.run.hex(),
        **dict(zip(TERM_NUMBERS, numbers, strict=True)),
        "weights": terms.rule,
    }


def read_terms(given: dict[str, Any]) -> SecureTerms:
    """The terms in an untrusted message, checked; other keys are ignored."""
    for name in TERM_NUMBERS:
        number = given.get(name)
        if type(number) is not int or not 0 <= number < _MAX_NUMBER:
            raise InputError(f"the terms of a secure sum need a whole number as {name}.")
    run, rule = given.get("run"), given.get("weights")
    if type(run) is not str or not _RUN_PATTERN.fullmatch(run):
        raise InputError("the terms of a secure sum need the name of a run, in hexadecimal digits.")
    if type(rule) is not str or not _WEIGHTS_PATTERN.fullmatch(rule):
        raise InputError("the terms of a secure sum need a rule of weights, such as polynomial:0.5.")
    weigh = parse_weights(rule)
    if str(weigh) != rule:
        raise InputError(f"the terms of a secure sum have weights {rule}, which are written {weigh}.")
    length, most, minimum, bits, weight_bits = (given[name] for name in TERM_NUMBERS)
    return SecureTerms(bytes.fromhex(run), length, most, minimum, bits, weight_bits, weigh, rule)


def write_noise(noise: HelperNoise | None) -> dict[str, Any] | None:
    """The noise as JSON, for `read_noise`."""
    if noise is None:
        return None
    return noise._asdict() | {"fields": [list(field) for field in noise.fields]}


def read_noise(given: Any) -> HelperNoise | None:
    """The helper's noise in an untrusted message."""
    if given is None:
        return None
    if type(given) is not dict or set(given) != set(HelperNoise._fields) or type(given["fields"]) is not list:
        raise InputError("the helper's noise needs fields, max_participations and min_separation.")
    fields, *bounds = (given[name] for name in HelperNoise._fields)
    if not all(type(bound) is int and 1 <= bound < _MAX_NUMBER for bound in bounds):
        raise InputError("the helper's noise covers whole numbers of participations and server steps.")
    pairs = [tuple(field) for field in fields if type(field) is list and len(field) == 2]
    if len(pairs) != len(fields) or not pairs or len(pairs) > _MAX_FIELDS:
        raise InputError("each field of the helper's noise needs a length and a standard deviation.")
    if not all(type(count) is int and type(deviation) is float for count, deviation in pairs):
        raise InputError("each field of the helper's noise needs a length and a standard deviation.")
    return HelperNoise(tuple(pairs), *bounds)


def noise_terms(terms: SecureTerms, noise: NoiseRequest | None) -> SecureTerms:
    """The terms of a sum to which the helper adds this noise."""
    if noise is None:
        return terms
    fields = tuple((count, deviation / terms.unit) for count, deviation in noise.fields)
    return replace(terms, noise=HelperNoise(fields, noise.max_participations, noise.min_separation))


def clipping_digest(bounds: Mapping[str, float] | None, moving: Sequence[str] = ()) -> str:
    """The value of `SecureTerms.clipping` for these bounds; empty if clients do not clip."""
    if bounds is None:
        return ""
    stated = [sorted((name, float(bound).hex()) for name, bound in bounds.items()), list(moving)]
    return hashlib.sha256(json.dumps(stated).encode()).hexdigest()


def weights_text(weights: StalenessWeights) -> str:
    """The name of these weights, for the other parties."""
    try:
        if parse_weights(str(weights)) == weights:
            return str(weights)
    except InputError:
        pass
    raise InputError(
        "secure aggregation over a network needs weights that have a name: use constant, polynomial or hinge."
    )


_ASSUMED_STALENESS = 100  # that updates may have in a run without a limit
_MAX_START_CHUNK = 128  # more clients than the loop collects at once in a full-participation start


@dataclass(frozen=True)
class Secure:
    """Two servers add secret shares; the docstring of `offbeat.privacy.secure` says what that protects.

    A sum is exact in fixed point of `bits` fractional bits, and refused if it could overflow or if
    (sum w)^2 / sum w^2 over the weights w of its clients is below `minimum`; with equal weights this is the
    number of distinct clients. A client that is in a buffer twice counts once, and both its reports are
    added. Staleness weights are rounded to multiples of 2^-weight_bits.

    Attributes:
        minimum: The fewest clients in a sum.
        bits: The fractional bits of the fixed-point numbers.
        stochastic: Whether numbers are rounded up or down at random, so that errors cancel on average.
        weight_bits: The bits of weights that are not 1.
    """

    minimum: int = DEFAULT_MINIMUM
    bits: int = 16
    stochastic: bool = False
    weight_bits: int = 8

    def __post_init__(self) -> None:
        for name in ("minimum", "bits", "weight_bits"):
            check_whole(f"{name} of secure sums", getattr(self, name), None)
        # checks all that can be checked without a run
        SecureTerms(b"?", 1, self.minimum, self.minimum, self.bits, self.weight_bits)

    @property
    def secret(self) -> bool:
        return True

    @property
    def rounding(self) -> float:
        return 2.0**-self.bits if self.stochastic else 2.0 ** -(self.bits + 1)

    def check(self, context: AggregationContext) -> None:
        """Reject a run whose buffers never have enough clients."""
        clients = min(context.buffer, context.population)
        if clients < self.minimum:
            raise InputError(
                f"secure aggregation needs {self.minimum} distinct clients, and a buffer of {context.buffer} "
                f"from {context.population} clients never has them: raise the buffer or lower the minimum."
            )
        reach = int(min(context.max_staleness, _ASSUMED_STALENESS))
        stale = not isinstance(context.dispatch, Synchronous)
        if stale and clients == self.minimum and context.weights(reach) != context.weights(0):
            raise InputError(
                f"updates of different staleness have different weights, so a buffer of {clients} clients "
                f"hides each of them less than {self.minimum} clients of equal weight would: raise the "
                "buffer, lower the minimum, set a maximum staleness of 0, or use constant weights."
            )

    def open(self, context: AggregationContext) -> "SecureSum":
        self.check(context)
        shared = SecureSum(self, context)
        shared.terms(1)
        return shared


class SecureSum:
    """The secure sums of one run, in one process."""

    def __init__(self, secure: Secure, context: AggregationContext) -> None:
        self._secure = secure
        self._context = context
        self._run = secrets.token_bytes(16)
        self._servers: tuple[SecureTerms, Helper] | None = None  # None until uploads have a length

    @property
    def largest(self) -> float:
        return self.terms(1).largest

    def terms(self, length: int) -> SecureTerms:
        """The terms for uploads of `length` numbers."""
        return agree_terms(self._secure, self._context, self._run, length)

    def piece(self, numbers: int) -> None:
        """None: the reports of a server step are one sum, since the difference of two could reveal one."""

    def secure_encoding(self, clip: ClippingBounds | None = None) -> None:
        """None: the uploads are encoded in this process."""

    def total(
        self,
        payload: Tree,
        tasks: Sequence[Task],
        cohort: Cohort,
        dtype: torch.dtype | None = None,
        noise: NoiseRequest | None = None,
        onto: Tree | None = None,
    ) -> Tree:
        check_weights(self._context.weights, tasks, cohort)
        stacks = [to_fixed_point_input(leaf).reshape(len(tasks), -1) for leaf in trees.leaves(payload)]
        length = sum(stack.shape[1] for stack in stacks)
        agreed, helper = self._servers or self._begin(length)
        helper.terms = terms = noise_terms(agreed, noise)
        if noise is not None:
            # one label for each sum: a step that is repeated has the same noise only for the same sum
            sums = [] if noise.seeded else [stack.double().sum(0) for stack in stacks]
            helper.noise_key = noise.key
            helper.noise_label = f"{cohort.version} {list(tasks)}".encode() + fingerprint(noise.key, sums)
        leader, key = Leader(terms, helper), helper.public_key
        try:
            for row, task in enumerate(tasks):
                parts = [stack[row] for stack in stacks]
                draw = rounding_generator(self._context.seed, task) if self._secure.stochastic else None
                leader.take(make_report(parts, task, terms, key, draw))
            residues = leader.total(tasks, cohort.version)
        finally:
            leader.forget(tasks)
        layout = PayloadLayout.of(trees.map(lambda leaf: leaf[0], payload))
        return unflatten_sum(residues, terms.unit, layout, dtype)

    def save(self) -> SavedState:
        if self._servers is None:
            return SavedState({}, {})
        terms, helper = self._servers
        return SavedState({"run": terms.run.hex(), "length": terms.length, "counted": helper.save()}, {})

    def load(self, saved: SavedState) -> None:
        if saved.facts:
            self._run = bytes.fromhex(saved.facts["run"])
            _, helper = self._begin(saved.facts["length"])
            helper.load(saved.facts["counted"])

    def _begin(self, length: int) -> tuple[SecureTerms, Helper]:
        """Create the servers, with a new key, since no sealed seed is stored longer than a sum takes."""
        terms = self.terms(length)
        self._servers = (terms, Helper(terms, X25519PrivateKey.generate()))
        return self._servers


class TensorSpec(NamedTuple):
    """Shape, dtype and device of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class PayloadLayout(NamedTuple):
    """The structure of one client's payload."""

    tree: trees.Structure
    leaves: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, payload: Tree) -> Self:
        leaves = trees.leaves(payload)
        return cls(
            trees.structure(payload),
            tuple(TensorSpec(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves),
        )


def agree_terms(
    secure: Secure, context: AggregationContext, run: bytes, length: int, rule: str = ""
) -> SecureTerms:
    """The terms of a run for uploads of `length` numbers."""
    start = 0 if context.algorithm.warmup() is None else min(context.population, _MAX_START_CHUNK)
    weight_bits = 0 if isinstance(context.weights, Equal) else secure.weight_bits
    most = max(context.buffer, start)
    return SecureTerms(run, length, most, secure.minimum, secure.bits, weight_bits, context.weights, rule)


def check_weights(weights: StalenessWeights, tasks: Sequence[Task], cohort: Cohort) -> None:
    """Reject a cohort with other weights than those of the terms."""
    if list(cohort.weights) != [weights(cohort.version - task.version) for task in tasks]:
        raise InputError("secure aggregation uses only the staleness weights of the run.")


def unflatten_sum(
    residues: Residues, unit: float, layout: PayloadLayout, dtype: torch.dtype | None = None
) -> Tree:
    """The sum of flat payloads as a tree; float64 holds it exactly, other dtypes round it."""
    sums = []
    start = 0
    for shape, own, device in layout.leaves:
        part = decode(residues[start : start + shape.numel()], unit)
        wide = own if own.is_floating_point else torch.get_default_dtype()
        sums.append(part.to(device, dtype or wide).view(shape))
        start += shape.numel()
    return trees.unflatten(layout.tree, sums)


def rounding_generator(seed: int, task: Task) -> torch.Generator:
    """The generator for the random rounding of one report."""
    own = draws.torch_seed(seed, "secure rounding", task.client, task.visit)
    return torch.Generator().manual_seed(own)


def to_fixed_point_input(leaf: Tensor) -> Tensor:
    """The leaf on the CPU, in a dtype from which the conversion to fixed point is exact."""
    wide = torch.float64 if leaf.dtype == torch.float64 or not leaf.is_floating_point() else torch.float32
    return leaf.detach().to("cpu", wide)


_LOG = logging.getLogger(__name__)


class HelperInfo(NamedTuple):
    """What a helper reports about itself."""

    key: bytes  # to which clients seal their seeds
    signed: bool  # whether it adds only reports that sites have signed
    minimum: int = DEFAULT_MINIMUM  # the least minimum of clients in a sum that it accepts
    sums: int = 0  # that it has returned, in all runs


class ExaminingHelper(AggregationHelper, Protocol):
    """A remote helper for one run; calls wait while it is down."""

    def examine(self, task: Task, sealed: bytes, signature: bytes) -> None:
        """Raise for a report that could not be added; nothing is counted."""
        ...


class HelperConnection(Protocol):
    """A connection to a helper."""

    def known(self) -> HelperInfo: ...

    def under(self, terms: SecureTerms) -> ExaminingHelper: ...


@dataclass(frozen=True)
class RemoteSecure:
    """Secure aggregation with a remote helper.

    The helper counts reports under the name of the run, which is unique and never changes.
    """

    secure: Secure
    run: bytes = field(repr=False)
    helper: HelperConnection = field(repr=False)
    signed: bool = False  # reject a helper that would add unsigned reports

    @property
    def secret(self) -> bool:
        return True

    @property
    def rounding(self) -> float:
        return self.secure.rounding

    def open(self, context: AggregationContext) -> "RemoteSecureSum":
        self.secure.check(context)
        dispatch = context.dispatch
        together = isinstance(dispatch, Synchronous) and dispatch.cohort == context.buffer
        if context.answers and not together and context.max_staleness > 0:
            raise InputError(
                "clients clip their own uploads here, so stale updates would have an earlier adaptive bound: "
                "use fixed bounds, a maximum staleness of 0, or a synchronous cohort as large as the buffer."
            )
        methods = (context.algorithm, context.algorithm.warmup())
        layouts = {
            _probe_layout(method, context, version)
            for method in methods
            if method is not None
            for version in (0, 1)
        }
        if len(layouts) > 1:
            raise InputError(
                "secure aggregation needs uploads of one form, and "
                f"{type(unwrapped(context.algorithm)).__name__} has {len(layouts)}: use another method."
            )
        return RemoteSecureSum(self, context, layouts.pop())


class RemoteSecureSum:
    """The secure sums of one run, with a remote helper."""

    def __init__(self, remote: RemoteSecure, context: AggregationContext, layout: PayloadLayout) -> None:
        self._remote = remote
        self._weights = context.weights
        self._layout = layout
        length = sum(leaf.shape.numel() for leaf in layout.leaves)
        self._terms = agree_terms(remote.secure, context, remote.run, length, weights_text(context.weights))
        self._info: HelperInfo | None = None  # None: the helper was not contacted yet
        self._before: str | None = None  # the key to which earlier reports were sealed
        self._sums = 0  # that the helper had returned when it was last contacted

    @property
    def largest(self) -> float:
        return self._terms.largest

    def piece(self, numbers: int) -> None:
        """None: the reports of a server step are one sum, which the helper counts as one."""

    def secure_encoding(self, clip: ClippingBounds | None = None) -> SecureEncoding:
        """The terms of these sums, as clients receive them."""
        known, terms = self._contact(), self._terms_of(clip)
        bounds = None if clip is None else clip.bounds.items()
        facts = write_terms(self._terms) | {
            "stochastic": self._remote.secure.stochastic,
            "key": known.key.hex(),
            "signed": known.signed,
            "bounds": bounds and {name: None if math.isinf(bound) else bound for name, bound in bounds},
            "moving": [] if clip is None else list(clip.moving),
            "noise": write_noise(terms.noise),
        }
        return SecureEncoding(facts, self._remote.helper.under(terms).examine)

    def total(
        self,
        payload: Tree,
        tasks: Sequence[Task],
        cohort: Cohort,
        dtype: torch.dtype | None = None,
        noise: NoiseRequest | None = None,
        onto: Tree | None = None,
    ) -> Tree:
        if not isinstance(payload, SecretShares):
            raise InputError(
                "the uploads are not encoded for secure aggregation with a remote helper: use a deployment."
            )
        check_weights(self._weights, tasks, cohort)
        self._contact()
        terms = self._terms_of(payload.clip)
        leader = Leader(terms, self._remote.helper.under(terms))
        for row, task in enumerate(tasks):
            leader.take(_report_of(payload, row, task))
        residues = _add_reports(leader, list(tasks), cohort.version)
        return unflatten_sum(residues, self._terms.unit, self._layout, dtype)

    def save(self) -> SavedState:
        key = self._info.key.hex() if self._info else self._before
        facts = {"run": self._terms.run.hex(), "length": self._terms.length, "key": key, "sums": self._sums}
        return SavedState(facts, {})

    def load(self, saved: SavedState) -> None:
        facts = saved.facts
        if (facts["run"], facts["length"]) != (self._terms.run.hex(), self._terms.length):
            raise InputError(
                "the checkpoint's secure aggregation is of another run or of uploads of another length: "
                "resume the run in its own folder."
            )
        self._before, self._info = facts["key"], None
        self._sums = facts.get("sums", 0)

    def _contact(self) -> HelperInfo:
        """What the helper reports about itself, checked once."""
        if self._info is None:
            known = self._remote.helper.known()
            if self._before not in (None, known.key.hex()):
                raise InputError(
                    "the helper has another key than before, so it cannot open what clients sent: "
                    "start it with the key and the store that it had."
                )
            if known.sums < self._sums:
                raise InputError(
                    f"the helper knows of {known.sums} sums, and it had given {self._sums} away before: it "
                    "was restored from a backup, and reports could be summed twice; restore its newest store."
                )
            self._sums = known.sums
            if self._remote.signed and not known.signed:
                raise InputError(
                    "the helper does not ask for signatures: start it with the sites' public keys, "
                    "or say that reports need not be signed."
                )
            if self._terms.minimum < known.minimum:
                raise InputError(
                    f"the helper adds the reports of at least {known.minimum} clients, and these sums may be "
                    f"of {self._terms.minimum}: raise the minimum."
                )
            self._info = known
        return self._info

    def _terms_of(self, clip: ClippingBounds | None) -> SecureTerms:
        """The terms with this clipping and noise, to which reports are bound."""
        if clip is None:
            return self._terms
        return noise_terms(
            replace(self._terms, clipping=clipping_digest(clip.bounds, clip.moving)), clip.noise
        )


def _add_reports(leader: Leader, tasks: list[Task], version: int) -> Residues:
    """The sum of the reports that can be added; the others count as zeros.

    Reports are examined when they arrive, so a report is left out only if the helper's keys changed since.
    """
    while True:
        try:
            return leader.total(tasks, version)
        except (BindingError, MessageError, ParticipationError, SignatureError) as refusal:
            rest = [task for task in tasks if task not in refusal.tasks]
            if len(rest) == len(tasks):
                raise
            _LOG.warning("a report is left out of a secure sum: %s", refusal)
            tasks = rest


def _report_of(shares: SecretShares, row: int, task: Task) -> Report:
    sealed, signature = (
        b"" if part is None else part[row].cpu().numpy().tobytes()
        for part in (shares.sealed, shares.signature)
    )
    return Report(task, shares.share[row].cpu().contiguous().numpy().view("uint32"), sealed, signature)


def _probe_layout(algorithm: AnyAlgorithm, context: AggregationContext, version: int) -> PayloadLayout:
    """The layout of one client's payload, found by a trial of the algorithm."""
    payload = upload = probe_upload(algorithm, context.x, version)
    if context.answers is not None:
        first = trees.leaves(upload)[0]
        payload = Payload(upload, torch.zeros(context.answers).to(first) if context.answers else ())
    return PayloadLayout.of(payload)
