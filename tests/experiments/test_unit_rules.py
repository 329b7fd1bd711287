"""The eleventh to twentieth explorations show what their records hold, and simulate the methods."""

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.tuning_free import unit_rules, unit_table, unit_tasks, varied
from experiments.tuning_free.bouncing import Bouncing
from experiments.tuning_free.steady import Steady
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor

from offbeat.algorithms import Setting, build
from offbeat.algorithms.cadence import Cadence
from offbeat.core import Batch, Batches, Cohort, Visit
from oracles.cadence import cadence
from oracles.replay import Run

VISIT = Visit(torch.tensor(0), torch.tensor(0))

FOLDER = Path(unit_table.__file__).parent
SECTION, _, REST = (
    (FOLDER / "README.md")
    .read_text()
    .partition("## Eleventh exploration")[2]
    .partition("## Twelfth exploration")
)
TWELFTH, _, LAST = REST.partition("## Thirteenth exploration")
THIRTEENTH, _, LAST = LAST.partition("## Fourteenth exploration")
FOURTEENTH, _, FIFTEENTH = LAST.partition("## Fifteenth exploration")


def table(number: int, section: str = SECTION) -> list[list[str]]:
    """The cells of one of a section's tables, without its head."""
    block = [part for part in section.split("\n\n") if part.startswith("|")][number]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()[2:]]


