"""The clients that can be given a task, and how one is chosen among them."""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from typing import Any, Protocol

from offbeat.schedule.rng import Rng

FANOUT_BITS = 4  # bits: each count of one level is the sum of 16 of the next
BUCKETS = 1 << 3 * FANOUT_BITS


class IdleSet:
    """The idle clients of a population, ranked by id.

    Buckets of consecutive ids list the clients that are taken; a tree of three levels counts the idle ones.
    The cost of a call depends on the number of taken clients, not on the size of the population.
    """

    def __init__(self, population: int, taken: Iterable[int] = ()) -> None:
        self.population = population
        self.count = population  # how many are idle
        self._bits = max(0, (population - 1).bit_length() - 3 * FANOUT_BITS)
        width = 1 << self._bits
        self._mask = width - 1
        self._leaves = [max(0, min(population - start * width, width)) for start in range(BUCKETS)]
        self._middle = _group_sums(self._leaves)
        self._top = _group_sums(self._middle)
        # Offsets within a bucket, not ids: small integers are shared objects, so they stay in the cache.
        self._taken: list[list[int]] = [[] for _ in range(BUCKETS)]
        for client in taken:
            self.take(client)

    def __len__(self) -> int:
        return self.count

    def __contains__(self, client: int) -> bool:
        if not 0 <= client < self.population:
            return False
        bucket, offset = self._taken[client >> self._bits], client & self._mask
        index = bisect_left(bucket, offset)
        return index == len(bucket) or bucket[index] != offset

    def take(self, client: int) -> None:
        """Make a client ineligible."""
        leaf, offset = client >> self._bits, client & self._mask
        bucket = self._taken[leaf] if 0 <= client < self.population else [offset]
        index = bisect_left(bucket, offset)
        if index < len(bucket) and bucket[index] == offset:
            raise ValueError(f"client {client} is not idle")
        bucket.insert(index, offset)
        self.count -= 1
        self._leaves[leaf] -= 1
        self._middle[leaf >> FANOUT_BITS] -= 1
        self._top[leaf >> 2 * FANOUT_BITS] -= 1

    def give(self, client: int) -> None:
        """Make a client eligible again."""
        leaf, offset = client >> self._bits, client & self._mask
        bucket = self._taken[leaf]
        index = bisect_left(bucket, offset)
        if index == len(bucket) or bucket[index] != offset:
            raise ValueError(f"client {client} is not taken")
        del bucket[index]
        self.count += 1
        self._leaves[leaf] += 1
        self._middle[leaf >> FANOUT_BITS] += 1
        self._top[leaf >> 2 * FANOUT_BITS] += 1

    def pick(self, rank: int) -> int:
        """The idle client that has `rank` idle clients before it."""
        if not 0 <= rank < self.count:
            raise IndexError(f"rank {rank} among {self.count} idle clients")
        node = 0
        for level in (self._top, self._middle, self._leaves):
            node <<= FANOUT_BITS
            here = level[node]
            while here <= rank:
                rank -= here
                node += 1
                here = level[node]
        bucket = self._taken[node]
        low, high = 0, len(bucket)  # bounds on the number of taken clients before it
        while low < high:
            middle = (low + high) // 2
            if bucket[middle] - middle <= rank:
                low = middle + 1
            else:
                high = middle
        return (node << self._bits) + rank + low

    def taken(self) -> list[int]:
        """The clients that are not idle, by id."""
        return [(leaf << self._bits) + offset for leaf, bucket in enumerate(self._taken) for offset in bucket]


def _group_sums(counts: list[int]) -> list[int]:
    return [
        sum(counts[start : start + (1 << FANOUT_BITS)]) for start in range(0, len(counts), 1 << FANOUT_BITS)
    ]


class ClientPool(Protocol):
    """The clients to choose from; `len` is the number of those that can be chosen."""

    def __len__(self) -> int: ...

    @property
    def resting(self) -> list[int]:
        """The clients that returned in this step; after `load`, call `rest` for each again."""
        ...

    def choose(self, count: int, draws: Rng) -> list[int]:
        """Choose `count` different clients, or all if there are fewer."""
        ...

    def among(self, there: Collection[int], count: int, draws: Rng) -> list[int]:
        """Choose among the available clients; those that returned in this step come last."""
        ...

    def take(self, client: int) -> None:
        """A client that was chosen starts a task."""
        ...

    def rest(self, client: int) -> None:
        """The client returned in this step."""
        ...

    def release(self, client: int) -> None:
        """The client returned without a usable update."""
        ...

    def settle(self) -> None:
        """The server step is over."""
        ...

    def give(self, client: int) -> None:
        """The client is idle again at once."""
        ...

    def save(self) -> Any:
        """Everything but who is resting, as JSON."""
        ...

    def load(self, data: Any) -> None: ...


class IdleClientPool:
    """A client is idle, in flight, or resting: returned in this step, and chosen only if none is idle."""

    def __init__(self, population: int) -> None:
        self._population = population
        self._idle = IdleSet(population)
        self._resting: list[int] = []  # by id

    def __len__(self) -> int:
        return self._idle.count or len(self._resting)

    @property
    def resting(self) -> list[int]:
        return list(self._resting)

    def choose(self, count: int, draws: Rng) -> list[int]:
        idle, resting = self._idle, self._resting
        if idle.count:
            return list(map(idle.pick, draws.ranks(idle.count, min(count, idle.count))))
        if resting:
            return list(map(resting.__getitem__, draws.ranks(len(resting), min(count, len(resting)))))
        return []

    def among(self, there: Collection[int], count: int, draws: Rng) -> list[int]:
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
        self._idle = IdleSet(self._population, data)
        self._resting = []

    def _unrest(self, client: int) -> bool:
        index = bisect_left(self._resting, client)
        found = index < len(self._resting) and self._resting[index] == client
        if found:
            del self._resting[index]
        return found


class AnyClientPool:
    """Every client can be chosen at any time; a busy one works through its tasks one after another."""

    def __init__(self, population: int) -> None:
        self._population = population

    def __len__(self) -> int:
        return self._population

    @property
    def resting(self) -> list[int]:
        return []

    def choose(self, count: int, draws: Rng) -> list[int]:
        return list(draws.ranks(self._population, min(count, self._population)))

    def among(self, there: Collection[int], count: int, draws: Rng) -> list[int]:
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


class RepeatedCohortPool:
    """The clients of one step are chosen again for the next step, and then others."""

    def __init__(self, population: int) -> None:
        self._pool = IdleClientPool(population)
        self._back: list[int] = []  # clients that returned in this step
        self._again: list[int] = []  # clients to be chosen first
        self._second = False  # whether this step is the second of two

    def __len__(self) -> int:
        return len(self._pool)

    @property
    def resting(self) -> list[int]:
        return list(self._back)

    def choose(self, count: int, draws: Rng) -> list[int]:
        if not self._again:
            return self._pool.choose(count, draws)
        chosen, self._again = self._again[:count], self._again[count:]
        return chosen

    def among(self, there: Collection[int], count: int, draws: Rng) -> list[int]:
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
