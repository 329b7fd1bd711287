"""Clients that classify: multinomial logistic regression with a bias, mean cross-entropy.

The model is one vector: the weight, row by row, of shape (classes, features), then the bias.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from oracles.replay import Vector


@dataclass(frozen=True)
class Softmax:
    """The caller names each visit's minibatches, as positions in the client's examples."""

    features: Sequence[npt.NDArray[np.float64]]  # per client (n_i, d)
    labels: Sequence[npt.NDArray[np.int64]]  # per client (n_i,)
    batches: Callable[[int, int], Sequence[npt.NDArray[np.int64]]]  # client, visit -> positions
    classes: int
    own: Sequence[npt.NDArray[np.int64]] | None = None  # per client its positions; None: all of them

    def steps(self, client: int, visit: int) -> int:
        return len(self.batches(client, visit))

    def loss(self, client: int, visit: int, k: int, x: Vector) -> float:
        rows = self.batches(client, visit)[k]
        chosen = self._log_probabilities(client, rows, x)[np.arange(len(rows)), self.labels[client][rows]]
        return -float(chosen.mean())

    def gradient(self, client: int, visit: int, k: int, x: Vector) -> Vector:
        return self._gradient(client, self.batches(client, visit)[k], x)

    def whole_gradient(self, client: int, x: Vector) -> Vector:
        rows = np.arange(len(self.labels[client])) if self.own is None else self.own[client]
        return self._gradient(client, rows, x)

    def _gradient(self, client: int, rows: npt.NDArray[np.int64], x: Vector) -> Vector:
        error = np.exp(self._log_probabilities(client, rows, x))  # (examples, classes)
        error[np.arange(len(rows)), self.labels[client][rows]] -= 1
        error /= len(rows)
        weight = error.T @ self.features[client][rows]  # (classes, features)
        return np.concatenate([weight.reshape(-1), error.sum(axis=0)])

    def _log_probabilities(
        self, client: int, rows: npt.NDArray[np.int64], x: Vector
    ) -> npt.NDArray[np.float64]:
        a = self.features[client][rows]
        weight = x[: -self.classes].reshape(self.classes, a.shape[1])
        scores = a @ weight.T + x[-self.classes :]
        scores = scores - scores.max(axis=1, keepdims=True)
        log_probabilities: npt.NDArray[np.float64] = scores - np.log(
            np.exp(scores).sum(axis=1, keepdims=True)
        )
        return log_probabilities
