"""Processor time of processes and all that they started, for machines that do other things too."""

import os
from pathlib import Path


def spent(roots: list[int], without: list[int]) -> float:
    """Seconds so far of processes and their descendants, less those of others; NaN where unknown."""
    stats = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = entry.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        stats[int(entry.parent.name)] = int(words[1]), sum(map(int, words[11:13]))  # parent; user and system
    total, there, apart = 0, list(roots), set(without) - set(roots)
    while there:
        here = there.pop()
        if here not in stats:
            return float("nan")
        total += stats[here][1]
        there += [pid for pid, (parent, _) in stats.items() if parent == here and pid not in apart]
    return total / os.sysconf("SC_CLK_TCK")
