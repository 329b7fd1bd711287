"""What an upload counts for when it is `staleness` versions late (FedAsync, section 5.2 of the paper)."""

from collections.abc import Callable
from typing import TypeAlias

Weight: TypeAlias = Callable[[int], float]


def constant(staleness: int) -> float:
    """Late or not, it counts the same."""
    return 1.0


def polynomial(a: float) -> Weight:
    """Fades as a power of the staleness; FedBuff takes a = 1/2."""

    def weight(staleness: int) -> float:
        return float((1.0 + staleness) ** -a)

    return weight


def hinge(a: float, b: float) -> Weight:
    """Full up to staleness b, then falls hyperbolically."""

    def weight(staleness: int) -> float:
        if staleness <= b:
            return 1.0
        return 1.0 / (a * (staleness - b) + 1.0)

    return weight
