"""Where the examples of several tasks are, as arrays that can be computed together."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.population.population import Indices


class Places(NamedTuple):
    """Indices of examples, padded with each task's own first, and which are real."""

    places: NDArray[np.int64]  # (tasks, steps, examples)
    mask: NDArray[np.bool_]  # of the same shape

    @property
    def full(self) -> bool:
        """Whether nothing is padding."""
        return bool(self.mask.all())

    @property
    def partial(self) -> bool:
        """Whether some minibatch holds both real examples and padding."""
        return bool((self.mask.any(-1) & ~self.mask.all(-1)).any())


def pad(tasks: list[list[Indices]]) -> Places:
    """Tasks of different lengths as one; lengths go up to the next rung, so that few shapes occur."""
    steps = _common([len(task) for task in tasks])
    examples = _common([max(map(len, task)) for task in tasks])
    places = np.empty((len(tasks), steps, examples), dtype=np.int64)
    mask = np.zeros(places.shape, dtype=bool)
    for row, task in enumerate(tasks):
        if len(task) == steps and all(len(batch) == examples for batch in task):
            places[row], mask[row] = task, True
            continue
        places[row] = task[0][0]
        for step, batch in enumerate(task):
            places[row, step, : len(batch)] = batch
            mask[row, step, : len(batch)] = True
    return Places(places, mask)


def alike(tasks: list[list[Indices]]) -> list[list[int]]:
    """Rows of tasks so like in length that computing them together wastes little."""
    groups: dict[tuple[int, int], list[int]] = {}
    for row, task in enumerate(tasks):
        groups.setdefault((_rung(len(task)), _rung(max(map(len, task)))), []).append(row)
    return list(groups.values())


def _common(lengths: list[int]) -> int:
    return lengths[0] if len(set(lengths)) == 1 else _rung(max(lengths))


def _rung(length: int) -> int:
    """The length rounded up to four leading bits: at most an eighth is padding."""
    step = 1 << max(0, length.bit_length() - 4)
    return -(-length // step) * step
