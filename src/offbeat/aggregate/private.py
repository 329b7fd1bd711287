"""Means under differential privacy: each upload is clipped, the sum is noised once, and all of it is counted.

Privacy is a client's: runs are compared that differ by one client's contributions. Nothing here makes
what a client keeps agree with what the server was told: a method whose server adds up changes of clients'
memory (control variates) sees clipped and noisy ones, and its mean drifts from theirs.
"""

import math
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any, Self

from offbeat.aggregate.aggregation import Opening
from offbeat.aggregate.noised import Noised, Plan
from offbeat.aggregate.summation import PlainSum, Summation
from offbeat.aggregate.terms import amplification_refused, terms
from offbeat.aggregate.uploads import reads_staleness, upload_fields
from offbeat.core import AnyAlgorithm, Bounded
from offbeat.errors import InputError
from offbeat.privacy.accountant import Accountant, Pld, check_delta, check_epsilon
from offbeat.privacy.correlated import Independent, Noise
from offbeat.privacy.mechanism import Gaussian, check_bounds, deal
from offbeat.privacy.quantile import Quantile
from offbeat.privacy.spending import Spending
from offbeat.schedule.availability import Always
from offbeat.schedule.dispatch import Dispatch, Phases, Poisson, Queues
from offbeat.schedule.participation import Participation
from offbeat.schedule.staleness import Equal


