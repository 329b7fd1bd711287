"""The page on a default that needs no tuning shows what its records hold."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.reproduce.page import fill_sections
from experiments.reproduce.tuning_cost import expected_best
from experiments.tuning_free import bench, bench_table, outcomes, systems, table, variants, widening
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from offbeat import Asynchronous, Examples, Population, Problem, Sequential, Steps, train
from offbeat.training.experiment import Experiment

FOLDER = Path(__file__).parent.parent.parent / "experiments" / "tuning_free"
PAGE = (FOLDER / "README.md").read_text()
RECORDS = bench_table.recorded(bench_table.RECORDS)
BENCH, HELD = outcomes.outcomes(RECORDS), outcomes.outcomes(RECORDS, systems.HELD_OUT)
SECTIONS = table.sections() | bench_table.sections(BENCH, HELD)
DIGITS = [system for system in systems.SYSTEMS if system["task"] == "digits, MLP" and "delays" not in system]
FORM = systems.FORM


def record(system: Any, method: str, words: Any = None, seed: int = 0, **more: Any) -> dict[str, Any]:
    """As the bench would write it."""
    rates = {} if method in ("cadence", "adamasfl") else {"falls": True, "weights": "polynomial:0.5"}
    rates = rates if method == "fedbuff" else rates | ({"weights": "constant"} if rates else {})
    cell = systems.whole({"method": method, "words": words or {}, "seed": seed} | rates | system)
    return cell | {"failure": None, "device": "cpu"} | more


def worth(last: float, average: float | None = None) -> dict[str, float]:
    best = last if average is None else average
    return {"last": last, "average 0.9": best, "average 0.98": last}


def complete(system: Any, ours: float = 0.8, theirs: float = 0.7) -> list[dict[str, Any]]:
    """Every run of a system: grids, what encloses their best, and the best settings' other seeds."""
    found = []
    for cell in systems.cells():
        if outcomes.within(cell, system):
            own = cell["method"] == "cadence"
            score = ours if own else theirs - 0.1 * (cell["method"] == "adamasfl")
            found.append(cell | {"failure": None} | worth(score) | ({"form": FORM} if own else {}))
    return closed(found, theirs - 0.2)


def closed(found: list[dict[str, Any]], beyond: float) -> list[dict[str, Any]]:
    """With all that follows: other settings are worth that, other seeds as much as the first."""
    while more := list(bench.wider(found)):
        found = found + [cell | {"failure": None} | worth(beyond) for cell in more]
    scored = {(each["method"], str(each["words"])): each for each in reversed(found)}
    known = {bench.named(each) for each in found}
    finals = [cell for cell in bench.finals(found) if bench.named(cell) not in known]
    return found + [scored[cell["method"], str(cell["words"])] | {"seed": cell["seed"]} for cell in finals]


def only(found: list[dict[str, Any]], system: Any) -> Any:
    (outcome,) = outcomes.outcomes(found, [system])
    return outcome


@pytest.mark.parametrize("name", SECTIONS)
def test_a_table_is_made_from_the_records(name: str) -> None:
    assert fill_sections(PAGE, {name: SECTIONS[name]}) == PAGE
    assert fill_sections(PAGE, {name: SECTIONS[name].replace("| ", "| 0", 1)}) != PAGE


def test_what_is_said_of_the_systems_held_out_holds() -> None:
    behind = [100 * outcome.shortfall for outcome in HELD]
    assert round(sum(behind) / len(behind), 1) == 1.2
    assert (
        "behind, by 1.2 points in the mean: ahead in one, within 0.7 in two, and behind by 1.3 to 3.5 "
        "in the other four, three of them on MNIST of 14 x 14." in PAGE
    )
    assert [round(points, 1) for points in behind if points > 0] == [0.7, 2.1, 2.8, 1.3, 0.0, 3.5]
    assert sum(points < 0 for points in behind) == 1
    far = {outcome.system["task"] for outcome in HELD if 100 * outcome.shortfall > 1}
    assert far == {"MNIST of 14 x 14, MLP", "digits, linear"}


def test_the_method_of_the_page_is_the_default() -> None:
    assert Experiment().algorithm == systems.OURS[0]


def test_nothing_stands_between_markers_but_what_is_made() -> None:
    assert set(re.findall(r"<!-- (.+) -->", PAGE)) - {"end"} == SECTIONS.keys()


def test_every_figure_is_made_from_the_records_and_shown() -> None:
    drawn = bench_table.figures(BENCH)
    assert drawn
    assert {path.name: path.read_text() for path in FOLDER.glob("*.svg")} == drawn
    assert re.findall(r"!\[.+?\]\((.+?)\)", PAGE) == list(drawn)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jsonl")), ids=lambda path: path.name)
def test_records_are_small_and_name_no_place_on_a_machine(path: Path) -> None:
    text = path.read_text()
    assert len(text) < 1_000_000
    assert not re.search(r"[\"\s]/\w", text)


