"""Which execution a run takes, by figures that are given here instead of measured."""

import json
import logging
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from offbeat import Asynchronous, Cadence, Examples, FedOpt, Sequential, Steps, Vectorised, train
from offbeat.core import AnyAlgorithm, Batch, Task
from offbeat.data.population import Population
from offbeat.engines import execution
from offbeat.engines.cuda import CompilerCache
from offbeat.engines.engine import Engine
from offbeat.engines.execution import AutotuneExecutor, Execution, Figures, choose_execution
from offbeat.engines.local import (
    DRAWS_NUMBERS,
    Executor,
    SequentialExecutor,
    TaskResults,
    TaskStart,
)
from offbeat.nn.problem import Precision, Problem
from offbeat.training import settings_file
from offbeat.training.build import build_run
from offbeat.training.experiment import Experiment
from offbeat.training.folder import RunFolder
from offbeat.training.loop import Snapshot
from offbeat.training.runner import run_experiment
from worlds import make_world

NAMES = ("mapped", "streamed", "mapped-compiled", "streamed-compiled")
METHOD = FedOpt(0.1, 1.0)
MEASURED = {"mapped": Figures(0.5, 0.02), "streamed": Figures(0.5, 0.04)}


def test_executions_without_the_compiler_are_measured_first() -> None:
    assert choose_execution({}, NAMES, 10**6) == "mapped"
    assert choose_execution({"mapped": MEASURED["mapped"]}, NAMES, 10**6) == "streamed"


def test_the_compiler_is_tried_where_its_time_is_expected_to_pay() -> None:
    assert choose_execution(MEASURED, NAMES, 1000) == "mapped"
    assert choose_execution(MEASURED, NAMES, 10_000) == "mapped-compiled"
    swapped = {"mapped": MEASURED["streamed"], "streamed": MEASURED["mapped"]}
    assert choose_execution(swapped, NAMES, 10_000) == "streamed-compiled"


def test_a_compiled_one_that_saves_less_than_expected_leads_to_the_other_and_back() -> None:
    found = {"mapped": Figures(0.5, 0.02), "streamed": Figures(0.5, 0.021)}
    found |= {"mapped-compiled": Figures(30.0, 0.019)}
    assert choose_execution(found, NAMES, 10_000) == "streamed-compiled"
    found |= {"streamed-compiled": Figures(30.0, 0.03)}
    assert choose_execution(found, NAMES, 10_000) == "mapped"  # 0.001 s saved 10,000 times is no 30 s
    assert choose_execution(found, NAMES, 100_000) == "mapped-compiled"


def test_a_known_start_counts_against_the_steps_that_are_left() -> None:
    found = MEASURED | {"mapped-compiled": Figures(5.0, 0.01), "streamed-compiled": Figures(5.0, 0.05)}
    assert choose_execution(found, NAMES, 400) == "mapped"
    assert choose_execution(found, NAMES, 500) == "mapped-compiled"


class Slow:
    """An execution that takes some seconds for its first group, and for each."""

    def __init__(self, start: float, group: float, made: list[str], name: str) -> None:
        self.start, self.group, self.made, self.name = start, group, made, name

    def executor(self, problem: Problem, population: Population) -> Executor:
        self.made.append(self.name)
        cache = CompilerCache(self.name.replace("_", "-"), problem, population)
        return SlowExecutor(problem, population, self.start, self.group, cache)


class SlowExecutor(SequentialExecutor):
    def __init__(
        self, problem: Problem, population: Population, start: float, group: float, cache: CompilerCache
    ) -> None:
        super().__init__(problem, population)
        self.left, self.group, self.cache, self.calls = start, group, cache, 0

    def __call__(
        self, algorithm: AnyAlgorithm, tasks: Sequence[Task], starts: Sequence[TaskStart], seed: int
    ) -> TaskResults:
        time.sleep(self.group + self.left * (1 / 3 if self.cache.filled(algorithm, len(tasks)) else 1))
        self.left = 0.0
        self.cache.fill(algorithm, len(tasks))
        self.calls += len(tasks)
        return super().__call__(algorithm, tasks, starts, seed)


