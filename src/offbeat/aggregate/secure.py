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
    """What `read_terms` reads."""
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
    """What `read_noise` reads."""
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
    """What `Terms.clipping` is where clients clip to these bounds; empty where they do not clip."""
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


_ASSUMED_STALENESS = 100  # versions, which a run without a limit should be prepared for
_MAX_START_CHUNK = 128  # more clients than the loop ever hands over at once in a full-participation start


@dataclass(frozen=True)
class Secure:
    """Two servers add secret shares; `offbeat.privacy.secure` says what that protects and what not.

    A sum is exact in fixed point of `bits` fractional bits, and refused where it could overflow or
    where (sum w)^2 / sum w^2 over the weights w of its clients is below `minimum`; with equal weights
    this is the number of distinct clients. A client that is in a buffer twice is one of them, and adds
    both its reports. Weights that fade are rounded to multiples of 2^-weight_bits.

    Attributes:
        minimum: The fewest clients in a sum.
        bits: The fractional bits of the fixed-point numbers.
        stochastic: Whether numbers are rounded up or down at random, so that errors cancel on average.
        weight_bits: The bits of weights that are not 1.
    """

    minimum: int = DEFAULT_MINIMUM
    bits: int = 16
    stochastic: bool = False  # round up or down at random, so that errors cancel on average
    weight_bits: int = 8  # not used where all weights are 1

    def __post_init__(self) -> None:
        for name in ("minimum", "bits", "weight_bits"):
            check_whole(f"{name} of secure sums", getattr(self, name), None)
        # All that can be wrong with these numbers alone, before there is a run.
        SecureTerms(b"?", 1, self.minimum, self.minimum, self.bits, self.weight_bits)

    @property
    def secret(self) -> bool:
        return True

    @property
    def rounding(self) -> float:
        return 2.0**-self.bits if self.stochastic else 2.0 ** -(self.bits + 1)

    def check(self, opening: AggregationContext) -> None:
        """Refuse a run whose buffers never have enough clients."""
        here = min(opening.buffer, opening.population)
        if here < self.minimum:
            raise InputError(
                f"secure aggregation needs {self.minimum} distinct clients, and a buffer of {opening.buffer} "
                f"from {opening.population} clients never has them: raise the buffer or lower the minimum."
            )
        reach = int(min(opening.max_staleness, _ASSUMED_STALENESS))
        stale = not isinstance(opening.dispatch, Synchronous)
        if stale and here == self.minimum and opening.weights(reach) != opening.weights(0):
            raise InputError(
                f"updates of different staleness have different weights, so that a buffer of {here} clients "
                f"hides each of them less than {self.minimum} clients of equal weight would: raise the "
                "buffer, lower the minimum, set a limit of 0, or use constant weights."
            )

    def open(self, opening: AggregationContext) -> "SecureSum":
        self.check(opening)
        shared = SecureSum(self, opening)
        shared.terms(1)
        return shared


