"""An audit of a private run: attacks on its own pipeline, and the epsilon that they prove.

The schedule, the weights, clipping, sums and noise are those of the run; only the local work is replaced by
what the worst clients would send. An attack guesses from all released sums whether a client, the canary, took
part. True positives p and false positives q prove that epsilon is at least log((p - delta) / q). Both are
bounded with confidence (Clopper and Pearson), and the threshold is chosen on a quarter of the trials and
judged on the others. A bound above the claim refutes the claim; one below it shows how small a claim would
have been refuted. At a large delta, such as 0.01, far fewer trials are needed to come near the claim.

- *canaries*: many clients send the largest upload, each along a coordinate of its own, or nothing; all others
  send nothing. One run is a trial of each of them, and they do not disturb each other. It finds too little
  noise, missing clipping, weights above 1 and wrong accounting.
- *replacement*, where who takes part is a secret: all other clients send the opposite of what the canary
  sends, and the canary is among the clients or is not. It finds other clients whose contributions depend on
  the canary, as in a buffer of fixed size. One run is one trial.
"""

import dataclasses
import math
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from scipy.signal import lfilter
from scipy.stats import beta
from torch import Tensor

from offbeat.aggregate.mean import PrivacyCost
from offbeat.aggregate.private import Private
from offbeat.aggregate.uploads import upload_fields
from offbeat.core import AnyAlgorithm, Batches, Cohort, Gradient, SavedState, Task, Traits, Visit, traits_of
from offbeat.engines.engine import ClientUpdates
from offbeat.errors import InputError
from offbeat.nn.problem import Statistics
from offbeat.privacy.correlated import BltNoise
from offbeat.privacy.mechanism import noise_shares
from offbeat.schedule.availability import Availability, Dropout, parse_availability
from offbeat.schedule.clock import Arrival, Clock
from offbeat.schedule.delays import Delay, parse_delay
from offbeat.schedule.dispatch import Dispatch, RandomAllocation, TimedDispatch, TimedPoisson
from offbeat.schedule.rng import Rng
from offbeat.schedule.staleness import StalenessWeights, parse_weights
from offbeat.training.build import build_aggregate, dry_run, with_calibrated_noise
from offbeat.training.experiment import Experiment, build_dispatch
from offbeat.training.loop import train
from offbeat.trees import Tree

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
_LENGTH = 10.0  # of what a canary sends, over its bound
_MAX_CANARIES = 256  # in one run
_THRESHOLDS = 200


class AttackOutcome(NamedTuple):
    """What one attack found."""

    name: str
    trials: int
    epsilon: float  # the lower bound that it proves, with confidence
    present: Floats  # scores of canaries that took part
    absent: Floats  # scores of canaries that did not


class AuditOutcome(NamedTuple):
    """The epsilon that was claimed, and what the attacks prove."""

    claimed: float
    delta: float
    confidence: float
    terms: str
    attacks: tuple[AttackOutcome, ...]

    @property
    def proved(self) -> float:
        """The largest epsilon that an attack proves; all bounds hold simultaneously with the confidence."""
        return max(attack.epsilon for attack in self.attacks)

    @property
    def refuted(self) -> bool:
        return self.proved > self.claimed


