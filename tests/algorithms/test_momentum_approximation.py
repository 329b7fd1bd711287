"""Momentum approximation: what it must be without delay, and what keeps it sound with it."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments.momentum import table4
from experiments.reproduce.page import fill_sections
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat import (
    CATALOGUE,
    Asynchronous,
    Cohort,
    Experiment,
    Exponential,
    FedOpt,
    InputError,
    Poisson,
    Polynomial,
    Sequential,
    Setting,
    Vectorised,
    build,
    train,
)
from offbeat.algorithms.fadas import Shrink
from offbeat.algorithms.fedopt import Adagrad, Adam, AmsGrad, Ema, Identity, Momentum, Plain, Upload
from offbeat.algorithms.momentum_approximation import (
    Approximation,
    LightApproximation,
    Ridge,
    Solver,
    Truncated,
    fit_blend,
    fit_weights,
    momentum_reach,
    momentum_weights,
    relative_errors,
    staleness_shares,
)
from offbeat.cli.main import main
from offbeat.training import checkpoint
from worlds import make_world, play

SPAN = 21


def cohort_of(version: int, staleness: Sequence[int], weights: Sequence[float] | None = None) -> Cohort:
    return Cohort(version, 100, tuple(staleness), tuple(weights or [1.0] * len(staleness)))


def counted(kind: Approximation | LightApproximation, cohort: Cohort) -> Tensor:
    """The weighted mean of the stamps that a cohort's clients send back."""
    x = torch.zeros(1, dtype=torch.float64)
    stamps = [kind.stamp(x, cohort.version - age) for age in cohort.staleness]
    return sum(w * s for w, s in zip(cohort.weights, stamps, strict=True)) / len(stamps)


def directions(kind: Momentum, steps: Sequence[Sequence[int]], d: int = 3) -> list[Tensor]:
    """What a momentum makes of random means under a schedule."""
    rng = np.random.default_rng(3)
    past = kind.init(torch.zeros(d, dtype=torch.float64))
    found = []
    for version, staleness in enumerate(steps):
        cohort = cohort_of(version, staleness)
        mark = counted(kind, cohort) if isinstance(kind, Approximation | LightApproximation) else ()
        m, past = kind(past, Upload(torch.from_numpy(rng.normal(size=d)), mark), cohort)
        found.append(m)
    return found


def half_normal(scale: float, rounds: int, cohort: int = 200, limit: int = 20) -> list[list[int]]:
    """Staleness that is the whole part of a half-normal variable, none beyond the limit or the beginning."""
    rng = np.random.default_rng(5)
    steps = []
    for version in range(rounds):
        ages = np.floor(np.abs(rng.normal(scale=scale, size=40 * cohort))).astype(int)
        steps.append(ages[ages <= min(version, limit)][:cohort].tolist())
    return steps


def dense(steps: Sequence[Sequence[int]]) -> np.ndarray:
    """W of equation 7, written out."""
    w = np.zeros((len(steps), len(steps)))
    for version, staleness in enumerate(steps):
        for age in staleness:
            w[version, version - age] += 1 / len(staleness)
    return w


def history(steps: Sequence[Sequence[int]], window: int) -> Tensor:
    """The last rows of W, by staleness."""
    rows = [np.bincount(each, minlength=SPAN) / len(each) for each in steps[-window:]]
    return torch.from_numpy(np.stack(rows))


def momentum_matrix(beta: float, rounds: int) -> np.ndarray:
    age = np.subtract.outer(np.arange(rounds), np.arange(rounds))
    return np.where(age >= 0, (1 - beta) * beta ** np.maximum(age, 0.0), 0)


