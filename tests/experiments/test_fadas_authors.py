"""FADAS as its authors ran it: the settings are theirs, and every cell runs and repeats, at a tiny size."""

import json
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from experiments.fadas import table as fadas_table
from experiments.reproduce import outcome
from experiments.reproduce.outcome import ComputeOptions, run_cell, trial_of
from experiments.reproduce.page import fill_sections, marker, section
from experiments.reproduce.records import recorded
from experiments.reproduce.study import Cell, Study
from experiments.reproduce.tables import Best
from experiments.studies.fadas import TABLE2 as REDUCED
from experiments.studies.fadas_authors import CLAIMED_SEEDS, CORNERS, ROWS, SEEDS, TABLE2, TABLE4, TABLE8
from experiments.studies.registry import STUDIES as REGISTERED
from torch import nn

from offbeat.algorithms import Setting, build
from offbeat.algorithms.fadas import Trailing
from offbeat.data.datasets import Source
from offbeat.data.partition import parse_partition
from offbeat.data.population import Examples
from offbeat.nn import models
from offbeat.nn.models import ResidualBlock
from offbeat.schedule.clock import Clock
from offbeat.schedule.delays import parse_delay
from offbeat.schedule.scheduler import Scheduler
from offbeat.schedule.statistics import iterate_buffers
from offbeat.training.build import build_dispatch

STUDIES = (CORNERS, TABLE2, TABLE8, TABLE4)
CLASSES, TINY, CLIENTS, WIDTH = 10, 8, 6, 32


