"""Who may be chosen, as the complement of who is taken."""

from bisect import bisect_left
from collections.abc import Iterable

# Few enough that the tree is shallow and cheap to build, many enough that each holds a handful of taken ids.
BUCKETS = 2**10


class Idle:
    """The clients of a population less those taken, ranked by id; a function of the set alone.

    A Fenwick tree counts the idle clients of buckets of consecutive ids; a bucket lists its taken
    ones. No call but the constructor depends on the size of the population.
    """

    def __init__(self, population: int, taken: Iterable[int] = ()) -> None:
        self.population = population
        self._bits = max(0, (population - 1).bit_length() - BUCKETS.bit_length() + 1)
        self._size = 1 << (population - 1 >> self._bits).bit_length()
        self.count = population  # how many are idle
        self._taken: list[list[int]] = [[] for _ in range(self._size)]
        # Node i of the tree counts the buckets from i - (i & -i) up to, not including, i.
        self._tree = [
            min(i << self._bits, population) - min(i - (i & -i) << self._bits, population)
            for i in range(self._size + 1)
        ]
        for client in taken:
            self.take(client)

    def __len__(self) -> int:
        return self.count

    def __contains__(self, client: int) -> bool:
        if not 0 <= client < self.population:
            return False
        bucket = self._taken[client >> self._bits]
        place = bisect_left(bucket, client)
        return place == len(bucket) or bucket[place] != client

    def take(self, client: int) -> None:
        """Make a client ineligible."""
        bucket = self._taken[client >> self._bits]
        place = bisect_left(bucket, client)
        if not 0 <= client < self.population or (place < len(bucket) and bucket[place] == client):
            raise ValueError(f"client {client} is not idle")
        bucket.insert(place, client)
        self.count -= 1
        node, tree, size = (client >> self._bits) + 1, self._tree, self._size
        while node <= size:
            tree[node] -= 1
            node += node & -node

    def give(self, client: int) -> None:
        """Make a client eligible again."""
        bucket = self._taken[client >> self._bits]
        place = bisect_left(bucket, client)
        if place == len(bucket) or bucket[place] != client:
            raise ValueError(f"client {client} is not taken")
        del bucket[place]
        self.count += 1
        node, tree, size = (client >> self._bits) + 1, self._tree, self._size
        while node <= size:
            tree[node] += 1
            node += node & -node

    def pick(self, rank: int) -> int:
        """The idle client that has `rank` idle clients before it."""
        if not 0 <= rank < self.count:
            raise IndexError(f"rank {rank} among {self.count} idle clients")
        position, step, tree = 0, self._size >> 1, self._tree
        while step:
            before = tree[position + step]
            if before <= rank:
                position += step
                rank -= before
            step >>= 1
        client = (position << self._bits) + rank  # if no one before it in its bucket is taken
        bucket = self._taken[position]
        low, high = 0, len(bucket)
        while low < high:
            middle = (low + high) // 2
            if bucket[middle] - middle <= client:
                low = middle + 1
            else:
                high = middle
        return client + low

    def taken(self) -> list[int]:
        """Who is not idle, by id."""
        return [client for bucket in self._taken for client in bucket]
