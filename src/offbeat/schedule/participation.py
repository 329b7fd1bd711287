"""Bounds on how often a client contributes, on which the privacy guarantees rest."""

from array import array
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from offbeat.errors import InputError, check_whole, renamed_parameters
from offbeat.schedule.pool import ClientPool, IdleClientPool


@renamed_parameters(most="max_participations", apart="min_separation")
@dataclass(frozen=True)
class Participation:
    """At most `max_participations` per client, any two of them at least `min_separation` server steps apart.

    With a separation of 0 a buffer may have two of them. The full-participation start is a contribution of
    every client; since it has noise of its own, the separation does not apply to it.

    Attributes:
        max_participations: The largest number of contributions of a client; None: any number.
        min_separation: The least number of server steps between two contributions of a client.
    """

    max_participations: int | None = None
    min_separation: int = 0

    def __post_init__(self) -> None:
        if self.max_participations is not None:
            check_whole("max_participations", self.max_participations, None)
        check_whole("min_separation", self.min_separation, None)
        if self.max_participations is not None and self.max_participations < 1:
            raise InputError(
                f"a client must be allowed at least 1 contribution, not {self.max_participations}."
            )
        if self.min_separation < 0:
            raise InputError(
                f"contributions cannot be {self.min_separation} server steps apart: give at least 0."
            )

    @property
    def bounded(self) -> bool:
        """Whether there is a bound."""
        return self.max_participations is not None or self.min_separation > 0

    def check(self, pool: ClientPool, population: int, buffer: int) -> None:
        """Reject bounds that cannot be enforced."""
        if not self.bounded:
            return
        if not isinstance(pool, IdleClientPool):
            raise InputError(
                "how often a client contributes cannot be bounded under phases or queues: "
                "use another dispatch, or no bound."
            )
        if population < self.min_separation * buffer:
            raise InputError(
                f"contributions {self.min_separation} server steps apart take "
                f"{self.min_separation * buffer} clients with a buffer of {buffer}, "
                f"and there are {population}: lower one of them or add clients."
            )

    def check_start(self) -> None:
        """Reject bounds that leave no contribution after a full-participation start."""
        if self.max_participations == 1:
            raise InputError(
                "the start with all clients is a contribution, and only 1 per client is allowed: "
                "allow more, or use the method without a start."
            )


class ParticipationTracker:
    """Counts the contributions of each client, and keeps clients out of the pool for the separation."""

    def __init__(self, participation: Participation, population: int) -> None:
        self._max, self._separation = participation.max_participations, participation.min_separation
        self._population = population
        self._counts = array("I", bytes(4 * population if self._max is not None else 0))
        self._resting: deque[tuple[int, int]] = deque()  # version, client; by version

    def hold(self, client: int, version: int) -> bool:
        """Count a contribution to the step from `version`; return whether the client leaves the pool."""
        if self._max is not None:
            self._counts[client] += 1
            if self._counts[client] >= self._max:
                return True
        if self._separation:
            self._resting.append((version + self._separation, client))
        return self._separation > 0

    def begin(self) -> None:
        """Count a contribution of every client, before the first step."""
        self._counts = array("I", [1]) * len(self._counts)

    def rested(self, version: int) -> list[int]:
        """The clients that return to the pool at this version; each is listed once."""
        clients = []
        while self._resting and self._resting[0][0] <= version:
            clients.append(self._resting.popleft()[1])
        return clients

    def ended(self, able: int, consumed: int, buffer: int) -> str | None:
        """Why no further buffer can be filled, if so; `able` clients are in the pool or in flight."""
        if self._max is None:
            return None
        left = self._population * self._max - consumed
        if (able if self._separation else left) >= buffer:
            return None
        rest = f", or must rest for {self._separation} server steps" if self._separation > 1 else ""
        return (
            f"too few clients may still contribute to fill a buffer of {buffer}: "
            f"the others have done so {self._max} time{'s' if self._max > 1 else ''}{rest}."
        )

    def save(self) -> dict[str, Any]:
        """As JSON."""
        counts = np.frombuffer(self._counts, dtype=self._counts.typecode)
        clients = counts.nonzero()[0]
        return {
            "clients": clients.tolist(),
            "counts": counts[clients].tolist(),
            "resting": [list(pair) for pair in self._resting],
        }

    def load(self, data: dict[str, Any]) -> None:
        """Restore what `save` returned."""
        self._counts = array("I", bytes(4 * len(self._counts)))
        for client, count in zip(data["clients"], data["counts"], strict=True):
            self._counts[client] = count
        self._resting = deque((version, client) for version, client in data["resting"])
