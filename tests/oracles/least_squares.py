"""Clients that fit lines: the loss of a minibatch is the mean of (a.x - b)^2 / 2 over its examples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from oracles.replay import Vector


@dataclass(frozen=True)
class LeastSquares:
    """The caller names each visit's minibatches, as positions in the client's examples."""

    features: Sequence[npt.NDArray[np.float64]]  # per client (n_i, d)
    targets: Sequence[npt.NDArray[np.float64]]  # per client (n_i,)
    batches: Callable[[int, int], Sequence[npt.NDArray[np.int64]]]  # client, visit -> positions
    own: Sequence[npt.NDArray[np.int64]] | None = None  # per client its positions; None: all of them

    def steps(self, client: int, visit: int) -> int:
        return len(self.batches(client, visit))

    def loss(self, client: int, visit: int, k: int, x: Vector) -> float:
        rows = self.batches(client, visit)[k]
        residual = self.features[client][rows] @ x - self.targets[client][rows]
        return 0.5 * float(residual @ residual) / len(rows)

    def gradient(self, client: int, visit: int, k: int, x: Vector) -> Vector:
        return self._gradient(client, self.batches(client, visit)[k], x)

    def whole_gradient(self, client: int, x: Vector) -> Vector:
        rows = np.arange(len(self.targets[client])) if self.own is None else self.own[client]
        return self._gradient(client, rows, x)

    def _gradient(self, client: int, rows: npt.NDArray[np.int64], x: Vector) -> Vector:
        a = self.features[client][rows]
        gradient: Vector = a.T @ (a @ x - self.targets[client][rows]) / len(rows)
        return gradient