class Tuned:
    """`Autotune` with candidates of known speed."""

    def __init__(self, spare: tuple[str, ...] = (), **figures: tuple[float, float]) -> None:
        self.made: list[str] = []
        self.spare = spare
        self.candidates: dict[str, Execution] = {
            name.replace("_", "-"): Slow(*each, self.made, name) for name, each in figures.items()
        }

    def executor(self, problem: Problem, population: Population) -> AutotuneExecutor:
        return AutotuneExecutor(self.candidates, problem, population, self.spare)


def run(execution: Any, rounds: int) -> tuple[torch.Tensor, dict[str, Any]]:
    world = make_world()
    shot = last_step(Vectorised(world.problem, world.population, execution=execution), rounds)
    report = shot.execution()
    assert report is not None
    return shot.x, report


def last_step(engine: Engine, rounds: int) -> Snapshot:
    return list(train(METHOD, engine, dispatch=Asynchronous(8), buffer=4, rounds=rounds))[-1]


@pytest.fixture(autouse=True)
def cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBEAT_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiler"))


def test_the_fastest_is_taken_with_the_reference_s_trajectory_and_its_figures_are_reported() -> None:
    x, report = run(Tuned(mapped=(0.0, 0.05), streamed=(0.0, 0.001)), rounds=3)
    world = make_world()
    assert torch.equal(x, last_step(Sequential(world.problem, world.population), rounds=3).x)
    assert report["chosen"] == "streamed"
    assert (report["tasks"], report["groups"], report["precision"]) == (4, 3, "float32")
    assert report["seconds"]["mapped"]["group"] > report["seconds"]["streamed"]["group"] >= 0.001


@pytest.mark.parametrize("able", [True, False], ids=["computes", "falls back"])
def test_what_was_chosen_and_why_is_among_the_settings_of_a_run(able: bool, tmp_path: Path) -> None:
    experiment = Experiment.of(algorithm="fedbuff", clients=8, buffer=4, concurrency=6, rounds=3)
    spec, tuned = build_run(experiment), Tuned(mapped=(0.0, 0.001))
    problem, population = spec.problem, spec.engine.population  # type: ignore[attr-defined]
    if not able:
        tuned.candidates = {"mapped": execution.Vmap()}
        problem = Problem(torch.nn.Sequential(torch.nn.Flatten(), Branching(64, 10)), problem.loss)
    engine = Vectorised(problem, population, execution=tuned)  # type: ignore[arg-type]
    with RunFolder.begin(tmp_path / "run", experiment.settings()) as folder:
        list(run_experiment(experiment, spec._replace(problem=problem, engine=engine), folder))
    report = settings_file.read(tmp_path / "run")["execution_report"]
    assert report["chosen"] == "mapped"
    assert (report["tasks"], report["groups"]) == (4, 3)
    assert report["seconds"]["mapped"]["group"] > 0
    reasons = report.get("fell_back", {})
    assert [reason.partition(":")[0] for reason in reasons.values()] == (
        [] if able else ["this module cannot be computed for many clients at once, so it runs one by one"]
    )


def test_a_second_run_measures_nothing_again() -> None:
    first, second = (Tuned(mapped=(0.0, 0.001), streamed=(0.0, 0.05)) for _ in range(2))
    run(first, rounds=40)
    _, report = run(second, rounds=40)
    assert first.made == ["mapped", "streamed", "mapped"]
    assert second.made == ["mapped"]
    assert report["chosen"] == "mapped"


