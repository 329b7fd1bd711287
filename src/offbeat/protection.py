"""What an experiment says of privacy, made real: how uploads become means."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from offbeat.aggregate.aggregation import Aggregate, Opening
from offbeat.aggregate.mean import Mean
from offbeat.aggregate.private import Private, amplifying
from offbeat.aggregate.secure import Secure
from offbeat.aggregate.summation import PlainSum, Summation
from offbeat.algorithms import find
from offbeat.algorithms.fedopt import FedOpt
from offbeat.algorithms.least_squares import Ridge
from offbeat.core import AnyAlgorithm
from offbeat.errors import InputError
from offbeat.experiment import Experiment
from offbeat.privacy.accountant import Accountant
from offbeat.privacy.banded import Banded
from offbeat.privacy.ledger import Tally
from offbeat.privacy.quantile import Quantile
from offbeat.privacy.search import last
from offbeat.privacy.spending import Spending
from offbeat.privacy.wording import parse_accountant, parse_shape
from offbeat.schedule.participation import Participation

_GRAIN = 1e-3  # the least noise is found to this part of it
_FAR = 20_000  # grains between noise of 1 and the least and most that is tried
_DIGITS = 4  # of the noise


def aggregate_of(experiment: Experiment, algorithm: AnyAlgorithm) -> Aggregate:
    """From uploads to means; the noise must be known."""
    summation: Summation = Secure() if experiment.secure else PlainSum()
    if experiment.clip is None:
        return Mean(summation)
    assert experiment.noise is not None
    assert experiment.delta is not None
    shape = parse_shape(experiment.noise_shape)
    apart = shape.bands if isinstance(shape, Banded) else 1
    return Private.of(
        algorithm,
        _bounds(experiment.clip),
        experiment.noise,
        experiment.delta,
        epsilon=experiment.epsilon,
        simulate_amplification=experiment.simulate_amplification,
        participation=Participation(experiment.most, apart if experiment.apart is None else experiment.apart),
        correlation=shape,
        accountant=parse_accountant(experiment.accountant),
        adaptive=None if experiment.adaptive_clip is None else Quantile(experiment.adaptive_clip),
        nominal=experiment.nominal_cohort,
        summation=summation,
        noise_seed=experiment.noise_seed,
    )


def with_noise(experiment: Experiment, opening: Opening) -> Experiment:
    """The same with the noise that keeps all its server steps below its epsilon, where none was given.

    Where noise and epsilon are given and no amplification is simulated, a client may contribute as often
    as fits.
    """
    if experiment.clip is None or (experiment.noise is not None and experiment.epsilon is None):
        return experiment
    if experiment.noise is not None:
        return _fitting(experiment, opening)
    draft = aggregate_of(dataclasses.replace(experiment, noise=1.0, epsilon=None), opening.algorithm)
    check_protection(draft, opening)
    assert isinstance(draft, Private)
    assert experiment.epsilon is not None
    spending = _spending(draft, opening)
    start, most = opening.algorithm.warmup() is not None, draft.participation.most
    times = opening.rounds if most is None else min(opening.rounds, most - start)
    noise = _least_noise(spending, Tally(start, opening.rounds, times), experiment.epsilon)
    return dataclasses.replace(experiment, noise=noise)


def _fitting(experiment: Experiment, opening: Opening) -> Experiment:
    aggregate = aggregate_of(experiment, opening.algorithm)
    check_protection(aggregate, opening)
    assert isinstance(aggregate, Private)
    assert experiment.epsilon is not None
    start = opening.algorithm.warmup() is not None
    fit = _spending(aggregate, opening).budget(experiment.epsilon, start, opening.rounds).contributions
    return experiment if math.isinf(fit) else dataclasses.replace(experiment, most=int(fit) + start)


def _spending(private: Private, opening: Opening) -> Spending:
    simulated = private.simulate_amplification
    return Spending(
        private.noise,
        private.delta,
        amplifying(opening.dispatch, opening.buffer, opening.population) if simulated else None,
        private.participation.most,
        private.participation.apart,
        private.correlation,
        private.accountant,
    )


def steadied(experiment: Experiment, aggregate: Aggregate) -> dict[str, Any]:
    """Hyperparameters; momentum approximation trusts noisy rows less, unless its solver was chosen."""
    given = dict(experiment.parameters)
    chosen = {"penalty", "rcond"} & given.keys()
    if (
        not isinstance(aggregate, Private)
        or "penalty" not in find(experiment.algorithm).parameters()
        or chosen
    ):
        return given
    share = dict(aggregate.shares).get("stamp", FedOpt.shares["stamp"])
    scale = 1.0 if aggregate.nominal is None else experiment.buffer / aggregate.nominal
    solver = Ridge.under_noise(aggregate.noise * scale / share, experiment.buffer)
    return given | {"penalty": solver.penalty}


def check_protection(aggregate: Aggregate, opening: Opening) -> None:
    """Refuse what the run itself would refuse, before there is one."""
    bounds, population = aggregate.participation, opening.population
    bounds.check(opening.dispatch.pool(population), population, opening.buffer)
    if opening.algorithm.warmup() is not None:
        bounds.check_start()
    aggregate.open(opening)


def _bounds(text: str) -> float | Mapping[str, float]:
    """One number, or `FIELD=BOUND` with commas between."""
    parts = text.split(",")
    if len(parts) == 1 and "=" not in text:
        return _bound(text, text)
    bounds: dict[str, float] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals:
            raise InputError("--clip takes one BOUND for all, or FIELD=BOUND for each field: name them.")
        if name in bounds:
            raise InputError(f"--clip gives {name} twice: leave one out.")
        bounds[name] = _bound(value, part)
    return bounds


def _bound(value: str, text: str) -> float:
    try:
        bound = float(value)
    except ValueError:
        raise InputError(f"--clip takes BOUND or FIELD=BOUND, not '{text}'.") from None
    if not bound > 0:
        raise InputError(f"--clip must be above 0, not {text}.")
    return bound


def _least_noise(spending: Spending, tally: Tally, epsilon: float) -> float:
    """Rounded up; found roughly first where the accountant is slow."""

    def noise(place: int) -> float:
        return math.exp(-_GRAIN * place)

    def search(accountant: Accountant, start: int) -> int:
        def spent(place: int) -> float:
            return dataclasses.replace(spending, noise=noise(place), accountant=accountant).epsilon(tally)

        found = last(spent, epsilon, start, 100, -_FAR, _FAR)
        if found < -_FAR:
            raise InputError(
                f"no noise brings epsilon down to {epsilon:g} by the {accountant.name} accountant: "
                "raise --epsilon or --delta."
            )
        return found

    rougher = spending.accountant.rougher()
    found = search(spending.accountant, 0 if rougher is None else search(rougher, 0))
    unit = 10.0 ** (math.floor(math.log10(noise(found))) + 1 - _DIGITS)
    return float(f"{math.ceil(noise(found) / unit) * unit:.{_DIGITS}g}")
