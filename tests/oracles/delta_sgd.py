"""Delta-SGD (Kim et al. 2024), Algorithm 1, with both gradients of a step on that step's minibatch."""

import numpy as np

from oracles.cases import Case
from oracles.fedbuff import fedbuff
from oracles.replay import Run, Vector, begin
from oracles.weights import Weight, constant, polynomial


def delta_sgd(
    run: Run,
    *,
    eta0: float,
    gamma: float,
    delta: float,
    theta0: float,
    server_lr: float = 1.0,
    weight: Weight = constant,
) -> list[Vector]:
    """x <- x + server_lr times the mean change of clients with adaptive steps."""
    problem, _, x0, steps = run
    models = begin(x0)
    for t, step in enumerate(steps):
        total = np.zeros_like(models[0])
        for client, version, visit in step:
            points, etas, thetas = [models[version]], [eta0], [theta0]
            for k in range(problem.steps(client, visit)):
                gradient = problem.gradient(client, visit, k, points[-1])
                if k > 0:
                    other = problem.gradient(client, visit, k, points[-2])
                    apart = float(np.linalg.norm(gradient - other))
                    moved = float(np.linalg.norm(points[-1] - points[-2]))
                    smooth = gamma * moved / (2 * apart) if apart > 0 else np.inf
                    etas.append(min(smooth, np.sqrt(1 + delta * thetas[-1]) * etas[-1]))
                    thetas.append(etas[-1] / etas[-2])
                points.append(points[-1] - etas[-1] * gradient)
            total += weight(t - version) * (points[-1] - points[0])
        models.append(models[-1] + server_lr * total / len(step))
    return models


DEFAULT = {"eta0": 0.2, "gamma": 2.0, "delta": 0.1, "theta0": 1.0}
GIVEN = {"local_lr": 0.3, "gamma": 0.7, "delta": 0.4, "theta": 0.5, "server_lr": 0.6}
KNOWN = {"eta0": 0.3, "gamma": 0.7, "delta": 0.4, "theta0": 0.5, "server_lr": 0.6}
CASES = {
    "delta-sgd": Case("delta-sgd", {}, delta_sgd, DEFAULT),
    "delta-sgd, other constants": Case("delta-sgd", GIVEN, delta_sgd, KNOWN),
    "delta-sgd fading": Case(
        "delta-sgd", {}, delta_sgd, DEFAULT | {"weight": polynomial(0.5)}, "polynomial:0.5"
    ),
    # steps that neither grow nor meet a limit are those of local SGD
    "delta-sgd is fedbuff": Case(
        "delta-sgd", {"delta": 0.0, "gamma": 1e9}, fedbuff, {"local_lr": 0.2, "server_lr": 1.0}
    ),
}
