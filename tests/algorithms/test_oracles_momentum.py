"""The oracles of momentum approximation and weight prediction among themselves, and against the paper."""

from itertools import pairwise

import numpy as np
import pytest
from test_oracles import CLIENTS, X0, assert_apart, assert_close, assert_same, least_squares

from oracles.fadas import fadas
from oracles.fedavg import fedavgm_ema
from oracles.fedbuff import fedbuff
from oracles.fedopt import fedadagrad, fedadam
from oracles.lines import Parabola
from oracles.momentum_approximation import (
    Matrix,
    arrivals,
    full,
    light,
    light_momentum_approximation,
    momentum_approximation,
    relative_error,
    ridge,
    target,
    truncated,
)
from oracles.private_momentum import private_momentum
from oracles.replay import Run, Task, Vector
from oracles.server_rules import adagrad, adam, amsgrad, identity
from oracles.traces import late, prompt
from oracles.weight_prediction import weight_prediction
from oracles.weights import polynomial

RATES = {"local_lr": 0.05, "server_lr": 0.7}
PROMPT, LATE = prompt(CLIENTS, 10, 3), late(CLIENTS, 14, 4)
SMALL = {"local_lr": 0.05, "server_lr": 0.1}
PLAIN = {  # what each rule is without delay, with its own parameters
    "fedavgm": (
        identity,
        lambda t, **k: fedavgm_ema(Run(least_squares(), CLIENTS, X0, t), **RATES, **k),
        RATES,
    ),
    "fedadam": (
        adam(0.9, 0.02),
        lambda t, beta: fedadam(
            Run(least_squares(), CLIENTS, X0, t), **SMALL, beta1=beta, beta2=0.9, tau=0.02
        ),
        SMALL,
    ),
    "fedadagrad": (
        adagrad(0.02),
        lambda t, beta: fedadagrad(Run(least_squares(), CLIENTS, X0, t), **SMALL, beta1=beta, tau=0.02),
        SMALL,
    ),
    "fadas": (
        amsgrad(0.9, 1e-3),
        lambda t, beta: fadas(Run(least_squares(), CLIENTS, X0, t), **SMALL, beta1=beta, beta2=0.9, eps=1e-3),
        SMALL,
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_without_delay_both_approximations_are_the_momentum(name: str) -> None:
    """Invariant 6; the penalty is what ridge is off by, so it is left out here."""
    rule, ordinary, rates = PLAIN[name]
    expected = ordinary(PROMPT, beta=0.8)
    common = {"beta": 0.8, "rule": rule, **rates}
    assert_same(
        momentum_approximation(Run(least_squares(), CLIENTS, X0, PROMPT), penalty=0.0, **common), expected
    )
    assert_same(
        momentum_approximation(Run(least_squares(), CLIENTS, X0, PROMPT), rcond=1e-2, **common), expected
    )
    assert_same(light_momentum_approximation(Run(least_squares(), CLIENTS, X0, PROMPT), **common), expected)


def test_without_delay_the_weights_are_the_momentums_row() -> None:
    rows = arrivals(PROMPT, 21)
    assert_close(rows, np.eye(10))
    weights = full(rows, 0.9, penalty=0.0)
    for t in range(10):
        assert_close(weights[t, : t + 1], target(t, 0.9))
    # ridge divides the weights of an identity by 1 + penalty
    assert_close(full(rows, 0.9, penalty=0.25) * 1.25, weights)
    lightly = light(rows, 0.9)
    for before, after in pairwise(lightly):
        t = int(np.flatnonzero(after)[-1])
        assert_close(after[t], 0.1)
        assert_close(after[:t], 0.9 * before[:t])


def test_the_momentums_row_adds_up_to_what_is_left_of_one() -> None:
    assert_close(target(4, 0.5), [0.5**5, 0.5**4, 0.5**3, 0.5**2, 0.5])
    assert target(30, 0.9).sum() == pytest.approx(1 - 0.9**31)


def test_with_beta_zero_the_target_is_the_newest_gradient_and_prompt_runs_are_fedbuff() -> None:
    """Invariant 7."""
    expected = fedbuff(Run(least_squares(), CLIENTS, X0, PROMPT), **RATES)
    for run in (
        momentum_approximation(Run(least_squares(), CLIENTS, X0, PROMPT), beta=0.0, penalty=0.0, **RATES),
        light_momentum_approximation(Run(least_squares(), CLIENTS, X0, PROMPT), beta=0.0, **RATES),
    ):
        assert_same(run, expected)
    assert_apart(
        momentum_approximation(Run(least_squares(), CLIENTS, X0, LATE), beta=0.0, **RATES),
        fedbuff(Run(least_squares(), CLIENTS, X0, LATE), **RATES),
    )


def test_two_late_steps_by_hand() -> None:
    # W = [[1, 0], [1/2, 1/2]], M_1 = (1/4, 1/2) with beta 1/2 and no penalty: a_1 W = M_1 has one solution,
    # a_11 = 1, a_10 = -1/4. Parabola at rate 1/2: descents are half of where they start.
    trace = [[Task(0, 0, 0)], [Task(1, 0, 0), Task(0, 1, 1)]]
    models = momentum_approximation(
        Run(Parabola(), 2, [1.0], trace), local_lr=0.5, server_lr=1.0, beta=0.5, penalty=0.0
    )
    r0, x1 = 0.5, 0.75
    r1 = (0.5 + x1 / 2) / 2
    assert_close(np.concatenate(models), [1, x1, x1 - (r1 - r0 / 4)])
    # MA-light: b_0 = (1/2, 0), so u (1/2, 1/2) + v (1/2, 0) = (1/4, 1/2): u = 1, v = -1/2
    lightly = light_momentum_approximation(
        Run(Parabola(), 2, [1.0], trace), local_lr=0.5, server_lr=1.0, beta=0.5
    )
    assert_close(np.concatenate(lightly), [1, x1, x1 - (r1 - 0.5 * 0.25)])


def test_where_all_is_stale_light_takes_the_least_of_equal_solutions() -> None:
    # rows (1, 0) twice, beta 1/2: b_0 = (1/2, 0); u + v/2 = 1/4 is least at (u, v) = (1/5, 1/10)
    weights = light(np.array([[1.0, 0.0], [1.0, 0.0]]), 0.5)
    assert_close(weights, [[0.5, 0], [0.1 * 0.5, 0.2]])


def test_fading_weights_are_in_the_rows_as_in_the_mean() -> None:
    rows = arrivals(LATE, 21, polynomial(0.5))
    t = max(range(len(LATE)), key=lambda t: max(t - task.version for task in LATE[t]))
    assert rows[t].sum() == pytest.approx(sum((1 + t - task.version) ** -0.5 for task in LATE[t]) / 4)
    assert rows[t].sum() < 1
    with pytest.raises(ValueError, match="does not fit a span"):
        arrivals(LATE, 2)


def test_ridge_and_truncation_are_what_their_normal_equations_say() -> None:
    rng = np.random.default_rng(8)
    b, y = rng.normal(size=(7, 4)), rng.normal(size=7)
    assert_close(b.T @ (b @ ridge(b, y, 0.3) - y) + 0.3 * ridge(b, y, 0.3), np.zeros(4))
    assert_close(truncated(b, y, 0.0), np.linalg.lstsq(b, y)[0])
    assert_close(truncated(b, y, 0.5), np.linalg.pinv(b, rcond=0.5) @ y)
    assert_close(truncated(np.zeros((3, 2)), y[:3], 0.1), np.zeros(2))


def half_normal(steps: int, buffer: int, scale: float, most: int = 20) -> Matrix:
    """Rows of W whose staleness is a half-normal of that scale, rounded down, and dropped above `most`."""
    rng = np.random.default_rng(12)
    rows = np.zeros((steps, steps))
    for t in range(steps):
        held = 0
        while held < buffer:
            staleness = int(abs(rng.normal()) * scale)
            if staleness <= min(t, most):
                rows[t, t - staleness] += 1 / buffer
                held += 1
    return rows


@pytest.mark.parametrize(("scale", "error"), [(5, 0.0005), (10, 0.03), (20, 0.08)])
def test_the_penalty_keeps_weights_small_at_a_small_error(scale: float, error: float) -> None:
    """Bounds a little above 0.003 %, 1.0 % and 3.4 %, which these rows give."""
    rows = half_normal(100, 200, scale)
    weights = full(rows, 0.9)
    assert np.abs(weights).max() < 3
    assert relative_error(weights, rows, 0.9) < error < relative_error(light(rows, 0.9), rows, 0.9)
    assert (
        abs(relative_error(full(rows, 0.9, window=60), rows, 0.9) - relative_error(weights, rows, 0.9))
        < 0.005
    )
    assert relative_error(full(rows, 0.9, rcond=1e-2), rows, 0.9) < 2 * error


def test_without_a_penalty_broad_delays_blow_the_weights_up() -> None:
    assert np.abs(full(half_normal(100, 200, 20), 0.9, penalty=0.0)).max() > 100


def test_a_window_of_one_uses_the_newest_descent_alone() -> None:
    rows = arrivals(LATE, 21)
    weights = full(rows, 0.9, window=1)
    assert_close(weights, np.diag(np.diag(weights)))
    for t in range(len(LATE)):
        row = rows[t, : t + 1]
        assert weights[t, t] == pytest.approx(row @ target(t, 0.9) / (row @ row + 1e-4))


def test_scales_see_the_raw_descents() -> None:
    history = [np.array([1.0, 0.0]), np.array([-2.0, 0.5])]
    assert_close(adam(0.5, 0.1, 0.0)(history), np.sqrt([0.25 + 2.0, 0.125]) + 0.1)
    assert_close(adagrad(0.1)(history), np.sqrt([5.01, 0.26]) + 0.1)
    falling = [np.array([2.0]), np.array([0.0])]
    assert_close(amsgrad(0.5, 0.1)(falling), [np.sqrt(2.0) + 0.1])


def test_weight_prediction_without_delay_is_the_momentum() -> None:
    for rule, ordinary, rates in PLAIN.values():
        for previous in (False, True):
            models = weight_prediction(
                Run(least_squares(), CLIENTS, X0, PROMPT), beta=0.8, rule=rule, previous=previous, **rates
            )
            assert_same(models, ordinary(PROMPT, beta=0.8))


def test_weight_prediction_by_hand() -> None:
    # Parabola at rate 1/2, no momentum: r_0 = 1/2, x_1 = 1/2, x_h = 1/8 with decay 3/4. Step 1 is prompt,
    # so r_1 = 1/4, x_2 = 1/4, x_h = 3/32 + 1/16. Step 2 is one late, from version 1: it starts at
    # 1/2 - 1/8 and walks half of that. By its previous staleness, which is 0, it starts at 1/2.
    trace = [[Task(0, 0, 0)], [Task(1, 1, 0)], [Task(0, 1, 1)], [Task(0, 2, 2)]]
    common = {"local_lr": 0.5, "server_lr": 1.0, "beta": 0.0, "decay": 0.75}
    known = weight_prediction(Run(Parabola(), 2, [1.0], trace), **common)
    x3 = 0.25 - 0.375 / 2
    assert_close(np.concatenate(known)[:4], [1, 0.5, 0.25, x3])
    guessed = weight_prediction(Run(Parabola(), 2, [1.0], trace), previous=True, **common)
    assert_close(np.concatenate(guessed)[:4], [1, 0.5, 0.25, 0.0])
    drift = 0.75 * (0.75 * 0.125 + 0.25 * 0.25) / 0.75  # x_h of version 2
    assert_close(guessed[4], -(0.25 - drift) / 2)


def test_every_rule_changes_under_delay_and_descends() -> None:
    problem = least_squares()
    for name, (rule, ordinary, rates) in PLAIN.items():
        naive = ordinary(LATE, beta=0.8)
        for run in (momentum_approximation, light_momentum_approximation, weight_prediction):
            models = run(Run(problem, CLIENTS, X0, LATE), beta=0.8, rule=rule, **rates)
            assert_apart(models, naive)
            assert whole(problem, models[-1]) < whole(problem, X0), (name, run)


def whole(problem: object, x: Vector) -> float:
    pairs = zip(problem.features, problem.targets, strict=True)  # type: ignore[attr-defined]
    return sum(float(np.mean((a @ x - b) ** 2)) for a, b in pairs)


@pytest.mark.parametrize("lightly", [False, True])
def test_without_noise_and_within_bounds_the_private_form_is_the_plain_one(lightly: bool) -> None:
    still = [(np.zeros(4), np.zeros(21))] * len(LATE)
    models = private_momentum(
        Run(least_squares(), CLIENTS, X0, LATE),
        bound=1e6,
        sigma=1.0,
        xi=2.4,
        noise=still,
        lightly=lightly,
        weight=polynomial(0.5),
        **RATES,
    )
    run = light_momentum_approximation if lightly else momentum_approximation
    assert_same(models, run(Run(least_squares(), CLIENTS, X0, LATE), weight=polynomial(0.5), **RATES))
