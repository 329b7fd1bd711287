"""Problems so simple that trajectories on them have closed forms."""

from dataclasses import dataclass

import numpy as np

from oracles.replay import Vector


@dataclass(frozen=True)
class Slope:
    """A loss that is the same line for every client, so that trajectories have closed forms."""

    slope: Vector
    count: int = 1

    def steps(self, client: int, visit: int) -> int:
        return self.count

    def gradient(self, client: int, visit: int, k: int, x: Vector) -> Vector:
        return self.slope

    def loss(self, client: int, visit: int, k: int, x: Vector) -> float:
        return float(self.slope @ x)

    def whole_gradient(self, client: int, x: Vector) -> Vector:
        return self.slope


@dataclass(frozen=True)
class Parabola:
    """x^2 / 2 for every client, one local step."""

    def steps(self, client: int, visit: int) -> int:
        return 1

    def gradient(self, client: int, visit: int, k: int, x: Vector) -> Vector:
        return x

    def loss(self, client: int, visit: int, k: int, x: Vector) -> float:
        return 0.5 * float(x @ x)

    def whole_gradient(self, client: int, x: Vector) -> Vector:
        return x


@dataclass(frozen=True)
class Fading:
    """A line whose slope is 1 in a client's first visit and 0 ever after; all it owns is level."""

    count: int = 1

    def steps(self, client: int, visit: int) -> int:
        return self.count

    def gradient(self, client: int, visit: int, k: int, x: Vector) -> Vector:
        return np.full_like(x, 1.0 if visit == 0 else 0.0)

    def loss(self, client: int, visit: int, k: int, x: Vector) -> float:
        return float(x.sum()) if visit == 0 else 0.0

    def whole_gradient(self, client: int, x: Vector) -> Vector:
        return np.zeros_like(x)
