"""How long uploads have been in this run, and which are longer than any client could come to."""

import statistics
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from offbeat.deploy.rejections import Reason, Rejected

_ENOUGH = 10  # accepted ones, before they say anything
_RECENT = 100  # that are looked at
_TIMES = (
    100.0  # their median: honest updates differ by what a site has and by how far training is, not so much
)
_COARSE = 1e6  # times the model, before enough are known: more is no step from it, whatever the rates
_LEAST = 1e-2  # times the model: where most are next to nothing, what is a little more does no harm


class Norms(NamedTuple):
    """Of one upload that was not hidden: of its fields without a bound, and of its running statistics."""

    kind: str  # uploads of different kinds are not compared
    fields: dict[str, float]
    statistics: dict[str, float]


class Lengths:
    """`most` is the longest that a field may be; None: found out; 0: nobody looks.

    Without any such limit one upload of huge numbers, each of them finite, ends the run or ruins its model.
    """

    def __init__(self, most: float | None, model: float) -> None:
        self._most = most
        self._unit = 1 + model  # a model may begin as zeros
        self._known: dict[str, deque[float]] = {}

    def check(self, norms: Norms) -> None:
        """Reject an upload that is too long."""
        if self._most == 0:
            return
        for name, norm in norms.fields.items():
            bound = self._usual(f"{norms.kind}.{name}", _LEAST) if self._most is None else self._most
            if not norm <= bound:
                raise Rejected(
                    Reason.NORM,
                    f"the upload's {name} has norm {norm:.4g}, above {bound:.4g}: "
                    "if that is right, set most_norm of [network].",
                )
        for name, norm in norms.statistics.items():
            bound = self._usual(f"{norms.kind}/{name}", 1.0)
            if not norm <= bound:
                raise Rejected(
                    Reason.NORM,
                    f"the running statistic {name} has norm {norm:.4g}, above {bound:.4g}: "
                    "if that is right, set most_norm of [network] to 0.",
                )

    def add(self, norms: Norms) -> None:
        """These were accepted."""
        if self._most == 0:
            return
        for name, norm in norms.fields.items():
            self._add(f"{norms.kind}.{name}", [norm])
        for name, norm in norms.statistics.items():
            self._add(f"{norms.kind}/{name}", [norm])

    def save(self) -> dict[str, list[float]]:
        """As JSON."""
        return {name: list(known) for name, known in self._known.items()}

    def load(self, saved: Mapping[str, list[float]]) -> None:
        """Go on from what `save` gave; what was accepted since this began comes after it."""
        since, self._known = self._known, {}
        for known in (saved, since):
            for name, norms in known.items():
                self._add(name, norms)

    def _add(self, name: str, norms: list[float] | deque[float]) -> None:
        self._known.setdefault(name, deque(maxlen=_RECENT)).extend(norms)

    def _usual(self, name: str, least: float) -> float:
        known = self._known.get(name, ())
        if len(known) < _ENOUGH:
            return _COARSE * self._unit
        return max(_TIMES * statistics.median(known), least * self._unit)