@dataclass(frozen=True)
class Private:
    """Clipped to `bounds`, with Gaussian noise of multiplier `noise` on the sum of each server step.

    Bounds that the algorithm itself guarantees need not be given. The squares of the shares add up to 1.
    """

    bounds: tuple[tuple[str, float], ...]  # of each field of an upload
    noise: float
    delta: float
    epsilon: float | None = None  # the budget; None: only counted
    simulate_amplification: bool = False  # counts as if Poisson sampling amplified, which is no guarantee
    participation: Participation = Participation(apart=1)
    shares: tuple[
        tuple[str, float], ...
    ] = ()  # of each field in the sensitivity; else the algorithm's, or alike
    correlation: Noise = Independent()
    accountant: Accountant = Pld()
    adaptive: Quantile | None = None  # moves the bounds that are given here
    nominal: int | None = None  # for simulations: noise as if cohorts were of this size
    summation: Summation = PlainSum()
    noise_seed: int | None = None  # for simulations: noise that can be repeated; None: from a secret key
    amplified: InitVar[bool] = False  # refused: it does not hold for a buffer of fixed size

    def __post_init__(self, amplified: bool) -> None:
        if amplified:
            raise amplification_refused("Participation(most=...)", "simulate_amplification=True")
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
        """For one algorithm: `clip` bounds the field that it sets no bound for itself, or names fields.

        None: it bounds all of them itself.
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
            open_ones = [name for name in fields if name not in declared(algorithm)[0]]
            if len(open_ones) != 1:
                raise InputError(
                    f"{type(algorithm).__name__} has {len(open_ones)} fields to bound, "
                    f"{' and '.join(open_ones)}: give bounds by field."
                )
            bounds = {open_ones[0]: clip}
        check_bounds(fields, dict(declared(algorithm)[0]) | bounds, bounds)
        return cls(tuple(bounds.items()), noise, delta, **others)

    def open(self, opening: Opening) -> Noised:
        """Begin a run, or refuse one whose assumptions do not hold."""
        known, parts = declared(opening.algorithm)
        fields = upload_fields(opening.algorithm)
        given = dict(self.bounds)
        bounds = {name: bound for name, bound in (dict(known) | given).items() if name in {*fields, *given}}
        check_bounds(fields, bounds, given)
        moving = tuple(name for name in given if math.isfinite(given[name])) if self.adaptive else ()
        summing = self.summation.open(opening._replace(answers=len(moving)))
        for name, bound in bounds.items():
            if summing.largest < bound < math.inf:
                raise InputError(
                    f"the bound of {name} is {bound:g}, and sums in secret hold {summing.largest:g} "
                    "a number: lower the bound, the buffer or the bits."
                )
        shares = deal(fields, dict(self.shares) or parts)
        if self.noise:
            self._check_run(opening)
        if self.nominal is not None and self.nominal < opening.buffer:
            raise InputError(
                f"the nominal cohort of {self.nominal} is below the buffer of {opening.buffer}: raise it."
            )
        if self.adaptive and not moving:
            raise InputError("adaptive clipping has no bound to move: give one to begin with.")
        cohort = opening.buffer if self.nominal is None else self.nominal
        mechanism = Gaussian(
            self.noise, tuple(shares.items()), opening.buffer / cohort, cohort, self.adaptive, moving
        )
        mechanism.check()
        simulated = self.simulate_amplification
        rate = amplifying(opening.dispatch, opening.buffer, opening.population) if simulated else None
        spending = Spending(
            self.noise,
            self.delta,
            rate,
            self.participation.most,
            self.participation.apart,
            self.correlation,
            self.accountant,
        )
        start = opening.algorithm.warmup() is not None
        buffer, population, seeded = opening.buffer, opening.population, self.noise_seed is not None
        said = terms(spending, start, buffer, population, self.nominal, seeded)
        budget = None
        if self.epsilon is not None:
            budget = spending.budget(self.epsilon, start, opening.rounds)
            if min(budget) < 1:
                raise InputError(
                    f"not one server step fits a budget of epsilon {self.epsilon:g} "
                    f"with noise {self.noise:g}: raise either."
                )
        rounding, seed = self.summation.rounding, self.noise_seed
        plan = Plan(
            mechanism, spending, said, budget, self.epsilon, start, opening.population, rounding, seed
        )
        return Noised(plan, bounds, summing)

    def _check_claims(self) -> None:
        """Refuse claims that contradict each other."""
        correlated = not isinstance(self.correlation, Independent)
        if correlated and self.simulate_amplification:
            raise InputError(
                "correlated noise is not amplified by sampling: use independent noise, or do not simulate "
                "amplification."
            )
        if correlated and self.adaptive:
            raise InputError("correlated noise needs bounds that stay: use it without adaptive clipping.")
        if not self.noise:
            return
        if not self.simulate_amplification and self.participation.most is None:
            raise InputError(
                "without amplification the contributions of a client must be bounded: say how many at most."
            )
        if self.participation.apart < 1:
            raise InputError(
                "a client could be twice in one server step: keep its contributions at least 1 step apart."
            )

    def _check_run(self, opening: Opening) -> None:
        """Refuse a run under which the noise would not be worth what is claimed."""
        dispatch, name = opening.dispatch, type(opening.algorithm).__name__
        if isinstance(dispatch, Phases | Queues):
            raise InputError(
                "how often a client contributes cannot be bounded under phases or queues: "
                "use another dispatch."
            )
        if not 0 <= opening.weights(0) <= 1:
            raise InputError("staleness weights above 1 would outgrow the bounds: use lower ones.")
        if not self.simulate_amplification:
            return
        if not isinstance(dispatch, Poisson):
            raise InputError(
                "only Poisson sampling amplifies: use poisson dispatch, or do not simulate amplification."
            )
        if not isinstance(opening.availability, Always):
            raise InputError(
                "clients that come and go are drawn the more often the fewer are there, so nothing is "
                "amplified: use clients that are always there, or do not simulate it."
            )
        if not isinstance(opening.weights, Equal):
            raise InputError(
                "staleness weights tell who was sampled when, so nothing is amplified: use constant ones."
            )
        if reads_staleness(opening.algorithm):
            raise InputError(
                f"{name}'s server reads how stale updates are, which tells who was sampled when: "
                "use it without, or do not simulate amplification."
            )


def declared(algorithm: AnyAlgorithm) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """The bounds that an algorithm guarantees, and the shares it asks for."""
    return (algorithm.bounds, algorithm.shares) if isinstance(algorithm, Bounded) else ({}, {})


def own_bounds(algorithm: AnyAlgorithm) -> Mapping[str, float] | None:
    """Of every field of an upload, where the algorithm guarantees them all."""
    known, fields = declared(algorithm)[0], upload_fields(algorithm)
    return {name: known[name] for name in fields} if all(name in known for name in fields) else None


def amplifying(dispatch: Dispatch, buffer: int, population: int) -> float:
    """The rate to simulate Poisson sampling with: a buffer may be filled by more than one drawing."""
    rate = dispatch.rate if isinstance(dispatch, Poisson) else 1.0
    return max(rate, buffer / population)