def test_a_later_run_expects_to_start_sooner_as_long_as_the_compiler_keeps_its_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(execution, "_COMPILER_SECONDS", 0.1)
    figures = {"mapped": (0.0, 0.05), "mapped_compiled": (0.9, 0.001)}
    _, first = run(Tuned(**figures), rounds=200)
    assert first["chosen"] == "mapped-compiled"
    assert first["seconds"]["mapped-compiled"]["start"] > 0.9
    _, later = run(Tuned(**figures), rounds=12)  # 0.3 and not 0.9 seconds, to save 0.5
    assert later["chosen"] == "mapped-compiled"
    _, short = run(Tuned(**figures), rounds=1)
    assert short["chosen"] == "mapped"
    shutil.rmtree(tmp_path / "compiler")
    _, cleared = run(Tuned(**figures), rounds=12)
    assert cleared["chosen"] == "mapped"


def test_what_was_compiled_by_hand_counts_as_well_and_its_start_is_kept_as_of_an_empty_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(execution, "_COMPILER_SECONDS", 0.9)
    figures = {"mapped": (0.0, 0.03), "mapped_compiled": (0.9, 0.001)}
    _, before = run(Tuned(**figures), rounds=60)  # a quarter of 1.8 seconds is less than 0.9
    assert before["chosen"] == "mapped"
    world = make_world()
    by_hand = Tuned(**figures).candidates["mapped-compiled"]
    last_step(Vectorised(world.problem, world.population, execution=by_hand), rounds=1)
    _, after = run(Tuned(**figures), rounds=60)  # and more than 0.3
    assert after["chosen"] == "mapped-compiled"
    assert 0.3 < after["seconds"]["mapped-compiled"]["start"] < 0.7
    (stored,) = json.loads((tmp_path / "executions.json").read_text()).values()
    assert stored["mapped-compiled"][0] == pytest.approx(3 * after["seconds"]["mapped-compiled"]["start"])
    assert stored["mapped"][0] == after["seconds"]["mapped"]["start"]


@pytest.mark.parametrize(
    "what",
    ["method", "execution", "minibatch", "module", "precision", "group", "examples", "type", "weight decay"],
)
def test_another_run_does_not_count_as_compiled(what: str) -> None:
    world = make_world(work=Steps(3, 4))
    inputs = world.population.data.inputs.shape[1]
    module = torch.nn.Linear(inputs, 3).double()
    CompilerCache("mapped-compiled", Problem(module, world.problem.loss), world.population).fill(METHOD, 4)
    other = Cadence.tuned(3) if what == "method" else METHOD
    name = "streamed-compiled" if what == "execution" else "mapped-compiled"
    own = make_world(work=Steps(3, 5 if what == "minibatch" else 4)).population
    if what == "examples":
        own = in_rows(own)
    made = torch.nn.Linear(inputs, 3, bias=what != "module").to(
        torch.float32 if what == "type" else torch.float64
    )
    precision = Precision.BFLOAT16 if what == "precision" else Precision.AUTO
    decay = 0.1 if what == "weight decay" else 0.0
    again = Problem(torch.nn.Linear(inputs, 3).double(), world.problem.loss)
    assert CompilerCache("mapped-compiled", again, world.population).filled(METHOD, 4)
    problem = Problem(made, world.problem.loss, decay, precision)
    assert not CompilerCache(name, problem, own).filled(other, 5 if what == "group" else 4)


def in_rows(population: Population) -> Population:
    """The same clients with examples of another shape."""
    assert isinstance(population.data, Examples)
    data = Examples(population.data.inputs.unsqueeze(1), population.data.targets)
    return Population(data, population.parts, population.work)


def test_what_runs_on_streams_is_compiled_for_groups_of_any_size() -> None:
    world = make_world()
    cache = CompilerCache("streamed-compiled", world.problem, world.population)
    cache.fill(METHOD, 4)
    assert cache.filled(METHOD, 5)