@pytest.fixture
def tiny_cifar10(monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    """A few images of eight pixels a side in CIFAR-10's place."""
    draws = torch.Generator().manual_seed(0)
    images = torch.randn(90, 3, TINY, TINY, generator=draws)
    labels = torch.arange(90) % CLASSES
    examples = Examples(images[:60], labels[:60]), Examples(images[60:], labels[60:])
    source = Source("cifar10", *examples, None, labels[:60].numpy(), CLASSES)
    monkeypatch.setattr(outcome, "load", lambda name, folder: source)
    outcome._source.cache_clear()
    yield source
    outcome._source.cache_clear()


def tiny(cell: Cell) -> Cell:
    """The same rule, model and work on few clients, in two steps; its split would leave clients empty."""
    made = replace(cell.experiment, clients=CLIENTS, concurrency=3, partition="iid", batch_size=5)
    if made.local_epochs is None:
        made = replace(made, local_steps=2)
    if made.precision == "tf32":
        made = replace(made, precision="float32")  # a CPU has no TF32
    return replace(cell, experiment=replace(made, buffer=min(2, made.buffer), rounds=2, eval_every=1))


def thin_resnet(shape: tuple[int, ...], classes: int, norm: Callable[[int], nn.Module]) -> nn.Module:
    """A block of ResNet-18 in its place."""
    return nn.Sequential(
        nn.Conv2d(shape[0], WIDTH, 3, 1, 1, bias=False),
        norm(WIDTH),
        ResidualBlock(WIDTH, WIDTH, 2, norm),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(WIDTH, classes),
    )


def distinct() -> list[Cell]:
    """Cells that differ in more than their seed and split."""
    cells = [cell for study in STUDIES for cell in study.full.cells if cell.experiment.seed == SEEDS[0]]
    return list({tiny(cell).key: cell for cell in reversed(cells)}.values())[::-1]


@pytest.mark.parametrize("study", [TABLE8, TABLE4], ids=lambda study: study.name)
def test_the_settings_of_the_tables_are_the_authors(study: Study) -> None:
    large = study is TABLE8
    rates = {
        "fedasync": {0.003} if large else {0.003, 0.01},
        "fedbuff": {(0.03, 1.0)},
        "fadas": {(0.1, 1e-4 if large else 3e-4)},
        "fadas-da": {(0.1, 1e-3)},
    }
    seen: dict[str, set[object]] = {}
    for cell in study.full.cells:
        made, given = cell.experiment, dict(cell.experiment.parameters)
        assert (made.data, made.model, made.augment) == ("cifar10", "resnet18-bn", "crop-flip")
        assert (made.local_epochs, made.batch_size, made.weight_decay) == (2, 50, 1e-4)
        assert (made.rounds, made.buffer) == (500 * cell.scale, (5 if large else 10) // cell.scale)
        assert (made.clients, made.concurrency) == ((50, 25) if large else (100, 20))
        assert (made.delays, made.dispatch) == (f"tiers:{'large' if large else 'mild'}", "round-refill")
        assert (made.local_optimizer, made.local_lr_schedule, made.server_lr_schedule) == (
            "sgd",
            *["constant"] * 2,
        )
        assert made.partition == f"fadas-script:{cell.column[4:-1]}"
        found = (given["local_lr"], given["server_lr"]) if "server_lr" in given else given["local_lr"]
        seen.setdefault(made.algorithm, set()).add(found)
        method = build(made.algorithm, Setting(made.buffer, 1, 1), given)
        scripted = cell.row in ("fadas", "fadas-da")
        assert isinstance(method, Trailing) == scripted
        assert given.get("unbiased", False) == scripted
        assert given.get("tau_c", 1) == 1
    assert seen == rates
    places = {(cell.row, cell.column, cell.experiment.seed) for cell in study.full.cells}
    assert places == {
        (row, column, seed) for row in ROWS for column in ("Dir(0.1)", "Dir(0.3)") for seed in SEEDS
    }
    assert set(CLAIMED_SEEDS) == {(row, alpha) for row in ROWS[:4] for alpha in (0.1, 0.3)}


def test_the_runs_with_the_seed_of_the_scripts_stand_beside_table_2_too() -> None:
    assert [*TABLE2.full.cells] == [one for one in TABLE8.full.cells if one.experiment.seed == SEEDS[0]]
    best = TABLE2.full.tabulate
    assert isinstance(best, Best)
    assert best.claimed["fadas", "Dir(0.1)"] == "72.04 ± 0.94"


def test_the_corners_differ_in_norm_and_local_work_alone() -> None:
    made = {(cell.row, cell.column): cell.experiment for cell in CORNERS.full.cells}
    assert len(made) == 5
    authors = made["BatchNorm", "two epochs"]
    table = {(cell.row, cell.column, cell.experiment.seed): cell.experiment for cell in TABLE8.full.cells}
    assert authors == table["fadas", "Dir(0.1)", 42]  # one run serves both
    changes = {
        ("BatchNorm", "two epochs"): {},
        ("BatchNorm", "20 steps each"): {"local_epochs": None, "local_steps": 20},
        ("GroupNorm", "two epochs"): {"model": "resnet18"},
        ("GroupNorm", "20 steps each"): {"model": "resnet18", "local_epochs": None, "local_steps": 20},
        ("BatchNorm, TF32", "two epochs"): {"precision": "tf32"},
    }
    assert made == {place: replace(authors, **change) for place, change in changes.items()}


def test_the_split_gives_the_clients_as_many_steps_as_in_the_scripts() -> None:
    labels = np.repeat(np.arange(CLASSES), 5000)  # CIFAR-10 has as many images of each class
    (text,) = {cell.experiment.partition for cell in CORNERS.full.cells}
    sizes = np.array([len(part) for part in parse_partition(text).split(labels, 50, 42)])
    steps = 2 * -(-sizes // 50)
    assert (steps.min(), steps.max(), round(steps.mean())) == (2, 124, 41)
    for cell in (*TABLE8.full.cells, *TABLE4.full.cells):  # or a run would be refused
        made = cell.experiment
        assert min(map(len, parse_partition(made.partition).split(labels, made.clients, made.seed))) > 0


@pytest.mark.parametrize(
    "cell", distinct(), ids=lambda cell: f"{cell.row}, {cell.column}, {cell.experiment.delays}"
)
def test_every_cell_runs_and_repeats_to_the_bit(
    cell: Cell, tiny_cifar10: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "resnet18", thin_resnet)
    one, two = (run_cell(tiny(cell), ComputeOptions()) for _ in range(2))
    assert one["failure"] is None
    assert one["version"] == [0, 1, 2]
    assert len(set(one["loss"])) > 1  # the model changes, by little at a server rate of 0.0001
    told = ("accuracy", "loss", "time", "client_updates")
    assert {name: one[name] for name in told} == {name: two[name] for name in told}


def test_the_authors_model_runs_in_whole_with_buffers_that_are_averaged(tiny_cifar10: Source) -> None:
    (cell,) = [one for one in distinct() if (one.row, one.column) == ("BatchNorm", "two epochs")]
    trial = trial_of(tiny(cell), ComputeOptions())
    assert trial.problem.tracks_statistics
    assert len(trial.problem.initial()[0]) == 11_173_962
    record = run_cell(tiny(cell).shortened(1), ComputeOptions())
    assert record["failure"] is None
    assert record["client_updates"] == [0, 2]


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_a_page_says_that_nothing_is_run_yet(study: Study) -> None:
    text = section(study, study.full, {}, quick=False)
    count = len({cell.key for cell in study.full.cells})
    assert f"0 of {count} runs, not run yet, about {study.full.minutes:.0f} minutes of an H200: `" in text
    assert f"`python -m experiments {study.name} --device cuda --data-dir DIR`" in text
    assert "±" in text  # what is claimed stands beside it


PAGE = fadas_table.PAGE.read_text()


def test_the_table_of_the_corners_by_step_is_that_of_the_records() -> None:
    made = fadas_table.tables()
    assert fill_sections(PAGE, made) == PAGE
    studied = {
        marker(study, quick).strip("<!->\n ")
        for study in REGISTERED.values()
        for quick in (False, True)
        if study.paper == "fadas"
    }
    assert set(re.findall(r"<!-- (.+) -->", PAGE)) - {"end", "glance"} <= studied | made.keys()


def test_a_run_that_has_ended_takes_the_place_of_its_course_until_it_paused() -> None:
    lines = [json.loads(line) for line in fadas_table.PAUSED.read_text().splitlines()]
    ended = recorded(fadas_table.RECORDS)
    courses = fadas_table.courses()
    for title, cell in fadas_table.cells().items():
        if cell.key in ended:
            assert max(courses[title]) == 500
    for line in lines:
        assert line["version"] == sorted(set(line["version"]))
        assert line["version"][-1] <= line["paused"] < 500
        assert len(line["version"]) == len(line["accuracy"]) == len(line["loss"])


def test_what_the_page_says_of_the_corners_holds() -> None:
    courses = fadas_table.courses()
    group, batch = courses["GroupNorm, 20 steps each"], courses["BatchNorm, 20 steps each"]
    twice, fedbuff = courses["BatchNorm, two epochs"], courses["FedBuff, BatchNorm, two epochs"]
    assert (round(batch[450], 1), round(group[450], 1), round(batch[450] - group[450])) == (61.2, 33.0, 28)
    assert (round(twice[250], 1), round(batch[250], 1), round(twice[250] - batch[250])) == (59.8, 46.0, 14)
    assert round(twice[250] - twice[200]) == 4
    last = [batch[version] for version in sorted(batch)[-5:]]
    assert f"ends at {statistics.mean(last):.2f} ± {statistics.stdev(last):.2f}" in PAGE
    swings = [value for version, value in fedbuff.items() if version >= 150]
    assert (round(min(swings)), round(max(swings))) == (34, 62)
    reduced = recorded(fadas_table.RECORDS)
    (one,) = (c for c in REDUCED.full.cells if (c.row, c.column) == ("fadas", "Dir(0.1)"))
    level = 100 * statistics.mean(reduced[one.key].accuracies[-5:])
    assert (round(level, 2), round(72.04 - level)) == (43.98, 28)
    assert round(level - group[450]) == 11


def test_the_corners_have_as_many_local_steps_as_the_page_says() -> None:
    cell = {(one.row, one.column): one for one in CORNERS.full.cells}["BatchNorm", "two epochs"]
    made = cell.experiment
    labels = np.repeat(np.arange(CLASSES), 5000)
    sizes = [len(part) for part in parse_partition(made.partition).split(labels, made.clients, made.seed)]
    dispatch = build_dispatch(made)
    draws = dispatch.source(made.seed)
    clock = Clock(parse_delay(made.delays).bind(draws, made.clients), draws)
    flow = Scheduler(clock, dispatch, draws, made.clients, made.buffer)
    tasks = [task for step in iterate_buffers(flow, 250) for task in step.tasks]
    taken = sum(2 * -(-sizes[task.client] // 50) for task in tasks)
    assert f"{taken:,} and {500 * 5 * 20:,} local steps" in PAGE