def printed(draw: str, name: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """What the program prints of a set on a draw: mean, bounded mean, worst, systems failed, runs failed."""
    given = argparse.Namespace(
        records=FOLDER / "unit_rules.jsonl", draw=draw, set=name, words=[], systems=False
    )
    unit_table.show(given)
    lines = capsys.readouterr().out.splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [[row[1], row[2], row[3], row[5], row[6]] for row in rows]


def test_the_first_table_is_printed_from_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    sets = ("first", "second", "third", "fourth", "fifth", "sixth")
    found = [row for name in sets for row in printed("development", name, capsys)]
    rows = table(0)
    assert len(rows) == 14
    assert [row for row in rows if row[1:] not in found] == []


def test_the_second_table_is_printed_from_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    fresh, another, short = (printed(draw, "final", capsys) for draw in ("fresh", "another", "short"))
    rows = table(1)
    assert len(rows) == 9
    for row in rows:
        assert row[1:4] in [[each[0], each[1], each[3]] for each in fresh], row
        assert row[4:7] in [[each[0], each[1], each[3]] for each in another], row
        assert row[7:9] in [[each[0], each[3]] for each in short], row


def test_the_two_known_failures_are_mended_by_as_much_as_the_page_says() -> None:
    rules, systems, best = unit_table.read(FOLDER / "unit_rules.jsonl")
    names = [unit_table.short_name(rule) for rule in rules["fifth"]]
    (steered,) = (
        n for n, name in enumerate(names) if name == "steered, few 3, gain 2, leap 8, evened 1, back -0.4"
    )
    some = {
        each["system"]: each for each in systems if (each["draw"], each["set"]) == ("development", "fifth")
    }
    ahead = [
        np.mean(some[name]["finals"][steered]) - np.mean(best["development", name]["finals"])
        for name in ("raw features", "large embedding")
    ]
    said = re.search(r"(\d\.\d) and (\d\.\d) points ahead of FedBuff", (FOLDER / "README.md").read_text())
    assert said is not None
    assert tuple(f"{value:.1f}" for value in ahead) == said.groups()


def test_the_table_of_the_new_draw_is_printed_from_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    given = argparse.Namespace(
        records=FOLDER / "unit_rules.jsonl", draw="test", set="test", words=[], systems=False
    )
    unit_table.show(given)
    lines = capsys.readouterr().out.splitlines()[2:]
    found = [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in lines]
    assert sorted(row[1:] for row in table(0, TWELFTH)) == sorted(found)


def test_the_table_of_the_old_bench_is_that_of_its_records() -> None:
    records = [json.loads(line) for line in (FOLDER / "exploration12.jsonl").read_text().splitlines()]
    ours = sorted(f"{100 * each['last']:.1f}" for each in records if each["method"] == "steady")
    rows = table(1, TWELFTH)
    assert sorted(row[1] for row in rows) == ours
    again = {f"{100 * each['last']:.1f}" for each in records if each["method"] == "cadence"}
    bench = (json.loads(line) for line in (FOLDER / "bench.jsonl").read_text().splitlines())
    first = {
        f"{100 * each['last']:.1f}" for each in bench if each["method"] == "cadence" and each["seed"] == 0
    }
    assert [row for row in rows if row[2] not in again | first] == []


def test_the_table_of_the_panel_is_printed_from_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    given = argparse.Namespace(
        records=FOLDER / "unit_rules.jsonl", draw="panel", set="thirteenth", words=[], systems=False
    )
    unit_table.show(given)
    lines = capsys.readouterr().out.splitlines()[2:]
    found = [[cell.strip() for cell in line.strip("|").split("|")][1:6] for line in lines]
    assert [row[1:] for row in table(1, THIRTEENTH)] == found
    assert len(found) == len(unit_rules.SETS["thirteenth"])
    _, systems, best = unit_table.read(given.records)
    panel = {unit_tasks.label(system) for system in unit_tasks.panel()}
    assert {each["system"] for each in systems if each["set"] == "thirteenth"} == panel
    assert {("panel", name) for name in panel} <= best.keys()


def test_the_table_of_the_cnn_is_that_of_its_records() -> None:
    records = [json.loads(line) for line in (FOLDER / "exploration13.jsonl").read_text().splitlines()]
    made = [
        [
            ", ".join([each["method"], *(f"{name} {value:g}" for name, value in each["words"].items())]),
            f"{100 * each['last']:.1f}",
            f"{each['unit']:g}",
        ]
        for each in records
    ]
    assert table(0, THIRTEENTH) == made
    grid = json.loads((FOLDER / "exploration13.json").read_text())
    assert all([each["method"], each["words"]] in [entry[:2] for entry in grid] for each in records)


@pytest.mark.parametrize(
    ("section", "name", "number", "draw"),
    [
        (FOURTEENTH, "fourteenth", 0, "panel"),
        (FOURTEENTH, "fourteenth", 1, "test"),
        (FOURTEENTH, "fourteenth", 3, "short"),
        (FIFTEENTH, "fifteenth", 1, "panel"),
        (FIFTEENTH, "fifteenth", 2, "test"),
        (FIFTEENTH, "fifteenth", 3, "short"),
    ],
    ids=lambda word: str(word)[:12],
)
def test_the_tables_of_the_last_explorations_are_printed_from_the_records(
    section: str, name: str, number: int, draw: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = argparse.Namespace(
        records=FOLDER / "unit_rules.jsonl", draw=draw, set=name, words=[], systems=False
    )
    unit_table.show(given)
    lines = capsys.readouterr().out.splitlines()[2:]
    found = [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in lines]
    assert [row[1:] for row in table(number, section)] == found
    assert len(found) == len(unit_rules.SETS[name])


def test_the_table_of_the_cnn_under_three_seeds_is_that_of_its_records() -> None:
    records = [json.loads(line) for line in (FOLDER / "exploration14.jsonl").read_text().splitlines()]
    made: dict[str, list[str]] = {}
    for each in sorted(records, key=lambda record: record["seed"]):
        made.setdefault(each["method"], []).append(f"{100 * each['last']:.1f}")
    assert {row[0]: row[1:4] for row in table(2, FOURTEENTH)} == made


def test_the_page_of_cadence_has_the_scales_and_the_short_runs_of_the_records(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (FOLDER.parents[1] / "docs" / "cadence.md").read_text()
    unit_table.show_scales(argparse.Namespace(records=FOLDER / "unit_rules.jsonl"))
    assert capsys.readouterr().out in page
    said = re.search(
        r"Cadence is (\S+) points behind .* over (\d+) systems .* was (\S+) behind, .* this (\S+) ahead\), "
        r".* in (\d) of them",
        page,
    )
    assert said is not None
    ((behind, _, _, failed, _),) = printed("short", "nineteenth", capsys)
    ((before, *_),) = printed("short", "own", capsys)
    former = min(printed("short", "final", capsys), key=lambda row: -float(row[0]))
    lost, count = failed.split(" of ")
    assert said.groups() == (behind, count, former[0], before.removeprefix("-"), lost)


EIGHTEENTH = (FOLDER / "README.md").read_text().partition("## Eighteenth exploration")[2]
BEFORE = unit_table.short_name(unit_rules.SETS["cadence"][0])
SHARED = re.compile(r"(^ratio, )|, leap 8|, evened 1(?=,|$)|, fitted 1e-06|, coherent 1|, widest 4")


def shown(draw: str, name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """What the program prints of a set on a draw, by rule, without the constants that all rules share."""
    given = argparse.Namespace(
        records=FOLDER / "unit_rules.jsonl", draw=draw, set=name, words=[], systems=False
    )
    (unit_table.show_scores if draw == "cnns" else unit_table.show)(given)
    lines = capsys.readouterr().out.splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    names = {BEFORE: "the form before", unit_table.short_name(unit_rules.STEADY): "*steady*"}
    return {names.get(row[0], SHARED.sub("", row[0])): row[1:] for row in rows}


def test_the_tables_of_the_eighteenth_exploration_are_printed_from_the_records(
    capsys: pytest.CaptureFixture[str],
) -> None:
    panel = shown("panel", "own", capsys) | shown("panel", "eighteenth", capsys)
    panel["the form before"] = shown("panel", "fifteenth", capsys)["the form before"]
    assert len(panel) == len(unit_rules.SETS["eighteenth"]) + 2
    assert {row[0]: row[1:] for row in table(0, EIGHTEENTH)} == panel
    sources = [
        ("development", "plain", "times 0.7, power 0.333"),
        ("test", "own", "method"),
        ("test", "test", "*steady*"),
        ("test", "test", "agreement"),
        ("short", "own", "method"),
        ("short", "final", "agreement"),
        ("unseen", "own", "method"),
        ("unseen", "unseen", "the form before"),
        ("unseen", "unseen", "*steady*"),
    ]
    draws = [shown(draw, name, capsys)[rule] for draw, name, rule in sources]
    assert [row[1:] for row in table(1, EIGHTEENTH)] == draws
    cnns = {name: cells[:1] for name, cells in shown("cnns", "cnns", capsys).items()}
    assert {row[0]: row[1:] for row in table(3, EIGHTEENTH)} == cnns


NINETEENTH, _, TWENTIETH = EIGHTEENTH.partition("## Nineteenth exploration")[2].partition(
    "## Twentieth exploration"
)
FORMER = ", longest 1e+09, top 1"


def named(text: str) -> str:
    """A form by the name that the page has for it."""
    text = text.removeprefix("varied, ").removeprefix("varied")
    if text.startswith(FORMER.removeprefix(", ")):
        return ", ".join(["the form before", *filter(None, text[len(FORMER) - 2 :].split(", "))])
    return text.replace("longest 1e+09, ", "") or "this form"


def forms(draws: str, name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """What the program prints of a set of forms on some draws, by the name of each."""
    given = argparse.Namespace(
        records=FOLDER / "unit_rules.jsonl", draw=draws, set=name, words=[], systems=False
    )
    unit_table.show(given)
    lines = capsys.readouterr().out.splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {named(row[0]): row[1:] for row in rows}


@pytest.mark.parametrize(
    ("number", "draws", "name"),
    [
        (0, "development,fresh,another", "networks"),
        (1, "short,test", "networks-three"),
        (2, "panel,short,test,unseen", "tried"),
        (3, "panel,short,test,unseen", "tried-two"),
        (4, "panel,short", "varied"),
    ],
)
def test_the_tables_of_the_nineteenth_exploration_are_printed_from_the_records(
    number: int, draws: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = forms(draws, name, capsys)
    assert len(found) == len(unit_rules.SETS[name])
    assert {row[0]: row[1:] for row in table(number, NINETEENTH)} == found


def test_what_the_page_says_of_draws_in_the_nineteenth_exploration_holds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (own,) = shown("later", "nineteenth", capsys).values()
    rivals = shown("later", "rivals", capsys)
    assert {row[0]: row[1:] for row in table(5, NINETEENTH)} == {"cadence": own} | rivals
    assert len(rivals) == 4
    assert all(float(row[0]) > float(own[0]) for row in rivals.values())
    (short,), (panel,) = (shown(draw, "nineteenth", capsys).values() for draw in ("short", "panel"))
    failed, count = short[4].split(" of ")
    assert f"There {failed} of {count} systems fail, where 3 did, and the mean is {short[0]}," in NINETEENTH
    assert panel[4] == "0 of 19"
    assert f"On the panel it is {panel[0]}, where it was -2.8, and no system fails." in NINETEENTH
    _, systems, best = unit_table.read(FOLDER / "unit_rules.jsonl")
    behind = {
        record["system"]: np.mean(best["later", record["system"]]["finals"]) - record["finals"][0][0]
        for record in systems
        if (record["draw"], record["set"]) == ("later", "nineteenth")
    }
    first, *rest = sorted(behind, key=lambda name: -behind[name])
    assert f"One fails, `{first}` by {behind[first]:.1f} points" in NINETEENTH
    assert f"The next are `{rest[0]}` ({behind[rest[0]]:.1f} behind) and `{rest[1]}`" in NINETEENTH


def test_the_tables_of_the_twentieth_exploration_are_those_of_the_records(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (former,), (own,) = (
        shown("later-three-seeds", name, capsys).values() for name in ("nineteenth", "twentieth")
    )
    assert {row[0]: row[1:] for row in table(0, TWENTIETH)} == {
        "the ninth form, without the bound": former,
        "the tenth form, with the bound of R": own,
    }
    _, systems, best = unit_table.read(FOLDER / "unit_rules.jsonl")
    long = [record for record in systems if (record["draw"], record["set"]) == ("long", "nineteenth")]
    rows = [
        [
            record["system"],
            *(f"{value:.1f}" for value in np.mean(record["curves"][0], 0)),
            f"{record['unit'][0]:.2g}",
        ]
        for record in long
    ]
    assert table(1, TWENTIETH) == rows
    assert len(long) == 2
    behind = {
        record["system"]: np.mean(best["later-three-seeds", record["system"]]["finals"])
        - np.mean(record["finals"][0])
        for record in systems
        if (record["draw"], record["set"]) == ("later-three-seeds", "twentieth")
    }
    assert sorted(name for name in behind if behind[name] > 5) == ["clear, deep", "diabetes, mlp"]
    said = (-behind["digits, cnn, weights x 0.1"], behind["diabetes, mlp"], behind["clear, deep"])
    assert f"{said[0]:.1f} points ahead on that CNN" in TWENTIETH
    assert f"by {said[1]:.1f} points, and `clear, deep` by {said[2]:.1f}." in TWENTIETH
    curves = np.array([curve for record in long for curve in record["curves"][0]])
    assert f"up to {(curves.max(1) - curves[:, -1]).max():.1f} point below the best look" in TWENTIETH
    assert all(np.argmax(np.mean(record["curves"][0], 0)) == 4 for record in long)


def test_forms_with_other_constants_take_the_steps_of_the_method() -> None:
    digits = load_digits()
    stored = {"digits_x": digits.data.astype(np.float32), "digits_y": digits.target}
    system = unit_tasks.System("check", "digits", "mlp", "dirichlet:0.3", 30, 8, 3, 4, 5, 40, "mild")
    race = unit_rules.Race(system, 0, [], (), stored, dtype=torch.float64)
    scored: list[Tensor] = []
    race.score = lambda at: (scored.append(at), at[:, 0])[1]  # type: ignore[method-assign]
    changed = {"between": 0.5, "brake": 2, "lead": 2, "tail": 5, "warm": 5}  # which are 0 in the method
    others = [
        {name: changed.get(name, 0.05 if math.isinf(value) else value / 4)}
        for name, value in varied.CONSTANTS.items()
    ]
    made = varied.run(race, [{"rule": "varied"}, *others], (1.0,))
    *_, state = unit_rules.follow(race, Cadence.tuned(steps=system.steps))
    (models,) = scored
    torch.testing.assert_close(models[0], state.x, rtol=0, atol=1e-12)
    assert made[0]["signals"]["unit"] == [float(f"{float(state.unit / race.size):.4g}")]
    idle = {
        name
        for other, model in zip(others, models[1:], strict=True)
        for name in other
        if torch.allclose(model, models[0], rtol=0, atol=1e-9)
    }
    assert idle == {"zero"}  # which counts with a brake alone


def test_what_the_page_says_of_the_systems_of_the_unseen_draw_holds() -> None:
    _, systems, best = unit_table.read(FOLDER / "unit_rules.jsonl")
    behind = {
        record["system"]: np.mean(best["unseen", record["system"]]["finals"]) - record["finals"][0][0]
        for record in systems
        if (record["draw"], record["set"]) == ("unseen", "own") and ("unseen", record["system"]) in best
    }
    first, second, third, *_ = sorted(behind, key=lambda name: -behind[name])
    assert (first, second) == ("clear, deep, weights x 100", "diabetes, mlp, inputs x 10")
    assert f"{behind[second]:.1f} points behind, where" in EIGHTEENTH
    assert f"In all others it is at most {behind[third]:.1f} points behind." in EIGHTEENTH
    assert f"fails in 2 of {len(behind)}." in EIGHTEENTH


def test_the_accuracies_of_the_cnn_of_the_eighteenth_exploration_are_those_of_its_records() -> None:
    records = [json.loads(line) for line in (FOLDER / "exploration18.jsonl").read_text().splitlines()]
    records = sorted((each for each in records if "pool" in each), key=lambda each: each.get("seed", 0))
    last = [f"{100 * record['last']:.1f}" for record in records]
    units = [f"{record['unit']:.2f}" for record in records]
    assert f"{last[0]}, {last[1]} and {last[2]} on seeds 0 to 2" in EIGHTEENTH
    assert f"{units[0]}, {units[1]} and {units[2]} of the first norm" in EIGHTEENTH


@pytest.mark.parametrize("method", [Steady, Bouncing])
def test_the_simulation_takes_the_steps_of_the_method(method: type[Steady | Bouncing]) -> None:
    digits = load_digits()
    stored = {"digits_x": digits.data.astype(np.float32), "digits_y": digits.target}
    assert unit_rules.check(stored, method, unit_rules.CHECKED[method]) < 1e-12


def test_the_method_itself_follows_its_oracle_on_the_schedule_of_a_race() -> None:
    digits = load_digits()
    stored = {"digits_x": digits.data.astype(np.float32), "digits_y": digits.target}
    system = unit_tasks.System("check", "digits", "linear", "dirichlet:0.3", 20, 8, 3, 2, 5, 12, "mild")
    race = unit_rules.Race(system, 0, [], (), stored, dtype=torch.float64)

    class Problem:
        """As oracles call it; `visit` is the place of the task in the schedule."""

        def rows(self, visit: int, k: int) -> Tensor:
            return torch.tensor(race.schedule.rows[visit // 3, visit % 3, k]).view(1, -1)

        def steps(self, client: int, visit: int) -> int:
            return 2

        def gradient(self, client: int, visit: int, k: int, x: Any) -> Any:
            return race.gradient(torch.from_numpy(x).view(1, 1, -1), self.rows(visit, k))[0].view(-1).numpy()

        def loss(self, client: int, visit: int, k: int, x: Any) -> float:
            return float(race.gradient(torch.from_numpy(x).view(1, 1, -1), self.rows(visit, k))[1])

        def whole_gradient(self, client: int, x: Any) -> Any:
            raise NotImplementedError

    plan = race.schedule
    steps = [
        [
            (int(c), int(v), 3 * t + n)
            for n, (c, v) in enumerate(zip(plan.clients[t], plan.versions[t], strict=True))
        ]
        for t in range(system.rounds)
    ]
    expected = cadence(Run(Problem(), system.clients, race.first.numpy(), steps), local_steps=2)
    states = list(unit_rules.follow(race, Cadence.tuned(steps=2)))
    for state, model in zip(states, expected[1:], strict=True):
        np.testing.assert_allclose(state.x.numpy(), model, rtol=0, atol=1e-10)
    record = unit_rules.record_cadence(race)
    assert record["words"] in unit_rules.SETS["own"]
    assert record["curve"][-1] == round(float(race.score(states[-1].x.view(1, -1))[0]), 2)
    assert len(record["signals"]["unit"]) == len(unit_rules.BINS)


def test_other_methods_run_on_the_schedule_of_a_race_and_fadas_with_many_rates_at_once() -> None:
    digits = load_digits()
    stored = {"digits_x": digits.data.astype(np.float32), "digits_y": digits.target}
    system = unit_tasks.System("check", "digits", "linear", "dirichlet:0.3", 20, 8, 3, 2, 5, 12, "mild")
    race = unit_rules.Race(system, 0, [], (), stored, dtype=torch.float64)
    for name in unit_rules.RIVALS:
        records = unit_rules.record_rival(race, name)
        assert len(records) == (len(unit_rules.ADAPTIVE) if name == "fadas-da" else 1)
        assert all(record["words"]["rule"] == record["method"] == name for record in records)
    made = {
        tuple(record["words"].values())[1:]: record["curve"]
        for record in unit_rules.record_rival(race, "fadas-da")
    }
    setting = Setting(system.buffer, system.steps, system.rounds)
    for local, server in ((0.1, 0.1), (0.01, 0.01)):
        method = build("fadas-da", setting, {"local_lr": local, "server_lr": server})
        *_, state = unit_rules.follow(race, method)
        assert made[local, server] == [round(float(race.score(state.x.view(1, -1))[0]), 2)]


@pytest.mark.parametrize("form", [Steady, Bouncing])
@given(seed=st.integers(0, 1000), scale=st.floats(-12, 12))
@settings(max_examples=20, deadline=None)
def test_what_a_form_uploads_is_bounded(form: type[Steady | Bouncing], seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    method: Any = form.tuned(4)
    x, goals = torch.from_numpy(rng.normal(size=5)), torch.from_numpy(10**scale * rng.normal(size=(4, 5)))
    state, memory = method.init(x), method.memory(x)
    for version in range(3):
        batches = Batches(tuple(Batch((goal,)) for goal in goals))
        upload, memory = method.local(method.broadcast(state, version), memory, batches, VISIT, Bowl())
        assert upload._fields == tuple(method.traits.bounds)
        for name, bound in method.traits.bounds.items():
            assert float(getattr(upload, name).norm()) <= bound + 1e-12
        state = method.step(state, upload, Cohort(version, 9, (min(version, 2), 0), (1.0, 1.0)))
        unit = state.units[0] if form is Steady else state.unit
        assert 0 < float(unit) < float("inf")


class Bowl:
    """Slopes of |x - goal|^2 / 2."""

    def __call__(self, x: Tensor, batch: Batch, /) -> Tensor:
        return x - batch.data[0]

    def with_loss(self, x: Tensor, batch: Batch, /) -> tuple[Tensor, Tensor]:
        return self(x, batch), (x - batch.data[0]).square().sum() / 2

    def descend(self, x: Tensor, batch: Batch, lr: float, /) -> Tensor:
        return x - lr * self(x, batch)


def test_the_tables_of_the_sixteenth_exploration_are_printed_from_the_records(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (FOLDER / "README.md").read_text()
    given = argparse.Namespace(
        records=FOLDER / "unit_rules.jsonl", draw="panel", set="sixteenth", words=[], systems=False
    )
    unit_table.show_lengths(given)
    assert capsys.readouterr().out in page
    unit_table.show(given)
    given.set = "longer"
    unit_table.show(given)
    cadence = unit_table.short_name(unit_rules.SETS["cadence"][0])
    dead = cadence.replace("revive 2", "revive 0")
    steady = unit_table.short_name(unit_rules.STEADY)
    said = page.split("## Sixteenth exploration")[1]
    printed = [line for line in capsys.readouterr().out.splitlines() if "cadence" in line or "gain" in line]
    assert len(printed) == len(unit_rules.SETS["sixteenth"]) + len(unit_rules.SETS["longer"])
    for row in printed:
        short = row.replace(f"{dead} |", "cadence, revive 0 |").replace(cadence, "cadence")
        assert short.replace(steady, "*steady*") in said


def test_what_the_page_says_of_lengths_of_local_steps_holds() -> None:
    rules, systems, _ = unit_table.read(FOLDER / "unit_rules.jsonl")
    said = (FOLDER / "README.md").read_text().split("## Sixteenth exploration")[1]
    found = {
        (record["system"], rule["start"], round(rule["walk"] / 0.12, 2)): final
        for record in systems
        if record["set"] == "lengths"
        for rule, (final,) in zip(rules["lengths"], record["finals"], strict=True)
    }
    raw = [f"development: {name}" for name in ("raw150, mlp", "raw features")]
    long = " and ".join(f"{found[name, 0.2, 1.0]:.1f}" for name in raw)
    assert f"gives {long} % with the present local steps" in said
    assert [found[name, 0.2, 0.33] for name in raw] == pytest.approx([46.4, 46.4], abs=0.05)
    heavy = "development: digits16, mlp, weights x 100"
    short, present = found[heavy, 0.06, 0.03], found[heavy, 0.06, 1.0]
    assert f"({short:.1f} with a thirtieth, {present:.1f} with the present length" in said


def rows_of_bouncing(
    show: Any, draw: str, sets: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> list[list[str]]:
    """What the program prints of these sets on a draw, with the names of the seventeenth exploration."""
    base = unit_rules.SETS["seventeenth"][2]
    names = {unit_table.short_name(unit_rules.SETS["cadence"][0]): "cadence"}
    names[unit_table.short_name(unit_rules.STEADY)] = "*steady*"
    found = []
    for name in sets:
        for rule in (each for each in unit_rules.SETS[name] if each["rule"] == "bouncing"):
            differs = [f"{word} {value:g}" for word, value in rule.items() if base.get(word) != value]
            names.setdefault(unit_table.short_name(rule), ", ".join(["bouncing", *differs]))
        records = FOLDER / "unit_rules.jsonl"
        show(argparse.Namespace(records=records, draw=draw, set=name, words=[], systems=False))
        lines = capsys.readouterr().out.splitlines()[2:]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        found += [[names[row[0]], *row[1:]] for row in rows]
    return found


def test_the_tables_of_the_seventeenth_exploration_are_printed_from_the_records(
    capsys: pytest.CaptureFixture[str],
) -> None:
    section = (FOLDER / "README.md").read_text().split("## Seventeenth exploration")[1]
    sets = ("seventeenth", "slower")
    show, scores = unit_table.show, unit_table.show_scores
    panel = rows_of_bouncing(show, "panel", sets, capsys)
    assert sorted(table(0, section)) == sorted(panel)
    assert len(panel) == sum(len(unit_rules.SETS[name]) for name in sets)
    assert sorted(table(1, section)) == sorted(rows_of_bouncing(show, "short", sets, capsys))
    assert table(2, section) == rows_of_bouncing(scores, "busy", sets, capsys)
    assert table(3, section) == [row[:2] for row in rows_of_bouncing(scores, "images", sets, capsys)]


def test_the_tables_of_the_alarm_are_printed_from_the_records(capsys: pytest.CaptureFixture[str]) -> None:
    section = (FOLDER / "README.md").read_text().split("## Seventeenth exploration")[1]
    show, scores, sets = unit_table.show, unit_table.show_scores, ("alarmed",)
    panel = rows_of_bouncing(show, "panel", sets, capsys)
    assert table(5, section) == panel
    assert len(panel) == len(unit_rules.SETS["alarmed"])
    short = {row[0]: [row[1], row[2], row[5]] for row in rows_of_bouncing(show, "short", sets, capsys)}
    busy, images = (
        {row[0]: [row[1]] for row in rows_of_bouncing(scores, draw, sets, capsys)}
        for draw in ("busy", "images")
    )
    assert table(6, section) == [[name, *short[name], *busy[name], *images[name]] for name, *_ in panel]


def test_no_alarm_is_heard_on_digits_whatever_the_concurrency() -> None:
    rules, systems, _ = unit_table.read(FOLDER / "unit_rules.jsonl")
    some = [record for record in systems if (record["set"], record["draw"]) == ("alarmed", "busy")]
    assert len(some) == 8
    for record in some:
        pairs = list(zip(rules["alarmed"], record["finals"], strict=True))
        quiet = {rule["gain"]: final for rule, final in pairs if "alarm" not in rule}
        assert record["finals"] == [quiet[rule["gain"]] for rule, _ in pairs], record["system"]


def test_the_table_of_the_cnn_of_the_seventeenth_exploration_is_that_of_its_records() -> None:
    section = (FOLDER / "README.md").read_text().split("## Seventeenth exploration")[1]
    records = [
        json.loads(line)
        for number, method in ((14, "cadence"), (17, "bouncing"))
        for line in (FOLDER / f"exploration{number}.jsonl").read_text().splitlines()
        if json.loads(line)["method"] == method
    ]
    made: dict[str, list[str]] = {}
    for each in sorted(records, key=lambda record: record.get("seed", 0)):
        words = each["words"]
        name = each["method"]
        if name == "bouncing":
            name += f", gain {words.get('growth', Bouncing.growth):g}"
            name += "".join(f", {word} {value:g}" for word, value in words.items() if word != "growth")
        made.setdefault(name, []).append(f"{100 * each['last']:.1f}")
    assert {row[0]: row[1:] for row in table(4, section)} == made