def test_every_system_has_a_row_whether_it_was_run_or_not() -> None:
    assert [outcome.system for outcome in BENCH] == list(systems.SYSTEMS)
    none = outcomes.outcomes([])
    rows = bench_table.systems(none).splitlines()[2:]
    assert sum(row.startswith("| ") for row in rows) == len(systems.SYSTEMS)
    assert all("missing" in row for row in rows if row.startswith("| "))
    assert none[0].shortfall is None
    asked = [cell for cell in systems.cells() if outcomes.within(cell, systems.SYSTEMS[0])]
    assert sum(none[0].missing.values()) == len(asked)
    assert "0 of 0 | reached so far" in bench_table.summary(none)
    assert f"| all {len(asked)} |" in rows[0]
    assert bench_table.figures(none) == {}


def test_a_shortfall_is_over_the_seeds_that_both_have() -> None:
    system = DIGITS[0]
    found = [each for each in complete(system) if each["method"] == "cadence" or each["seed"] == 0]
    for seed, last in enumerate((0.9, 0.7, 0.5)):
        found.append(record(system, "cadence", seed=seed, form=FORM, **worth(last, 0.99)))
    best = {"local_lr": 0.3, "server_lr": 1.0}  # enclosed by its grid
    found.append(record(system, "fedbuff", best, **worth(0.8, 0.95)))
    alone = only(found, system)
    assert alone.ours == {0: 0.9, 1: 0.7, 2: 0.5}  # its own last model, and the later record of two
    assert (alone.best.method, alone.best.words, alone.best.scores) == ("fedbuff", best, {0: 0.95})
    assert alone.missing == {"finals": 10}  # of five competitors, as printed included
    assert alone.shortfall == pytest.approx(0.05)
    assert "| 5.0 (seed 0) |" in bench_table.systems([alone])
    assert "| on other seeds 10 |" in bench_table.systems([alone])
    told = bench_table.summary([alone])
    assert "| 5.00 points, over 1 of 1 systems |" in told
    assert "In 1 of these systems" in told
    assert "it is 25.00 points in the mean, 25.00 at worst" in told

    found = [
        each | (worth(0.6) if each["seed"] and each["method"] == "fedbuff" else {})
        for each in closed(found, 0)
    ]
    whole = only(found, system)
    assert whole.missing == {}
    assert "of these systems" not in bench_table.summary([whole])
    assert whole.shortfall == pytest.approx((0.05 - 0.1 + 0.1) / 3)
    row = bench_table.systems([whole]).splitlines()[2]
    assert (
        "| 70.0 ± 20.0 | fedbuff 0.3 / 1: 71.7 (3 seeds; grid: 9 and 2 beyond) | 1.7 | 95.0 | 70.0 |" in row
    )
    assert row.endswith("| 60.0 | – |")


def test_the_best_competitor_is_the_one_that_is_best_over_seeds() -> None:
    system = DIGITS[0]
    lucky, steady = {"local_lr": 0.3, "server_lr": 1.0}, {"local_lr": 0.3, "server_lr": 0.01}
    found = [*complete(system), record(system, "fedbuff", lucky, **worth(0.9))]
    found.append(record(system, "fadas-da", steady, **worth(0.8)))
    found += [record(system, "fedbuff", lucky, seed=seed, **worth(0.5)) for seed in (1, 2)]
    found += [record(system, "fadas-da", steady, seed=seed, **worth(0.8)) for seed in (1, 2)]
    assert only(found, system).best.method == "fadas-da"


def test_a_grid_goes_on_until_its_best_is_enclosed() -> None:
    rates = widening.Rates
    tried = {rates(0.1, 0.5): 0.5, rates(0.1, 1.0): 0.6, rates(0.3, 0.5): 0.6, rates(0.3, 1.0): 0.7}
    assert set(widening.beyond(tried, adaptive=False)) == {(1.0, 1.0), (0.3, 2.0)}
    assert set(widening.beyond(tried, adaptive=True)) == {(1.0, 1.0), (0.3, 3.0)}
    tried |= {rates(1.0, 1.0): 0.8, rates(0.3, 2.0): 0.2}
    assert set(widening.beyond(tried, adaptive=False)) == {(3.0, 1.0), (1.0, 0.5), (1.0, 2.0)}
    tried |= {rates(3.0, 1.0): 0.0, rates(1.0, 0.5): 0.7, rates(1.0, 2.0): 0.79}
    assert list(widening.beyond(tried, adaptive=False)) == []
    between = {rates(0.05, 1.0): 0.1, rates(0.1, 1.0): 0.1, rates(0.2, 1.0): 0.9}
    assert set(widening.beyond(between, adaptive=False)) == {(0.3, 1.0), (0.2, 0.5), (0.2, 2.0)}
    assert set(widening.beyond({rates(10.0, 8.0): 0.9}, adaptive=False)) == {(3.0, 8.0), (10.0, 4.0)}
    assert list(widening.beyond({}, adaptive=False)) == []


