"""What goes down with a task of each version, and what has to come up."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from offbeat.aggregate.aggregation import Hiding
from offbeat.core import AnyAlgorithm, TwoTrips, Vector
from offbeat.deploy.intake import Intake, plain_intake
from offbeat.deploy.secure_intake import secure_intake
from offbeat.deploy.terms import Terms
from offbeat.deploy.wire import Form, form_of, length, pack
from offbeat.problem import Statistics
from offbeat.trees import Tree

_LEAST = 64 * 1024  # bytes that any upload may have
_ROOM = 4  # times what an upload should be


class Down(NamedTuple):
    """The message of one version, as it travels."""

    payload: bytes
    form: Form
    secure: dict[str, Any] | None


class Published:
    """Versions that somebody may still be sent, the newest among them."""

    def __init__(self, x: Vector, statistics: Statistics) -> None:
        self._model = x, statistics
        self._hiding: Hiding | None = None
        self._newest = 0
        self._algorithm: AnyAlgorithm | None = None
        self._intakes: dict[int, Intake] = {}
        self._downs: dict[int, Down] = {}

    def __getitem__(self, version: int) -> Down:
        return self._downs[version]

    def add(
        self,
        version: int,
        algorithm: AnyAlgorithm,
        message: Tree,
        statistics: Statistics,
        hiding: Hiding | None,
        needed: Iterable[int],
    ) -> None:
        """A new version; of those before it only the needed ones are held."""
        if algorithm is not self._algorithm:
            self._algorithm, self._intakes = algorithm, {}
        self._hiding, self._newest = hiding, version
        secure = None if hiding is None else hiding.facts
        tree = (message, statistics)
        held = {old: self._downs[old] for old in needed if old in self._downs}
        self._downs = held | {version: Down(pack(tree), form_of(tree), secure)}

    def intake(self, version: int) -> Intake:
        """What uploads of tasks from this version must be."""
        if self._hiding is not None:
            return secure_intake(self._hiding, self._newest)
        assert self._algorithm is not None
        kind = version % 2 if isinstance(self._algorithm, TwoTrips) and self._algorithm.two_trips else 0
        if kind not in self._intakes:
            self._intakes[kind] = plain_intake(self._algorithm, *self._model, version)
        return self._intakes[kind]


def limit_of(intake: Intake, terms: Terms) -> int:
    """The most bytes that an upload may have."""
    return max(_LEAST, _ROOM * length(intake.form)) if terms.most_bytes is None else terms.most_bytes
