"""Where chance comes from: who is chosen, how long a task takes, which tier a client is in."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

from offbeat.draws import below, generator, uniform
from offbeat.errors import InputError
from offbeat.schedule.tiers import tier_chances


class Draws(Protocol):
    """A source of draws; `save` and `load` carry what a later draw depends on, as JSON."""

    @property
    def seed(self) -> int: ...

    def tiers(self, gamma: float, population: int) -> Callable[[int], int]:
        """Each client's tier: 0, 1 or 2."""
        ...

    def duration(self, client: int, visit: int) -> float:
        """A number in [0, 1) that a delay law turns into seconds."""
        ...

    def ranks(self, size: int, count: int) -> Sequence[int]:
        """`count` different numbers below `size`, uniformly."""
        ...

    def binomial(self, trials: int, rate: float) -> int: ...

    def hide(self, secret: int) -> None:
        """Choose by a secret in place of the seed, so that the seed does not tell who was chosen."""
        ...

    def save(self) -> dict[str, Any]: ...

    def load(self, data: dict[str, Any]) -> None: ...


@dataclass
class KeyedDraws:
    """Every draw is a function of the seed and of what it is for; choices are numbered."""

    seed: int
    choices: int = 0
    secret: int | None = None  # what choices follow from, where it is not the seed

    def __post_init__(self) -> None:
        if not -(2**63) <= self.seed < 2**63:
            raise InputError(f"the seed {self.seed} is out of range: give a whole number of at most 63 bits.")

    def tiers(self, gamma: float, population: int) -> Callable[[int], int]:
        bounds = list(accumulate(tier_chances(gamma)))[:-1]
        seed = self.seed
        return lambda client: bisect_right(bounds, uniform(seed, "tier", client))

    def duration(self, client: int, visit: int) -> float:
        return uniform(self.seed, "duration", client, visit)

    def ranks(self, size: int, count: int) -> Sequence[int]:
        first, seed = self.choices, self._root
        self.choices += count
        if count == 1:
            return (below(size, seed, "choice", first),)
        chosen: list[int] = []
        moved: dict[int, int] = {}  # a shuffle of range(size) that writes down only what it moves
        for drawn in range(count):
            last = size - 1 - drawn
            place = below(last + 1, seed, "choice", first + drawn)
            chosen.append(moved.get(place, place))
            moved[place] = moved.get(last, last)
        return chosen

    def binomial(self, trials: int, rate: float) -> int:
        self.choices += 1
        return int(generator(self._root, "binomial", self.choices).binomial(trials, rate))

    def hide(self, secret: int) -> None:
        self.secret = secret

    def save(self) -> dict[str, Any]:
        return {"choices": self.choices, "secret": self.secret}

    def load(self, data: dict[str, Any]) -> None:
        self.choices, self.secret = int(data["choices"]), data["secret"]

    @property
    def _root(self) -> int:
        return self.seed if self.secret is None else self.secret
