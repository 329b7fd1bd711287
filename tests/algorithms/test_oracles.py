"""The oracles among themselves: gradients, closed forms, reductions and the papers' invariants."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from oracles.adamasfl import adamasfl, adamasfl_states, theorem_2
from oracles.fadas import equation_4, equation_77, fadas, steady
from oracles.fedams import fedams, fedams_additive
from oracles.fedasync import fedasync
from oracles.fedavg import fedavg, fedavgm, fedavgm_ema
from oracles.fedbuff import fedbuff
from oracles.fedopt import fedadagrad, fedadam, fedyogi
from oracles.least_squares import LeastSquares
from oracles.lines import Fading, Parabola, Slope
from oracles.replay import Problem, Run, Task, Vector, local_sgd
from oracles.softmax import Softmax
from oracles.traces import alone, late, prompt
from oracles.weights import Weight, constant, hinge, polynomial

CLIENTS = 6
FEATURES = 4
X0 = np.array([0.5, -1.0, 0.25, 2.0])
Oracle = Callable[..., list[Vector]]


def draw_batches(client: int, visit: int) -> list[npt.NDArray[np.int64]]:
    """Minibatches of 3 out of 8 examples; clients differ in how many they have."""
    rng = np.random.default_rng([7, client, visit])
    return [rng.choice(8, size=3, replace=False) for _ in range(1 + client % 3)]


def least_squares() -> LeastSquares:
    rng = np.random.default_rng(1)
    features = [rng.normal(size=(8, FEATURES)) for _ in range(CLIENTS)]
    targets = [rng.normal(size=8) for _ in range(CLIENTS)]
    return LeastSquares(features, targets, draw_batches)


def softmax() -> Softmax:
    rng = np.random.default_rng(2)
    features = [rng.normal(size=(8, FEATURES)) for _ in range(CLIENTS)]
    labels = [rng.integers(0, 3, size=8) for _ in range(CLIENTS)]
    return Softmax(features, labels, draw_batches, classes=3)


def assert_close(actual: npt.ArrayLike, expected: npt.ArrayLike) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=0, atol=1e-13)


def assert_same(one: list[Vector], other: list[Vector]) -> None:
    assert len(one) == len(other)
    for x, y in zip(one, other, strict=True):
        assert_close(x, y)


def assert_apart(one: list[Vector], other: list[Vector]) -> None:
    assert float(np.abs(one[-1] - other[-1]).max()) > 1e-4


def test_the_late_trace_has_delay_and_repeats() -> None:
    trace = late(CLIENTS, 12, 4)
    assert max(t - task.version for t, step in enumerate(trace) for task in step) >= 3
    assert any(len({task.client for task in step}) < len(step) for step in trace)


@pytest.mark.parametrize("problem", [least_squares(), softmax()])
def test_gradients_are_central_differences(problem: LeastSquares | Softmax) -> None:
    size = FEATURES if isinstance(problem, LeastSquares) else 3 * FEATURES + 3
    x = np.random.default_rng(5).normal(size=size)
    h = 1e-5
    for client in range(CLIENTS):
        k = problem.steps(client, 2) - 1
        slopes = [
            (problem.loss(client, 2, k, x + h * e) - problem.loss(client, 2, k, x - h * e)) / (2 * h)
            for e in np.eye(size)
        ]
        np.testing.assert_allclose(problem.gradient(client, 2, k, x), slopes, rtol=1e-7, atol=1e-9)


def test_softmax_reads_weight_rows_then_bias() -> None:
    problem = Softmax([np.array([[1.0, 2.0]])], [np.array([1])], lambda client, visit: [np.array([0])], 2)
    weight = np.array([[0.1, 0.2], [0.3, 0.4]])
    bias = np.array([0.5, -0.5])
    scores = weight @ np.array([1.0, 2.0]) + bias
    expected = -np.log(np.exp(scores[1]) / np.exp(scores).sum())
    assert problem.loss(0, 0, 0, np.concatenate([weight.reshape(-1), bias])) == pytest.approx(expected)


def test_softmax_survives_large_scores() -> None:
    problem = Softmax([np.array([[1.0]])], [np.array([1])], lambda client, visit: [np.array([0])], 2)
    x = np.array([1e4, -1e4, 0.0, 0.0])
    assert problem.loss(0, 0, 0, x) == 2e4
    np.testing.assert_array_equal(problem.gradient(0, 0, 0, x), [1, -1, 1, -1])


def test_weights_have_the_papers_values() -> None:
    assert [constant(s) for s in (0, 9)] == [1, 1]
    assert [polynomial(0.5)(s) for s in (0, 3)] == [1, 0.5]
    assert [hinge(10, 4)(s) for s in (0, 4, 5, 6)] == [1, 1, 1 / 11, 1 / 21]


@pytest.mark.parametrize("trace", [prompt(CLIENTS, 8, 3), late(CLIENTS, 8, 4)])
@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("fedavg", lambda p, t: fedavg(Run(p, CLIENTS, X0, t), local_lr=0.05)),
        ("fedavgm", lambda p, t: fedavgm(Run(p, CLIENTS, X0, t), local_lr=0.05)),
        ("fedavgm_ema", lambda p, t: fedavgm_ema(Run(p, CLIENTS, X0, t), local_lr=0.05)),
        ("fedadam", lambda p, t: fedadam(Run(p, CLIENTS, X0, t), local_lr=0.05, server_lr=0.1)),
        ("fedyogi", lambda p, t: fedyogi(Run(p, CLIENTS, X0, t), local_lr=0.05, server_lr=0.1)),
        ("fedadagrad", lambda p, t: fedadagrad(Run(p, CLIENTS, X0, t), local_lr=0.05, server_lr=0.1)),
        ("fedams", lambda p, t: fedams(Run(p, CLIENTS, X0, t), local_lr=0.05, server_lr=0.1)),
        (
            "fedams_additive",
            lambda p, t: fedams_additive(Run(p, CLIENTS, X0, t), local_lr=0.05, server_lr=0.1),
        ),
        ("fedbuff", lambda p, t: fedbuff(Run(p, CLIENTS, X0, t), local_lr=0.05, weight=polynomial(0.5))),
        ("fedasync", lambda p, t: fedasync(Run(p, CLIENTS, X0, t), local_lr=0.05, rho=0.1)),
        ("fadas", lambda p, t: fadas(Run(p, CLIENTS, X0, t), local_lr=0.05, server_lr=0.1)),
        ("adamasfl", lambda p, t: adamasfl(Run(p, CLIENTS, X0, t), local_lr=0.05, server_lr=0.1, beta=0.5)),
    ],
)
def test_every_oracle_starts_at_x0_descends_and_leaves_its_inputs_alone(
    name: str, run: Oracle, trace: list[list[Task]]
) -> None:
    problem = least_squares()
    before = X0.copy()
    models = run(problem, trace)
    np.testing.assert_array_equal(X0, before)
    np.testing.assert_array_equal(models[0], X0)
    assert len(models) == len(trace) + 1
    assert whole_loss(problem, models[-1]) < whole_loss(problem, X0), name
    assert_same(models, run(problem, trace))
    assert_same(models[:4], run(problem, trace[:3]))


def whole_loss(problem: LeastSquares, x: Vector) -> float:
    return sum(
        0.5 * float(np.mean((a @ x - b) ** 2)) for a, b in zip(problem.features, problem.targets, strict=True)
    )


def test_a_late_upload_is_measured_from_the_version_it_started_from() -> None:
    # Parabola, rate 1/2: the descent from x_v is x_v / 2. Staleness 1 has weight 2^(-1/2).
    trace = [[Task(0, 0, 0)], [Task(1, 0, 0)]]
    models = fedbuff(Run(Parabola(), CLIENTS, [1.0], trace), local_lr=0.5, weight=polynomial(0.5))
    assert_close(np.concatenate(models), [1, 0.5, 0.5 - 0.5 / 2**0.5])
    mixed = fedasync(Run(Parabola(), CLIENTS, [1.0], trace), local_lr=0.5, alpha=0.6, weight=polynomial(0.5))
    alpha = 0.6 / 2**0.5
    assert_close(np.concatenate(mixed), [1, 0.7, (1 - alpha) * 0.7 + alpha * 0.5])


def test_the_mean_divides_by_the_number_of_tasks_not_by_the_weights() -> None:
    problem = Slope(np.array([1.0]))
    trace = [[Task(0, 0, 0)], [Task(1, 0, 0), Task(2, 1, 0)]]
    models = fedbuff(
        Run(problem, CLIENTS, [0.0], trace), local_lr=1.0, weight=lambda s: 1.0 if s == 0 else 0.2
    )
    assert_close(models[2] - models[1], [-0.6])


def test_fedavg_moves_by_server_lr_times_all_local_steps() -> None:
    models = fedavg(Run(Slope(np.array([2.0, -1.0]), 3), 1, [0, 0], alone(4)), local_lr=0.1, server_lr=0.5)
    assert_close(models[-1], -4 * 0.5 * 0.3 * np.array([2.0, -1.0]))


def test_fedavgm_accumulates_a_geometric_series() -> None:
    change, beta, n = -0.1, 0.9, 20
    series = np.cumsum((1 - beta ** np.arange(1, n + 1)) / (1 - beta))
    heavy = fedavgm(Run(Slope(np.array([1.0])), 1, [0.0], alone(n)), local_lr=0.1, beta=beta)
    moving = fedavgm_ema(Run(Slope(np.array([1.0])), 1, [0.0], alone(n)), local_lr=0.1, beta=beta)
    assert_close(np.concatenate(heavy[1:]), change * series)
    assert_close(np.concatenate(moving[1:]), change * (1 - beta) * series)


@pytest.mark.parametrize("v0", [None, 0.0, 4.0])
def test_fedopt_follows_its_closed_form_on_a_line(v0: float | None) -> None:
    change, tau, n = -0.5, 0.1, np.arange(1, 8)
    start = tau**2 if v0 is None else v0
    m = (1 - 0.9**n) * change
    problem, trace = Slope(np.array([1.0])), alone(7)
    adam = fedadam(Run(problem, 1, [0.0], trace), local_lr=0.5, server_lr=0.2, tau=tau, v0=v0)
    v = 0.99**n * start + (1 - 0.99**n) * change**2
    assert_close(np.diff(np.concatenate(adam)), 0.2 * m / (np.sqrt(v) + tau))
    yogi = fedyogi(Run(problem, 1, [0.0], trace), local_lr=0.5, server_lr=0.2, tau=tau, v0=v0)
    v = start - n * 0.01 * change**2 * np.sign(start - change**2)
    assert_close(np.diff(np.concatenate(yogi)), 0.2 * m / (np.sqrt(v) + tau))
    adagrad = fedadagrad(Run(problem, 1, [0.0], trace), local_lr=0.5, server_lr=0.2, tau=tau, v0=v0)
    v = start + n * change**2
    assert_close(np.diff(np.concatenate(adagrad)), 0.2 * change / (np.sqrt(v) + tau))


def test_fedams_keeps_the_largest_second_moment() -> None:
    # One change of -1, then none: m fades, vhat stays at 1 - beta2.
    expected = -0.3 * 0.1 * 0.9 ** np.arange(6) / 0.01**0.5
    for run in (fedams, fedams_additive, fadas):
        models = run(Run(Fading(), 1, [0.0], alone(6)), local_lr=1.0, server_lr=0.3, eps=1e-16)
        assert_close(np.diff(np.concatenate(models)), expected)


def test_eps_is_a_floor_in_fedams_and_an_addition_in_the_fadas_form() -> None:
    problem, trace = Slope(np.array([1.0])), alone(1)
    floor = fedams(Run(problem, 1, [0.0], trace), local_lr=0.01, server_lr=1.0, eps=0.25)
    assert_close(floor[1], [-0.1 * 0.01 / 0.5])
    added = fedams_additive(Run(problem, 1, [0.0], trace), local_lr=0.01, server_lr=1.0, eps=0.25)
    assert_close(added[1], [-0.1 * 0.01 / (0.1 * 0.01 + 0.25)])


@pytest.mark.parametrize("run", [fedams, fedams_additive, fadas])
def test_bias_correction_makes_every_step_on_a_line_the_server_rate(run: Oracle) -> None:
    problem, trace = Slope(np.array([3.0, -2.0])), alone(10)
    corrected = run(Run(problem, 1, [0.0, 0.0], trace), local_lr=0.1, server_lr=0.2, eps=1e-18, correct=True)
    assert_close(corrected[-1], [-2.0, 2.0])
    printed = run(Run(problem, 1, [0.0, 0.0], trace), local_lr=0.1, server_lr=0.2, eps=1e-18)
    n = np.arange(1, 11)
    np.testing.assert_allclose(
        np.diff(np.array(corrected)[:, 0]) / np.diff(np.array(printed)[:, 0]),
        np.sqrt(1 - 0.99**n) / (1 - 0.9**n),
        rtol=1e-12,
    )


@pytest.mark.parametrize("trace", [prompt(CLIENTS, 8, 3), late(CLIENTS, 8, 4)])
def test_fedbuff_with_constant_weights_is_fedavg(trace: list[list[Task]]) -> None:
    problem = least_squares()
    averaged = fedavg(Run(problem, CLIENTS, X0, trace), local_lr=0.1, server_lr=0.7)
    assert_same(fedbuff(Run(problem, CLIENTS, X0, trace), local_lr=0.1, server_lr=0.7), averaged)


def test_fading_weights_matter_only_when_there_is_delay() -> None:
    problem = least_squares()
    for trace, check in ((prompt(CLIENTS, 8, 3), assert_same), (late(CLIENTS, 8, 4), assert_apart)):
        plain = fedbuff(Run(problem, CLIENTS, X0, trace), local_lr=0.1)
        check(fedbuff(Run(problem, CLIENTS, X0, trace), local_lr=0.1, weight=polynomial(0.5)), plain)


@pytest.mark.parametrize("run", [fedavgm, fedavgm_ema])
@pytest.mark.parametrize("weight", [constant, polynomial(0.5), hinge(10, 1)])
def test_fedavgm_without_memory_is_fedbuff(run: Oracle, weight: Weight) -> None:
    problem, trace = least_squares(), late(CLIENTS, 8, 4)
    momentum = run(Run(problem, CLIENTS, X0, trace), local_lr=0.1, beta=0.0, weight=weight)
    assert_same(momentum, fedbuff(Run(problem, CLIENTS, X0, trace), local_lr=0.1, weight=weight))


@pytest.mark.parametrize("trace", [prompt(CLIENTS, 8, 3), late(CLIENTS, 8, 4)])
@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("rate", [steady, equation_77(1000), equation_4(1000)])
def test_fadas_below_its_threshold_is_fedams_in_its_additive_form(
    trace: list[list[Task]], correct: bool, rate: Callable[[float, int], float]
) -> None:
    problem = least_squares()
    ours = fadas(Run(problem, CLIENTS, X0, trace), local_lr=0.1, server_lr=0.05, correct=correct, rate=rate)
    ams = fedams_additive(Run(problem, CLIENTS, X0, trace), local_lr=0.1, server_lr=0.05, correct=correct)
    assert_same(ours, ams)


def test_delay_adaptive_rates_follow_their_equations() -> None:
    assert [equation_77(4)(0.5, s) for s in (0, 4, 5, 10)] == [0.5, 0.5, 0.1, 0.05]
    assert [equation_4(4)(0.15, s) for s in (0, 4, 5, 10)] == [0.15, 0.15, 0.15, 0.1]


def test_delay_adaptive_fadas_divides_a_step_by_the_largest_staleness_of_its_buffer() -> None:
    problem = Slope(np.array([1.0]))
    trace = [*alone(3), [Task(1, 3, 0), Task(2, 0, 0)]]
    plain = fadas(Run(problem, CLIENTS, [0.0], trace), local_lr=0.1, server_lr=0.2)
    damped = fadas(Run(problem, CLIENTS, [0.0], trace), local_lr=0.1, server_lr=0.2, rate=equation_77(1))
    assert_same(damped[:4], plain[:4])
    assert_close(3 * (damped[4] - damped[3]), plain[4] - plain[3])


def test_fedasync_with_alpha_1_and_no_delay_is_sequential_fedavg() -> None:
    problem, trace = least_squares(), prompt(CLIENTS, 12, 1)
    x = X0
    for [task] in trace:
        x = local_sgd(problem, task.client, task.visit, x, 0.1)
    mixed = fedasync(Run(problem, CLIENTS, X0, trace), local_lr=0.1, alpha=1.0, weight=hinge(10, 4))
    assert_same(mixed, fedavg(Run(problem, CLIENTS, X0, trace), local_lr=0.1))
    assert_close(mixed[-1], x)


def test_fedasync_with_a_buffer_and_no_delay_is_fedavg_at_rate_alpha() -> None:
    problem, trace = least_squares(), prompt(CLIENTS, 8, 3)
    mixed = fedasync(Run(problem, CLIENTS, X0, trace), local_lr=0.1, alpha=0.6)
    assert_same(mixed, fedavg(Run(problem, CLIENTS, X0, trace), local_lr=0.1, server_lr=0.6))


def test_the_proximal_term_pulls_towards_the_model_handed_out() -> None:
    # On a line of slope 1: y_k - x_v = -(1/rho) (1 - (1 - lr rho)^k).
    models = fedasync(Run(Slope(np.array([1.0]), 5), 1, [3.0], alone(1)), local_lr=0.2, alpha=1.0, rho=0.5)
    assert_close(models[1], [3 - (1 - 0.9**5) / 0.5])


def test_theorem_2_gives_the_rates_of_its_formulas() -> None:
    # S K = 16, T = 256: sqrt(16/256), 16^(1/4) / 256^(3/4), 1 / (8 sqrt(256)).
    np.testing.assert_allclose(theorem_2(2, 8, 256), (1 / 128, 2 / 64, 1 / 4), rtol=1e-15)
    assert theorem_2(10, 50, 400).beta == 1


def test_adamasfl_starts_from_every_clients_mean_gradient_at_x0() -> None:
    problem = least_squares()
    [state] = adamasfl_states(Run(problem, CLIENTS, X0, []), local_lr=0.1, server_lr=0.1, beta=0.5)
    for client in range(CLIENTS):
        rows = np.concatenate(draw_batches(client, 0))
        a, b = problem.features[client][rows], problem.targets[client][rows]
        assert_close(state.variates[client], a.T @ (a @ X0 - b) / len(rows))
    assert_close(state.c, np.mean(state.variates, axis=0))
    assert_close(state.g, state.c)


@pytest.mark.parametrize("trace", [prompt(CLIENTS, 10, 3, 1), late(CLIENTS, 10, 4, 1)])
def test_adamasfl_keeps_the_mean_of_the_control_variates_and_bounds_its_moves(
    trace: list[list[Task]],
) -> None:
    rates = theorem_2(4, 2, 10)
    states = adamasfl_states(Run(least_squares(), CLIENTS, X0, trace), **rates._asdict())
    for before, state in pairwise(states):
        assert_close(state.c, np.mean(state.variates, axis=0))
        assert np.linalg.norm(state.x - before.x) <= rates.server_lr * (1 + 1e-12)
        for upload in state.uploads:
            assert np.linalg.norm(upload.delta) <= 1 + 1e-12


def test_adamasfl_without_delay_has_the_mean_local_direction_as_momentum() -> None:
    trace = prompt(CLIENTS, 10, 3, 1)
    states = adamasfl_states(Run(least_squares(), CLIENTS, X0, trace), local_lr=0.1, server_lr=0.1, beta=0.3)
    for state in states[1:]:
        directions = [upload.direction for upload in state.uploads]
        assert_close(state.g, np.mean(directions, axis=0))


def test_adamasfl_works_with_the_anchor_of_the_version_handed_out() -> None:
    trace, beta = late(CLIENTS, 10, 4, 1), 0.3
    states = adamasfl_states(Run(least_squares(), CLIENTS, X0, trace), local_lr=0.1, server_lr=0.1, beta=beta)
    for t, step in enumerate(trace):
        variates = list(states[t].variates)
        for task, upload in zip(step, states[t + 1].uploads, strict=True):
            handed = states[task.version]
            anchor = beta * handed.c + (1 - beta) * handed.g
            direction = beta * (upload.gradient - variates[task.client]) + anchor
            assert_close(upload.direction, direction)
            variates[task.client] = upload.gradient


@pytest.mark.parametrize("trace", [prompt(CLIENTS, 10, 3, 1), late(CLIENTS, 10, 4, 1)])
def test_adamasfl_with_beta_1_is_scaffold_with_unit_steps_and_ignores_momentum(
    trace: list[list[Task]],
) -> None:
    problem = least_squares()
    expected = unit_scaffold(problem, trace, local_lr=0.1, server_lr=0.2)
    assert_same(adamasfl(Run(problem, CLIENTS, X0, trace), local_lr=0.1, server_lr=0.2, beta=1.0), expected)
    assert_apart(adamasfl(Run(problem, CLIENTS, X0, trace), local_lr=0.1, server_lr=0.2, beta=0.5), expected)


def unit_scaffold(
    problem: Problem, trace: list[list[Task]], *, local_lr: float, server_lr: float
) -> list[Vector]:
    """SCAFFOLD, option II with normalised steps; it has no momentum to ignore."""

    def mean_gradient(client: int) -> Vector:
        count = problem.steps(client, 0)
        return sum((problem.gradient(client, 0, k, X0) for k in range(count)), 0 * X0) / count

    own = [mean_gradient(client) for client in range(CLIENTS)]
    models = [X0]
    means = [np.mean(own, axis=0)]
    for step in trace:
        moves = []
        for task in step:
            y, seen, moved = models[task.version], [], []
            for k in range(problem.steps(task.client, task.visit)):
                seen.append(problem.gradient(task.client, task.visit, k, y))
                u = seen[-1] - own[task.client] + means[task.version]
                moved.append(u / np.sqrt(u @ u))
                y = y - local_lr * moved[-1]
            moves.append(np.mean(moved, axis=0))
            own[task.client] = np.mean(seen, axis=0)
        models.append(models[-1] - server_lr * np.mean(moves, axis=0))
        means.append(np.mean(own, axis=0))
    return models


def test_adamasfl_walks_a_line_at_server_rate_however_steep_it_is() -> None:
    slope = np.array([3e5, -4e5])
    models = adamasfl(
        Run(Slope(slope, 3), CLIENTS, [0.0, 0.0], prompt(CLIENTS, 5, 2, 1)),
        local_lr=0.1,
        server_lr=0.2,
        beta=0.4,
    )
    np.testing.assert_allclose(models[-1], [-0.6, 0.8], rtol=1e-9)


def test_adamasfl_stands_still_where_there_is_no_slope() -> None:
    models = adamasfl(
        Run(Slope(np.zeros(4), 2), CLIENTS, X0, prompt(CLIENTS, 3, 2, 1)),
        local_lr=0.1,
        server_lr=0.2,
        beta=0.4,
    )
    for x in models:
        np.testing.assert_array_equal(x, X0)