def audit(
    experiment: Experiment,
    trials: int = 20_000,
    replacements: int = 1_000,
    confidence: float = 0.95,
    delta: float | None = None,
    observe: Callable[[int, int], None] = lambda done, whole: None,
    seed: int | None = None,
) -> AuditOutcome:
    """Attack the pipeline of an experiment; no data are needed.

    `trials` counts canaries, `replacements` the runs of the second attack, where there is one. The claim is
    that of the run at `delta`, or at its own. `observe` is called with the number of runs done. With a `seed`
    the samples and the noise of all runs follow from it, and the same audit gives the same outcome.
    """
    if experiment.clip is None:
        raise InputError("this run is not private, so there is no claim to audit: name a run with noise.")
    if trials < 100 or replacements < 100:
        raise InputError("an audit of fewer than 100 trials proves nothing: give more.")
    if not 0 < confidence < 1:
        raise InputError(f"the confidence is {confidence:g}: give a number between 0 and 1, such as 0.95.")
    if experiment.nominal_cohort is not None:
        raise InputError(
            "the noise of this run is scaled as for a larger cohort, so its epsilon is not its own: audit a "
            "run without a nominal cohort."
        )
    pipeline = _Pipeline.of(experiment, seed)
    if delta is not None:
        pipeline = dataclasses.replace(
            pipeline, private=dataclasses.replace(pipeline.private, delta=delta, epsilon=None)
        )
    if not pipeline.private.noise:
        raise InputError("this run adds no noise, so there is no claim to audit: name a run with noise.")
    canaries = min(_MAX_CANARIES, experiment.clients)
    runs = -(-trials // canaries)
    whole = runs + (replacements if pipeline.secret_sample else 0)
    share = 1 - (1 - confidence) / (2 if pipeline.secret_sample else 1)
    claimed, terms, at = 0.0, "", pipeline.private.delta
    present: list[Floats] = []
    absent: list[Floats] = []
    for number in range(runs):
        scores, taken, judged, spent = pipeline.attack_canaries(canaries)
        present.append(scores[taken & judged])
        absent.append(scores[~taken & judged])
        if not number or not pipeline.secret_sample:  # otherwise it is the same for all runs
            cost = spent()
            claimed, terms = max((claimed, terms), (cost.epsilon, cost.terms))
        observe(number + 1, whole)
    found = [_judge("canaries", np.concatenate(present), np.concatenate(absent), at, share)]
    if pipeline.secret_sample:
        sums: tuple[list[Floats], list[Floats]] = ([], [])
        for number in range(replacements):
            sums[number % 2].append(pipeline.attack_replacement(present=number % 2 == 1))
            observe(runs + number + 1, whole)
        without, with_canary = (np.stack(each) for each in sums)
        found.append(
            _judge(
                "replacement", *pipeline.score_replacement(with_canary, without), delta=at, confidence=share
            )
        )
    return AuditOutcome(claimed, at, confidence, terms, tuple(found))


@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """The run that is attacked."""

    private: Private
    dispatch: Dispatch
    weights: StalenessWeights
    delays: Delay
    availability: Availability
    dropout: Dropout
    clients: int
    buffer: int
    rounds: int
    max_staleness: float
    algorithm: AnyAlgorithm
    bounds: dict[str, float]
    shares: dict[str, float]
    draws: np.random.Generator
    seeded: bool  # whether the noise follows from the draws as well

    @classmethod
    def of(cls, experiment: Experiment, seed: int | None) -> "_Pipeline":
        dispatch, weights = build_dispatch(experiment), parse_weights(experiment.weights)
        availability = parse_availability(experiment.availability)
        context = dry_run(experiment, dispatch, weights, availability)
        private = build_aggregate(with_calibrated_noise(experiment, context), context.algorithm)
        assert isinstance(private, Private)
        fields = upload_fields(context.algorithm)
        traits = traits_of(context.algorithm)
        bounds = {name: float({**traits.bounds, **dict(private.bounds)}[name]) for name in fields}
        return cls(
            dataclasses.replace(private, noise_seed=None),
            dispatch,
            weights,
            parse_delay(experiment.delays),
            availability,
            Dropout(experiment.dropout),
            experiment.clients,
            experiment.buffer,
            experiment.rounds,
            context.max_staleness,
            context.algorithm,
            bounds,
            noise_shares(fields, dict(private.shares) or traits.shares),
            np.random.default_rng(seed),
            seed is not None,
        )

    @property
    def secret_sample(self) -> bool:
        """Whether the claim assumes that the sample of clients is secret."""
        return self.private.simulate_amplification or isinstance(self.dispatch, TimedDispatch)

    def attack_canaries(self, count: int) -> tuple[Floats, Mask, Mask, Callable[[], PrivacyCost]]:
        """The scores of canaries, which of them took part, which to evaluate, and the privacy spent.

        If it is public who contributes when, those that contribute most often are evaluated.
        """
        taken = self.draws.permutation(count) % 2 == 1
        signs = torch.zeros(self.clients, count, dtype=torch.float64)
        signs[torch.arange(count), torch.arange(count)] = torch.from_numpy(taken.astype(np.float64))
        sums, steps, spent = self._run(self.clients, signs)
        if self.secret_sample:
            return self._mixture_score(sums, 1.0), taken, np.ones(count, bool), spent
        at = np.zeros_like(sums)
        for step, tasks in enumerate(steps):
            at[step, [task.client for task in tasks if task.client < count]] = 1.0
        shape = self.private.correlation
        coefficients = (
            shape.column(len(sums))
            if isinstance(shape, BltNoise)
            else getattr(shape, "coefficients", np.ones(1))
        )
        known, seen = (lfilter(coefficients, [1.0], each, axis=0) for each in (at, sums))
        often = at.sum(0)
        return (known * seen).sum(0), taken, often == often.max(), spent

    def attack_replacement(self, *, present: bool) -> Floats:
        """The released sums, where all but the last client send the opposite of what it sends."""
        clients = self.clients if present else self.clients - 1
        signs = torch.full((clients, 1), -1.0, dtype=torch.float64)
        if present:
            signs[-1] = 1.0
        return self._run(clients, signs)[0][:, 0]

    def score_replacement(self, present: Floats, absent: Floats) -> tuple[Floats, Floats]:
        """The log likelihood ratios; a quarter of the runs without the canary gives the expected sum."""
        usual = float(np.median(absent[: len(absent) // 4]))
        step = 1.0 if isinstance(self.dispatch, TimedDispatch) else 2.0  # it also replaces another client
        with_it, without = (self._mixture_score((sums - usual).T, step) for sums in (present, absent))
        return with_it, without

    def _mixture_score(self, sums: Floats, step: float) -> Floats:
        """The log likelihood ratio, where the canary moves some unknown releases by `step`."""
        noise = self.private.noise
        logs = (step * sums - step**2 / 2) / noise**2
        if isinstance(self.dispatch, RandomAllocation) and not len(sums) % self.dispatch.slots:
            epochs = logs.reshape(-1, self.dispatch.slots, logs.shape[1])
            top = epochs.max(1, keepdims=True)
            ratios: Floats = (np.log(np.exp(epochs - top).mean(1)) + top[:, 0]).sum(0)
            return ratios
        rate = self.dispatch.rate if isinstance(self.dispatch, TimedPoisson) else self.buffer / self.clients
        logs = np.logaddexp(math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate) + logs)
        total: Floats = logs.sum(0)
        return total

    def _run(
        self, clients: int, signs: Tensor
    ) -> tuple[Floats, list[tuple[Task, ...]], Callable[[], PrivacyCost]]:
        """The sums in units of the bounds (releases, coordinates), the tasks, and the privacy spent."""
        method = _CanaryMethod(tuple(self.bounds), traits_of(self.algorithm))
        engine = _CanaryEngine(
            clients, signs, tuple(self.bounds.values()), self.delays, self.dropout, self.availability
        )
        seed = int(self.draws.integers(2**31))
        private = dataclasses.replace(self.private, noise_seed=seed) if self.seeded else self.private
        sums, steps, last = [], [], None
        for last in train(
            method,
            engine,
            dispatch=self.dispatch,
            buffer=self.buffer,
            rounds=self.rounds,
            weights=self.weights,
            max_staleness=self.max_staleness,
            aggregate=private,
            seed=seed,
        ):
            if last.filled is not None:
                parts = zip(last.state.means, self.bounds.values(), self.shares.values(), strict=True)
                sums.append(sum(self.buffer * share**2 / bound * mean for mean, bound, share in parts))
                steps.append(last.filled.tasks)
        assert last is not None
        spent = cast(Callable[[], PrivacyCost], last.spent)  # the aggregation is private
        return torch.stack(sums).double().numpy(), steps, spent


class _Released(NamedTuple):
    """The state of a server that keeps what was released last."""

    x: Tensor
    means: tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class _CanaryMethod:
    """A method whose uploads have the fields of another method, and whose server state is the last mean."""

    fields: tuple[str, ...]
    of: Traits

    @property
    def traits(self) -> Traits:
        return Traits(bounds=self.of.bounds, shares=self.of.shares)

    def init(self, x: Tensor) -> _Released:
        return _Released(x, tuple(torch.zeros_like(x) for _ in self.fields))

    def memory(self, x: Tensor) -> tuple[()]:
        return ()

    def broadcast(self, state: _Released, version: int) -> Tensor:
        return state.x

    def local(
        self, message: Tensor, memory: tuple[()], batches: Batches, visit: Visit, grad: Gradient
    ) -> tuple[Any, tuple[()]]:
        return self.upload(*(torch.zeros_like(message) for _ in self.fields)), ()

    def step(self, state: _Released, mean: Any, cohort: Cohort) -> _Released:
        return _Released(state.x, tuple(mean))

    def warmup(self) -> None:
        return None

    @property
    def upload(self) -> Any:
        return _upload_type(self.fields)


_UPLOADS: dict[tuple[str, ...], Any] = {}


def _upload_type(fields: tuple[str, ...]) -> Any:
    """The same type for the same fields, by which trees are distinguished."""
    return _UPLOADS.setdefault(fields, namedtuple("CanaryUpload", fields))


@dataclasses.dataclass(frozen=True)
class _CanaryEngine:
    """Clients that send `signs` times more than their bound in every field."""

    clients: int
    signs: Tensor  # (clients, coordinates)
    bounds: tuple[float, ...]
    delays: Delay
    dropout: Dropout
    availability: Availability

    def initial(self) -> tuple[Tensor, Statistics]:
        return torch.zeros(self.signs.shape[1], dtype=torch.float64), {}

    def open(self, algorithm: AnyAlgorithm, seed: int, rng: Rng) -> "_CanarySession":
        clock = Clock(self.delays.bind(rng, self.clients), rng, self.dropout)
        assert isinstance(algorithm, _CanaryMethod)
        return _CanarySession(clock, self, algorithm)


class _CanarySession:
    """One run: the clock of a simulation, and uploads that need no work."""

    def __init__(self, clock: Clock, engine: _CanaryEngine, method: _CanaryMethod) -> None:
        self._clock, self._engine, self._method = clock, engine, method

    @property
    def now(self) -> float:
        return self._clock.now

    @property
    def busy(self) -> int:
        return self._clock.busy

    def start(self, task: Task, *, sure: bool = False, until: float = math.inf) -> None:
        self._clock.start(task, sure=sure)

    def next(self, until: float = math.inf) -> Arrival | None:
        return self._clock.next(until)

    def wait(self, until: float) -> None:
        self._clock.wait(until)

    def publish(self, version: int, algorithm: AnyAlgorithm, message: Tree, statistics: Statistics) -> None:
        pass

    def gather(self, tasks: Sequence[Task], version: int) -> ClientUpdates:
        signs = self._engine.signs[[task.client for task in tasks]]
        parts = [_LENGTH * bound * signs for bound in self._engine.bounds]
        return ClientUpdates(self._method.upload(*parts), {})

    def forget(self, tasks: Sequence[Task]) -> None:
        pass

    def save(self) -> SavedState:
        return SavedState({}, {})

    def confirm(self) -> None:
        pass

    def load(self, saved: SavedState) -> None:
        pass

    def close(self) -> None:
        pass


def proved_epsilon(
    threshold: float, present: Floats, absent: Floats, delta: float, confidence: float
) -> float:
    """The epsilon that true and false positives at one threshold prove."""
    tail = (1 - confidence) / 2
    positives, mistakes = int((present > threshold).sum()), int((absent > threshold).sum())
    low = beta.ppf(tail, positives, len(present) - positives + 1) if positives else 0.0
    high = beta.ppf(1 - tail, mistakes + 1, len(absent) - mistakes) if mistakes < len(absent) else 1.0
    return float(math.log((low - delta) / high)) if low > delta else 0.0


def _judge(name: str, present: Floats, absent: Floats, delta: float, confidence: float) -> AttackOutcome:
    """Choose a threshold and a direction on a quarter of the trials, and evaluate them on the others."""
    few, some = len(present) // 4, len(absent) // 4
    best, chosen = -math.inf, (1.0, 0.0)
    for sign in (1.0, -1.0):
        first, second = (present, absent) if sign > 0 else (-absent, -present)
        for threshold in np.quantile(np.concatenate([first[:few], second[:some]]), _quantiles()):
            found = proved_epsilon(threshold, first[:few], second[:some], delta, confidence)
            if found > best:
                best, chosen = found, (sign, float(threshold))
    sign, threshold = chosen
    first, second = (present[few:], absent[some:]) if sign > 0 else (-absent[some:], -present[few:])
    proved = max(0.0, proved_epsilon(threshold, first, second, delta, confidence))
    return AttackOutcome(name, len(present) + len(absent), proved, present, absent)


def _quantiles() -> Floats:
    return np.linspace(0.01, 0.999, _THRESHOLDS)


def error_rates(attack: AttackOutcome) -> Iterator[tuple[float, float]]:
    """False and true positives of an attack at all thresholds, where both are above 0."""
    for threshold in np.unique(np.quantile(np.concatenate([attack.present, attack.absent]), _quantiles())):
        mistakes, hits = (attack.absent > threshold).mean(), (attack.present > threshold).mean()
        if mistakes > 0 and hits > 0:
            yield float(mistakes), float(hits)