@settings(max_examples=50, deadline=None)
@given(st.tuples(st.floats(-3.5, 0.5), st.floats(-2, 2)), st.booleans())
def test_a_grid_that_goes_on_ends_at_the_top_of_a_hill(top: tuple[float, float], adaptive: bool) -> None:
    def height(rates: Any) -> float:
        base = 1 if adaptive else 0.3
        away = math.log10(rates.local_lr) - top[0], math.log10(rates.server_lr) - base * top[1]
        return 1 / (1 + away[0] ** 2 + away[1] ** 2)

    tried = {rates: height(rates) for rates in (widening.Rates(0.1, 1.0), widening.Rates(0.3, 1.0))}
    for _ in range(40):
        more = list(widening.beyond(tried, adaptive))
        if not more:
            break
        assert not tried.keys() & set(more)
        tried |= {rates: height(rates) for rates in more}
    else:
        pytest.fail("it does not end")
    best = max(tried, key=lambda rates: tried[rates])
    assert abs(math.log10(best.local_lr) - top[0]) < 0.3  # half of a step, and a little


def test_what_lies_beyond_a_grid_is_asked_for_and_counted() -> None:
    system = DIGITS[0]
    found = complete(system)
    corner = systems.GRIDS["digits, MLP"]["ca2fl"][-1]
    found.append(record(system, "ca2fl", corner, **worth(0.79)))
    asked = [cell for cell in bench.wider(found) if outcomes.within(cell, system)]
    assert {tuple(cell["words"].values()) for cell in asked} == {(1.0, 1.0), (0.3, 2.0)}
    assert all(cell["falls"] and cell["seed"] == 0 and "last" not in cell for cell in asked)
    outcome = only(found, system)
    assert outcome.missing["wider"] == 2
    assert outcome.judged
    assert "beyond grids 2" in bench_table.systems([outcome])
    after = only(closed(found, 0.1), system)
    assert after.missing == {}
    assert len(after.tried("ca2fl")) == len(after.grid("ca2fl")) + len(after.grid("ca2fl", wider=True))
    assert after.curve("ca2fl")[: len(after.grid("ca2fl"))] == expected_best(after.grid("ca2fl"))
    assert after.curve("ca2fl")[-1] == pytest.approx(0.79)
    found = [*closed(found, 0.1), record(system, "ca2fl", {"local_lr": 1.0, "server_lr": 1.0}, **worth(0.9))]
    assert max(only(found, system).curve("ca2fl")) == pytest.approx(0.9)


def test_a_grid_that_is_not_whole_gives_no_shortfall_and_says_what_is_missing() -> None:
    system = DIGITS[0]
    found = [each for each in complete(system) if each["words"] != {"local_lr": 1.0, "server_lr": 2.0}]
    outcome = only(found, system)
    assert outcome.shortfall is None
    assert outcome.missing == {"fedbuff": 1}
    row = bench_table.systems([outcome]).splitlines()[2]
    assert "grid: 8 of 9 and 2 beyond) | missing |" in row
    assert row.endswith("| fedbuff 1 |")
    assert outcomes.costs([outcome])[0].best == ()


def test_runs_of_the_present_form_alone_count_where_there_are_any() -> None:
    system = DIGITS[0]
    found = [{name: value for name, value in each.items() if name != "form"} for each in complete(system)]
    before = only(found, system)
    assert before.former
    assert "80.0 ± 0.0 \\* |" in bench_table.systems([before])
    assert "earlier form" in bench_table.systems([before]).splitlines()[-1]
    assert bench_table.summary([before]).count("so far") == 3
    after = only([*found, record(system, "cadence", form=FORM, **worth(0.6))], system)
    assert (after.former, after.ours) == (False, {0: 0.6})
    assert after.missing == {"cadence": 2}
    assert "\\*" not in bench_table.systems([after])


def test_a_run_that_diverged_is_counted_and_worth_a_guess() -> None:
    system = DIGITS[0]
    found = complete(system)
    found.append(record(system, "cadence", seed=1, form=FORM) | {"failure": "NaN"})
    words = {"local_lr": 0.1, "server_lr": 0.5}
    found.append(record(system, "fedbuff", words) | {"failure": "NaN"})
    outcome = only(found, system)
    assert outcome.diverged == 1
    assert outcome.ours[1] == 0.1
    assert sorted(outcome.grid("fedbuff"))[:2] == [0.1, 0.7]
    assert "| none | 1 of 3 | not reached so far |" in bench_table.summary([outcome])


