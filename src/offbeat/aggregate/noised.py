"""One private run: clip, add up, noise, count."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from offbeat import trees
from offbeat.aggregate.aggregation import Hiding, Spent
from offbeat.aggregate.payload import Clip, Payload, Shares, prepare
from offbeat.aggregate.summation import Summing
from offbeat.aggregate.terms import corrected_end
from offbeat.core import Cohort, Saved, Task
from offbeat.errors import InputError
from offbeat.privacy import clipping
from offbeat.privacy.accountant import Releases
from offbeat.privacy.correlated import Independent, NoiseStream
from offbeat.privacy.gaussian import mark_of, secret_key, seeded_key, subkey
from offbeat.privacy.ledger import Ledger, Tally
from offbeat.privacy.mechanism import Gaussian
from offbeat.privacy.spending import Budget, Spending
from offbeat.trees import Tree


class Plan(NamedTuple):
    """What a private run keeps to."""

    mechanism: Gaussian
    spending: Spending
    terms: str
    budget: Budget | None
    epsilon: float | None  # that the budget came from
    start: bool  # whether everybody contributes before the first server step
    population: int
    rounding: float  # of each number, by the way that uploads are summed
    seed: int | None  # of the noise; None: it has a secret key


class Noised:
    """An aggregation whose releases are private, and which knows what they have told."""

    private = True

    def __init__(self, plan: Plan, bounds: dict[str, float], summing: Summing) -> None:
        self.bounds = bounds  # those of the next release
        self._plan, self._mechanism, self._spending = plan, plan.mechanism, plan.spending
        self._ledger = Ledger(plan.population, plan.spending.most, plan.spending.apart)
        self._summing = summing
        self._unlock(secret_key() if plan.seed is None else seeded_key(plan.seed))
        self._known: tuple[tuple[Releases, ...], float] | None = None  # the last epsilon computed

    def collect(self, uploads: Tree, tasks: Sequence[Task], cohort: Cohort) -> Tree:
        if not all(0 <= weight <= 1 for weight in cohort.weights):
            raise InputError("staleness weights above 1 would outgrow the bounds: use lower ones.")
        clip = self._clip
        if not isinstance(uploads, Shares):
            payload: Tree = prepare(uploads, clip.bounds, clip.moving)
        elif clip.moving and any(cohort.staleness):
            raise InputError("clients that clip by themselves knew other bounds than those of this step.")
        else:
            payload = uploads._replace(clip=clip)
        total = self._summing.total(payload, tasks, cohort)
        if not self._starting:
            self._ledger.contribute([task.client for task in tasks])
        return total

    def release(self, total: Payload, cohort: Cohort) -> Tree:
        starting = self._starting
        stream, step = (self._first, 0) if starting else (self._stream, self._ledger.tally.steps)
        noised = self._noise(total, stream, step)
        if starting:
            self._ledger.begin()
        else:
            self._ledger.release()
        if self._mechanism.adaptive is not None:
            for name, answer in zip(self._mechanism.moving, noised.answers.tolist(), strict=True):
                bound = self.bounds[name]
                moved = self._mechanism.adaptive.move(bound, answer, sum(cohort.weights))
                self.bounds[name] = min(moved, self._summing.largest)
        return trees.over(lambda leaf: leaf / len(cohort.weights), noised.uploads)

    @property
    def hides_sample(self) -> bool:
        return self._spending.rate is not None and self._plan.seed is None

    def hiding(self) -> Hiding | None:
        """With the bounds of the next release, by which clients that hide their uploads have to clip."""
        return self._summing.hiding(self._clip)

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

    def spent(self) -> Callable[[], Spent]:
        return partial(self._spent, self._ledger.tally)

    def _spent(self, tally: Tally) -> Spent:
        releases = self._spending.releases(tally)
        if self._known is None or self._known[0] != releases:
            self._known = releases, self._spending.epsilon(tally)
        return Spent(self._known[1], self._spending.delta, tally.steps + tally.start, self._plan.terms)

    def save(self) -> Saved:
        """The key is in here and nowhere else."""
        parts = {"ledger": self._ledger.save(), "noise": self._stream.save(), "sum": self._summing.save()}
        facts: dict[str, Any] = {name: part.facts for name, part in parts.items()}
        facts |= {
            "bounds": dict(self.bounds),
            "key": None if self._plan.seed is not None else self._key.hex(),
            "spent": {  # for whoever reads the file without the run
                "releases": [list(each) for each in self._spending.releases(self._ledger.tally)],
                "delta": self._spending.delta,
                "accountant": self._spending.accountant.name,
                "made": self._ledger.tally.steps + self._ledger.tally.start,
                "terms": self._plan.terms,
            },
        }
        tensors = {
            f"{name}.{key}": value for name, part in parts.items() for key, value in part.tensors.items()
        }
        return Saved(facts, tensors)

    def load(self, saved: Saved) -> None:
        facts = saved.facts
        self.bounds = dict(facts["bounds"])
        self._unlock(bytes.fromhex(facts["key"]) if self._plan.seed is None else self._key)
        for name, part in (("ledger", self._ledger), ("noise", self._stream), ("sum", self._summing)):
            mine = {key: value for key, value in saved.tensors.items() if key.startswith(f"{name}.")}
            part.load(Saved(facts[name], {key.removeprefix(f"{name}."): v for key, v in mine.items()}))

    @property
    def _starting(self) -> bool:
        """Whether what is collected now is the start of everybody."""
        return self._plan.start and not self._ledger.tally.start

    @property
    def _clip(self) -> Clip:
        return Clip(dict(self.bounds), list(self._mechanism.moving))

    def _unlock(self, key: bytes) -> None:
        self._key = key
        self._first: NoiseStream = Independent().open(subkey(key, "start"))
        self._stream: NoiseStream = self._spending.correlation.open(subkey(key, "steps"))

    def _noise(self, total: Payload, stream: NoiseStream, step: int) -> Payload:
        """Every number of a sum with its noise."""
        parts = clipping.fields(total.uploads)
        sizes = {name: trees.size(part) for name, part in parts.items()}
        deviations = self._mechanism.deviations(self.bounds, sizes, self._plan.rounding)
        numbers = itertools.count()
        # noise that follows from a seed hides nothing anyway, and is to be the same for other sums
        mark = b"" if self._plan.seed is not None else mark_of(self._key, trees.leaves(total))

        def draw(leaf: Tensor, deviation: float) -> Tensor:
            number = next(numbers)
            return leaf + deviation * stream.draw(step, number, leaf, mark) if deviation else leaf

        noised = {
            name: trees.over(lambda leaf, d=deviations[name]: draw(leaf, d), part)
            for name, part in parts.items()
        }
        answers = trees.over(lambda leaf: draw(leaf, self._mechanism.answer_deviation()), total.answers)
        return Payload(clipping.replace(total.uploads, noised), answers)
