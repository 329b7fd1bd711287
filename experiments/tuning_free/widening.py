"""Where a competitor's grid goes on: beyond its best setting, until rates on every side of it do worse."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

_THIRDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
_HALVES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


class Rates(NamedTuple):
    """One setting."""

    local_lr: float
    server_lr: float


def beyond(tried: Mapping[Rates, float], adaptive: bool) -> Iterator[Rates]:
    """The settings next to the best that nothing tried lies at or behind; none: the best is enclosed.

    A side is closed by a setting with the same other rate, however far it is, and whatever came of it. An
    adaptive server's rates go by thirds, as local rates do; those of a server that takes means go by halves.
    """
    if not tried:
        return
    best = max(tried, key=lambda rates: tried[rates])
    for name, ladder in (("local_lr", _THIRDS), ("server_lr", _THIRDS if adaptive else _HALVES)):
        at = getattr(best, name)
        line = [getattr(rates, name) for rates in tried if rates._replace(**{name: at}) == best]
        higher = [rung for rung in ladder if rung > at * 1.01]
        lower = [rung for rung in ladder if rung < at / 1.01]
        if higher and max(line) <= at:
            yield best._replace(**{name: higher[0]})
        if lower and min(line) >= at:
            yield best._replace(**{name: lower[-1]})