def test_a_setting_that_diverged_on_another_seed_gives_way_to_the_next() -> None:
    system = DIGITS[0]
    first, second = {"local_lr": 0.3, "server_lr": 1.0}, {"local_lr": 0.3, "server_lr": 0.5}
    found = [*complete(system), record(system, "fedbuff", first, **worth(0.9))]
    found.append(record(system, "fedbuff", second, **worth(0.85)))
    assert only(found, system).best.words == first
    assert {cell["seed"] for cell in bench.finals(found) if cell["words"] == first} == {1, 2}
    found.append(record(system, "fedbuff", first, seed=1) | {"failure": "NaN"})
    assert only(found, system).best.words == second
    assert only(found, system).missing == {"wider": 1, "finals": 2}
    assert {cell["seed"] for cell in bench.finals(found) if cell["words"] == second} == {1, 2}
    assert not [cell for cell in bench.finals(found) if cell["words"] == first]


def test_what_runs_as_printed_competes_by_its_averages() -> None:
    system = DIGITS[0]
    bare = [each for each in complete(system) if each["method"] != "adamasfl"]
    outcome = only([*bare, record(system, "adamasfl", **worth(0.75, 0.9))], system)
    assert outcome.shortfall == pytest.approx(0.1)
    row = bench_table.systems([outcome]).splitlines()[2]
    assert "| adamasfl as printed, averaged: 90.0 (1 seed) | 10.0 (seed 0) |" in row
    assert row.endswith("| 75.0 | on other seeds 2 |")
    assert only(bare, system).shortfall is None


def test_the_summary_judges_by_the_aims() -> None:
    pairs = [(0.8, 0.81), (0.8, 0.8)]
    made = [only(complete(system, *pair), system) for system, pair in zip(DIGITS, pairs, strict=False)]
    told = bench_table.summary(made)
    assert "| at most 0.5 points | 0.50 points, over 2 of 2 systems | reached |" in told
    assert "| at most 2 points | 1.00 points (digits, MLP: Dir(0.5), 10 of 100 at work) | reached |" in told
    assert "| at most 1.5 points | 0.00 points (digits, MLP: Dir(0.5)) | reached |" in told
    assert "| none | 0 of 6 | reached |" in told
    assert "Behind by more" not in told
    assert "Ahead of every competitor in 0 of 2 systems." in told

    made[1] = only(complete(DIGITS[1], 0.78, 0.81), DIGITS[1])
    told = bench_table.summary(made)
    assert "| 2.00 points, over 2 of 2 systems | not reached |" in told
    assert "| 3.00 points (digits, MLP: Dir(0.5), 20 of 100 at work) | not reached |" in told
    assert "| 2.00 points (digits, MLP: Dir(0.5)) | not reached |" in told
    assert "Behind by more than 2 points: digits, MLP: Dir(0.5), 20 of 100 at work (3.0)." in told


def test_a_system_is_asked_for_again_once_the_method_has_another_form() -> None:
    asked = [cell for cell in systems.cells() if cell["method"] == "cadence"]
    assert {cell["form"] for cell in asked} == {FORM}
    known = {bench.named(each) for each in RECORDS if each["method"] == "cadence"}
    left = [cell for cell in asked if bench.named(cell) not in known]
    former = {outcome.system["task"] for outcome in (*BENCH, *HELD) if outcome.former}
    assert {cell["task"] for cell in left} == former
    assert all(any(bench.named(cell | {"form": form}) in known for form in (5, 7, 8)) for cell in left)


def test_groups_differ_in_concurrency_alone() -> None:
    groups = outcomes.flatnesses(outcomes.outcomes([]))
    counts = [[outcome.system["concurrency"] for outcome in group.outcomes] for group in groups]
    assert [10, 20, 60, 90] in counts
    for group in groups:
        rest = [{k: v for k, v in o.system.items() if k != "concurrency"} for o in group.outcomes]
        assert rest == [rest[0]] * len(rest)
    assert len({str(group.outcomes[0].system) for group in groups}) == len(groups)


def test_the_cost_of_tuning_is_the_mean_of_what_is_expected_over_systems() -> None:
    made = []
    for number, system in enumerate(DIGITS[:2]):
        found = complete(system, 0.8 + 0.1 * number, 0.7)
        for place, words in enumerate(systems.GRIDS["digits, MLP"]["ca2fl"]):
            found.append(record(system, "ca2fl", words, **worth(0.5 + 0.1 * number + 0.04 * place)))
        made.append(only(found, system))
    spent = {cost.method: cost for cost in outcomes.costs(made)}
    assert spent["cadence"].best == pytest.approx((0.85,))
    assert not spent["cadence"].tuned
    on_grid = expected_best([0.55, 0.59, 0.63, 0.67])
    assert spent["ca2fl"].best == pytest.approx((*on_grid, 0.67, 0.67))  # two beyond it
    assert spent["fedbuff"].best == pytest.approx((0.7,) * 11)
    assert spent["adamasfl"].best == pytest.approx((0.6,))
    (drawing,) = bench_table.figures(made).values()
    root = ElementTree.fromstring(drawing)
    texts = {node.text for node in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"cadence", "adamasfl", "ca2fl"} <= texts
    assert "| ca2fl | 61.0 | 64.3 | 66.0 | 67.0 (6 runs) |" in bench_table.cost(made)
    assert "more than all 6" in bench_table.cost(made)


