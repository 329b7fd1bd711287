"""The control-variate oracles among themselves: identities, invariants and closed forms."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest

from oracles.adamasfl import Rates, adamasfl, theorem_2
from oracles.ca2fl import ca2fl, ca2fl_states
from oracles.defedavg import defedavg
from oracles.dude import dude, dude_states
from oracles.fafed import fafed
from oracles.fedavg import fedavg
from oracles.fedcm import fedcm, fedcm_vr
from oracles.fedsps import fedsps
from oracles.least_squares import LeastSquares
from oracles.lines import Fading, Parabola, Slope
from oracles.masfl import masfl, masfl_states, masfl_theory
from oracles.mime import mime
from oracles.padamfed import padamfed, padamfed_states, padamfed_theory, padamfed_vr, padamfed_vr_theory
from oracles.replay import Problem, Run, Task, Vector, local_sgd
from oracles.scaffold import scaffold, scaffold_states
from oracles.scaffold_m import scaffold_m, scaffold_m_states, scaffold_m_vr
from oracles.softmax import Softmax
from oracles.traces import alone, late, prompt
from oracles.variates import State

CLIENTS, FEATURES, EXAMPLES = 6, 4, 8
X0 = np.array([0.5, -1.0, 0.25, 2.0])
THREE = Rates(local_lr=0.1, server_lr=0.15, beta=0.3)
RATES = THREE._asdict()
ALL_OF_THEM = prompt(CLIENTS, 8, CLIENTS, 1)
PROMPT, LATE = prompt(CLIENTS, 10, 3, 1), late(CLIENTS, 10, 4, 1)
Trace = list[list[Task]]
Batches = Callable[[int, int], list[npt.NDArray[np.int64]]]
Oracle = Callable[..., list[Vector]]
States = Callable[[Problem, Trace], list[State]]


def draw_batches(count: int | None = None, size: int = 3) -> Batches:
    """Minibatches out of 8 examples; without a count, clients differ in how many they have."""

    def batches(client: int, visit: int) -> list[npt.NDArray[np.int64]]:
        rng = np.random.default_rng([7, client, visit])
        steps = 1 + client % 3 if count is None else count
        return [rng.choice(EXAMPLES, size=size, replace=False) for _ in range(steps)]

    return batches


def least_squares(count: int | None = None, size: int = 3, clients: int = CLIENTS) -> LeastSquares:
    rng = np.random.default_rng(1)
    features = [rng.normal(size=(EXAMPLES, FEATURES)) for _ in range(clients)]
    targets = [rng.normal(size=EXAMPLES) for _ in range(clients)]
    return LeastSquares(features, targets, draw_batches(count, size))


def softmax() -> Softmax:
    rng = np.random.default_rng(2)
    features = [rng.normal(size=(EXAMPLES, FEATURES)) for _ in range(CLIENTS)]
    labels = [rng.integers(0, 3, size=EXAMPLES) for _ in range(CLIENTS)]
    return Softmax(features, labels, draw_batches(), classes=3)


def hessian(problem: LeastSquares, client: int, visit: int, k: int) -> npt.NDArray[np.float64]:
    a = problem.features[client][problem.batches(client, visit)[k]]
    product: npt.NDArray[np.float64] = a.T @ a / len(a)
    return product


def mean_loss(problem: LeastSquares, x: Vector) -> float:
    pairs = zip(problem.features, problem.targets, strict=True)
    return float(np.mean([0.5 * np.mean((a @ x - b) ** 2) for a, b in pairs]))


def assert_close(actual: npt.ArrayLike, expected: npt.ArrayLike) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=0, atol=1e-12)


def assert_apart(one: list[Vector], other: list[Vector]) -> None:
    assert float(np.abs(one[-1] - other[-1]).max()) > 1e-4


@dataclass(frozen=True)
class Unstarted:
    """A problem whose visit 0 has no slope: control variates that are filled from it start at zero."""

    problem: Problem

    def steps(self, client: int, visit: int) -> int:
        return self.problem.steps(client, visit)

    def gradient(self, client: int, visit: int, k: int, x: Vector) -> Vector:
        return self.problem.gradient(client, visit, k, x) * (visit > 0)

    def loss(self, client: int, visit: int, k: int, x: Vector) -> float:
        return self.problem.loss(client, visit, k, x)

    def whole_gradient(self, client: int, x: Vector) -> Vector:
        return self.problem.whole_gradient(client, x)


def scaffold_m_mean(run: Run, **rates: float) -> list[Vector]:
    return scaffold_m(run, **rates, g0="mean")


def scaffold_m_vr_mean(run: Run, **rates: float) -> list[Vector]:
    return scaffold_m_vr(run, **rates, g0="mean")


ANY_TRACE: dict[str, tuple[Oracle, dict[str, float]]] = {
    "masfl": (masfl, RATES),
    "padamfed": (padamfed, RATES),
    "padamfed_vr": (padamfed_vr, RATES),
    "scaffold 1": (scaffold, {"local_lr": 0.05, "option": 1}),
    "scaffold 2": (scaffold, {"local_lr": 0.05, "option": 2}),
    "scaffold_m": (scaffold_m, RATES),
    "scaffold_m mean": (scaffold_m_mean, RATES),
    "scaffold_m_vr": (scaffold_m_vr, RATES),
    "fedcm": (fedcm, RATES),
    "fedcm_vr": (fedcm_vr, RATES),
    "ca2fl": (ca2fl, {"local_lr": 0.05}),
    "dude": (dude, {"local_lr": 0.05, "server_lr": 0.1}),
    "defedavg": (defedavg, {"local_lr": 0.05}),
    "fedsps": (fedsps, {"bound": 0.1}),
}
ROUNDS: dict[str, tuple[Oracle, dict[str, float]]] = {
    "mime": (mime, {"local_lr": 0.1, "beta": 0.5}),
    "mime lite": (mime, {"local_lr": 0.1, "beta": 0.5, "lite": True}),
    "fafed": (fafed, {"lr": 0.05, "alpha": 0.3}),
}
STATES: dict[str, States] = {
    "masfl": lambda p, t: masfl_states(Run(p, CLIENTS, X0, t), **RATES),
    "padamfed": lambda p, t: padamfed_states(Run(p, CLIENTS, X0, t), *THREE),
    "padamfed_vr": lambda p, t: padamfed_states(Run(p, CLIENTS, X0, t), *THREE, vr=True),
    "scaffold_m": lambda p, t: scaffold_m_states(Run(p, CLIENTS, X0, t), *THREE),
    "scaffold_m_vr": lambda p, t: scaffold_m_states(Run(p, CLIENTS, X0, t), *THREE, vr=True),
}


@pytest.mark.parametrize("problem", [least_squares(), softmax()])
def test_a_whole_gradient_is_the_central_difference_of_the_mean_loss_over_what_a_client_owns(
    problem: LeastSquares | Softmax,
) -> None:
    size = FEATURES if isinstance(problem, LeastSquares) else 3 * FEATURES + 3
    x, h = np.random.default_rng(5).normal(size=size), 1e-5
    everything = [np.arange(EXAMPLES)] * CLIENTS
    some = [np.arange(client % 3, EXAMPLES, 2) for client in range(CLIENTS)]
    for own, given in ((everything, None), (everything, everything), (some, some)):
        for client in range(CLIENTS):
            single = replaced(problem, given, whole_batches(own))
            slopes = [
                (single.loss(client, 0, 0, x + h * e) - single.loss(client, 0, 0, x - h * e)) / (2 * h)
                for e in np.eye(size)
            ]
            np.testing.assert_allclose(single.whole_gradient(client, x), slopes, rtol=1e-7, atol=1e-9)


def whole_batches(own: list[npt.NDArray[np.int64]]) -> Batches:
    return lambda client, visit: [own[client]]


def replaced(
    problem: LeastSquares | Softmax, own: list[npt.NDArray[np.int64]] | None, batches: Batches
) -> LeastSquares | Softmax:
    if isinstance(problem, LeastSquares):
        return LeastSquares(problem.features, problem.targets, batches, own)
    return Softmax(problem.features, problem.labels, batches, problem.classes, own)


@pytest.mark.parametrize("problem", [Slope(np.array([2.0, -1.0])), Parabola(), Fading()])
def test_gradients_of_the_simple_problems_are_central_differences(problem: Problem) -> None:
    x, h = np.array([0.7, -0.2]), 1e-5
    for visit in (0, 1):
        slopes = [
            (problem.loss(0, visit, 0, x + h * e) - problem.loss(0, visit, 0, x - h * e)) / (2 * h)
            for e in np.eye(2)
        ]
        np.testing.assert_allclose(problem.gradient(0, visit, 0, x), slopes, atol=1e-9)
    np.testing.assert_allclose(problem.whole_gradient(0, x), slopes, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "trace"),
    [(name, trace) for name in ANY_TRACE for trace in (PROMPT, LATE)]
    + [(name, trace) for name in ROUNDS for trace in (PROMPT, ALL_OF_THEM)],
)
def test_every_oracle_starts_at_x0_descends_and_leaves_its_inputs_alone(name: str, trace: Trace) -> None:
    problem, before = least_squares(), X0.copy()
    oracle, known = (ANY_TRACE | ROUNDS)[name]
    models = oracle(Run(problem, CLIENTS, X0, trace), **known)
    np.testing.assert_array_equal(X0, before)
    np.testing.assert_array_equal(models[0], X0)
    assert len(models) == len(trace) + 1
    assert mean_loss(problem, models[-1]) < mean_loss(problem, X0)
    np.testing.assert_array_equal(models, oracle(Run(problem, CLIENTS, X0, trace), **known))
    np.testing.assert_array_equal(models[:4], oracle(Run(problem, CLIENTS, X0, trace[:3]), **known))


@pytest.mark.parametrize(
    ("oracle", "given", "defaults"),
    [
        (scaffold, {"local_lr": 0.05}, {"server_lr": 1.0, "option": 2}),
        (scaffold_m, RATES, {"g0": "zero"}),
        (scaffold_m_vr, RATES, {"g0": "zero"}),
        (ca2fl, {"local_lr": 0.05}, {"server_lr": 1.0}),
        (defedavg, {"local_lr": 0.05}, {"server_lr": 1.0}),
        (fedsps, {}, {"c": 0.5, "lower": 0.0, "bound": 1.0, "server_lr": 1.0}),
        (mime, {"local_lr": 0.05}, {"server_lr": 1.0, "beta": 0.9, "lite": False}),
    ],
)
def test_defaults_are_those_of_the_papers(
    oracle: Oracle, given: dict[str, float], defaults: dict[str, float]
) -> None:
    one = oracle(Run(least_squares(), CLIENTS, X0, PROMPT), **given)
    np.testing.assert_array_equal(one, oracle(Run(least_squares(), CLIENTS, X0, PROMPT), **given, **defaults))


@pytest.mark.parametrize("name", ROUNDS)
def test_methods_with_rounds_refuse_late_work(name: str) -> None:
    oracle, known = ROUNDS[name]
    with pytest.raises(ValueError, match="rounds"):
        oracle(Run(least_squares(), CLIENTS, X0, LATE), **known)


@pytest.mark.parametrize("count", [None, 3])
@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_masfl_without_delay_is_scaffold_m_from_the_mean(count: int | None, beta: float) -> None:
    problem, rates = least_squares(count), RATES | {"beta": beta}
    ours = masfl(Run(problem, CLIENTS, X0, PROMPT), **rates)
    assert_close(ours, scaffold_m(Run(problem, CLIENTS, X0, PROMPT), **rates, g0="mean"))
    if beta < 1:
        assert_apart(ours, scaffold_m(Run(problem, CLIENTS, X0, PROMPT), **rates))
    late_ones = masfl(Run(problem, CLIENTS, X0, LATE), **rates)
    assert_apart(late_ones, scaffold_m(Run(problem, CLIENTS, X0, LATE), **rates, g0="mean"))


@pytest.mark.parametrize("trace", [PROMPT, LATE])
@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_adamasfl_is_padamfed(trace: Trace, beta: float) -> None:
    problem, rates = least_squares(), RATES | {"beta": beta}
    ours = adamasfl(Run(problem, CLIENTS, X0, trace), **rates)
    assert_close(ours, padamfed(Run(problem, CLIENTS, X0, trace), **rates))


@pytest.mark.parametrize("trace", [PROMPT, LATE])
@pytest.mark.parametrize("name", STATES)
def test_c_is_the_mean_of_all_variates_after_every_step(name: str, trace: Trace) -> None:
    for state in STATES[name](least_squares(), trace):
        assert_close(state.c, np.mean(state.variates, axis=0))


@pytest.mark.parametrize("trace", [PROMPT, LATE])
@pytest.mark.parametrize("option", [1, 2])
def test_scaffold_keeps_the_mean_of_its_variates_too(option: int, trace: Trace) -> None:
    for state in scaffold_states(Run(least_squares(), CLIENTS, X0, trace), local_lr=0.1, option=option):
        assert_close(state.c, np.mean(state.variates, axis=0))


@pytest.mark.parametrize("name", STATES)
def test_momentum_without_delay_is_the_mean_of_the_local_directions(name: str) -> None:
    for state in STATES[name](least_squares(), PROMPT)[1:]:
        assert_close(state.g, np.mean(state.directions, axis=0))


@pytest.mark.parametrize("name", ["masfl", "padamfed", "scaffold_m"])
def test_a_task_works_with_its_versions_anchor_and_its_clients_latest_variate(name: str) -> None:
    states, beta = STATES[name](least_squares(), LATE), RATES["beta"]
    for t, step in enumerate(LATE):
        own = list(states[t].variates)
        done = zip(step, states[t + 1].gradients, states[t + 1].directions, strict=True)
        for task, gradient, direction in done:
            handed = states[task.version]
            anchor = beta * handed.c + (1 - beta) * handed.g
            assert_close(direction, beta * (gradient - own[task.client]) + anchor)
            own[task.client] = gradient
        assert_close(states[t + 1].variates, own)


@pytest.mark.parametrize("name", ["padamfed_vr", "scaffold_m_vr"])
def test_a_reduced_task_compares_with_the_version_before_its_own(name: str) -> None:
    problem, beta = least_squares(), RATES["beta"]
    states = STATES[name](problem, LATE)
    for t, step in enumerate(LATE):
        own = list(states[t].variates)
        done = zip(step, states[t + 1].gradients, states[t + 1].directions, strict=True)
        for task, gradient, direction in done:
            handed, before = states[task.version], states[max(task.version - 1, 0)].x
            count = problem.steps(task.client, task.visit)
            again = [problem.gradient(task.client, task.visit, k, before) for k in range(count)]
            reduced = (1 - beta) * (handed.g - np.mean(again, axis=0))
            assert_close(direction, gradient + beta * (handed.c - own[task.client]) + reduced)
            own[task.client] = gradient
        assert_close(states[t + 1].variates, own)


def test_late_momentum_of_padamfed_vr_uses_the_newest_means_and_what_clients_uploaded() -> None:
    problem, beta = least_squares(), RATES["beta"]
    states = STATES["padamfed_vr"](problem, LATE)
    for t, step in enumerate(LATE):
        own = list(states[t].variates)
        total = np.zeros(FEATURES)
        for task, gradient in zip(step, states[t + 1].gradients, strict=True):
            before = states[max(task.version - 1, 0)].x
            count = problem.steps(task.client, task.visit)
            again = sum(problem.gradient(task.client, task.visit, k, before) for k in range(count)) / count
            total += gradient - beta * own[task.client] - (1 - beta) * again
            own[task.client] = gradient
        expected = total / len(step) + beta * states[t].c + (1 - beta) * states[t].g
        assert_close(states[t + 1].g, expected)


def test_the_start_is_every_clients_mean_gradient_at_x0() -> None:
    problem = least_squares()
    for name, run in STATES.items():
        [state] = run(problem, [])
        for client in range(CLIENTS):
            rows = np.concatenate(problem.batches(client, 0))
            a, b = problem.features[client][rows], problem.targets[client][rows]
            assert_close(state.variates[client], a.T @ (a @ X0 - b) / len(rows))
        assert_close(state.g, 0 * X0 if name.startswith("scaffold_m") else state.c)


@pytest.mark.parametrize(("oracle", "trace"), [(masfl, PROMPT), (scaffold_m, PROMPT), (scaffold_m, LATE)])
def test_with_beta_1_and_variates_from_zero_the_family_is_scaffold_option_2(
    oracle: Oracle, trace: Trace
) -> None:
    # SCAFFOLD starts from zero, the others from visit 0: without slope there, both do.
    problem, eta, gamma, count = Unstarted(least_squares(3)), 0.1, 0.15, 3
    expected = scaffold(Run(problem, CLIENTS, X0, trace), local_lr=eta, server_lr=gamma / (eta * count))
    assert_close(oracle(Run(problem, CLIENTS, X0, trace), local_lr=eta, server_lr=gamma, beta=1.0), expected)
    assert_apart(oracle(Run(problem, CLIENTS, X0, trace), **RATES), expected)


@pytest.mark.parametrize("trace", [PROMPT, LATE])
@pytest.mark.parametrize(
    ("plain", "reduced"),
    [(padamfed, padamfed_vr), (scaffold_m, scaffold_m_vr), (fedcm, fedcm_vr)],
)
def test_variance_reduction_does_nothing_without_memory(plain: Oracle, reduced: Oracle, trace: Trace) -> None:
    problem, memoryless = least_squares(), RATES | {"beta": 1.0}
    expected = plain(Run(problem, CLIENTS, X0, trace), **memoryless)
    assert_close(reduced(Run(problem, CLIENTS, X0, trace), **memoryless), expected)
    assert_apart(
        reduced(Run(problem, CLIENTS, X0, trace), **RATES), plain(Run(problem, CLIENTS, X0, trace), **RATES)
    )


@pytest.mark.parametrize(
    ("oracle", "unit", "left"),
    [
        (fedcm_vr, False, 0.7),
        (scaffold_m_vr, False, 0.7),
        (scaffold_m_vr_mean, False, 0.0),
        (padamfed_vr, True, 0.0),
    ],
)
def test_reduced_momentum_of_one_client_without_noise_forgets_its_start_only(
    oracle: Oracle, unit: bool, left: float
) -> None:
    # g^{t+1} - f'(x^t) = (1 - beta) (g^t - f'(x^{t-1})): from g^0 = 0 it is -(1 - beta)^{t+1} f'(x^0).
    problem = least_squares(1, EXAMPLES, 1)
    models = oracle(Run(problem, 1, X0, prompt(1, 8, 1, 1)), **RATES)
    for t, (x, after) in enumerate(pairwise(models)):
        g = problem.whole_gradient(0, x) - left ** (t + 1) * problem.whole_gradient(0, X0)
        assert_close(x - after, 0.15 * g / (np.linalg.norm(g) if unit else 1))


def test_theory_gives_the_rates_of_its_formulas() -> None:
    # S K = 16, T = 256; for VR S K = 8, T = 64.
    np.testing.assert_allclose(padamfed_theory(2, 8, 256), (1 / 128, 2 / 64, 1 / 4), rtol=1e-15)
    np.testing.assert_allclose(padamfed_vr_theory(2, 4, 64), (1 / 256, 1 / 8, 1 / 8), rtol=1e-14)
    assert padamfed_theory(10, 50, 400) == pytest.approx(theorem_2(10, 50, 400), abs=1e-15)
    assert padamfed_vr_theory(8, 8, 4) == pytest.approx((1 / 32, 4 / 4 ** (2 / 3), 1))


def test_masfl_theory_takes_the_largest_local_rate_for_which_its_theorem_holds() -> None:
    cohort, local_steps, rounds, smoothness, staleness = 2, 8, 2048, 3.0, 3
    rates = masfl_theory(cohort, local_steps, rounds, smoothness, staleness)
    assert rates.beta == pytest.approx((16 / 2048) ** 0.5)
    assert rates.server_lr == pytest.approx(rates.beta / 12)
    a = staleness**2 * rates.beta**2 + 20 * np.exp(2) * (rates.local_lr * local_steps * smoothness) ** 2
    assert 1 - 4 * a - rates.beta == pytest.approx(0, abs=1e-12)
    for refused in ((10, 10, 400, 1.0, 2), (4, 4, 16, 1.0, 0)):
        with pytest.raises(ValueError, match="Theorem 1"):
            masfl_theory(*refused)


def test_scaffold_option_1_keeps_the_whole_gradient_at_the_model_handed_out() -> None:
    problem = least_squares()
    states = scaffold_states(Run(problem, CLIENTS, X0, LATE), local_lr=0.1, server_lr=0.7, option=1)
    for t, step in enumerate(LATE):
        own = list(states[t].variates)
        moved = np.zeros(FEATURES)
        for client, version, visit in step:
            shift = states[version].c - own[client]
            y = states[version].x
            for k in range(problem.steps(client, visit)):
                y = y - 0.1 * (problem.gradient(client, visit, k, y) + shift)
            moved += (y - states[version].x) / len(step)
            own[client] = problem.whole_gradient(client, states[version].x)
        assert_close(states[t + 1].variates, own)
        assert_close(states[t + 1].x, states[t].x + 0.7 * moved)


@pytest.mark.parametrize(("oracle", "bad"), [(scaffold, {"option": 3}), (scaffold_m, {"g0": "c"})])
def test_a_form_that_does_not_exist_is_refused(oracle: Oracle, bad: dict[str, object]) -> None:
    known = {"local_lr": 0.1, "server_lr": 0.1} | ({} if oracle is scaffold else {"beta": 0.5})
    with pytest.raises(ValueError, match=r"options|g0"):
        oracle(Run(least_squares(), CLIENTS, X0, PROMPT), **known, **bad)


@pytest.mark.parametrize("oracle", [fedcm, fedcm_vr])
def test_fedcm_without_memory_is_fedavg_and_on_a_line_fills_its_momentum_from_zero(
    oracle: Oracle,
) -> None:
    problem = least_squares(3)
    expected = fedavg(Run(problem, CLIENTS, X0, LATE), local_lr=0.1, server_lr=0.15 / 0.3)
    assert_close(oracle(Run(problem, CLIENTS, X0, LATE), **RATES | {"beta": 1.0}), expected)
    line = oracle(Run(Slope(np.array([2.0]), 3), 1, [0.0], alone(6)), **RATES)
    assert_close(np.diff(np.concatenate(line)), -0.15 * 2 * (1 - 0.7 ** np.arange(1, 7)))


@pytest.mark.parametrize("reduced", [False, True])
def test_a_late_task_of_fedcm_has_the_momentum_of_its_version(reduced: bool) -> None:
    problem, beta = least_squares(), RATES["beta"]
    models = (fedcm_vr if reduced else fedcm)(Run(problem, CLIENTS, X0, LATE), **RATES)
    momenta = [0 * X0, *((x - after) / RATES["server_lr"] for x, after in pairwise(models))]
    for t, step in enumerate(LATE):
        directions = []
        for client, version, visit in step:
            y, last, taken = models[version], models[max(version - 1, 0)], []
            for k in range(problem.steps(client, visit)):
                gradient, again = (problem.gradient(client, visit, k, at) for at in (y, last))
                fresh = gradient - (1 - beta) * again if reduced else beta * gradient
                taken.append(fresh + (1 - beta) * momenta[version])
                y = y - RATES["local_lr"] * taken[-1]
            directions.append(np.mean(taken, axis=0))
        assert_close(momenta[t + 1], np.mean(directions, axis=0))


def test_ca2fl_with_everybody_once_moves_by_the_mean_change() -> None:
    problem = least_squares()
    states = ca2fl_states(Run(problem, CLIENTS, X0, ALL_OF_THEM), 0.1, 0.7)
    expected = fedavg(Run(problem, CLIENTS, X0, ALL_OF_THEM), local_lr=0.1, server_lr=0.7)
    assert_close([state.x for state in states], expected)
    for state in states[1:]:
        assert_close(state.v, np.mean(state.cache, axis=0))


def test_ca2fl_compares_with_the_cache_before_storing_and_divides_its_mean_by_the_population() -> None:
    problem = least_squares()
    states = ca2fl_states(Run(problem, CLIENTS, X0, LATE), 0.1, 0.7)
    last: dict[int, Vector] = {}
    for t, step in enumerate(LATE):
        h = sum(last.values(), np.zeros(FEATURES)) / CLIENTS
        v = h
        for client, version, visit in step:
            start = states[version].x
            change = local_sgd(problem, client, visit, start, 0.1) - start
            v = v + (change - last.get(client, np.zeros(FEATURES))) / len(step)
            last[client] = change
        assert_close(states[t].h, h)
        assert_close(states[t].h, np.mean(states[t].cache, axis=0))
        assert_close(states[t + 1].v, v)
        assert_close(states[t + 1].x, states[t].x + 0.7 * v)


def test_dude_walks_along_the_mean_of_everybodys_last_gradient() -> None:
    problem = least_squares()
    states = dude_states(Run(problem, CLIENTS, X0, LATE), 0.1, 0.7)
    last = [
        np.mean([problem.gradient(i, 0, k, X0) for k in range(1 + i % 3)], axis=0) for i in range(CLIENTS)
    ]
    for t, step in enumerate(LATE):
        assert_close(states[t].table, last)
        for client, version, visit in step:
            y, seen = states[version].x, []
            for k in range(problem.steps(client, visit)):
                seen.append(problem.gradient(client, visit, k, y))
                y = y - 0.1 * seen[-1]
            last[client] = np.mean(seen, axis=0)
        assert_close(states[t + 1].mean, np.mean(last, axis=0))
        assert_close(states[t + 1].x, states[t].x - 0.7 * np.mean(last, axis=0))


def test_dude_with_one_local_step_does_not_know_a_local_rate() -> None:
    problem = least_squares(1)
    one = dude(Run(problem, CLIENTS, X0, LATE), local_lr=0.1, server_lr=0.2)
    assert_close(one, dude(Run(problem, CLIENTS, X0, LATE), local_lr=0.5, server_lr=0.2))


@pytest.mark.parametrize("trace", [PROMPT, LATE])
def test_defedavg_is_fedavg_on_whatever_trace_it_is_given(trace: Trace) -> None:
    problem = least_squares()
    expected = fedavg(Run(problem, CLIENTS, X0, trace), local_lr=0.1, server_lr=0.7)
    assert_close(defedavg(Run(problem, CLIENTS, X0, trace), local_lr=0.1, server_lr=0.7), expected)


def test_polyaks_step_on_a_parabola_is_half_of_one_over_c_up_to_the_bound() -> None:
    # (x^2 / 2 - lower) / (c x^2), of which the server takes its share.
    def first(**known: float) -> float:
        return float(fedsps(Run(Parabola(), 1, [2.0], alone(1)), **known)[1][0])

    assert first() == 0
    assert first(c=1.0) == pytest.approx(2 - 0.5 * 2)
    assert first(c=1.0, lower=1.0) == pytest.approx(2 - 0.25 * 2)
    assert first(c=1.0, bound=0.125) == pytest.approx(2 - 0.125 * 2)
    assert first(c=1.0, server_lr=0.5) == pytest.approx(2 - 0.5 * 0.5 * 2)


def test_polyaks_step_is_taken_anew_in_every_local_step_and_stands_where_there_is_no_slope() -> None:
    problem = least_squares(2, clients=1)
    y = X0
    for k in range(2):
        gradient = problem.gradient(0, 0, k, y)
        y = y - problem.loss(0, 0, k, y) / (2 * np.linalg.norm(gradient) ** 2) * gradient
    assert_close(fedsps(Run(problem, 1, X0, alone(1)), c=2.0, bound=1e9)[1], y)
    assert_close(fedsps(Run(Slope(np.zeros(4)), 1, X0, alone(2))), [X0] * 3)


def test_a_late_polyak_descent_is_measured_from_the_version_it_started_from() -> None:
    models = fedsps(Run(Parabola(), 2, [1.0], [[Task(0, 0, 0)], [Task(1, 0, 0)]]), c=2.0)
    assert_close(np.concatenate(models), [1, 0.75, 0.5])


@pytest.mark.parametrize("lite", [False, True])
def test_mime_on_a_line_freezes_its_momentum_during_a_round(lite: bool) -> None:
    models = mime(Run(Slope(np.array([2.0]), 3), 1, [0.0], alone(6)), local_lr=0.1, beta=0.8, lite=lite)
    assert_close(np.diff(np.concatenate(models)), -3 * 0.1 * 2 * (1 - 0.8 ** np.arange(1, 7)))


def test_mime_corrects_each_minibatch_by_itself_at_the_servers_model() -> None:
    problem, eta, beta = least_squares(), 0.1, 0.6
    models = mime(Run(problem, CLIENTS, X0, PROMPT), local_lr=eta, server_lr=0.7, beta=beta)
    m = np.zeros(FEATURES)
    for t, step in enumerate(PROMPT):
        c = np.mean([problem.whole_gradient(task.client, models[t]) for task in step], axis=0)
        ends = []
        for task in step:
            moved = np.zeros(FEATURES)
            for k in range(problem.steps(task.client, task.visit)):
                curved = hessian(problem, task.client, task.visit, k) @ moved
                moved = moved - eta * ((1 - beta) * (curved + c) + beta * m)
            ends.append(moved)
        assert_close(models[t + 1], models[t] + 0.7 * np.mean(ends, axis=0))
        m = (1 - beta) * c + beta * m


def test_mime_lite_without_momentum_is_fedavg() -> None:
    problem = least_squares()
    models = mime(Run(problem, CLIENTS, X0, PROMPT), local_lr=0.1, server_lr=0.7, beta=0.0, lite=True)
    assert_close(models, fedavg(Run(problem, CLIENTS, X0, PROMPT), local_lr=0.1, server_lr=0.7))


def test_mime_lite_remembers_whole_gradients() -> None:
    # Minibatches are level after visit 0, and so is all that a client owns: only visit 0 moves.
    models = mime(Run(Fading(), 1, [0.0], alone(4)), local_lr=1.0, beta=0.5, lite=True)
    assert_close(np.concatenate(models), [0, -0.5, -0.5, -0.5, -0.5])
    problem = least_squares(1)
    x1, x2 = mime(Run(problem, CLIENTS, X0, PROMPT[:2]), local_lr=0.1, beta=0.6, lite=True)[1:]
    c = np.mean([problem.whole_gradient(task.client, X0) for task in PROMPT[0]], axis=0)
    fresh = np.mean([problem.gradient(task.client, task.visit, 0, x1) for task in PROMPT[1]], axis=0)
    assert_close(x1 - x2, 0.1 * (0.4 * fresh + 0.6 * 0.4 * c))


def test_fafed_on_a_line_walks_at_its_rate_in_every_coordinate() -> None:
    slope, eps = np.array([3.0, -2.0]), 0.5
    models = fafed(
        Run(Slope(slope, 2), 1, [0.0, 0.0], prompt(1, 3, 1, 1)), lr=lambda n: 1 / n, alpha=0.3, eps=eps
    )
    walked = np.array([1 + 1 / 2, 1 / 3 + 1 / 4, 1 / 5 + 1 / 6])
    assert_close(np.diff(models, axis=0), -np.outer(walked, slope / (abs(slope) + eps)))


def test_fafed_freezes_its_scale_during_a_round() -> None:
    # Slope 1 at the start, none after: m = (1 - alpha)^n, and round r divides by sqrt(rho_v^(r K)) + eps.
    count, lr, alpha, rho_v, eps = 2, 0.1, 0.3, 0.8, 0.01
    models = fafed(
        Run(Fading(count), 1, [0.0], prompt(1, 3, 1, 1)), lr=lr, alpha=lambda n: alpha, rho_v=rho_v, eps=eps
    )
    moves = [
        sum(lr * (1 - alpha) ** (r * count + k) for k in range(count)) / (rho_v ** (r * count / 2) + eps)
        for r in range(3)
    ]
    assert_close(np.diff(np.concatenate(models)), -np.array(moves))


def test_fafed_without_noise_descends_along_the_gradient_whatever_alpha_is() -> None:
    problem, trace = least_squares(1, EXAMPLES, 1), prompt(1, 6, 1, 1)
    models = fafed(Run(problem, 1, X0, trace), lr=0.1, alpha=0.2, rho_v=0.7)
    v = problem.whole_gradient(0, X0) ** 2
    for x, after in pairwise(models):
        assert_close(x - after, 0.1 * problem.whole_gradient(0, x) / (np.sqrt(v) + 1e-3))
        v = 0.7 * v + 0.3 * problem.whole_gradient(0, after) ** 2


def test_fafed_corrects_its_momentum_on_the_minibatch_it_has_drawn() -> None:
    # With alpha = 0 and rho_v = 1: m <- m + H (x' - x) with the minibatch's H, and the scale never changes.
    problem, lr = least_squares(), 0.05
    models = fafed(Run(problem, CLIENTS, X0, ALL_OF_THEM), lr=lr, alpha=0.0, rho_v=1.0)
    firsts = [
        np.mean([problem.gradient(i, 0, k, X0) for k in range(1 + i % 3)], axis=0) for i in range(CLIENTS)
    ]
    m, scale = np.mean(firsts, axis=0), np.sqrt(np.mean(np.square(firsts), axis=0)) + 1e-3
    for t, step in enumerate(ALL_OF_THEM):
        moves, momenta = [], []
        for task in step:
            moved, own = np.zeros(FEATURES), m
            for k in range(problem.steps(task.client, task.visit)):
                move = -lr * own / scale
                own = own + hessian(problem, task.client, task.visit, k) @ move
                moved = moved + move
            moves.append(moved)
            momenta.append(own)
        assert_close(models[t + 1] - models[t], np.mean(moves, axis=0))
        m = np.mean(momenta, axis=0)
