"""Cadence: unit steps in units of the model's norm, control variates of units, trusted by 1 / (1 + age).

age is the mean staleness of a buffer's updates, smoothed by a tenth, or all of it as long as an update of
the first model is in the buffer. The part of the clients that is missing shrinks by 1 - S/N a step. A client
that occurs twice in a step works from what its first occurrence left. The model is the mean of the path with
weights that grow as a polynomial of degree 8.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from oracles.replay import Problem, Step, Vector


def cadence(
    problem: Problem,
    population: int,
    x0: npt.ArrayLike,
    steps: Sequence[Step],
    *,
    cohort: int,
    local_steps: int,
    variates: bool = True,
) -> list[Vector]:
    """Models 0 to T."""
    path = [np.array(x0, dtype=np.float64)]
    models = [path[0]]
    ages, means, missing = [0.0], [np.zeros_like(path[0])], [1.0]
    own = [np.zeros_like(path[0]) for _ in range(population)]

    def unit(x: Vector) -> float:
        first = max(1.0, float(np.linalg.norm(path[0])))
        return min(max(1.0, float(np.linalg.norm(x))), 2 * first)

    for t, step in enumerate(steps):
        descent, shift = np.zeros_like(path[0]), np.zeros_like(path[0])
        for client, version, visit in step:
            trust = 1 / (1 + ages[version]) if variates else 0.0
            start = path[version]
            length = 0.12 / np.sqrt(local_steps) * unit(start)
            y, count = start.copy(), problem.steps(client, visit)
            units = np.zeros_like(y)
            for k in range(count):
                gradient = problem.gradient(client, visit, k, y)
                towards = gradient / max(float(np.linalg.norm(gradient)), 1e-12)
                u = towards + trust * (means[version] - (1 - missing[version]) * own[client])
                y = y - length * u / max(float(np.linalg.norm(u)), 1e-12)
                units += towards / count
            descent += (start - y) / (length * count) / len(step)
            shift += units - own[client]
            own[client] = units
        seen = float(np.mean([t - version for _, version, _ in step]))
        early = any(version == 0 for _, version, _ in step)
        ages.append(seen if early else 0.9 * ages[-1] + 0.1 * seen)
        means.append(means[-1] + shift / population)
        missing.append(missing[-1] * (1 - len(step) / population))
        noise = np.sqrt(cohort * local_steps / (4 * (t + 1)))
        rate = min(float(noise), 1.0, 3 * 0.12 * np.sqrt(local_steps) / (1 + ages[-1]))
        path.append(path[-1] - rate * unit(path[-1]) * descent)
        models.append(models[-1] + 9 / (t + 10) * (path[-1] - models[-1]))
    return models