def test_what_the_page_says_of_the_exploration_holds() -> None:
    found = table.rows()
    base = "local_decay True, local_rate 0.0447, server_rate 0.24, {}whole True"

    def last(words: str) -> list[float]:
        cells = found["unit", words]
        return [cells[setting]["last"] for setting in ((0.5, 20), (0.5, 60), (0.5, 90), (0.1, 20), (0.1, 60))]

    plain, trusting = last(base.format("")), last(base.format("trust -1.0, "))
    assert all(better >= other for better, other in zip(trusting, plain, strict=True))
    assert min(a - b for a, b in zip(trusting[3:], plain[3:], strict=True)) > 0.03
    moving = last("beta 0.5, " + base.format("trust -1.0, "))
    assert moving[0] > max(trusting)
    assert moving[2] < 0.75
    fedbuff = [cells for (method, _), cells in found.items() if method == "fedbuff"]
    best = [
        max(
            max(each["average 0.9"], each["average 0.98"])
            for cells in fedbuff
            if not (each := cells[setting])["failure"]
        )
        for setting in ((0.5, 20), (0.5, 60), (0.5, 90), (0.1, 20), (0.1, 60))
    ]
    assert [round(value, 3) for value in best[:3]] == [0.906, 0.894, 0.876]
    assert sum(own > other - 0.001 for own, other in zip(trusting, best, strict=True)) == 4


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"whole": True, "trust": -1.0},
        {"trust": 1.0, "beta": 0.5},
        {"schedule": "free"},
        {"heavy": 0.9, "live": True},
    ],
)
def test_every_kind_of_variant_trains(words: dict[str, Any]) -> None:
    variant = variants.Variant
    torch.manual_seed(0)
    inputs = torch.randn(200, 8)
    targets = (inputs @ torch.randn(8, 3)).argmax(1)
    module = torch.nn.Linear(8, 3)
    problem = Problem(module, lambda outputs, targets: cross_entropy(outputs, targets, reduction="none"))
    population = Population(Examples(inputs, targets), list(np.arange(200).reshape(10, 20)), Steps(3, 10))
    method = variant((24, 3), 40, 0.1, 0.3, local_decay=True, **words)
    shots = list(
        train(method, Sequential(problem, population), dispatch=Asynchronous(4), buffer=2, rounds=40)
    )
    outputs = problem.module(shots[-1].x)(inputs)
    assert (outputs.argmax(1) == targets).float().mean() > 0.8


def test_what_the_page_says_of_small_systems_holds() -> None:
    found, rates = table.systems(), "noise 1.0, trust -1.0, {}walk 0.14, whole True"
    ours = found[
        "unit", "lazily True, leap 3.0, live True, local_decay True, " + rates.format("unitary True, ")
    ]
    raw = found["unit", "lazily True, leap 3.0, live True, local_decay True, " + rates.format("")]
    grid = [cells for (method, _), cells in found.items() if method == "fedbuff" and len(cells) >= 6]
    assert len(grid) == 12

    def best(record: dict[str, Any]) -> float:
        return max(record["last"], record["average 0.9"], record["average 0.98"])

    systems = [system for system in table.SYSTEMS if all(system in cells for cells in grid)]
    assert len(systems) == 6
    ahead = [best(ours[system]) - max(best(cells[system]) for cells in grid) for system in systems]
    assert 0.001 < min(ahead) < max(ahead) < 0.023

    def mean(cells: dict[tuple[float, ...], dict[str, Any]]) -> float:
        return sum(best(cells[system]) for system in systems) / len(systems)

    fixed = found["unit", "lazily True, leap 3.0, live False, local_decay True, " + rates.format("")]
    assert 0.009 < mean(raw) - mean(fixed) < 0.014
    assert 0.0005 < mean(raw) - mean(ours) < 0.0035


def test_the_third_exploration_says_each_run_once() -> None:
    found = table.larger()
    assert sum(map(len, found.values())) == len(table.recorded(table.THIRD))
    assert {setting for cells in found.values() for setting in cells} == set(table.LARGER)


CNN, LETTERS = table.LARGER[:4], table.LARGER[4]
BASE = "walk 0.14, leap 3, noise 1"


def last(method: str, words: str = BASE) -> dict[tuple[Any, ...], float]:
    cells = table.larger()[method, words]
    return {setting: each["last"] for setting, each in cells.items() if not each["failure"]}


def gains(words: str, over: str = BASE) -> list[float]:
    """Of the prototype, in points, on the CNN and, where it was run, on Shakespeare."""
    new, old = last("prototype", words), last("prototype", over)
    return [round(100 * (new[at] - old[at]), 2) for at in (*CNN, LETTERS) if at in new]


