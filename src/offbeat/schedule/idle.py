"""Who may be chosen, as the complement of who is taken."""

from bisect import bisect_left
from collections.abc import Iterable

FAN = 4  # bits: each count of one level is the sum of 16 of the next
BUCKETS = 1 << 3 * FAN


class Idle:
    """The clients of a population less those taken, ranked by id; a function of the set alone.

    Buckets of consecutive ids list who is taken in them; a tree of three levels counts the idle.
    No call depends on the size of the population, only on how many are taken.
    """

    def __init__(self, population: int, taken: Iterable[int] = ()) -> None:
        self.population = population
        self.count = population  # how many are idle
        self._bits = max(0, (population - 1).bit_length() - 3 * FAN)
        width = 1 << self._bits
        self._mask = width - 1
        self._leaves = [max(0, min(population - start * width, width)) for start in range(BUCKETS)]
        self._middle = _sums(self._leaves)
        self._top = _sums(self._middle)
        # Places within a bucket, not ids: small numbers are shared objects, so they stay in the cache.
        self._taken: list[list[int]] = [[] for _ in range(BUCKETS)]
        for client in taken:
            self.take(client)

    def __len__(self) -> int:
        return self.count

    def __contains__(self, client: int) -> bool:
        if not 0 <= client < self.population:
            return False
        bucket, place = self._taken[client >> self._bits], client & self._mask
        index = bisect_left(bucket, place)
        return index == len(bucket) or bucket[index] != place

    def take(self, client: int) -> None:
        """Make a client ineligible."""
        leaf, place = client >> self._bits, client & self._mask
        bucket = self._taken[leaf] if 0 <= client < self.population else [place]
        index = bisect_left(bucket, place)
        if index < len(bucket) and bucket[index] == place:
            raise ValueError(f"client {client} is not idle")
        bucket.insert(index, place)
        self.count -= 1
        self._leaves[leaf] -= 1
        self._middle[leaf >> FAN] -= 1
        self._top[leaf >> 2 * FAN] -= 1

    def give(self, client: int) -> None:
        """Make a client eligible again."""
        leaf, place = client >> self._bits, client & self._mask
        bucket = self._taken[leaf]
        index = bisect_left(bucket, place)
        if index == len(bucket) or bucket[index] != place:
            raise ValueError(f"client {client} is not taken")
        del bucket[index]
        self.count += 1
        self._leaves[leaf] += 1
        self._middle[leaf >> FAN] += 1
        self._top[leaf >> 2 * FAN] += 1

    def pick(self, rank: int) -> int:
        """The idle client that has `rank` idle clients before it."""
        if not 0 <= rank < self.count:
            raise IndexError(f"rank {rank} among {self.count} idle clients")
        node = 0
        for level in (self._top, self._middle, self._leaves):
            node <<= FAN
            here = level[node]
            while here <= rank:
                rank -= here
                node += 1
                here = level[node]
        bucket = self._taken[node]
        low, high = 0, len(bucket)  # how many taken ones come before it
        while low < high:
            middle = (low + high) // 2
            if bucket[middle] - middle <= rank:
                low = middle + 1
            else:
                high = middle
        return (node << self._bits) + rank + low

    def taken(self) -> list[int]:
        """Who is not idle, by id."""
        return [(leaf << self._bits) + place for leaf, bucket in enumerate(self._taken) for place in bucket]


def _sums(counts: list[int]) -> list[int]:
    return [sum(counts[start : start + (1 << FAN)]) for start in range(0, len(counts), 1 << FAN)]
