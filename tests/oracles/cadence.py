"""Cadence: unit steps in a unit of length that losses and gradients give.

Gradients count by the largest norm that the client has met in the task. With control variates, which are
trusted by 1 / (1 + age), steps have unit length; without them they are as short as the gradients. The
server's coordinates are divided by their root mean square (1 % of a new square, corrected for the start), and
the step keeps its length.

age is the mean staleness of a buffer's updates, smoothed by a tenth, or all of it as long as an update of
the first model is in every buffer. The part of the clients that is missing shrinks by 1 - S/N a step. A
client that occurs twice in a step works from what its first occurrence left. The model is the mean of the
path with weights that grow as a polynomial of degree 8.

Each client reports the loss f of its first minibatch as a fraction of f + R |g|, at most 0.99, where g is its
gradient and R what the server sent: for the first model its norm, or 1 if that is less; no norm of a later
point of the path counts as less than that. R of the next version is (first^2 recent)^(1/3), or the norm of
the path's last point if that is less, and six times that is the unit, of the server's step at once and of
the clients that are sent it; who was sent the first model takes a unit from its own report, within the same
bound. Odds are the fraction that was reported by what it leaves. first is that norm times the odds of the
mean over all tasks in buffers that have clients of the first model alone; recent begins so, too, and in a
buffer of S tasks that have clients of the first model alone, or none, its logarithm moves by S / (S + 10)
towards that of the R they had, times the odds of their mean. For clients of later models that R is a
geometric running mean over 1 + age versions.

A server step is at most 0.12 units long, as far as a task goes whose steps have unrelated directions.

For noise the unit is the first model's norm, nothing is reported, what a task uploads of its steps has unit
length, and a server step has no bound but those by staleness and by the recent length.
"""

import numpy as np

from oracles.cases import Case
from oracles.replay import Run, Vector


def odds(part: float) -> float:
    """A fraction by what is left."""
    return part / (1 - part)


def cadence(run: Run, *, local_steps: int, variates: bool = True, noisy: bool = False) -> list[Vector]:
    """Models 0 to T."""
    problem, population, x0, steps = run
    path = [np.array(x0, dtype=np.float64)]
    models = [path[0]]
    ages, means, missing = [0.0], [np.zeros_like(path[0])], [1.0]
    own = [np.zeros_like(path[0]) for _ in range(population)]
    squares, lengths, early = np.zeros_like(path[0]), 0.0, True
    norm = max(1.0, float(np.linalg.norm(path[0])))
    reaches = [norm]  # R, by version
    of_the_first: list[float] = []  # what clients of the first model reported
    recent, sent = norm, norm

    for t, step in enumerate(steps):
        descent, shift, reports = np.zeros_like(path[0]), np.zeros_like(path[0]), []
        for client, version, visit in step:
            trust = 1 / (1 + ages[version]) if variates else 0.0
            others = trust * (means[version] - (1 - missing[version]) * own[client])
            y, count = path[version].copy(), problem.steps(client, visit)
            found, taken, largest = np.zeros_like(y), np.zeros_like(y), 0.0
            for k in range(count):
                gradient = problem.gradient(client, visit, k, y)
                if k == 0:
                    loss = problem.loss(client, visit, k, y)
                    report = min(loss / (loss + reaches[version] * float(np.linalg.norm(gradient))), 0.99)
                    reports.append(report)
                    change = min(odds(report), 1) if version == 0 else 1
                    unit = norm if noisy else 6 * reaches[version] * change
                largest = max(largest, float(np.linalg.norm(gradient)))
                v = gradient / largest
                u = (v + others) / np.linalg.norm(v + others) if variates else v
                y = y - 0.12 / np.sqrt(local_steps) * unit * u
                found, taken = found + v / count, taken + u / count
            descent += (taken / np.linalg.norm(taken) if noisy else taken) / len(step)
            shift += found - own[client]
            own[client] = found

        late = [t - version for _, version, _ in step]
        early = early and any(version == 0 for _, version, _ in step)
        ages.append(np.mean(late) if early else 0.9 * ages[-1] + 0.1 * np.mean(late))
        means.append(means[-1] + shift / population)
        missing.append(missing[-1] * (1 - len(step) / population))

        from_first = sum(version == 0 for _, version, _ in step)
        ratio = odds(float(np.mean(reports)))
        fraction = len(step) / (len(step) + 10) if t else 1.0
        if from_first == len(step):
            of_the_first += reports
            recent = recent ** (1 - fraction) * (norm * ratio) ** fraction
        elif not from_first:
            recent = recent ** (1 - fraction) * (sent * ratio) ** fraction
        first = norm * odds(float(np.mean(of_the_first)))
        longest = max(norm, float(np.linalg.norm(path[-1])))
        reaches.append(norm / 6 if noisy else min(np.cbrt(first**2 * recent), longest))
        fraction = 1 / (1 + ages[-1]) if t else 1.0
        sent = sent ** (1 - fraction) * reaches[-1] ** fraction

        length = float(np.linalg.norm(descent))
        lengths = 0.9 * lengths + 0.1 * length if t else length
        rate = min(0.75 / np.sqrt(t + 1) / lengths, 8 * 0.12 * np.sqrt(local_steps) / (1 + ages[-1]))
        rate = rate if noisy else min(rate, 0.12 / length)
        squares = 0.99 * squares + 0.01 * descent**2
        usual = np.sqrt(squares / (1 - 0.99 ** (t + 1)))
        equalised = descent / (usual + 1e-3 * np.sqrt(np.mean(usual**2)) + 1e-12)
        equalised *= length / np.linalg.norm(equalised)
        path.append(path[-1] - rate * 6 * reaches[-1] * equalised)
        models.append(models[-1] + 9 / (t + 10) * (path[-1] - models[-1]))
    return models


CASES = {
    "cadence": Case("cadence", {}, cadence, {"local_steps": 3}),
    "cadence without variates": Case(
        "cadence", {"variates": False}, cadence, {"local_steps": 3, "variates": False}
    ),
    "cadence for noise": Case("cadence", {"noisy": True}, cadence, {"local_steps": 3, "noisy": True}),
}