def test_what_the_page_says_of_no_end_holds() -> None:
    known, endless = last("with an end"), last("without an end")
    gained = [round(100 * (endless[at] - known[at]), 1) for at in (*CNN, LETTERS)]
    assert gained[2:4] == [3.4, 2.2]
    assert (min(gained[:2] + gained[4:]), max(gained[:2] + gained[4:])) == (-0.8, 0.6)
    falling = gains("server falls")
    assert (round(max(falling), 1), round(min(falling), 1)) == (-1.0, -3.6)
    both = gains("age averaged from the start, noise by T, local falls, server falls")
    assert 0.4 < both[0] < 0.6
    assert -3.1 < both[2] < -2.6
    assert -3.1 < both[3] < -2.6


def test_what_the_page_says_of_larger_models_holds() -> None:
    walks = {walk: last("prototype", f"walk {walk}") for walk in (0.07, 0.28)} | {0.14: last("prototype")}
    letters = [round(walks[walk][LETTERS], 3) for walk in (0.07, 0.14, 0.28)]
    assert letters == [0.35, 0.322, 0.191]
    assert walks[0.07][0.1, 90] - walks[0.14][0.1, 90] == pytest.approx(-0.05, abs=0.004)
    shorter = gains("unit at most 2, walk 0.1", "unit at most 2")
    assert (round(shorter[4], 1), round(shorter[3], 1)) == (1.4, -1.5)

    half, twice = gains("leap 1.5"), gains("leap 6")
    assert (round(max(half[:4]), 1), round(min(half[:4]), 1)) == (-0.9, -3.5)
    assert round(half[4]) == -2
    assert max(twice[:4]) < 0.05
    assert round(twice[4]) == -9
    for words in ("noise 0.5", "noise 2", "noise by T", "degree 3", "age averaged from the start", "trust 2"):
        assert max(map(abs, gains(words))) < 1, words
    without = gains("no control variates")
    assert [round(-gain, 1) for gain in without[2:]] == [1.4, 0.9, 0.7]
    assert max(map(abs, without[:2])) < 0.15
    tensors = gains("by tensor")
    assert max(map(abs, tensors[:4])) < 0.65
    assert round(tensors[4]) == -7
    assert min(gains("unit at most 2")) > -0.05
    once = gains("unit at most 1")
    assert (round(once[4], 1), round(once[2], 1)) == (1.0, -0.8)


def test_what_the_page_says_of_others_on_larger_models_holds() -> None:
    found, own = table.larger(), last("prototype")

    def best(method: str, at: tuple[Any, ...]) -> float:
        """The best of all its settings, averages included."""
        cells = [cells[at] for (name, _), cells in found.items() if name == method and at in cells]
        return max(
            max(each["last"], each["average 0.9"], each["average 0.98"])
            for each in cells
            if not each["failure"]
        )

    ahead = [round(100 * (own[at] - best("fedbuff", at)), 1) for at in CNN]
    assert (min(ahead), max(ahead)) == (2.0, 3.9)
    assert all(own[at] - best("fadas-da", at) > own[at] - best("fedbuff", at) for at in CNN)
    assert round(100 * (own[LETTERS] - best("fadas-da", LETTERS)), 1) == -0.6
    assert round(100 * (own[LETTERS] - best("fedbuff", LETTERS))) == 3
    shorter = last("prototype", "walk 0.07")[LETTERS]
    assert round(100 * (shorter - best("fadas-da", LETTERS)), 1) == 2.2
    crowded = [cells[None, 90] for cells in found.values() if (None, 90) in cells]
    assert len(crowded) > 10
    assert all(each["failure"] or round(each["last"], 3) == 0.191 for each in crowded)


def test_what_the_page_says_of_the_fourth_exploration_holds() -> None:
    rows = json.loads((FOLDER / "exploration4.json").read_text())["rows"]
    found = {(row["systems"], row["words"]): row["accuracy"] for row in rows}
    assert len(found) == len(rows)

    def mean(systems: str, words: str) -> float:
        return sum(found[systems, words]) / len(found[systems, words])

    own, largest = "by each gradient's own norm", "by the largest norm so far"
    half, whole = f"{largest}, evened by 1/2", f"{largest}, evened by the power 1"
    assert (round(mean("d", own), 3), round(mean("d", largest), 3)) == (0.845, 0.939)
    assert all(mean(systems, largest) > mean(systems, own) for systems in "pc")
    fadas = mean("l", "FADAS, delay-adaptive, 0.03 / 0.003")
    assert [round(each, 3) for each in (mean("l", whole), fadas, mean("l", largest))] == [0.312, 0.323, 0.225]
    assert mean("c", largest) - mean("c", whole) > 0.02
    assert all(mean(systems, half) > mean(systems, largest) for systems in "pc")
    assert 0.5 < (mean("l", half) - mean("l", largest)) / (mean("l", whole) - mean("l", largest)) < 0.75
    strides = [mean("s", f"{half}, stride {stride}") for stride in (0.35, 0.5, 0.75)]
    assert max(strides) - min(strides) < 0.002
    final = f"{half}, stride 0.5"
    assert found["p", f"{final}, three times the trust"][3] < found["p", final][3] - 0.04
    assert found["e", f"{final}, full trust"][1] > found["e", final][1]
    assert 0.003 < mean("p", f"{final}, leap 4") - mean("p", final) < 0.006
    assert found["k", final][0] < 0.82
    mended = found["k", f"{final}, steps below 1/4 four times as long"]
    assert mended[0] > 0.94
    assert abs(mended[3] - found["k", final][3]) < 0.001
    assert found["l", f"{final}, leap 4"][1] < found["l", final][1] - 0.08


