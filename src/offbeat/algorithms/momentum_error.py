"""How far momentum under a schedule is from momentum without delay (arXiv 2402.09247, table 4)."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.algorithms.least_squares import Ridge, Solver
from offbeat.algorithms.momentum_approximation import blend, fit, momentum, reach, spread


class RelativeErrors(NamedTuple):
    """|A W - M|^2 / |M|^2 over all entries, of three ways to choose A."""

    approximation: float
    light: float
    naive: float  # A = M: momentum that does not know of staleness


def relative_errors(
    staleness: Iterable[Sequence[int]], beta: float, span: int, window: int = 80, solver: Solver = Ridge()
) -> RelativeErrors:
    """From the staleness of each server step's updates, all below `span`."""
    rows: deque[Tensor] = deque(maxlen=window)
    ages = reach(beta, span)
    light = naive = torch.zeros(ages, dtype=torch.float64)
    missed, whole = torch.zeros(3, dtype=torch.float64), 0.0
    for version, each in enumerate(staleness):
        row = torch.bincount(torch.tensor(each), minlength=span).double() / len(each)
        rows.append(row)
        history = torch.stack(list(rows))
        basis = spread(history)
        fitted = fit(history, beta, version, solver) @ basis
        _, light = blend(row, light, beta, version)
        naive = beta * torch.cat([naive.new_zeros(1), naive[:-1]])
        naive[:span] += (1 - beta) * row
        target = momentum(beta, version, max(ages, len(fitted)))
        whole += float(target.square().sum())
        missed += torch.stack([_distance(target, made) for made in (fitted, light, naive)])
    return RelativeErrors(*(missed / whole).tolist())


def _distance(target: Tensor, made: Tensor) -> Tensor:
    """Squared; `made` is 0 beyond its end."""
    return (target[: len(made)] - made).square().sum() + target[len(made) :].square().sum()
