"""Which reports have been counted: for each client, its visits as ranges."""

from bisect import bisect_left, bisect_right
from itertools import chain, islice
from typing import Any, Protocol

from offbeat.core import Task


class Counts(Protocol):
    """A set of (client, visit) that only grows."""

    def __contains__(self, task: Task, /) -> bool: ...

    def add(self, task: Task) -> None: ...


class Counted:
    """In memory; a client whose visits all count takes one range."""

    def __init__(self) -> None:
        self._bounds: dict[int, list[int]] = {}  # first, one past the last, first, ... in order

    def __contains__(self, task: Task) -> bool:
        return bisect_right(self._bounds.get(task.client, []), task.visit) % 2 == 1

    def add(self, task: Task) -> None:
        self._cover(task.client, task.visit, task.visit + 1)

    def save(self) -> dict[str, Any]:
        """As JSON."""
        clients = sorted(self._bounds)
        bounds = [self._bounds[client] for client in clients]
        return {
            "clients": clients,
            "sizes": [len(one) for one in bounds],
            "bounds": list(chain.from_iterable(bounds)),
        }

    def load(self, data: dict[str, Any]) -> None:
        """Count those too; nothing is forgotten."""
        bounds = iter(data["bounds"])
        for client, size in zip(data["clients"], data["sizes"], strict=True):
            own = list(islice(bounds, size))
            for first, end in zip(own[::2], own[1::2], strict=True):
                self._cover(client, first, end)

    def _cover(self, client: int, first: int, end: int) -> None:
        bounds = self._bounds.setdefault(client, [])
        left, right = bisect_left(bounds, first), bisect_right(bounds, end)
        bounds[left:right] = [first] * (left % 2 == 0) + [end] * (right % 2 == 0)
