"""Means under differential privacy: uploads are clipped, sums get noise, and releases are counted.

Sums and noise are in double precision whatever the dtype of the model, to which the result is rounded last:
otherwise the noise could be lost in the rounding of a large sum.

The unit of privacy is a client: neighbouring runs differ by one client's contributions. Nothing here makes
the clients' memory agree with what the server received: a method whose server adds up changes of clients'
memory (control variates) gets clipped and noisy changes, so its mean drifts from that of the clients.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from offbeat import trees
from offbeat.aggregate.mean import (
    AggregationContext,
    PlainSum,
    PrivacyCost,
    RunningSum,
    SecureEncoding,
    Summation,
)
from offbeat.aggregate.uploads import (
    ClippingBounds,
    NoiseRequest,
    Payload,
    SecretShares,
    clip_uploads,
    probe_upload,
    server_reads_staleness,
    upload_fields,
)
from offbeat.algorithms.rates import unwrapped
from offbeat.core import AnyAlgorithm, Cohort, SavedState, Task, traits_of
from offbeat.errors import InputError, describe, unknown_name
from offbeat.privacy import clipping
from offbeat.privacy.accountant import Accountant, PldAccountant, RdpAccountant, check_delta, check_epsilon
from offbeat.privacy.correlated import IndependentNoise, NoiseCorrelation, NoiseStream
from offbeat.privacy.ledger import (
    NOISE_SOURCES,
    Ledger,
    PrivacyAccounting,
    PrivacyBudget,
    ReleaseTotals,
    amplification_refused,
    corrected_end,
    noise_statement,
    privacy_statement,
)
from offbeat.privacy.mechanism import (
    AdaptiveClipping,
    GaussianMechanism,
    check_bounds,
    fingerprint,
    noise_shares,
    secret_key,
    seeded_key,
    subkey,
)
from offbeat.privacy.secure.terms import NOISE_ROOM
from offbeat.schedule.availability import Always
from offbeat.schedule.dispatch import Dispatch, Phases, Poisson, Queues, TimedDispatch, TimedPoisson
from offbeat.schedule.participation import Participation
from offbeat.schedule.staleness import Equal
from offbeat.trees import Tree


class PrivatePlan(NamedTuple):
    """What follows from the settings of a private run when it is opened."""

    mechanism: GaussianMechanism
    spending: PrivacyAccounting
    terms: str
    budget: PrivacyBudget | None
    epsilon: float | None  # of the budget
    start: bool  # whether every client contributes before the first server step
    population: int
    rounding: float  # of each number when uploads are summed
    seed: int | None  # of the noise; None: it has a secret key
    dtype: torch.dtype  # of the model, to which releases are rounded
    source: str  # of the noise: server, helper or both
    sizes: Mapping[str, int]  # numbers of each field of an upload


class PrivateAggregation:
    """The private aggregation of one run, with its ledger."""

    private = True

    def __init__(self, plan: PrivatePlan, bounds: dict[str, float], summing: RunningSum) -> None:
        self.bounds = bounds  # those of the next release
        self._plan, self._mechanism, self._spending = plan, plan.mechanism, plan.spending
        self._ledger = Ledger(plan.population, plan.spending.max_participations, plan.spending.min_separation)
        self._summing = summing
        self._unlock(secret_key() if plan.seed is None else seeded_key(plan.seed))
        self._known: tuple[ReleaseTotals, float, float | None] | None = None  # the last epsilons computed

    def piece(self, numbers: int) -> int | None:
        return self._summing.piece(numbers)

    def collect(self, uploads: Tree, tasks: Sequence[Task], cohort: Cohort, onto: Tree | None = None) -> Tree:
        if not all(0 <= weight <= 1 for weight in cohort.weights):
            raise InputError("staleness weights above 1 would outgrow the bounds: use lower ones.")
        clip = self._clip
        if not isinstance(uploads, SecretShares):
            payload: Tree = clip_uploads(uploads, clip.bounds, clip.moving)
        elif clip.moving and any(cohort.staleness):
            raise InputError("clients that clip by themselves knew other bounds than those of this step.")
        else:
            payload = uploads._replace(clip=clip)
        total = self._summing.total(payload, tasks, cohort, torch.float64, clip.noise, onto)
        if not self._starting:
            self._ledger.contribute([task.client for task in tasks])
        return total

    def release(self, total: Payload, cohort: Cohort) -> Tree:
        starting = self._starting
        stream, step = (self._first, 0) if starting else (self._stream, self._ledger.tally.steps)
        noised = total if self._plan.source == "helper" else self._noise(total, stream, step)
        if starting:
            self._ledger.begin()
        else:
            self._ledger.release()
        if self._mechanism.adaptive is not None:
            for name, answer in zip(self._mechanism.moving, noised.answers.tolist(), strict=True):
                bound = self.bounds[name]
                moved = self._mechanism.adaptive.move(bound, answer, sum(cohort.weights))
                self.bounds[name] = min(moved, self._summing.largest)
        return trees.map(lambda leaf: (leaf / len(cohort.weights)).to(self._plan.dtype), noised.uploads)

    @property
    def hides_sample(self) -> bool:
        drawn = self._spending.rate is not None or self._spending.sampling is not None
        return drawn and self._plan.seed is None

    def secure_encoding(self) -> SecureEncoding | None:
        """With the bounds of the next release, to which clients clip their uploads."""
        return self._summing.secure_encoding(self._clip)

    def ended(self) -> str | None:
        tally, budget, epsilon = self._ledger.tally, self._plan.budget, self._plan.epsilon
        if budget is None or (tally.steps < budget.steps and tally.largest < budget.contributions):
            return None
        made = f"{tally.steps} server step{'s' if tally.steps != 1 else ''}"
        if tally.steps >= budget.steps:
            return corrected_end(
                f"the privacy budget of epsilon {epsilon:g} is spent after {made}.", self._plan.terms
            )
        times = f"{tally.largest} time{'s' if tally.largest != 1 else ''}"
        return (
            f"the privacy budget of epsilon {epsilon:g} is spent after {made}, "
            f"in which some client contributed {times}."
        )

    def spent(self) -> Callable[[], PrivacyCost]:
        return partial(self._spent, self._ledger.tally)

    def _spent(self, tally: ReleaseTotals) -> PrivacyCost:
        spending = self._spending
        if self._known is None or self._known[0] != tally:
            self._known = tally, spending.epsilon(tally), spending.unamplified(tally)
        _, epsilon, unamplified = self._known
        return PrivacyCost(epsilon, spending.delta, tally.steps + tally.start, self._plan.terms, unamplified)

    def save(self) -> SavedState:
        """With the noise key, which is stored nowhere else."""
        parts = {"ledger": self._ledger.save(), "noise": self._stream.save(), "sum": self._summing.save()}
        facts: dict[str, Any] = {name: part.facts for name, part in parts.items()}
        facts |= {
            "bounds": dict(self.bounds),
            "key": None if self._plan.seed is not None else self._key.hex(),
            "spent": {  # for readers of the checkpoint that do not build the run
                "releases": [list(each) for each in self._spending.releases(self._ledger.tally)],
                "unamplified": self._spending.sampling is not None,
                "delta": self._spending.delta,
                "accountant": self._spending.accountant.name,
                "made": self._ledger.tally.steps + self._ledger.tally.start,
                "terms": self._plan.terms,
            },
        }
        tensors = {
            f"{name}.{key}": value for name, part in parts.items() for key, value in part.tensors.items()
        }
        return SavedState(facts, tensors)

    def load(self, saved: SavedState) -> None:
        facts = saved.facts
        self.bounds = dict(facts["bounds"])
        self._unlock(bytes.fromhex(facts["key"]) if self._plan.seed is None else self._key)
        for name, part in (("ledger", self._ledger), ("noise", self._stream), ("sum", self._summing)):
            own = {key: value for key, value in saved.tensors.items() if key.startswith(f"{name}.")}
            part.load(SavedState(facts[name], {key.removeprefix(f"{name}."): v for key, v in own.items()}))

    @property
    def _starting(self) -> bool:
        """Whether the full-participation start is being collected."""
        return self._plan.start and not self._ledger.tally.start

    @property
    def _clip(self) -> ClippingBounds:
        return ClippingBounds(dict(self.bounds), list(self._mechanism.moving), self._helper_noise())

    def _helper_noise(self) -> NoiseRequest | None:
        """The noise that the helper adds to the next sum."""
        plan, mechanism = self._plan, self._mechanism
        if plan.source == "server":
            return None
        deviations = mechanism.deviations(self.bounds, plan.sizes, plan.rounding)
        fields = [(size, deviations[name]) for name, size in plan.sizes.items()]
        if mechanism.moving:
            fields.append((len(mechanism.moving), mechanism.answer_deviation()))
        most = plan.spending.max_participations
        assert most is not None
        return NoiseRequest(
            tuple(fields),
            most,
            plan.spending.min_separation,
            subkey(self._key, "helper"),
            plan.seed is not None,
        )

    def _unlock(self, key: bytes) -> None:
        self._key = key
        self._first: NoiseStream = IndependentNoise().open(subkey(key, "start"))
        self._stream: NoiseStream = self._spending.correlation.open(subkey(key, "steps"))

    def _noise(self, total: Payload, stream: NoiseStream, step: int) -> Payload:
        """A sum with noise on every number."""
        parts = clipping.fields(total.uploads)
        sizes = {name: trees.numel(part) for name, part in parts.items()}
        deviations = self._mechanism.deviations(self.bounds, sizes, self._plan.rounding)
        numbers = itertools.count()
        # noise that follows from a seed hides nothing, and should be the same for other sums
        mark = b"" if self._plan.seed is not None else fingerprint(self._key, trees.leaves(total))

        def draw(leaf: Tensor, deviation: float) -> Tensor:
            number = next(numbers)
            return leaf + deviation * stream.draw(step, number, leaf, mark) if deviation else leaf

        noised = {
            name: trees.map(lambda leaf, d=deviations[name]: draw(leaf, d), part)
            for name, part in parts.items()
        }
        answers = trees.map(lambda leaf: draw(leaf, self._mechanism.answer_deviation()), total.answers)
        return Payload(clipping.replace(total.uploads, noised), answers)


@dataclass(frozen=True)
class Private:
    """Clipped to `bounds`, with Gaussian noise of multiplier `noise` on the sum of each server step.

    Bounds that the algorithm itself guarantees need not be given. The squares of the shares add up to 1.

    Attributes:
        bounds: Pairs of a field of an upload and its bound.
        noise: The noise multiplier.
        delta: The delta of the guarantee.
        epsilon: The budget that ends the run; None: it is only counted.
        simulate_amplification: Whether to assume amplification by Poisson sampling, which is no guarantee.
        participation: How often a client may contribute.
        shares: The shares of fields in the sensitivity; those left out are the algorithm's own, or equal.
        correlation: How the noise of different steps is correlated.
        accountant: How epsilon is computed: by PLD or RDP.
        adaptive: How the given bounds adapt during the run; None: they are fixed.
        nominal: For simulations: the size of cohort for which the noise is scaled.
        summation: How uploads are summed.
        noise_seed: For simulations: a seed of noise that can be repeated; None: a secret key.
        noise_source: Who adds the noise: server, or under secure aggregation helper or both.
    """

    bounds: tuple[tuple[str, float], ...]
    noise: float
    delta: float
    epsilon: float | None = None
    simulate_amplification: bool = False
    participation: Participation = Participation(min_separation=1)
    shares: tuple[tuple[str, float], ...] = ()
    correlation: NoiseCorrelation = IndependentNoise()
    accountant: Accountant = PldAccountant()
    adaptive: AdaptiveClipping | None = None
    nominal: int | None = None
    summation: Summation = PlainSum()
    noise_seed: int | None = None
    noise_source: str = "server"
    amplified: InitVar[bool] = False  # rejected: it does not hold for a buffer of fixed size

    def __post_init__(self, amplified: bool) -> None:
        if amplified:
            raise amplification_refused(
                "Participation(max_participations=...)", "simulate_amplification=True"
            )
        if not isinstance(self.bounds, tuple):
            raise InputError(
                f"the bounds are {describe(self.bounds)}: give pairs of a field and its bound, such as "
                '(("delta", 1.0),).'
            )
        for name, bound in self.bounds:
            if not bound > 0:
                raise InputError(f"the bound of {name} is {bound}: give a number above 0.")
            if math.isinf(bound) and self.noise:
                raise InputError(f"the bound of {name} is infinite, so no noise hides it: give a finite one.")
        if len(dict(self.bounds)) < len(self.bounds):
            raise InputError("a field has two bounds: give one for each.")
        if not 0 <= self.noise < math.inf:
            raise InputError(f"the noise multiplier is {self.noise}: give a finite number of at least 0.")
        check_delta(self.delta)
        if self.epsilon is not None:
            check_epsilon(self.epsilon)
            if not self.noise:
                raise InputError("there is a privacy budget but no noise: give noise above 0.")
        if self.nominal is not None and self.nominal < 1:
            raise InputError(f"the nominal cohort is {self.nominal}: give at least 1.")
        self._check_claims()

    @classmethod
    def of(
        cls,
        algorithm: AnyAlgorithm,
        clip: float | Mapping[str, float] | None,
        noise: float,
        delta: float,
        **others: Any,
    ) -> Self:
        """The settings for one algorithm: `clip` is the bound of its one unbounded field, or bounds by field.

        None: the algorithm bounds all of its fields.
        """
        fields, known = upload_fields(algorithm), own_bounds(algorithm)
        if clip is None or isinstance(clip, Mapping):
            bounds = dict(clip or {})
        elif known is not None:
            raise InputError(
                f"{type(algorithm).__name__} bounds all that it uploads itself "
                f"({', '.join(f'{name} by {bound:g}' for name, bound in known.items())}): "
                "leave clip out, or give bounds by field."
            )
        else:
            open_ones = [name for name in fields if name not in declared_bounds(algorithm)[0]]
            if len(open_ones) != 1:
                raise InputError(
                    f"{type(algorithm).__name__} has {len(open_ones)} fields to bound, "
                    f"{' and '.join(open_ones)}: give bounds by field."
                )
            bounds = {open_ones[0]: clip}
        check_bounds(fields, dict(declared_bounds(algorithm)[0]) | bounds, bounds)
        return cls(tuple(bounds.items()), noise, delta, **others)

    def open(self, context: AggregationContext) -> PrivateAggregation:
        """Begin a run; raises if its assumptions do not hold."""
        known, parts = declared_bounds(context.algorithm)
        fields = upload_fields(context.algorithm)
        given = dict(self.bounds)
        bounds = {name: bound for name, bound in (dict(known) | given).items() if name in {*fields, *given}}
        check_bounds(fields, bounds, given)
        moving = tuple(name for name in given if math.isfinite(given[name])) if self.adaptive else ()
        summing = self.summation.open(context._replace(answers=len(moving)))
        for name, bound in bounds.items():
            if summing.largest < bound < math.inf:
                raise InputError(
                    f"the bound of {name} is {bound:g}, and secure aggregation holds {summing.largest:g} "
                    "a number: lower the bound, the buffer or the bits."
                )
        shares = noise_shares(fields, dict(self.shares) or parts)
        if self.noise:
            self._check_run(context)
        if self.nominal is not None and self.nominal < context.buffer:
            raise InputError(
                f"the nominal cohort of {self.nominal} is below the buffer of {context.buffer}: raise it."
            )
        if self.adaptive and not moving:
            raise InputError("adaptive clipping has no bound to move: give one to begin with.")
        cohort = context.buffer if self.nominal is None else self.nominal
        mechanism = GaussianMechanism(
            self.noise, tuple(shares.items()), context.buffer / cohort, cohort, self.adaptive, moving
        )
        mechanism.check()
        sizes = {
            name: trees.numel(part)
            for name, part in clipping.fields(probe_upload(context.algorithm, context.x)).items()
        }
        if self.noise_source != "server":
            self._check_helper_noise(context)
            deviations = mechanism.deviations(bounds, sizes, self.summation.rounding)
            if moving:
                deviations["answers"] = mechanism.answer_deviation()
            for name, deviation in deviations.items():
                room = bounds.get(name, 0.5) + NOISE_ROOM * deviation / context.buffer
                if room > summing.largest:
                    raise InputError(
                        f"the bound of {name} with its noise takes {room:.4g} a number, and secure "
                        f"aggregation has {summing.largest:.4g}: lower the bound, the noise, the buffer or "
                        "the bits."
                    )
        spending = self.accounting(context)
        start = context.algorithm.warmup() is not None
        buffer, population, seeded = context.buffer, context.population, self.noise_seed is not None
        party = noise_statement(self.noise_source) if self.noise and self.summation.secret else None
        terms = privacy_statement(spending, start, buffer, population, self.nominal, seeded, party)
        budget = None
        if self.epsilon is not None:
            budget = spending.budget(self.epsilon, start, context.rounds)
            if min(budget) < 1:
                raise InputError(
                    f"not one server step fits a budget of epsilon {self.epsilon:g} "
                    f"with noise {self.noise:g}: raise either."
                )
        rounding, seed = self.summation.rounding, self.noise_seed
        plan = PrivatePlan(
            mechanism,
            spending,
            terms,
            budget,
            self.epsilon,
            start,
            context.population,
            rounding,
            seed,
            context.x.dtype,
            self.noise_source,
            sizes,
        )
        return PrivateAggregation(plan, bounds, summing)

    def accounting(self, context: AggregationContext) -> PrivacyAccounting:
        """The accounting of a run with these settings."""
        dispatch = context.dispatch
        return PrivacyAccounting(
            self.noise,
            self.delta,
            _sampling_rate(dispatch, context.buffer, context.population)
            if self.simulate_amplification
            else None,
            self.participation.max_participations,
            self.participation.min_separation,
            self.correlation,
            self.accountant,
            dispatch.sampling if isinstance(dispatch, TimedDispatch) else None,
        )

    def _check_helper_noise(self, context: AggregationContext) -> None:
        """Reject a run in which the helper cannot add the noise."""
        if not self.summation.secret:
            raise InputError("noise from the helper needs secure aggregation: use that, too.")
        if not isinstance(self.accountant, RdpAccountant):
            raise InputError(
                "the helper's noise is a discrete Gaussian, whose Renyi divergences are known and whose "
                "privacy loss distribution is not that of a Gaussian: use the rdp accountant."
            )
        if context.algorithm.warmup() is not None:
            raise InputError(
                f"{type(unwrapped(context.algorithm)).__name__} starts with sums over all clients in pieces, "
                "each of which would get the helper's noise: use a method without such a start, or noise "
                "from the server."
            )

    def _check_claims(self) -> None:
        """Reject settings that contradict each other."""
        if self.noise_source not in NOISE_SOURCES:
            raise unknown_name("source of noise", self.noise_source, NOISE_SOURCES)
        if self.noise_source != "server":
            if not self.noise:
                raise InputError("there is no noise for the helper to add: give noise above 0.")
            if not isinstance(self.correlation, IndependentNoise):
                raise InputError("the helper's noise is independent from sum to sum: use independent noise.")
            if self.simulate_amplification or self.participation.max_participations is None:
                raise InputError(
                    "the helper counts how often a client contributes, and its noise is not amplified: give "
                    "the largest number of contributions."
                )
        correlated = not isinstance(self.correlation, IndependentNoise)
        if correlated and self.simulate_amplification:
            raise InputError(
                "correlated noise is not amplified by sampling: use independent noise, or do not simulate "
                "amplification."
            )
        if correlated and self.adaptive:
            raise InputError("correlated noise needs fixed bounds: use it without adaptive clipping.")
        if not self.noise:
            return
        if self.participation.min_separation < 1:
            raise InputError(
                "a client could be twice in one server step: keep its contributions at least 1 step apart."
            )

    def _check_run(self, context: AggregationContext) -> None:
        """Reject a run for which the noise does not give the claimed privacy."""
        dispatch, name = context.dispatch, type(unwrapped(context.algorithm)).__name__
        if isinstance(dispatch, Phases | Queues):
            raise InputError(
                "how often a client contributes cannot be bounded under phases or queues: "
                "use another dispatch."
            )
        if not 0 <= context.weights(0) <= 1:
            raise InputError("staleness weights above 1 would outgrow the bounds: use lower ones.")
        if isinstance(dispatch, TimedDispatch):
            self._check_timed(context)
            return
        if not self.simulate_amplification and self.participation.max_participations is None:
            raise InputError(
                "without amplification the contributions of a client must be bounded: give the largest "
                "number."
            )
        if not self.simulate_amplification:
            return
        if not isinstance(dispatch, Poisson):
            raise InputError(
                "only Poisson sampling amplifies: use poisson dispatch, or do not simulate amplification."
            )
        if not isinstance(context.availability, Always):
            raise InputError(
                "with availability that varies, clients are drawn more often when fewer are available, so "
                "nothing is amplified: use clients that are always available, or do not simulate it."
            )
        if not isinstance(context.weights, Equal):
            raise InputError(
                "staleness weights reveal who was sampled when, so nothing is amplified: use constant ones."
            )
        if server_reads_staleness(context.algorithm):
            raise InputError(
                f"{name}'s server uses the staleness of updates, which reveals who was sampled when: use it "
                "without, or do not simulate amplification."
            )

    def _check_timed(self, context: AggregationContext) -> None:
        """Reject settings that the proof for timed releases does not cover."""
        if self.simulate_amplification:
            raise InputError(
                "the amplification of timed releases is proved: do not simulate it, or use poisson dispatch."
            )
        if self.participation.max_participations is not None or self.participation.min_separation != 1:
            raise InputError(
                "under timed releases the dispatch draws how often a client contributes: leave the "
                "participation out."
            )
        if not isinstance(self.correlation, IndependentNoise):
            raise InputError(
                "correlated noise is not amplified by the draw of timed releases: use independent noise, or "
                "another dispatch."
            )
        if self.summation.secret:
            raise InputError(
                "secure aggregation needs a minimum of reports in a sum, and under timed releases whether it "
                "is reached reveals who was drawn: use one of the two."
            )
        if isinstance(context.dispatch, TimedPoisson) and context.dispatch.lead > 1:
            raise InputError(
                "with a lead above 1 a client may be late for one release because it works for a later one, "
                "which Poisson sampling does not cover: use a lead of 1, or allocation dispatch."
            )
        if not getattr(context.availability, "by_client", False):
            raise InputError(
                f"whether a client is available by {type(context.availability).__name__} might depend on "
                "other clients, which timed releases do not cover: use Always or Cycle."
            )


def declared_bounds(algorithm: AnyAlgorithm) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """The bounds that an algorithm guarantees, and the shares of its traits."""
    return traits_of(algorithm).bounds, traits_of(algorithm).shares


def own_bounds(algorithm: AnyAlgorithm) -> Mapping[str, float] | None:
    """The bound of every field of an upload, if the algorithm guarantees all of them."""
    known, fields = declared_bounds(algorithm)[0], upload_fields(algorithm)
    return {name: known[name] for name in fields} if all(name in known for name in fields) else None


def _sampling_rate(dispatch: Dispatch, buffer: int, population: int) -> float:
    """The rate of simulated Poisson sampling; more than one draw may have to fill a buffer."""
    rate = dispatch.rate if isinstance(dispatch, Poisson) else 1.0
    return max(rate, buffer / population)
