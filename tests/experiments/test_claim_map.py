"""The map of AdaMasFL's claims: which runs follow from which, and what is counted."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import experiments.__main__ as command
import numpy as np
import pytest
import torch
from experiments.__main__ import main
from experiments.reproduce import outcome
from experiments.reproduce.measures import LastModel, paired
from experiments.reproduce.outcome import ComputeOptions, run_cell, source_of
from experiments.reproduce.records import Curve, recorded
from experiments.reproduce.study import Cell, Study, Version
from experiments.studies import registry
from experiments.studies.adamasfl import FULL_MAP, MAP, QUICK_MAP
from experiments.studies.claim_map import LADDER, ClaimMap
from experiments.studies.fadas import both
from experiments.studies.map_table import FACTORS, Measured, Place, rank_correlation, sign_test
from scipy import stats

from offbeat.data.datasets import Source
from offbeat.data.population import Examples
from oracles.adamasfl import adamasfl, theorem_2
from oracles.replay import Run, Vector

PLACE = Place("dirichlet:0.5", 5, 5, 300)
TINY = Place("iid", 2, 2, 4)


def mapped(place: Place = PLACE, **more: object) -> ClaimMap:
    return replace(ClaimMap((place,), (), (), (), {"data": "digits", "clients": 100}), **more)


def curve(accuracy: float, failure: str | None = None) -> Curve:
    return Curve((0, 1), (0.0, 1.0), (0.1, accuracy), failure, None, 1.0, "CPU", "2026-01-02")


def ran(cells: tuple[Cell, ...], accuracies: dict[float, float]) -> dict[str, Curve]:
    """Records of all: by the local rate of a tuned method, and 0.5 of the others."""
    found = {}
    for cell in cells:
        given = dict(cell.experiment.parameters)
        tuned = given.get("server_lr") == 1.0
        found[cell.key] = curve(accuracies.get(given["local_lr"], 0.0) if tuned else 0.5)
    return found


def test_a_grid_goes_on_until_its_best_rate_has_a_worse_one_on_both_sides() -> None:
    made, peak = mapped(), {0.03: 0.3, 0.1: 0.4, 0.3: 0.5, 1.0: 0.6, 3.0: 0.2}
    found = ran(made.cells(), peak)
    tried, best = made.grid(PLACE, "fedbuff", found)
    assert ([dict(cell.experiment.parameters)["local_lr"] for cell in tried], best) == ([1.0], None)
    found |= ran(tuple(tried), peak)
    tried, best = made.grid(PLACE, "fedbuff", found)
    assert ([dict(cell.experiment.parameters)["local_lr"] for cell in tried], best) == ([1.0, 3.0], None)
    found |= ran(tuple(tried), peak)
    assert made.grid(PLACE, "fedbuff", found)[1] == both(1.0, 1.0)
    lower = ran(made.cells(), {0.03: 0.5, 0.1: 0.4, 0.3: 0.1})
    (down,), _ = made.grid(PLACE, "defedavg", lower)
    assert dict(down.experiment.parameters)["local_lr"] == 0.01


def test_a_rate_that_diverges_encloses_as_a_bad_one_does() -> None:
    made = mapped()
    found = ran(made.cells(), {0.03: 0.3, 0.1: 0.4})
    for cell in made.cells():
        if dict(cell.experiment.parameters).get("local_lr") == 0.3:
            found[cell.key] = curve(0.9, "the loss became NaN")
    assert made.grid(PLACE, "fedbuff", found) == ([], both(0.1, 1.0))


def test_a_grid_ends_with_its_ladder() -> None:
    made = mapped()
    every = {rate: rate for rate in LADDER}
    found = ran(made.cells(), every)
    for _ in LADDER:
        found |= ran(tuple(made.grid(PLACE, "fedbuff", found)[0]), every)
    assert made.grid(PLACE, "fedbuff", found)[1] == both(LADDER[-1], 1.0)


def test_what_is_tuned_is_swept_at_its_best_rate_and_repeated_where_it_decides() -> None:
    made = mapped(decisive=(PLACE,))
    assert made.follow({}) == ()
    found = ran(made.cells(), {0.03: 0.3, 0.1: 0.6, 0.3: 0.2})
    later = made.follow(found)
    assert {dict(cell.experiment.parameters).get("local_lr", 0.1) for cell in later} == {0.1}
    assert len({cell.key for cell in later}) == len(later) == 2 * 2 + 2 * (3 * 3 + 1)
    brief = mapped(brief=(PLACE,), decisive=(PLACE,))
    assert len(brief.cells()) < len(made.cells())
    assert brief.follow(found) == ()
    lasting = replace(brief, lasting=(PLACE,))
    assert {cell.experiment.concurrency for cell in lasting.follow(found)} == {10, 90}


def test_the_rates_are_the_theorems_and_longer_ones_their_multiples() -> None:
    for made in (FULL_MAP, QUICK_MAP):
        for place in made.places:
            local, server, _ = theorem_2(place.cohort, place.steps, place.rounds)
            assert place.theorem == pytest.approx((local, server), rel=1e-12)
            assert place.rounds * server == pytest.approx(place.work**0.25)
    rates = {cell.row.partition(": ")[2]: dict(cell.experiment.parameters) for cell in mapped().cells()}
    assert rates["adamasfl"] == rates["padamfed"] == rates["padamfed-vr"] == {}
    for factor in FACTORS:
        given = rates[f"adamasfl, rates x {factor}"]
        assert [*given.values()] == pytest.approx([factor * rate for rate in PLACE.theorem])
    assert [*rates["adamasfl, decayed"].values()] == pytest.approx([PLACE.theorem[0], 2 * PLACE.theorem[1]])
    schedules = {
        (cell.experiment.server_lr_schedule, cell.experiment.local_lr_schedule)
        for cell in mapped().cells()
        if cell.row.endswith("decayed")
    }
    assert schedules == {("linear", "linear")}  # the same path, and no step at its end


class Scaled:
    """Quadratic losses of which weights are a multiple of others: x = factor y."""

    def __init__(self, factor: float) -> None:
        self.factor, self.goals = factor, np.random.default_rng(0).normal(size=(3, 4))

    def gradient(self, client: int, visit: int, k: int, x: Vector) -> Vector:
        curved = np.arange(1.0, 5.0) * (self.factor * x - self.goals[client] - 0.1 * (visit + k))
        return self.factor * curved

    def steps(self, client: int, visit: int) -> int:
        return 2


def test_longer_rates_are_a_model_of_smaller_weights() -> None:
    steps = [[(0, 0, 1), (1, 0, 1)], [(2, 0, 1), (0, 1, 2)], [(1, 1, 2), (2, 2, 2)]]
    start, factor = np.array([3.0, -1.0, 2.0, 0.5]), 10.0
    longer = adamasfl(Run(Scaled(1.0), 3, start, steps), local_lr=0.2, server_lr=0.5, beta=0.4)
    smaller = adamasfl(Run(Scaled(factor), 3, start / factor, steps), local_lr=0.02, server_lr=0.05, beta=0.4)
    np.testing.assert_allclose([factor * x for x in smaller], longer, rtol=1e-12)


def test_a_place_is_told_from_its_records() -> None:
    made = mapped(decisive=(PLACE,))
    found = ran(made.cells(), {0.03: 0.3, 0.1: 0.6, 0.3: 0.2})
    found |= ran(made.follow(found), {0.1: 0.6})
    table = made((*made.cells(), *made.follow(found)), found)
    (row,) = table.rows
    assert row[0] == "Dir(0.5), S 5, K 5, T 300"
    assert row[1] == "9.3"
    assert row[2:6] == ("0.500", "0.500", "0.600 (fedbuff, local 0.1)", "-0.100")
    assert row[-1] == str(len(found))
    assert "at the theorem's rates in 0 of 1 places (best -0.100, sign test p = 1)" in table.notes[0]
    assert "3 seeds: adamasfl minus fedbuff -0.100 ± 0.000 (p = 0)" in table.notes[-1]
    assert [*made.drawings((), found, "name")] == ["name.svg"]
    empty = made(made.cells(), {})
    assert (empty.rows[0][2], empty.notes) == ("not run", ("Not run yet.",))
    assert made.drawings((), {}, "name") == {}


def test_a_run_that_diverged_is_said_and_not_compared() -> None:
    one = Measured(
        PLACE,
        {10: 0.5, 40: 0.4, 90: -math.inf},
        {},
        {},
        {"fedbuff": 0.6, "defedavg": -math.inf},
        {"fedbuff": 0.1, "defedavg": 0.1},
        {},
        {},
    )
    assert one.best == "fedbuff"
    assert one.margin(one.middle) == pytest.approx(-0.2)
    assert one.change(one.printed) == -math.inf
    assert not one.finite


@pytest.mark.parametrize("gaps", [(0.1, 0.3, 0.2), (-0.5, 0.4, 0.2), (0.01, 0.011, 0.012)])
def test_the_paired_test_is_students(gaps: tuple[float, ...]) -> None:
    p = stats.ttest_1samp(gaps, 0.0).pvalue
    sign = "-" if sum(gaps) < 0 else "+"
    assert paired(gaps, LastModel().say) == (
        f"{sign}{abs(np.mean(gaps)):.3f} ± {np.std(gaps, ddof=1):.3f} (p = {p:.2g})"
    )
    with pytest.raises(ValueError, match="3 seeds"):
        paired(gaps[:2], LastModel().say)


@pytest.mark.parametrize(("count", "of"), [(0, 15), (3, 9), (5, 10), (9, 9)])
def test_the_sign_test_is_that_of_fair_coins(count: int, of: int) -> None:
    assert sign_test(count, of) == pytest.approx(stats.binomtest(count, of).pvalue)


def test_the_rank_correlation_is_spearmans() -> None:
    xs, ys = [7.5, 75.0, 75.0, 250.0, 25.0], [-0.1, -0.2, 0.3, 0.1, -0.1]
    assert rank_correlation(xs, ys) == pytest.approx(stats.spearmanr(xs, ys).statistic)
    assert math.isnan(rank_correlation(xs, [0.1] * 5))


def test_images_are_averaged_over_squares_for_smaller_models(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.arange(32.0).reshape(2, 1, 4, 4)
    examples = Examples(images, torch.tensor([0, 1]))
    source = Source("fashion-mnist", examples, examples, None, np.array([0, 1]), 2)
    monkeypatch.setattr(outcome, "load", lambda name, folder: source)
    outcome._source.cache_clear()
    cell = QUICK_MAP.cells()[0]
    assert cell.pooled == 2
    made = source_of(cell, ComputeOptions())
    outcome._source.cache_clear()
    assert made.train.inputs[0, 0].tolist() == [[2.5, 4.5], [10.5, 12.5]]
    assert made.test.inputs.shape == (2, 1, 2, 2)
    assert replace(cell, pooled=1).key != cell.key


def here(cells: list[Cell], spot: ComputeOptions, *_: float) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Cells run in this process."""
    return ((one, run_cell(one, spot)) for one in cells)