def test_what_the_page_says_of_the_sixth_exploration_holds() -> None:
    rows = json.loads((FOLDER / "exploration6.json").read_text())["rows"]
    found = {(row["systems"], row["words"]): row["accuracy"] for row in rows}
    assert len(found) == len(rows)
    resnet = {words: accuracy[0] for (group, words), accuracy in found.items() if group == "resnet"}
    fixed = {words: accuracy for words, accuracy in resnet.items() if words.endswith("fixed")}
    assert max(fixed, key=lambda words: fixed[words]) == "2 % of the first norm, fixed"
    assert max(resnet.values()) == max(fixed.values()) == pytest.approx(0.488, abs=5e-4)
    for group, best in {"c": "200 %", "l": "10 %"}.items():
        tried = {words: a[0] for (each, words), a in found.items() if each == group and "fixed" in words}
        assert max(tried, key=lambda words: tried[words]) == f"{best} of the first norm, fixed"
    assert resnet["two steps in a row: product above 0.008, from 1 %"] < 0.101
    quick, slow = "by how much above 1.4, at most 4, from 2 %", "agreement above 1.6, from 1 % (form 4)"
    ours, strict = (f"by how much above {bound}, at most 2, from 2 %" for bound in (1.4, 1.6))
    theirs = found["h", "FedBuff, 0.3 / 1"][0]
    assert found["h", slow][0] < found["h", ours][0] < theirs < found["h", quick][0]
    assert 0 < found["l", ours][1] - found["l", quick][1] < 0.03
    assert all(one > other for one, other in zip(found["c", ours], found["c", strict], strict=True))
    assert all(one < other for one, other in zip(found["l", ours], found["l", strict], strict=True))


def test_what_the_page_says_of_the_seventh_exploration_holds() -> None:
    rows = json.loads((FOLDER / "exploration7.json").read_text())["rows"]
    found = {(row["systems"], row["words"]): row["accuracy"] for row in rows}
    assert len(found) == len(rows)
    before, mend, floor = (
        "always of unit length (form 5)",
        "below 1/4, four times as long",
        "below 1/4, four times as long, at least 10 / K (cadence)",
    )
    gained = {
        group: [
            round(100 * (new - old), 1)
            for new, old in zip(found[group, floor], found[group, before], strict=True)
        ]
        for group in "kK"
    }
    assert gained["k"] == [4.4, 1.2, 0.1, 0.5]
    assert gained["K"][2] == 3.4
    assert max(map(abs, gained["K"][:2])) < 0.2
    short = [b - a for a, b in zip(found["e", mend], found["e", before[:-1] + ", and cadence)"], strict=True)]
    assert round(100 * max(short), 1) == 1.1
    half = "below 1/2, twice as long, at least 10 / K"
    assert found["k", floor][3] - found["k", half][3] == pytest.approx(0.005, abs=5e-4)
    assert all(
        a < b for a, b in zip(found["k", "the same, at least 20 / K"][:3], found["k", floor][:3], strict=True)
    )
    theirs = next(words for _, words in found if words.startswith("FedBuff"))
    assert found["k", theirs][0] == pytest.approx(0.936, abs=5e-4)
    assert found["K", theirs][2] == pytest.approx(0.81)


def test_what_the_page_says_of_the_eighth_exploration_holds() -> None:
    rows = json.loads((FOLDER / "exploration8.json").read_text())["rows"]
    found = {(row["systems"], row["words"]): np.array(row["accuracy"]) for row in rows}
    assert len(found) == len(rows)

    def gain(group: str, words: str) -> Any:
        """Points above the method as it is."""
        return 100 * (found[group, words] - found[group, "as it is (cadence)"])

    sent = "sent unit, at most 8"
    shrunk = gain("g", f"{sent}, from 15 %, shrinking until directions agree")
    assert shrunk[0] < -12.5
    assert (shrunk[5] < -7, shrunk[6] < -11) == (True, True)
    assert np.abs(gain("g", sent)).max() < 1.35
    few = gain("h", f"{sent}, by 100 steps")
    assert few[4] == pytest.approx(4.2)
    assert np.abs(np.delete(few, 4)).max() < 0.4
    assert gain("k", f"{sent}, by 100 steps")[0] < -1
    assert (gain("H", "from 100 %")[-2:] < 0.51).all()
    assert gain("H", "from 15 %")[[1, 4]] == pytest.approx([1.0, 3.1])
    longer = gain("h", "local step 0.24 / sqrt(K)")
    assert longer[[3, 6]] == pytest.approx([-0.6, 2.0])
    assert gain("m", "local step 0.24 / sqrt(K)")[3] == pytest.approx(-1.2)
    assert gain("h", "leap 8").min() == pytest.approx(-13.1)
    assert gain("h", "coordinates not evened").min() == pytest.approx(-4.1)
    assert gain("h", "local step 0.06 / sqrt(K)").min() == pytest.approx(-3.8)
    assert round(gain("h", "path weighed by degree 5").mean(), 1) == 0.3


