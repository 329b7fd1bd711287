"""Cadence: unit steps in a unit found on the way, control variates trusted by 1 / (1 + age).

Gradients count by the largest norm that the client has met in the task. Without control variates they are
not brought to unit length after that; with them steps are units, but for tasks of more than 10: what is
shorter than 1/4 is then made four times as long, and at least 10 / K. The server's coordinates are divided by
the square root of their root mean square (1 % of a new square, corrected for the start), and the step keeps
its length.

age is the mean staleness of a buffer's updates, smoothed by a tenth, or all of it as long as an update of
the first model is in every buffer. The part of the clients that is missing shrinks by 1 - S/N a step. A
client that occurs twice in a step works from what its first occurrence left. The model is the mean of the
path with weights that grow as a polynomial of degree 8. The unit begins at 2 % of the first model's norm, at
most twice that. Each time that the b buffers since the last look hold 20 local steps or more, it grows by
e b / (b + age) of itself: e is the square of the sum of their tasks' mean steps, by 1.69 tasks / K, with
variates times 1 + trust^2 of the models before the last buffer, less 1, from 0 to 2. `noisy`: it is the first
model's norm.

With variates and without noise clients also say how their new variate lies to the mean that they were sent,
and by how much the number of its coordinates that are not zero differs from that of their last one, by the
larger of the two. Both are smoothed: a buffer of S tasks has a part of S / (S + 3), or S / (S + 9) for the
second. What the unit's logarithm was when these clients began is reckoned by smoothing it, too, by a part
of 1 / (1 + age). Three times what it is above 0.05 is added to that, and three times what is below
-0.4; the unit goes the same part of the way there, only upwards in the first case and only downwards in the
second, in which it does not grow otherwise. Where half of the coordinates are lost, the path begins again,
with at most a quarter of the unit, and what comes from before does not count.
"""

import numpy as np

from oracles.cases import Case
from oracles.replay import Run, Vector


def cadence(run: Run, *, local_steps: int, variates: bool = True, noisy: bool = False) -> list[Vector]:
    """Models 0 to T."""
    problem, population, x0, steps = run
    path = [np.array(x0, dtype=np.float64)]
    models = [path[0]]
    ages, means, missing = [0.0], [np.zeros_like(path[0])], [1.0]
    own = [np.zeros_like(path[0]) for _ in range(population)]
    squares, lengths, early = np.zeros_like(path[0]), 0.0, True
    norm = max(1.0, float(np.linalg.norm(path[0])))
    units_of = [norm if noisy else 0.02 * norm]
    since: list[tuple[int, Vector]] = []
    begun, ceiling = 0, 2 * norm
    cosine, lately, parts = 0.0, float(np.log(units_of[0])), [0.0]

    for t, step in enumerate(steps):
        descent, shift = np.zeros_like(path[0]), np.zeros_like(path[0])
        cosines, counted = [], []
        for client, version, visit in step:
            trust = 1 / (1 + ages[version]) if variates else 0.0
            start = path[version]
            length = 0.12 / np.sqrt(local_steps) * units_of[version]
            y, count = start.copy(), problem.steps(client, visit)
            units, largest = np.zeros_like(y), 1e-12
            for k in range(count):
                gradient = problem.gradient(client, visit, k, y)
                largest = max(largest, float(np.linalg.norm(gradient)))
                towards = gradient / largest
                u = towards + trust * (means[version] - (1 - missing[version]) * own[client])
                if variates:
                    short = max(float(np.linalg.norm(u)), 1e-12)
                    u *= min(1, max(4 * short, 10 / local_steps)) / short
                y = y - length * u
                units += towards / count
            descent += (start - y) / (length * count) / len(step)
            anchor = trust * means[version]
            lengths_of = float(np.linalg.norm(units) * np.linalg.norm(anchor))
            cosines.append(float(np.dot(units, anchor)) / max(lengths_of, 1e-12))
            now, then = np.count_nonzero(units), np.count_nonzero(own[client])
            counted.append((now - then) / max(now, then) if now and then else parts[version])
            shift += units - own[client]
            own[client] = units
        seen = float(np.mean([t - version for _, version, _ in step]))
        early = early and any(version == 0 for _, version, _ in step)
        ages.append(seen if early else 0.9 * ages[-1] + 0.1 * seen)
        means.append(means[-1] + shift / population)
        missing.append(missing[-1] * (1 - len(step) / population))
        lengths = float(np.linalg.norm(descent)) if t == 0 else 0.9 * lengths + 0.1 * np.linalg.norm(descent)
        rate = min(
            0.75 / np.sqrt(t + 1) / max(lengths, 1e-12), 1.0, 4 * 0.12 * np.sqrt(local_steps) / (1 + ages[-1])
        )
        squares = 0.99 * squares + 0.01 * descent**2
        usual = np.sqrt(squares / (1 - 0.99 ** (t + 1)))
        equalised = descent / np.sqrt(usual + 1e-3 * np.sqrt(np.mean(usual**2)) + 1e-12)
        equalised *= np.linalg.norm(descent) / max(float(np.linalg.norm(equalised)), 1e-12)
        path.append(path[-1] - rate * units_of[-1] * equalised)
        since.append((len(step), descent))
        tasks = sum(count for count, _ in since)
        before = unit = units_of[-1]
        if tasks * local_steps >= 20:
            total = np.sum([count * mean for count, mean in since], axis=0)
            noise = 1.69 * tasks / local_steps * (1 + (1 + ages[-2]) ** -2 if variates else 1)
            excess = float(np.clip(np.sum(total**2) / noise - 1, 0, 2))
            if not noisy:
                unit *= 1 + excess * len(since) / (len(since) + ages[-1])
            since = []
        unit = min(unit, ceiling)
        parts.append(parts[-1])
        if variates and not noisy:
            part = len(step) / (len(step) + 3)
            cosine += part * (float(np.mean(cosines)) - cosine)
            if cosine > 0.05:
                unit = max(unit, before ** (1 - part) * np.exp(part * (lately + 3 * (cosine - 0.05))))
            elif cosine < -0.4:
                unit = min(before, before ** (1 - part) * np.exp(part * (lately + 3 * (cosine + 0.4))))
            if min(version for _, version, _ in step) >= begun:
                parts[-1] += len(step) / (len(step) + 9) * (float(np.mean(counted)) - parts[-1])
                if parts[-1] < -0.5:
                    path[-1], begun, ceiling, parts[-1] = path[0], t + 1, np.exp(lately) / 4, 0.0
            unit = max(min(unit, ceiling), 1e-12)
            lately += (float(np.log(unit)) - lately) / (1 + ages[-1])
        units_of.append(unit)
        models.append(models[-1] + 9 / (t + 10) * (path[-1] - models[-1]))
    return models


CASES = {
    "cadence": Case("cadence", {}, cadence, {"local_steps": 3}),
    "cadence without variates": Case(
        "cadence", {"variates": False}, cadence, {"local_steps": 3, "variates": False}
    ),
    "cadence for noise": Case("cadence", {"noisy": True}, cadence, {"local_steps": 3, "noisy": True}),
}
