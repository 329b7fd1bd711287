"""Sources of random numbers for schedules: the choice of clients, durations of tasks, and tiers of clients.

`KeyedRng` has no state but a count of choices. `FadasScriptRng` repeats the drawing order of the FADAS
authors' scripts (Wang et al., ICML 2024), which gives the published delays: one generator of NumPy and one
of Python, both seeded alike. NumPy: one Dirichlet call for all clients' tiers, then one `choice` for the
first set. Python: one number for the duration of each task in the order in which they start, and one
`sample` for each later set.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from scipy.special import gammainc, gammaincinv, gammaln

from offbeat.draws import generator, randbelow, secret_words, uniform
from offbeat.errors import InputError

TIER_CONCENTRATIONS = (3.0, 2.0, 1.0)

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def tier_probabilities(gamma: float) -> tuple[float, float, float]:
    """The probability of each tier of the FADAS paper: the argmax of Dirichlet(3g, 2g, g).

    A Dirichlet vector is a normalised vector of independent Gamma variables, so tier i is the
    largest with probability E[product of the other two distribution functions at G_i]; the
    expectation is an integral over G_i's own quantiles.
    """
    shapes = [gamma * concentration for concentration in TIER_CONCENTRATIONS]
    nodes, weights = np.polynomial.legendre.leggauss(64)
    inner = (nodes + 1) / 2
    quantiles = inner**2 * (3 - 2 * inner)  # crowds the nodes where the integrand is not smooth, at the ends
    weights = weights * 3 * inner * (1 - inner)
    chances = []
    for own, shape in enumerate(shapes):
        logs = _gamma_log_quantile(shape, quantiles)
        others = [_gamma_cdf(other, logs) for j, other in enumerate(shapes) if j != own]
        chances.append(float(weights @ (others[0] * others[1])))
    total = sum(chances)
    small, medium, large = (chance / total for chance in chances)
    return small, medium, large


# Gamma variables of tiny shape underflow, so both work on logarithms and use x^a / Gamma(a + 1) near zero.
_TINY_LOG = -600.0


def _gamma_log_quantile(shape: float, quantiles: FloatArray) -> FloatArray:
    near_zero = (np.log(quantiles) + gammaln(shape + 1)) / shape
    exact: FloatArray = np.log(np.maximum(gammaincinv(shape, quantiles), np.exp(_TINY_LOG)))
    return np.where(near_zero < _TINY_LOG, near_zero, exact)


def _gamma_cdf(shape: float, logs: FloatArray) -> FloatArray:
    near_zero = np.exp(np.minimum(shape * logs - gammaln(shape + 1), 0.0))
    exact: FloatArray = gammainc(shape, np.exp(np.maximum(logs, _TINY_LOG)))
    return np.where(logs < _TINY_LOG, near_zero, exact)


class Rng(Protocol):
    """A source of random numbers; `save` and `load` carry what a later draw depends on, as JSON."""

    @property
    def seed(self) -> int: ...

    def tiers(self, gamma: float, population: int) -> Callable[[int], int]:
        """Each client's tier: 0, 1 or 2."""
        ...

    def duration(self, client: int, visit: int) -> float:
        """A number in [0, 1) that a delay distribution turns into seconds."""
        ...

    def ranks(self, size: int, count: int) -> Sequence[int]:
        """`count` different numbers below `size`, uniformly."""
        ...

    def binomial(self, trials: int, rate: float) -> int: ...

    def many_below(self, bound: int, purpose: str, number: int, count: int) -> IntArray:
        """`count` numbers below a bound, one for each client; a function of purpose and number."""
        ...

    def many_uniform(self, purpose: str, number: int, count: int) -> FloatArray:
        """`count` numbers in [0, 1), one for each client; a function of purpose and number."""
        ...

    def hide(self, secret: int) -> None:
        """Draw from a secret of up to 256 bits in place of the seed, which would reveal who was chosen."""
        ...

    def save(self) -> dict[str, Any]: ...

    def load(self, data: dict[str, Any]) -> None: ...


