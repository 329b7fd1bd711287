import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from offbeat import trees
from offbeat.data.population import Examples
from offbeat.report import figures
from offbeat.report.chart import format_number
from offbeat.report.figures import fairness_figure, gini, participation_figure
from offbeat.report.load import ClientAccuracies, client_accuracies, read_runs
from offbeat.report.tables import summary_table
from offbeat.training import checkpoint
from offbeat.training.build import AnySimulatedEngine, build_run
from offbeat.training.evaluate import accuracy, evaluate
from offbeat.training.experiment import Experiment
from report_world import SMALL, change_settings, lines, make_run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("taking_part") / "run")


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30))
def test_gini_is_the_mean_difference_of_any_two_over_twice_the_mean(values: list[int]) -> None:
    counts: NDArray[np.int64] = np.array(values)
    differences = np.abs(counts[:, None] - counts[None, :]).mean()
    expected = differences / (2 * counts.mean()) if counts.any() else 0.0
    assert gini(counts) == pytest.approx(expected, abs=1e-12)


def test_participation_is_sorted_and_complete(made: Path) -> None:
    (line,) = participation_figure(read_runs([made])).lines
    counts = np.zeros(12)
    for step in lines(made, "trace"):
        for client, *_ in step["tasks"]:
            counts[client] += 1
    assert line.ys.tolist() == sorted(counts, reverse=True)
    assert line.xs[-1] == 1


def test_the_figures_have_every_client(made: Path) -> None:
    (run,) = read_runs([made])
    assert run.trace is not None
    taken = np.arange(1000)
    (line,) = participation_figure([replace(run, trace=replace(run.trace, taken=taken))]).lines
    assert line.ys.tolist() == taken[::-1].tolist()
    np.testing.assert_allclose(line.xs, np.arange(1, 1001) / 1000)
    (line,) = fairness_figure([run], {"run": ClientAccuracies(8, taken / 1000)}).lines
    assert line.ys.tolist() == (taken / 1000).tolist()


def test_of_a_great_many_clients_some_are_shown_evenly_and_both_ends() -> None:
    shares, values = figures._sorted_curve(np.arange(1_000_000)[::-1])
    assert len(shares) == 100_000
    assert (shares[0], shares[-1], values[0], values[-1]) == (1e-6, 1, 999_999, 0)
    assert np.diff(shares).max() < 1.2e-5


def test_accuracies_are_those_of_each_clients_own_examples(made: Path) -> None:
    found = client_accuracies(read_runs([made]))["run"]
    assert isinstance(found, ClientAccuracies)
    experiment = Experiment.of(algorithm="fedbuff", **SMALL)
    trial = build_run(experiment)
    assert isinstance(trial.engine, AnySimulatedEngine)
    population = trial.engine.population
    x = checkpoint.load(made / "checkpoint" / "state.safetensors").tensors["state.0"]
    expected = []
    for client in range(12):
        part = population.parts[client]
        own: Examples = trees.map(lambda leaf, rows=part: leaf[rows], population.data)
        expected.append(evaluate(trial.problem, x, own, {"accuracy": accuracy})["accuracy"])
    np.testing.assert_allclose(found.accuracies, expected)
    assert found.version == 8
    rows = {row.name: row.texts[0] for row in summary_table(read_runs([made]), {"run": found})}
    known = {"mean": np.mean(expected), "worst tenth": min(expected), "spread": np.std(expected)}
    for words, value in known.items():
        assert rows[f"training accuracy over clients, {words}"] == format_number(float(value))


def test_an_averaged_model_is_the_one_that_is_asked(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ema_decay=0.9)
    plain = make_run(tmp_path / "plain")
    averaged, other = (client_accuracies(read_runs([each])).popitem()[1] for each in (folder, plain))
    assert isinstance(averaged, ClientAccuracies)
    assert isinstance(other, ClientAccuracies)
    assert averaged.accuracies.tolist() != other.accuracies.tolist()


def test_what_cannot_be_computed_is_left_out_with_a_sentence(made: Path, tmp_path: Path) -> None:
    for name in ("deployed", "unsaved", "elsewhere"):
        shutil.copytree(made, tmp_path / name)
    change_settings(tmp_path / "deployed", task={"module": "clinic:module"})
    shutil.rmtree(tmp_path / "unsaved" / "checkpoint")
    change_settings(tmp_path / "elsewhere", data="mnist", data_dir=str(tmp_path / "nothing"))
    runs = read_runs([tmp_path / name for name in ("deployed", "unsaved", "elsewhere")])
    figure = fairness_figure(runs, client_accuracies(runs))
    assert figure.lines == ()
    assert "deployed: its examples are at its sites" in figure.notes[0]
    assert "there is no checkpoint" in figure.notes[1]
    assert "nothing" in figure.notes[2]


@pytest.mark.parametrize(
    "settings", [{"simulate_amplification": True}, {"dispatch": "allocation", "clip": "0.5"}]
)
def test_who_took_part_stays_a_secret_where_privacy_rests_on_it(
    made: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    shutil.copytree(made, tmp_path / "hidden")
    change_settings(tmp_path / "hidden", **settings)
    figure = participation_figure(read_runs([tmp_path / "hidden"]))
    assert figure.lines == ()
    assert "assumes that participation stays secret" in figure.notes[0]
