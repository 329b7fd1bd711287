"""The FADAS authors' scripts, all of them: who works, from which model, and what becomes of it.

Round by round: those who were chosen train at once; all but the last of them from the model of the round
before (in round 0 all from the first), and every change is measured from the model of this round. Then
the M with the least time left are used, the others' time runs on, and M new ones are chosen among all
who do not work.
"""

import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from oracles.replay import Problem, Vector, begin, local_sgd


class Pending(NamedTuple):
    """Work that is done but has not arrived."""

    left: float  # time
    client: int
    round: int
    change: Vector


def fadas_scripts(
    problem: Problem,
    clients: int,
    x0: npt.ArrayLike,
    *,
    seconds: Sequence[tuple[float, float]],  # of fast, middling and slow clients
    concurrency: int,
    buffer: int,
    rounds: int,
    seed: int,
    local_lr: float,
    server_lr: float,
    threshold: float = float("inf"),  # of staleness, above which the rate is divided by it
    correct: bool = False,
    beta1: float = 0.9,
    beta2: float = 0.99,
    eps: float = 1e-8,
) -> tuple[list[Vector], list[list[tuple[int, int]]]]:
    """The models, and the client and round of what each step used."""
    python, legacy = random.Random(seed), np.random.RandomState(seed)
    tier = legacy.dirichlet([3, 2, 1], size=clients).argmax(axis=1)
    chosen = [int(client) for client in legacy.choice(clients, concurrency, replace=False)]
    models = begin(x0)
    m, v, vhat = 0 * models[0], 0 * models[0], 0 * models[0]
    visits: Counter[int] = Counter()
    pending: list[Pending] = []
    used = []
    for t in range(rounds):
        now = models[-1]
        for place, client in enumerate(chosen):
            late = t > 0 and place < len(chosen) - 1
            end = local_sgd(problem, client, visits[client], models[-2] if late else now, local_lr)
            visits[client] += 1
            pending.append(Pending(python.uniform(*seconds[tier[client]]), client, t, end - now))
        pending.sort(key=lambda job: job.left)
        done, pending = pending[:buffer], pending[buffer:]
        pending = [job._replace(left=job.left - done[-1].left) for job in pending]
        used.append([(job.client, job.round) for job in done])
        delta = sum((job.change for job in done), 0 * now) / buffer
        m = beta1 * m + (1 - beta1) * delta
        v = beta2 * v + (1 - beta2) * delta**2
        vhat = np.maximum(vhat, v)
        direction, scale = m, np.sqrt(vhat)
        if correct:
            direction, scale = m / (1 - beta1 ** (t + 1)), scale / np.sqrt(1 - beta2 ** (t + 1))
        worst = max(t - job.round for job in done)
        rate = server_lr / worst if worst > threshold else server_lr
        models.append(now + rate * direction / (scale + eps))
        working = {job.client for job in pending}
        chosen = python.sample([client for client in range(clients) if client not in working], buffer)
    return models, used
