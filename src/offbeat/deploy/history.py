"""What has happened so far, in as much memory after a year as after an hour."""

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

Point = TypeVar("Point")


class Thinned(Generic[Point]):
    """A series of at most `most` points: evenly spaced ones, and the last."""

    def __init__(self, most: int = 400) -> None:
        self._most = most
        self._kept: list[Point] = []
        self._last: Point | None = None
        self._stride = 1
        self._seen = 0

    def add(self, point: Point) -> None:
        if self._seen % self._stride == 0:
            if len(self._kept) == self._most - 1:
                self._kept = self._kept[::2]
                self._stride *= 2
            if self._seen % self._stride == 0:
                self._kept.append(point)
        self._last = point
        self._seen += 1

    def points(self) -> list[Point]:
        """Oldest first."""
        tail_kept = self._seen == 0 or (self._seen - 1) % self._stride == 0
        return list(self._kept) if tail_kept or self._last is None else [*self._kept, self._last]


class Bins:
    """How often each whole number occurred, in bins whose width doubles when one falls beyond the last."""

    def __init__(self, count: int = 24) -> None:
        self.width = 1
        self.counts = [0] * count
        self.number = self.total = self.most = 0

    def add(self, value: int) -> None:
        while value >= self.width * len(self.counts):
            halves = [sum(self.counts[n : n + 2]) for n in range(0, len(self.counts), 2)]
            self.counts = halves + [0] * (len(self.counts) - len(halves))
            self.width *= 2
        self.counts[value // self.width] += 1
        self.number += 1
        self.total += value
        self.most = max(self.most, value)

    @property
    def mean(self) -> float | None:
        return self.total / self.number if self.number else None


class Minutes:
    """Counts of several kinds in each of the last minutes; the last one is not over yet."""

    def __init__(self, kinds: int, minutes: int = 60) -> None:
        self._kinds = kinds
        self._rows: deque[list[int]] = deque(maxlen=minutes)
        self._minute: int | None = None

    def add(self, kind: int, now: float) -> None:
        self._go_on(now)
        self._rows[-1][kind] += 1

    def counts(self, now: float) -> Sequence[list[int]]:
        """Of each kind, oldest first."""
        self._go_on(now)
        return [[row[kind] for row in self._rows] for kind in range(self._kinds)]

    def _go_on(self, now: float) -> None:
        """Minutes in which nothing happened are there too; a clock that was set back counts for the last."""
        minute = int(now // 60)
        if self._minute is None:
            self._minute = minute - 1
        passed = max(0, minute - self._minute)
        self._rows.extend([0] * self._kinds for _ in range(min(passed, self._rows.maxlen or passed)))
        self._minute += passed