def test_figures_are_not_those_of_examples_of_another_shape_or_of_another_type() -> None:
    world = make_world()
    problem, population = world.problem, world.population
    single = Problem(problem.module(problem.initial()[0]).float(), problem.loss)
    runs = [(problem, population), (problem, in_rows(population)), (single, population)]
    assert len({execution.cache_key(METHOD, *each, (4, 3, 4)) for each in runs}) == 3


def test_a_start_of_the_compiler_with_a_filled_cache_is_not_taken_for_a_third_of_one_with_an_empty_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(execution, "_COMPILER_SECONDS", 3.0)
    figures = {"mapped": (0.0, 0.03), "mapped_compiled": (0.1, 0.001)}  # as in the process that compiled it
    by_hand = Tuned(**figures).candidates["mapped-compiled"]
    world = make_world()
    last_step(Vectorised(world.problem, world.population, execution=by_hand), rounds=1)
    _, filled = run(Tuned(**figures), rounds=200)  # a quarter of 6 seconds is more than one
    assert filled["chosen"] == "mapped-compiled"
    (stored,) = json.loads((tmp_path / "executions.json").read_text()).values()
    assert stored["mapped-compiled"][0] == 3.0
    shutil.rmtree(tmp_path / "compiler")
    _, cleared = run(Tuned(**figures), rounds=20)  # 0.6 seconds mapped
    assert cleared["chosen"] == "mapped"


@pytest.mark.parametrize("kind", ["compiles", "falls back", "cannot be mapped"])
def test_a_compiled_execution_notes_that_the_compiler_has_it_unless_it_fell_back(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*rest: Any, **more: Any) -> Any:
        raise RuntimeError("no compiler")

    def accept(graph: Any, **more: Any) -> Any:
        return graph

    monkeypatch.setattr(torch, "compile", refuse if kind == "falls back" else accept)
    world = make_world()
    problem = world.problem
    if kind == "cannot be mapped":
        problem = Problem(Branching(world.population.data.inputs.shape[1], 3).double(), problem.loss)
    engine = Vectorised(problem, world.population, execution=execution.Vmap(compiled=True))
    last_step(engine, rounds=1)
    cache = CompilerCache("mapped-compiled", problem, world.population)
    assert cache.filled(METHOD, 4) is (kind == "compiles")


def test_a_compiler_s_cache_that_cannot_be_written_to_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    world = make_world()
    cache = CompilerCache("mapped-compiled", world.problem, world.population)
    cache.fill(METHOD, 4)
    assert not cache.filled(METHOD, 4)