@given(st.floats(-0.95, 0.95))
@settings(max_examples=15, deadline=None)
def test_without_staleness_it_is_the_momentum_itself(beta: float) -> None:
    fresh = [[0, 0]] * 30
    own = directions(Ema(beta), fresh)
    for m, expected in zip(directions(Approximation(beta, solver=Truncated()), fresh), own, strict=True):
        torch.testing.assert_close(m, expected, rtol=0, atol=1e-12)
    for m, expected in zip(directions(LightApproximation(beta), fresh), own, strict=True):
        torch.testing.assert_close(m, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("penalty", [1e-4, 0.1])
def test_without_staleness_the_ridge_shrinks_by_its_penalty_and_no_more(penalty: float) -> None:
    """W is the identity, so (1 + penalty) a = M."""
    fresh = [[0, 0]] * 30
    made = directions(Approximation(0.9, solver=Ridge(penalty)), fresh)
    for m, expected in zip(made, directions(Ema(0.9), fresh), strict=True):
        torch.testing.assert_close((1 + penalty) * m, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.99])
def test_without_staleness_the_light_one_mixes_as_momentum_does(beta: float) -> None:
    row = torch.zeros(SPAN, dtype=torch.float64)
    row[0] = 1
    origins = torch.zeros(momentum_reach(beta, SPAN), dtype=torch.float64)
    for version in range(40):
        (u, v), origins = fit_blend(row, origins, beta, version)
        assert u == pytest.approx(1 - beta, abs=1e-12)
        if version:
            assert v == pytest.approx(beta, abs=1e-12)
        else:
            assert v == 0


def test_without_beta_fresh_means_are_taken_as_they_are() -> None:
    fresh = [[0, 0]] * 10
    own = directions(Plain(), fresh)
    for kind in (Approximation(0.0, solver=Truncated()), LightApproximation(0.0), Ema(0.0)):
        for m, expected in zip(directions(kind, fresh), own, strict=True):
            torch.testing.assert_close(m, expected, rtol=0, atol=1e-12)


def test_the_first_mean_has_the_weight_of_momentum() -> None:
    for kind in (Approximation(0.9, solver=Truncated()), LightApproximation(0.9)):
        (m,) = directions(kind, [[0]])
        torch.testing.assert_close(m, 0.1 * directions(Plain(), [[0]])[0])


@pytest.mark.parametrize("scale", [10, 20])
def test_regularisation_bounds_the_weights_where_plain_least_squares_explodes(scale: float) -> None:
    """With the whole history, as the paper has it: a window by itself already helps."""
    steps = half_normal(scale, 200)
    largest: dict[str, float] = {}
    solvers: dict[str, Solver] = {"plain": Truncated(0.0), "ridge": Ridge(), "truncated": Truncated()}
    for version in range(79, 200, 20):
        rows = history(steps[: version + 1], version + 1)
        for name, solver in solvers.items():
            a = fit_weights(rows, 0.9, version, solver)
            largest[name] = max(largest.get(name, 0.0), float(a.abs().max()))
    assert largest["plain"] > {10: 100, 20: 1e5}[scale]
    assert largest["ridge"] < 2
    assert largest["truncated"] < 2


def test_the_errors_are_those_of_the_matrices_written_out() -> None:
    rounds, beta, penalty = 60, 0.8, 1e-3
    steps = half_normal(4, rounds, cohort=9)
    w, m = dense(steps), momentum_matrix(beta, rounds)
    a = np.zeros_like(w)
    light = np.zeros_like(w)
    for t in range(rounds):
        b = w[: t + 1, : t + 1].T
        a[t, : t + 1] = np.linalg.solve(b.T @ b + penalty * np.eye(t + 1), b.T @ m[t, : t + 1])
        before = light[t - 1] if t else np.zeros(rounds)
        basis = np.stack([w[t], before @ w])
        u, v = np.linalg.lstsq(basis.T, m[t], rcond=None)[0]
        light[t] = v * before
        light[t, t] += u
    expected = [np.sum((one @ w - m) ** 2) / np.sum(m**2) for one in (a, light, m)]
    found = relative_errors(steps, beta, SPAN, rounds, Ridge(penalty))
    assert list(found) == pytest.approx(expected, rel=1e-8)


