"""The processes that a process has started, and the memory of a process."""

import contextlib
from pathlib import Path


def descendants(pid: int) -> set[int]:
    """The processes that a process has started, and those that these have started."""
    parents: dict[int, int] = {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(place.parent.name)] = int(place.read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    while new := {each for each, parent in parents.items() if parent in found | {pid}} - found:
        found |= new
    return found


def resident_mib(pid: int, field: str = "VmRSS") -> float:
    """The resident memory of a process, or with "VmHWM" the most that it had; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) / 1024
    return 0.0
