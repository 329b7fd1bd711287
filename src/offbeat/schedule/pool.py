"""Who can be given a task: idle clients, and failing those, clients that are just back."""

from bisect import bisect_left, insort
from collections.abc import Iterable

from offbeat.schedule.idle import Idle
from offbeat.schedule.sources import Draws


class Pool:
    """A client is idle, in flight, or resting: back in this step, and chosen only when nobody is idle."""

    def __init__(self, population: int, taken: Iterable[int] = ()) -> None:
        self._idle = Idle(population, taken)
        self._resting: list[int] = []  # by id

    def __len__(self) -> int:
        """How many can be chosen."""
        return self._idle.count or len(self._resting)

    def choose(self, count: int, draws: Draws) -> list[int]:
        """That many different clients, or all that can be chosen, uniformly."""
        idle, resting = self._idle, self._resting
        if idle.count:
            return list(map(idle.pick, draws.ranks(idle.count, min(count, idle.count))))
        if resting:
            return list(map(resting.__getitem__, draws.ranks(len(resting), min(count, len(resting)))))
        return []

    def take(self, client: int) -> None:
        """Send off one that was chosen."""
        if self._idle.count:
            self._idle.take(client)
        else:
            self._unrest(client)

    def rest(self, client: int) -> None:
        """It is back."""
        insort(self._resting, client)

    def release(self, client: int) -> None:
        """It is idle, if it is resting."""
        if self._unrest(client):
            self._idle.give(client)

    def settle(self) -> None:
        """All who rest are idle."""
        for client in self._resting:
            self._idle.give(client)
        self._resting.clear()

    def give(self, client: int) -> None:
        """It is back and idle at once."""
        self._idle.give(client)

    def taken(self) -> list[int]:
        """Who is not idle, by id."""
        return self._idle.taken()

    def _unrest(self, client: int) -> bool:
        place = bisect_left(self._resting, client)
        found = place < len(self._resting) and self._resting[place] == client
        if found:
            del self._resting[place]
        return found
