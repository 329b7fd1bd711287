"""Processor time of a program with all the processes that it starts."""

import contextlib
import os
import threading
import time
from pathlib import Path

import numpy as np


class Meter:
    """Follows the processor time of all that descends from this process, from a thread."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def between(self, begin: float, end: float) -> float:
        """Seconds of it, from one time of the clock to another."""
        times, spent = zip(*self._seen, strict=True)
        first, last = np.interp([begin, end], times, spent)
        return float(last - first)

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._over.wait(0.25):
            self._seen.append((time.time(), descendants_spent()))


def descendants_spent() -> float:
    """Processor seconds of all descendants, with those that have ended and were waited for."""
    found: dict[int, tuple[int, float, float]] = {}  # parent, own, of children that are gone
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            facts = place.read_text().rpartition(")")[2].split()
            own, gone = (sum(map(int, facts[at : at + 2])) for at in (11, 13))
            found[int(place.parent.name)] = int(facts[1]), own, gone
    ours, total, left = {os.getpid()}, 0.0, True
    total += found[os.getpid()][2] if os.getpid() in found else 0.0
    while left:
        left = {each for each, facts in found.items() if facts[0] in ours} - ours
        total += sum(sum(found[each][1:]) for each in left)
        ours |= left
    return total / os.sysconf("SC_CLK_TCK")
