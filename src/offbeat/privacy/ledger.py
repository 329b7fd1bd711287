"""Who has contributed how often: what the privacy spent is computed from."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from offbeat.core import Saved
from offbeat.errors import InputError


class Tally(NamedTuple):
    """What the ledger comes to."""

    start: bool  # whether everybody contributed once before the first server step
    steps: int  # releases made in server steps
    largest: int  # contributions to them of the client with the most


class Ledger:
    """Releases made, and each client's contributions to those of server steps."""

    def __init__(self, population: int, most: int | None, apart: int) -> None:
        self._most, self._apart = most, apart
        self._start, self._steps, self._largest = False, 0, 0
        self._counts = np.zeros(population, np.int32)
        self._last = np.zeros(population, np.int32)  # the release it contributed to, where it did

    @property
    def tally(self) -> Tally:
        """What has been released so far."""
        return Tally(self._start, self._steps, self._largest)

    def contribute(self, clients: Sequence[int]) -> None:
        """These are in the next release; refuses what the noise does not cover."""
        for client in clients:
            count, now = int(self._counts[client]), self._steps + 1
            if count and now - self._last[client] < self._apart:
                raise InputError(
                    f"client {client} contributed twice within {self._apart} server steps, which the noise "
                    "does not cover: use a schedule that keeps to the bounds on participation."
                )
            if self._most is not None and count + self._start >= self._most:
                raise InputError(
                    f"client {client} contributed more than {self._most} times, which the noise does not "
                    "cover: use a schedule that keeps to the bounds on participation."
                )
            self._counts[client], self._last[client] = count + 1, now
            self._largest = max(self._largest, count + 1)

    def release(self) -> None:
        """One server step's mean is out."""
        self._steps += 1

    def begin(self) -> None:
        """The mean of everybody, before the first server step, is out."""
        self._start = True

    def save(self) -> Saved:
        """Only those who contributed."""
        clients = self._counts.nonzero()[0]
        tensors = {
            "clients": torch.from_numpy(clients),
            "contributions": torch.from_numpy(self._counts[clients]),
            "last": torch.from_numpy(self._last[clients]),
        }
        return Saved({"start": self._start, "steps": self._steps}, tensors)

    def load(self, saved: Saved) -> None:
        """Go on from what `save` gave."""
        self._start, self._steps = saved.facts["start"], saved.facts["steps"]
        clients = saved.tensors["clients"].numpy()
        self._counts[:], self._last[:] = 0, 0
        self._counts[clients] = saved.tensors["contributions"].numpy()
        self._last[clients] = saved.tensors["last"].numpy()
        self._largest = int(self._counts.max(initial=0))