class SecureSum:
    """The secure sums of one run, in one process."""

    def __init__(self, secure: Secure, opening: AggregationContext) -> None:
        self._secure = secure
        self._opening = opening
        self._run = secrets.token_bytes(16)
        self._servers: tuple[SecureTerms, Helper] | None = None  # None until uploads have a length

    @property
    def largest(self) -> float:
        return self.terms(1).largest

    def terms(self, length: int) -> SecureTerms:
        """For uploads of that many numbers."""
        return agree_terms(self._secure, self._opening, self._run, length)

    def piece(self, numbers: int) -> None:
        """The reports of a server step are one sum: the difference of two could reveal who is in them."""

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
        check_weights(self._opening.weights, tasks, cohort)
        stacks = [to_fixed_point_input(leaf).reshape(len(tasks), -1) for leaf in trees.leaves(payload)]
        length = sum(stack.shape[1] for stack in stacks)
        agreed, helper = self._servers or self._begin(length)
        helper.terms = terms = noise_terms(agreed, noise)
        if noise is not None:
            # One label for one sum: the noise of a step that is repeated is the same for the same sum alone.
            sums = [] if noise.seeded else [stack.double().sum(0) for stack in stacks]
            helper.noise_key = noise.key
            helper.noise_label = f"{cohort.version} {list(tasks)}".encode() + fingerprint(noise.key, sums)
        leader, key = Leader(terms, helper), helper.public_key
        try:
            for row, task in enumerate(tasks):
                parts = [stack[row] for stack in stacks]
                draw = rounding_generator(self._opening.seed, task) if self._secure.stochastic else None
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
        """With a new key: no sealed seed outlives a sum here."""
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
    secure: Secure, opening: AggregationContext, run: bytes, length: int, rule: str = ""
) -> SecureTerms:
    """What clients and both servers keep to in a run, for uploads of that many numbers."""
    start = 0 if opening.algorithm.warmup() is None else min(opening.population, _MAX_START_CHUNK)
    weight_bits = 0 if isinstance(opening.weights, Equal) else secure.weight_bits
    most = max(opening.buffer, start)
    return SecureTerms(run, length, most, secure.minimum, secure.bits, weight_bits, opening.weights, rule)


def check_weights(weights: StalenessWeights, tasks: Sequence[Task], cohort: Cohort) -> None:
    """Refuse a cohort with other weights than were agreed on."""
    if list(cohort.weights) != [weights(cohort.version - task.version) for task in tasks]:
        raise InputError("secure aggregation weighs reports by the run's own staleness weights alone.")


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
    """The draws that round one report up or down."""
    own = draws.torch_seed(seed, "secure rounding", task.client, task.visit)
    return torch.Generator().manual_seed(own)


def to_fixed_point_input(leaf: Tensor) -> Tensor:
    """On the CPU, in a dtype that fixed point is exact in."""
    wide = torch.float64 if leaf.dtype == torch.float64 or not leaf.is_floating_point() else torch.float32
    return leaf.detach().to("cpu", wide)


_LOG = logging.getLogger(__name__)


class HelperInfo(NamedTuple):
    """What a helper reports about itself."""

    key: bytes  # that clients seal to
    signed: bool  # whether it adds only what sites have signed
    minimum: int = DEFAULT_MINIMUM  # clients in a sum, below which it serves no run
    sums: int = 0  # that it has given away, in all runs


class ExaminingHelper(AggregationHelper, Protocol):
    """A remote helper for one run; calls wait while it is down."""

    def examine(self, task: Task, sealed: bytes, signature: bytes) -> None:
        """Refuse a report that could not be added; nothing is counted."""
        ...


class HelperConnection(Protocol):
    """A connection to a helper."""

    def known(self) -> HelperInfo: ...

    def under(self, terms: SecureTerms) -> ExaminingHelper: ...


@dataclass(frozen=True)
class RemoteSecure:
    """Secure aggregation with these settings, and a helper that is reached over a network.

    The run's name is what the helper counts under: a new one for each run, and the same for ever after.
    """

    secure: Secure
    run: bytes = field(repr=False)
    helper: HelperConnection = field(repr=False)
    signed: bool = False  # refuse a helper that would add what no known site has signed

    @property
    def secret(self) -> bool:
        return True

    @property
    def rounding(self) -> float:
        return self.secure.rounding

    def open(self, opening: AggregationContext) -> "RemoteSecureSum":
        self.secure.check(opening)
        dispatch = opening.dispatch
        together = isinstance(dispatch, Synchronous) and dispatch.cohort == opening.buffer
        if opening.answers and not together and opening.max_staleness > 0:
            raise InputError(
                "clients clip by themselves here, so a bound that moves would be another one for stale "
                "updates: fix the bounds, use a limit of 0, or a synchronous cohort as large as the buffer."
            )
        methods = (opening.algorithm, opening.algorithm.warmup())
        layouts = {
            _probe_layout(method, opening, version)
            for method in methods
            if method is not None
            for version in (0, 1)
        }
        if len(layouts) > 1:
            raise InputError(
                "secure aggregation needs uploads of one form, and "
                f"{type(unwrapped(opening.algorithm)).__name__} has {len(layouts)}: use another method."
            )
        return RemoteSecureSum(self, opening, layouts.pop())