@pytest.mark.parametrize("named", [True, False])
def test_notes_are_where_torch_keeps_what_it_compiled(
    named: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not named:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setenv("LOGNAME", "DOMAIN\\somebody")
    world = make_world()
    CompilerCache("mapped-compiled", world.problem, world.population).fill(METHOD, 4)
    (note,) = tmp_path.rglob("offbeat/*")
    assert note.parent.parent == Path(cache_dir())


def test_figures_of_the_compiler_stay_as_measured_when_a_later_run_measures_another_candidate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stored() -> Any:
        (figures,) = json.loads((tmp_path / "executions.json").read_text()).values()
        return figures["mapped-compiled"]

    monkeypatch.setattr(execution, "_COMPILER_SECONDS", 0.1)
    figures = {"mapped": (0.0, 0.05), "mapped_compiled": (0.9, 0.001)}
    run(Tuned(**figures), rounds=200)
    measured = stored()
    later = Tuned(**figures, streamed=(0.0, 0.05))
    run(later, rounds=200)
    assert later.made[0] == "streamed"
    assert stored() == measured


def test_compiling_is_announced_and_only_where_the_run_is_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(execution, "_COMPILER_SECONDS", 0.1)
    caplog.set_level(logging.INFO)
    figures = {"mapped": (0.0, 0.05), "mapped_compiled": (0.1, 0.001)}
    _, short = run(Tuned(**figures), rounds=3)
    assert short["chosen"] == "mapped"
    assert not [record for record in caplog.records if "compiling" in record.message]
    monkeypatch.setenv("OFFBEAT_CACHE", "")
    _, long = run(Tuned(**figures), rounds=40)
    assert long["chosen"] == "mapped-compiled"
    _, said, chosen = [record.message for record in caplog.records]
    assert said == "compiling the model: about 0 s, which are expected to pay in 40 server steps."
    assert re.fullmatch(r"local work runs mapped-compiled \(mapped .* ms after .* s; for 4 tasks\)\.", chosen)


def test_a_run_says_once_that_it_compiles_where_that_was_chosen_by_hand_or_by_earlier_figures(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "compile", lambda graph, **more: graph)
    caplog.set_level(logging.INFO)
    world = make_world()
    said = []
    for how in (execution.Vmap(), execution.Vmap(compiled=True), execution.Vmap(compiled=True)):
        last_step(Vectorised(world.problem, world.population, execution=how), rounds=3)
        said.append([record.message for record in caplog.records])
        caplog.clear()
    assert said == [[], ["compiling the model: about 15 s."], ["compiling the model: about 5 s."]]
    tuned = Tuned()
    tuned.candidates = {"mapped-compiled": execution.Vmap(compiled=True)}
    tuned_run(world.problem, tuned, rounds=3)
    assert len([record for record in caplog.records if "compiling" in record.message]) == 1
    caplog.clear()
    tuned_run(world.problem, tuned, rounds=3)
    compiling, chosen = [record.message for record in caplog.records]
    assert compiling == "compiling the model: about 5 s."
    assert chosen.startswith("local work runs mapped-compiled (")


def test_a_candidate_that_fails_is_left_out_with_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    tuned = Tuned(streamed=(0.0, 0.001))
    tuned.candidates = {"mapped": Broken()} | tuned.candidates
    _, report = run(tuned, rounds=2)
    assert report["chosen"] == "streamed"
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["mapped execution is not used: no kernel"]


class Broken:
    """An execution that fails."""

    def executor(self, problem: Problem, population: Population) -> Executor:
        return self  # type: ignore[return-value]

    def __call__(self, *rest: Any) -> TaskResults:
        raise RuntimeError("no kernel\nis there")

    def close(self) -> None:
        pass


def test_spare_candidates_are_tried_only_where_the_others_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OFFBEAT_CACHE", "")
    usual = Tuned(spare=("streamed",), mapped=(0.0, 0.05), streamed=(0.0, 0.001))
    _, report = run(usual, rounds=2)
    assert report["chosen"] == "mapped"
    assert usual.made == ["mapped"]
    failing = Tuned(spare=("streamed",), streamed=(0.0, 0.001), mapped_compiled=(0.0, 0.0))
    failing.candidates = {"mapped": Broken()} | failing.candidates
    assert tuned_run(make_world().problem, failing, rounds=2)["chosen"] == "streamed"
    module = Branching(make_world().population.data.inputs.shape[1], 3).double()
    falling = Tuned(spare=("streamed",), streamed=(0.0, 0.001))
    mapped = {"mapped": execution.Vmap(), "mapped-compiled": execution.Vmap(compiled=True)}
    falling.candidates = mapped | falling.candidates
    assert tuned_run(Problem(module, make_world().problem.loss), falling, rounds=2)["chosen"] == "streamed"
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "mapped execution is not used: no kernel"
    ]