def test_one_command_runs_what_follows_from_its_own_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = ClaimMap((TINY,), (), (), (), {"data": "digits", "clients": 100, "batch_size": 5})
    version = Version(made.cells(), made, 1000, made.follow)
    study = Study("tiny-map", "adamasfl", "a source", "a map", version, version, "Nothing.")
    monkeypatch.setattr(registry, "STUDIES", {study.name: study})
    monkeypatch.setattr(command, "results", here)
    words = [study.name, "--quick", "--out", str(tmp_path), "--processes", "1"]
    assert main([*words, "--runs", "5"]) == 0
    assert len(recorded(tmp_path / "quick.jsonl")) == 5
    assert main(words) == 0
    found = recorded(tmp_path / "quick.jsonl")
    assert len(found) > len(made.cells())
    assert {cell.key for cell in version.after(found).cells} == found.keys()
    assert "not run" not in capsys.readouterr().out.rpartition("a source: a map")[2]


def test_the_study_is_the_slides_data_with_a_cnn_and_a_small_model_for_a_cpu() -> None:
    assert {cell.experiment.model for cell in MAP.full.cells} == {"cnn"}
    assert {cell.experiment.model for cell in MAP.quick.cells} == {"mlp"}
    assert {cell.experiment.data for cell in (*MAP.full.cells, *MAP.quick.cells)} == {"fashion-mnist"}
    for made in (FULL_MAP, QUICK_MAP):
        cohorts, steps, rounds = zip(*(place[1:] for place in made.places), strict=True)
        assert (min(cohorts), max(cohorts)) == (min(steps), max(steps)) == (5, 50)
        assert (min(rounds), max(rounds)) == (300, 3000)
        assert {place.split for place in made.places} == {"iid", "dirichlet:0.5", "dirichlet:0.1"}
        assert {*made.brief, *made.decisive} <= {*made.places}