class RemoteSecureSum:
    """The secure sums of one run, with a remote helper."""

    def __init__(self, distant: RemoteSecure, opening: AggregationContext, layout: PayloadLayout) -> None:
        self._distant = distant
        self._weights = opening.weights
        self._layout = layout
        length = sum(leaf.shape.numel() for leaf in layout.leaves)
        self._terms = agree_terms(distant.secure, opening, distant.run, length, weights_text(opening.weights))
        self._known: HelperInfo | None = None  # until somebody asks
        self._before: str | None = None  # the key that earlier reports were sealed to
        self._sums = 0  # that the helper had given away when it was asked last

    @property
    def largest(self) -> float:
        return self._terms.largest

    def piece(self, numbers: int) -> None:
        """The reports of a server step are one sum, and the helper counts it as one."""

    def secure_encoding(self, clip: ClippingBounds | None = None) -> SecureEncoding:
        """The terms of these sums, as clients receive them."""
        known, terms = self._meet(), self._terms_of(clip)
        bounds = None if clip is None else clip.bounds.items()
        facts = write_terms(self._terms) | {
            "stochastic": self._distant.secure.stochastic,
            "key": known.key.hex(),
            "signed": known.signed,
            "bounds": bounds and {name: None if math.isinf(bound) else bound for name, bound in bounds},
            "moving": [] if clip is None else list(clip.moving),
            "noise": write_noise(terms.noise),
        }
        return SecureEncoding(facts, self._distant.helper.under(terms).examine)

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
                "these sums are of what clients hid by themselves: use an engine of a deployment."
            )
        check_weights(self._weights, tasks, cohort)
        self._meet()
        terms = self._terms_of(payload.clip)
        leader = Leader(terms, self._distant.helper.under(terms))
        for row, task in enumerate(tasks):
            leader.take(_report_of(payload, row, task))
        residues = _add_reports(leader, list(tasks), cohort.version)
        return unflatten_sum(residues, self._terms.unit, self._layout, dtype)

    def save(self) -> SavedState:
        key = self._known.key.hex() if self._known else self._before
        facts = {"run": self._terms.run.hex(), "length": self._terms.length, "key": key, "sums": self._sums}
        return SavedState(facts, {})

    def load(self, saved: SavedState) -> None:
        facts = saved.facts
        if (facts["run"], facts["length"]) != (self._terms.run.hex(), self._terms.length):
            raise InputError(
                "the checkpoint's secure aggregation is of another run or of uploads of another length: "
                "go on in the folder that the run was begun in."
            )
        self._before, self._known = facts["key"], None
        self._sums = facts.get("sums", 0)

    def _meet(self) -> HelperInfo:
        if self._known is None:
            known = self._distant.helper.known()
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

    def _terms_of(self, clip: ClippingBounds | None) -> SecureTerms:
        """The terms of reports with this clipping and noise: no others can be opened under them."""
        if clip is None:
            return self._terms
        return noise_terms(
            replace(self._terms, clipping=clipping_digest(clip.bounds, clip.moving)), clip.noise
        )


def _add_reports(leader: Leader, tasks: list[Task], version: int) -> Residues:
    """Of the reports that can be added; one that cannot counts as a report of zeros.

    Reports are examined when they come in, so that this is for a helper whose keys have changed since.
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


def _probe_layout(algorithm: AnyAlgorithm, opening: AggregationContext, version: int) -> PayloadLayout:
    """Of one client's payload, found by trying the algorithm."""
    payload = upload = probe_upload(algorithm, opening.x, version)
    if opening.answers is not None:
        first = trees.leaves(upload)[0]
        payload = Payload(upload, torch.zeros(opening.answers).to(first) if opening.answers else ())
    return PayloadLayout.of(payload)
