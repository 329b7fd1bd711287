"""The drawing order of the FADAS authors' scripts (Wang et al., ICML 2024), which gives the published delays.

One generator of NumPy and one of Python, both seeded alike. NumPy: one Dirichlet call for all
clients' tiers, then one `choice` for the first set. Python: one number for the duration of each
task in the order in which they start, and one `sample` for each later set. This place alone
knows the order.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from offbeat.errors import InputError
from offbeat.schedule.tiers import CONCENTRATIONS


class ScriptDraws:
    """A source of draws with state, in the order of the scripts."""

    def __init__(self, seed: int) -> None:
        if not 0 <= seed < 2**32:
            raise InputError(f"the seed {seed} is out of range for rounds: give one from 0 to {2**32 - 1}.")
        self.seed = seed
        self._python = random.Random(seed)
        self._numpy = np.random.RandomState(seed)
        self._first = True

    def tiers(self, gamma: float, population: int) -> Callable[[int], int]:
        """One Dirichlet vector for each client; its largest entry is the tier."""
        vectors = self._numpy.dirichlet([gamma * c for c in CONCENTRATIONS], size=population)
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

    def hide(self, secret: int) -> None:
        """These draws repeat what is published."""
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