@pytest.mark.parametrize(("features", "spared"), [(4, True), (4000, False)])
def test_streams_are_tried_where_a_gradient_is_large(
    features: int, spared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(work=Steps(3, 50))
    data = Examples(torch.randn(200, features), torch.randint(0, 3, (200,)))
    population = Population(data, [range(200)], Steps(3, 50))  # type: ignore[list-item]
    hidden = 3000 if features > 4 else 4
    module = torch.nn.Sequential(torch.nn.Linear(features, hidden), torch.nn.Linear(hidden, 3))
    problem = Problem(module, world.problem.loss)
    sample = Batch((data.inputs[:5], data.targets[:5]))
    operations = problem.flops(sample)
    monkeypatch.setattr(Problem, "device", property(lambda self: torch.device("cuda")))
    monkeypatch.setattr(execution, "sample_batch", lambda *rest: sample)
    monkeypatch.setattr(Problem, "draws_random_numbers", lambda self, batch: False)
    monkeypatch.setattr(Problem, "flops", lambda self, batch: operations)
    made = execution.Autotune().executor(problem, population)
    assert isinstance(made, AutotuneExecutor)
    assert bool(made._spare) is spared


class Branching(torch.nn.Linear):
    """A module that cannot be mapped, since its path depends on the data."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs)
        return outputs if outputs.sum() > -1e30 else -outputs


def tuned_run(problem: Problem, tuned: Tuned, rounds: int) -> dict[str, Any]:
    engine = Vectorised(problem, make_world().population, execution=tuned)  # type: ignore[arg-type]
    report = last_step(engine, rounds).execution()
    assert report is not None
    return report


@pytest.mark.parametrize("others", [("streamed",), ()], ids=["of two", "of one"])
def test_what_falls_back_is_tried_once_and_neither_compiled_nor_remembered(
    others: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(execution, "_COMPILER_SECONDS", 0.0)  # so that compiling pays
    world = make_world()
    module = Branching(world.population.data.inputs.shape[1], 3).double()
    caplog.set_level(logging.INFO)
    for _ in range(2):  # with the figures of the first
        caplog.clear()
        tuned = Tuned(**dict.fromkeys(others, (0.0, 0.002)))
        mapped = {"mapped": execution.Vmap(), "mapped-compiled": execution.Vmap(compiled=True)}
        tuned.candidates = mapped | tuned.candidates
        report = tuned_run(Problem(module, world.problem.loss), tuned, rounds=2)
        assert report["chosen"] == (others[0] if others else "mapped")
        assert list(report["seconds"]) == list(others or ["mapped"])
        assert list(report["fell_back"]) == ["mapped"]
        assert "so it runs one by one" in report["fell_back"]["mapped"]
        said = [record for record in caplog.records if "so it runs one by one" in record.message]
        assert [record.levelname for record in said] == ["INFO" if others else "WARNING"]


def test_a_compiled_execution_is_expected_to_gain_on_the_fastest_where_its_own_is_missing() -> None:
    measured = {"first": Figures(0.1, 0.5), "second": Figures(9.0, 0.01)}
    names = ("first", "second", "third-compiled")
    assert choose_execution(measured, names, 100) == "second"
    assert choose_execution(measured, names, 10_000) == "third-compiled"
    assert choose_execution({}, ["third-compiled"], 10) == "third-compiled"


def test_a_module_that_draws_is_said_to_be_computed_one_by_one_before_anything_is_tried(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    noisy = torch.nn.Sequential(torch.nn.RReLU(), torch.nn.Linear(world.population.data.inputs.shape[1], 3))
    problem = Problem(noisy.double(), world.problem.loss)
    for each, draws in ((problem, True), (world.problem, False)):
        monkeypatch.setattr(Problem, "device", property(lambda self: torch.device("cuda")))
        sample = world.population.data.inputs[:5], world.population.data.targets[:5]
        monkeypatch.setattr(execution, "sample_batch", lambda *rest, sample=sample: Batch(sample))
        monkeypatch.setattr(Problem, "draws_random_numbers", lambda self, batch, draws=draws: draws)
        monkeypatch.setattr(Problem, "flops", lambda self, batch: 1)
        made = execution.Autotune().executor(each, world.population)
        assert isinstance(made, SequentialExecutor) is draws
    assert [record.message for record in caplog.records] == [DRAWS_NUMBERS]
