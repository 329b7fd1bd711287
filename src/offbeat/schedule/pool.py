"""Who can be given a task."""

from bisect import bisect_left, insort
from collections.abc import Collection
from typing import Any, Protocol

from offbeat.schedule.chance import Draws
from offbeat.schedule.idle import Idle


class Pool(Protocol):
    """The clients, as far as choosing among them goes; `len` is how many can be chosen."""

    def __len__(self) -> int: ...

    @property
    def resting(self) -> list[int]:
        """Those that are back in this step: after `load`, each is to be rested again."""
        ...

    def choose(self, count: int, draws: Draws) -> list[int]:
        """That many different clients, or all that can be chosen."""
        ...

    def among(self, there: Collection[int], count: int, draws: Draws) -> list[int]:
        """The same of those who are there; whoever is back in this step only where nobody else is."""
        ...

    def take(self, client: int) -> None:
        """Send off one that was chosen."""
        ...

    def rest(self, client: int) -> None:
        """It is back in this step."""
        ...

    def release(self, client: int) -> None:
        """It came back with nothing of use."""
        ...

    def settle(self) -> None:
        """The step is over."""
        ...

    def give(self, client: int) -> None:
        """It is back and idle at once."""
        ...

    def save(self) -> Any:
        """All but who is resting, as JSON."""
        ...

    def load(self, data: Any) -> None: ...


class IdleFirst:
    """A client is idle, in flight, or resting: back in this step, and chosen only when nobody is idle."""

    def __init__(self, population: int) -> None:
        self._population = population
        self._idle = Idle(population)
        self._resting: list[int] = []  # by id

    def __len__(self) -> int:
        return self._idle.count or len(self._resting)

    @property
    def resting(self) -> list[int]:
        return list(self._resting)

    def choose(self, count: int, draws: Draws) -> list[int]:
        idle, resting = self._idle, self._resting
        if idle.count:
            return list(map(idle.pick, draws.ranks(idle.count, min(count, idle.count))))
        if resting:
            return list(map(resting.__getitem__, draws.ranks(len(resting), min(count, len(resting)))))
        return []

    def among(self, there: Collection[int], count: int, draws: Draws) -> list[int]:
        chosen: list[int] = []
        for group in (self._idle, self._resting):
            able = sorted(client for client in there if client in group)
            some = min(count - len(chosen), len(able))
            chosen += map(able.__getitem__, draws.ranks(len(able), some)) if some else ()
        return chosen

    def take(self, client: int) -> None:
        if client in self._idle:
            self._idle.take(client)
        else:
            self._unrest(client)

    def rest(self, client: int) -> None:
        insort(self._resting, client)

    def release(self, client: int) -> None:
        if self._unrest(client):
            self._idle.give(client)

    def settle(self) -> None:
        for client in self._resting:
            self._idle.give(client)
        self._resting.clear()

    def give(self, client: int) -> None:
        self._idle.give(client)

    def save(self) -> list[int]:
        return self._idle.taken()

    def load(self, data: list[int]) -> None:
        self._idle = Idle(self._population, data)
        self._resting = []

    def _unrest(self, client: int) -> bool:
        place = bisect_left(self._resting, client)
        found = place < len(self._resting) and self._resting[place] == client
        if found:
            del self._resting[place]
        return found


class Anybody:
    """Every client can be chosen at any time; one that is at work takes its tasks one after another."""

    def __init__(self, population: int) -> None:
        self._population = population

    def __len__(self) -> int:
        return self._population

    @property
    def resting(self) -> list[int]:
        return []

    def choose(self, count: int, draws: Draws) -> list[int]:
        return list(draws.ranks(self._population, min(count, self._population)))

    def among(self, there: Collection[int], count: int, draws: Draws) -> list[int]:
        able = sorted(there)
        return list(map(able.__getitem__, draws.ranks(len(able), min(count, len(able)))))

    def take(self, client: int) -> None:
        pass

    def rest(self, client: int) -> None:
        pass

    def release(self, client: int) -> None:
        pass

    def settle(self) -> None:
        pass

    def give(self, client: int) -> None:
        pass

    def save(self) -> None:
        return None

    def load(self, data: None) -> None:
        pass


class Twice:
    """Those of one step are chosen again for the next, and then others."""

    def __init__(self, population: int) -> None:
        self._pool = IdleFirst(population)
        self._back: list[int] = []  # of this step
        self._again: list[int] = []  # to be chosen first
        self._second = False  # whether this step is the second of two

    def __len__(self) -> int:
        return len(self._pool)

    @property
    def resting(self) -> list[int]:
        return list(self._back)

    def choose(self, count: int, draws: Draws) -> list[int]:
        if not self._again:
            return self._pool.choose(count, draws)
        chosen, self._again = self._again[:count], self._again[count:]
        return chosen

    def among(self, there: Collection[int], count: int, draws: Draws) -> list[int]:
        again = list(dict.fromkeys(client for client in self._again if client in there))[:count]
        self._again = []
        return again + self._pool.among(set(there) - set(again), count - len(again), draws)

    def take(self, client: int) -> None:
        self._pool.take(client)

    def rest(self, client: int) -> None:
        self._pool.rest(client)
        self._back.append(client)

    def release(self, client: int) -> None:
        self._pool.release(client)
        self._back.remove(client)

    def settle(self) -> None:
        self._pool.settle()
        self._again = [] if self._second else self._back
        self._back, self._second = [], not self._second

    def give(self, client: int) -> None:
        self._pool.give(client)

    def save(self) -> list[Any]:
        return [self._pool.save(), self._again, self._second]

    def load(self, data: list[Any]) -> None:
        taken, self._again, self._second = data
        self._back = []
        self._pool.load(taken)