def test_what_the_page_says_of_the_ninth_exploration_holds() -> None:
    rows = json.loads((FOLDER / "exploration9.json").read_text())["rows"]
    found = {(row["systems"], row["words"]): row["accuracy"] for row in rows}
    assert len(found) == len(rows)
    ahead = {
        words: 100 * (ours - theirs) for (group, words), (ours, theirs, *_) in found.items() if group == "o"
    }
    assert (len(ahead), sum(points > -2 for points in ahead.values())) == (13, 9)
    worst = {words for words, points in ahead.items() if points < -4.5}
    assert {words.partition(",")[0] for words in worst} == {"digits", "bags of 500 words"}
    before = found["r", "as it is (cadence)"]

    def back(words: str) -> list[float]:
        return [100 * (new - old) for new, old in zip(found["r", words], before, strict=True)]

    told, alone = "all steps by calm / 0.5", "each client's steps by the square of its own calm / 0.5"
    assert back(told) == pytest.approx([3.8, 4.7])
    assert back(alone) == pytest.approx([3.3, 3.2])
    usual = np.array(found["c", "as it is (cadence)"])
    lost = {words: 100 * (usual - found["c", words]) for group, words in found if group == "c"}
    assert lost[told] == pytest.approx([0, 0, 0.25, 0, 0], abs=0.03)
    assert lost[alone][2] == pytest.approx(0.65)
    assert max(lost["all steps fade with (1 + t / 20)^-1/2"]) < 1
    assert back("local steps alone fade with (1 + t / 10)^-1/2")[1] < 0


def _last(found: list[dict[str, Any]], system: dict[str, Any], seed: int) -> float:
    """Of the later run, where one was done again."""
    records = [record for record in found if record["seed"] == seed and bench.within(record, system)]
    return float(records[-1]["last"])


def test_what_the_page_says_of_the_tenth_exploration_holds() -> None:
    rows = json.loads((FOLDER / "exploration10.json").read_text())["rows"]
    means = {row["words"]: np.array(row["accuracy"]) for row in rows if row["systems"] == "b"}
    lost = 100 * (means["as it is (cadence)"] - means["all steps by calm / 0.5"])
    assert lost == pytest.approx([0.33, -0.06, 0.01])
    eased = [json.loads(line) for line in (FOLDER / "exploration10.jsonl").read_text().splitlines()]
    usual = [
        record for record in RECORDS if record["method"] == "cadence" and record.get("form", 1) in (5, 6)
    ]
    groups = (
        [system for system in systems.SYSTEMS if system["task"] == "digits, MLP"],
        [system for system in systems.SYSTEMS if system["task"].startswith("Fashion-MNIST of")],
        systems.HELD_OUT,
    )
    last = [
        [
            np.array([[_last(found, system, seed) for seed in systems.SEEDS] for system in group])
            for group in groups
        ]
        for found in (usual, eased)
    ]
    for words, found in zip(means, last, strict=True):
        assert [each.mean() for each in found] == pytest.approx(means[words], abs=5e-5)
    digits = 100 * (last[0][0] - last[1][0]).ravel()
    assert (len(digits), round(digits.std(ddof=1) / len(digits) ** 0.5, 2)) == (27, 0.11)
    for usual, *others in (row["accuracy"] for row in rows if row["systems"] == "m"):
        assert all(abs(other - usual) < 0.1 for other in others)


@pytest.mark.parametrize("form", [7, 8, 9])
def test_what_the_page_says_of_the_last_forms_on_the_bench_holds(form: int) -> None:
    gains = []
    for _, before, now in table.forms(form):
        assert before.keys() == now.keys()
        gains.append(100 * float(np.mean([now[seed]["last"] - before[seed]["last"] for seed in now])))
        for run in now.values():
            assert form != 7 or run["unit"] == 2  # its bound, so nothing returned
    said = (
        f"{np.mean(gains):+.2f} points in the mean of {len(gains)} systems, "
        f"between {min(gains):+.2f} and {max(gains):+.2f}."
    )
    assert said in PAGE