def test_a_window_costs_little_where_delays_are_moderate() -> None:
    steps = half_normal(5, 250)
    whole = relative_errors(steps, 0.9, SPAN, window=250).approximation
    cut = relative_errors(steps, 0.9, SPAN, window=80).approximation
    assert abs(cut - whole) < 3e-4
    assert whole < 1e-3


def test_approximation_is_nearer_than_its_light_form_and_both_than_naive_momentum() -> None:
    errors = relative_errors(half_normal(10, 150), 0.9, SPAN)
    assert errors.approximation < 0.05
    assert 2 * errors.approximation < errors.light < errors.naive


@given(
    version=st.integers(0, 70),
    span=st.integers(1, 25),
    exponent=st.floats(0, 2),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_a_row_without_noise_is_the_part_of_each_staleness(
    version: int, span: int, exponent: float, data: st.DataObject
) -> None:
    """However often the ring has gone round, and with the same weights as the mean."""
    ages = st.integers(0, min(version, span - 1))
    staleness = data.draw(st.lists(ages, min_size=1, max_size=8))
    weigh = Polynomial(exponent)
    cohort = cohort_of(version, staleness, [weigh(age) for age in staleness])
    expected = np.zeros(span)
    for age, weight in zip(staleness, cohort.weights, strict=True):
        expected[age] += weight / len(staleness)
    row = staleness_shares(counted(Approximation(0.9, span), cohort), cohort)
    np.testing.assert_allclose(row.numpy(), expected, rtol=0, atol=1e-14)


@given(version=st.integers(0, 40), seed=st.integers(0, 2**20), noise=st.floats(0.01, 1))
@settings(max_examples=60, deadline=None)
def test_a_noisy_row_keeps_to_what_is_known_without_it(version: int, seed: int, noise: float) -> None:
    rng = np.random.default_rng(seed)
    cohort = cohort_of(version, [0] * 10, [0.5] * 10)
    row = staleness_shares(torch.from_numpy(rng.normal(scale=noise, size=SPAN)), cohort)
    assert float(row.min()) >= 0
    assert not row[version + 1 :].any()
    assert float(row.sum()) == pytest.approx(0.5) or not row.any()


def test_the_reach_of_the_light_one_is_as_good_as_more() -> None:
    steps = half_normal(10, 400)
    short = torch.zeros(momentum_reach(0.9, SPAN), dtype=torch.float64)
    long = torch.zeros(4 * len(short), dtype=torch.float64)
    for version, each in enumerate(steps):
        row = torch.from_numpy(np.bincount(each, minlength=SPAN) / len(each))
        first, short = fit_blend(row, short, 0.9, version)
        second, long = fit_blend(row, long, 0.9, version)
        assert first == pytest.approx(second, abs=1e-10)


def test_the_light_ones_origins_are_its_weights_times_the_shares() -> None:
    rounds = 30
    steps = half_normal(3, rounds, cohort=7)
    w = dense(steps)
    origins, a = torch.zeros(momentum_reach(0.9, SPAN), dtype=torch.float64), np.zeros(rounds)
    for version, each in enumerate(steps):
        row = torch.from_numpy(np.bincount(each, minlength=SPAN) / len(each))
        (u, v), origins = fit_blend(row, origins, 0.9, version)
        a *= v
        a[version] += u
        by_age = (a @ w)[: version + 1][::-1]
        np.testing.assert_allclose(origins[: version + 1].numpy(), by_age, rtol=0, atol=1e-13)


def test_momentums_own_row_adds_up_to_what_has_begun() -> None:
    row = momentum_weights(0.9, 4, 9)
    assert float(row.sum()) == pytest.approx(1 - 0.9**5)
    assert not row[5:].any()


def test_a_step_copies_no_history_and_keeps_no_more_than_the_window() -> None:
    kind = Approximation(0.9, span=4, window=3)
    past = kind.init(torch.zeros(5))
    assert [r.numel() for r in past.means] == [0, 0, 0]
    places = []
    for version in range(6):
        cohort = cohort_of(version, [min(version, 2)])
        mean = Upload(torch.ones(5), counted(kind, cohort))
        _, after = kind(past, mean, cohort)
        assert all(a is b for a, b in zip(after.means, (*past.means[1:], mean.delta), strict=True))
        places.append(len(after.means))
        past = after
    assert set(places) == {3}
    assert past.rows.shape == (3, 4)


KINDS = {"full": Approximation(0.8, span=9, window=5), "light": LightApproximation(0.8, span=9)}
SCALES = {
    "avgm": Identity(),
    "adam": Adam(0.99, 0.01),
    "adagrad": Adagrad(0.01),
    "fadas": AmsGrad(0.99, 1e-4),
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_run_goes_on_with_the_same_bits_and_engines_agree(
    kind: str, scale: str, tmp_path: Path
) -> None:
    world = make_world()
    algorithm = FedOpt(0.1, 0.1, KINDS[kind], SCALES[scale], Shrink(3))
    options = {
        "dispatch": Asynchronous(8),
        "buffer": 3,
        "rounds": 12,
        "max_staleness": 8,
        "weights": Polynomial(0.5),
    }
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    whole = list(train(algorithm, engine, **options))
    for shot in train(algorithm, engine, **options):
        if shot.version in (3, 7):
            checkpoint.save(tmp_path / f"{shot.version}", shot.checkpoint())
    for cut in (3, 7):
        rest = list(train(algorithm, engine, resume=checkpoint.load(tmp_path / f"{cut}"), **options))
        for left, right in zip(whole[cut + 1 :], rest, strict=True):
            assert torch.equal(left.x, right.x)
    together = list(
        train(algorithm, Vectorised(world.problem, world.population, Exponential(1.0)), **options)
    )
    torch.testing.assert_close(together[-1].x, whole[-1].x, rtol=0, atol=1e-10)
    assert max(max(shot.cohort.staleness) for shot in whole if shot.cohort) > 1


def test_a_span_must_hold_the_stalest_update_that_may_come() -> None:
    world = make_world()
    engine = Sequential(world.problem, world.population, Exponential(1.0))
    algorithm = FedOpt(0.1, 1.0, Approximation(0.9, span=5))
    for limit in (float("inf"), 5):
        with pytest.raises(InputError, match="with a span of 5 takes updates of a staleness below that"):
            play(algorithm, engine, Asynchronous(5), rounds=8, max_staleness=limit)
    play(algorithm, engine, Asynchronous(5), rounds=8, max_staleness=4)
    play(algorithm, engine, Asynchronous(5), rounds=5)  # nothing can be staler than the run is long


@pytest.mark.parametrize(
    "make",
    [
        lambda: Approximation(1.0),
        lambda: Approximation(0.9, span=0),
        lambda: Approximation(0.9, window=0),
        lambda: LightApproximation(-1.0),
        lambda: LightApproximation(0.9, span=0),
        lambda: Ridge(0.0),
        lambda: Ridge(float("nan")),
        lambda: Truncated(1.0),
    ],
)
def test_what_cannot_work_is_refused(make) -> None:
    with pytest.raises(InputError, match="must lie in"):
        make()


def test_noise_asks_for_a_larger_penalty() -> None:
    """(xi r / C)^2 for sigma 0.8, S = 1.1 S_delta, noise lowered from a cohort of 5000 to one of 200."""
    sigma, r, cohort = 0.8, 200 / 5000, 200
    xi = sigma * 1.1 / np.sqrt(0.21)
    assert xi == pytest.approx(2.4004 * sigma, rel=1e-4)
    assert Ridge.under_noise(xi, 10) == Ridge((xi / 10) ** 2)
    assert Ridge.under_noise(xi * r, cohort) == Ridge(1e-4)


def test_the_catalogue_counts_vectors_of_the_models_size_alone() -> None:
    sent = {"down": 1, "up": 1, "client": 0}
    assert CATALOGUE["ma-fedavgm"].cost.vectors() == sent | {"server": 81}
    assert CATALOGUE["ma-fedadam"].cost.vectors() == sent | {"server": 82}
    assert CATALOGUE["ma-light-fedavgm"].cost.vectors() == sent | {"server": 2}
    assert CATALOGUE["fedavgm"].cost.vectors() == sent | {"server": 2}


def test_an_experiment_takes_the_papers_staleness_limit_unless_told() -> None:
    assert Experiment.of(algorithm="ma-fedavgm").max_staleness == 20
    assert Experiment.of(algorithm="ma-fedavgm", max_staleness=7).max_staleness == 7
    assert Experiment.of(algorithm="fedbuff").max_staleness is None


@pytest.mark.parametrize("beta", [-0.5, 0.5])
def test_naive_momentum_of_either_sign_runs_on_stale_buffers(beta: float) -> None:
    world = make_world()
    engine = Vectorised(world.problem, world.population, Exponential(1.0))
    naive = build("fedavgm", Setting(3, 3, 8), {"averaged": True, "beta": beta})
    for dispatch in (Asynchronous(5), Poisson(0.5)):
        shots = play(naive, engine, dispatch)
        assert not torch.equal(shots[0].x, shots[-1].x)


SCHEDULE = "schedule --rounds 60 --delays half-normal:5 --dispatch poisson --max-staleness 20"


def test_the_schedule_command_tells_the_errors(capsys) -> None:
    assert main([*SCHEDULE.split(), "--momentum", "0.9", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["momentum"]
    assert told["beta"] == 0.9
    assert 0 < told["approximation"] < told["light"] < told["naive"]
    assert main([*SCHEDULE.split(), "--momentum", "0.9"]) == 0
    assert "naive" in capsys.readouterr().out
    assert main([*SCHEDULE.split(), "--json"]) == 0
    assert "momentum" not in json.loads(capsys.readouterr().out)


def test_the_schedule_command_refuses_what_is_no_momentum(capsys) -> None:
    assert main([*SCHEDULE.split(), "--momentum", "1"]) == 2
    assert "must lie in (-1, 1)" in capsys.readouterr().err


def test_a_run_refuses_a_span_that_its_limit_exceeds(capsys, tmp_path: Path) -> None:
    words = ["run", "ma-fedavgm", "--max-staleness", "30", "--rounds", "100", "--out", str(tmp_path / "run")]
    assert main(words) == 2
    assert "lower the staleness limit, or raise the span" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_experiments_page_shows_table_4_as_it_was_measured() -> None:
    page = table4.PAGE.read_text()
    records = json.loads(table4.RECORDS.read_text())
    assert fill_sections(page, table4.tables(records)) == page
    for name, kind in (("laws", "uniform"), ("windows", "80")):
        changed = json.loads(json.dumps(records))
        first = next(iter(changed[name][kind]))
        changed[name][kind][first] = {"approximation": 1, "light": 1, "naive": 1} if name == "laws" else 1
        assert fill_sections(page, table4.tables(changed)) != page


def test_the_order_of_the_laws_in_table_4_is_the_papers() -> None:
    """Uniform delays are the worst for both."""
    records = json.loads(table4.RECORDS.read_text())["laws"]
    for started in ("1.2", "2", "4"):
        for kind in ("approximation", "light"):
            errors = {law: records[law][started][kind] for law in table4.PAPER}
            assert max(errors, key=errors.__getitem__) == "uniform"


def test_under_poisson_sampling_staleness_does_not_depend_on_the_scale_of_delays() -> None:
    """A factor of 2^10 changes no rounding."""
    one, other = (table4.staleness(f"half-normal:{scale}", 1.5, 40, 20_000) for scale in (1, 1024))
    assert one == other
    assert max(map(max, one)) > 3