@dataclass
class KeyedRng:
    """Every draw is a function of the seed and of what it is for; choices are numbered."""

    seed: int
    choices: int = 0
    secret: int | None = None  # replaces the seed for the choice of clients

    def __post_init__(self) -> None:
        if not -(2**63) <= self.seed < 2**63:
            raise InputError(f"the seed {self.seed} is out of range: give a whole number of at most 63 bits.")

    def tiers(self, gamma: float, population: int) -> Callable[[int], int]:
        bounds = list(accumulate(tier_probabilities(gamma)))[:-1]
        seed = self.seed
        return lambda client: bisect_right(bounds, uniform(seed, "tier", client))

    def duration(self, client: int, visit: int) -> float:
        return uniform(self.seed, "duration", client, visit)

    def ranks(self, size: int, count: int) -> Sequence[int]:
        first, seed = self.choices, self._root
        self.choices += count
        if count == 1:
            return (randbelow(size, seed, "choice", first),)
        chosen: list[int] = []
        moved: dict[int, int] = {}  # a partial shuffle of range(size) that stores only what it moves
        for drawn in range(count):
            last = size - 1 - drawn
            index = randbelow(last + 1, seed, "choice", first + drawn)
            chosen.append(moved.get(index, index))
            moved[index] = moved.get(last, last)
        return chosen

    def binomial(self, trials: int, rate: float) -> int:
        self.choices += 1
        return int(generator(self._root, "binomial", self.choices).binomial(trials, rate))

    def many_below(self, bound: int, purpose: str, number: int, count: int) -> IntArray:
        if self.secret is None:
            return generator(self.seed, purpose, number).integers(bound, size=count)
        words = secret_words(self.secret, purpose, number, count)
        return (words % np.uint64(bound)).astype(np.int64)

    def many_uniform(self, purpose: str, number: int, count: int) -> FloatArray:
        if self.secret is None:
            return generator(self.seed, purpose, number).random(count)
        words = secret_words(self.secret, purpose, number, count) >> np.uint64(11)
        return words.astype(np.float64) * 2.0**-53

    def hide(self, secret: int) -> None:
        self.secret = secret

    def save(self) -> dict[str, Any]:
        return {"choices": self.choices, "secret": self.secret}

    def load(self, data: dict[str, Any]) -> None:
        self.choices, self.secret = int(data["choices"]), data["secret"]

    @property
    def _root(self) -> int:
        return self.seed if self.secret is None else self.secret & (2**62 - 1)


class FadasScriptRng:
    """A source with state that draws in the order of the scripts."""

    def __init__(self, seed: int) -> None:
        if not 0 <= seed < 2**32:
            raise InputError(
                f"the seed {seed} is out of range for round-refill dispatch: give one from 0 to {2**32 - 1}."
            )
        self.seed = seed
        self._python = random.Random(seed)
        self._numpy = np.random.RandomState(seed)
        self._first = True

    def tiers(self, gamma: float, population: int) -> Callable[[int], int]:
        """One Dirichlet vector for each client; its largest entry is the tier."""
        vectors = self._numpy.dirichlet([gamma * c for c in TIER_CONCENTRATIONS], size=population)
        return bytes(vectors.argmax(axis=1).astype(np.uint8)).__getitem__

    def duration(self, client: int, visit: int) -> float:
        return self._python.random()

    def ranks(self, size: int, count: int) -> Sequence[int]:
        if self._first:
            self._first = False
            first: list[int] = self._numpy.choice(size, count, replace=False).tolist()
            return first
        return self._python.sample(range(size), count)  # the same draws as sampling the list of clients

    def binomial(self, trials: int, rate: float) -> int:
        return int(self._numpy.binomial(trials, rate))

    def many_below(self, bound: int, purpose: str, number: int, count: int) -> IntArray:
        """Refused: the scripts draw in a fixed order."""
        raise InputError("FADAS's scripts draw in an order of their own: use another dispatch.")

    def many_uniform(self, purpose: str, number: int, count: int) -> FloatArray:
        """Refused: the scripts draw in a fixed order."""
        raise InputError("FADAS's scripts draw in an order of their own: use another dispatch.")

    def hide(self, secret: int) -> None:
        """Refused: these draws repeat what is published."""
        raise InputError("what FADAS's scripts draw is public: use another dispatch.")

    def save(self) -> dict[str, Any]:
        version, words, gauss = self._python.getstate()
        state: Any = self._numpy.get_state(legacy=True)
        name, keys, *rest = state
        return {
            "python": [version, list(words), gauss],
            "numpy": [name, keys.tolist(), *rest],
            "first": self._first,
        }

    def load(self, data: dict[str, Any]) -> None:
        version, words, gauss = data["python"]
        self._python.setstate((version, tuple(words), gauss))
        name, keys, *rest = data["numpy"]
        self._numpy.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        self._first = bool(data["first"])
