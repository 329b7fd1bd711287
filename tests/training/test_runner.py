import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest

from offbeat.errors import DivergedError
from offbeat.training import runner
from offbeat.training.build import build_run
from offbeat.training.checkpoint import Checkpoint
from offbeat.training.evaluate import accuracy, ema, evaluate
from offbeat.training.experiment import Experiment
from offbeat.training.folder import FAILURE_FILE, RunFolder, read_jsonl
from offbeat.training.loop import train
from offbeat.training.runner import run_experiment

SMALL = Experiment.of(
    algorithm="fedbuff",
    clients=12,
    buffer=3,
    concurrency=5,
    local_steps=1,
    batch_size=4,
    rounds=7,
    eval_every=3,
    dropout=0.2,
    max_staleness=1,
)


@pytest.fixture(scope="module")
def trial():
    return build_run(SMALL)


def test_records_say_what_the_trace_says(trial, tmp_path):
    with RunFolder.begin(tmp_path, SMALL.settings()) as folder:
        steps = list(run_experiment(SMALL, trial, folder))
    records, trace = (list(read_jsonl(tmp_path, name)) for name in ("records", "trace"))
    assert [step.version for step in steps] == list(range(8))
    assert [record["version"] for record in records] == [0, 3, 6, 7]
    assert [step.record for step in steps if step.record] == records
    assert [line["version"] for line in trace] == list(range(1, 8))
    for before, record in itertools.pairwise(records):
        lines = [line for line in trace if before["version"] < line["version"] <= record["version"]]
        ages = [line["version"] - 1 - started for line in lines for _, started, *_ in line["tasks"]]
        assert record["staleness_mean"] == pytest.approx(sum(ages) / len(ages))
        assert record["staleness_max"] == max(ages)
        assert record["time"] == lines[-1]["time"]
        for name in ("lost", "dropped"):
            assert record[name] - before[name] == sum(len(line[name]) for line in lines)
    assert records[-1]["lost"] > 0
    assert records[-1]["dropped"] > 0


def test_what_is_evaluated_is_the_average_where_one_is_asked_for(trial):
    averaged = dataclasses.replace(SMALL, ema_decay=0.9, eval_every=1)
    x = None
    shots = train(
        trial.algorithm,
        trial.engine,
        dispatch=trial.dispatch,
        buffer=3,
        rounds=7,
        weights=trial.weights,
        max_staleness=trial.max_staleness,
        seed=SMALL.seed,
    )
    for shot, step in zip(shots, run_experiment(averaged, trial), strict=True):
        x = shot.x if x is None else ema(x, shot.x, 0.9)
        scores = evaluate(trial.problem, x, trial.test, {"accuracy": accuracy})
        assert {name: step.record[name] for name in scores} == scores


@pytest.mark.parametrize("cut", range(7))
def test_a_run_stopped_after_any_step_goes_on_with_the_same_records(trial, tmp_path, cut):
    experiment = dataclasses.replace(SMALL, ema_decay=0.9)
    with RunFolder.begin(tmp_path / "whole", {}) as folder:
        list(run_experiment(experiment, trial, folder))
    asked = itertools.chain([False] * cut, itertools.repeat(True))
    with RunFolder.begin(tmp_path / "cut", {}) as folder:
        assert len(list(run_experiment(experiment, trial, folder, stop=lambda: next(asked)))) == cut + 1
        assert folder.version == cut
    with RunFolder.resume(tmp_path / "cut", {}) as folder:
        list(run_experiment(experiment, trial, folder))
    assert (tmp_path / "cut" / "trace.jsonl").read_bytes() == (
        tmp_path / "whole" / "trace.jsonl"
    ).read_bytes()
    one, other = (
        [line | {"elapsed": 0} for line in read_jsonl(tmp_path / p, "records")] for p in ("cut", "whole")
    )
    assert one == other
    elapsed = [line["elapsed"] for line in read_jsonl(tmp_path / "cut", "records")]
    assert elapsed == sorted(elapsed)


class Saves:
    """A folder that only remembers which versions were saved."""

    resumed = None
    path = Path("nowhere")

    def __init__(self):
        self.versions = []
        self.notes = {}

    def note(self, **facts):
        self.notes.update(json.loads(json.dumps(facts)))

    def append(self, name, line):
        json.dumps(line)

    def flush(self):
        pass

    def save(self, state: Checkpoint) -> None:
        self.versions.append(state.facts["version"])


@pytest.mark.parametrize(("every", "versions"), [(None, [0, 7]), (1, list(range(8))), (3, [0, 3, 6, 7])])
def test_checkpoints_are_taken_first_last_and_as_often_as_asked(trial, every, versions):
    folder = Saves()
    list(run_experiment(SMALL, trial, folder, save_every=every))
    assert folder.versions == versions
    assert folder.notes["engine_reason"] == trial.engine_reason


def test_checkpoints_by_time_take_a_small_share_of_it(trial, monkeypatch):
    clock = itertools.count(step=2.0)  # every look at it takes two seconds
    monkeypatch.setattr(runner.time, "monotonic", lambda: next(clock))
    folder = Saves()
    list(run_experiment(dataclasses.replace(SMALL, rounds=60, eval_every=60), trial, folder))
    gaps = [b - a for a, b in itertools.pairwise(folder.versions[:-1])]
    assert gaps
    assert min(gaps) > 5


def test_the_start_with_everybody_is_told_of(monkeypatch):
    monkeypatch.setattr("offbeat.training.loop._MIN_PIECE", 3)
    experiment = dataclasses.replace(SMALL, algorithm="adamasfl", weights="constant")
    seen = []
    next(run_experiment(experiment, build_run(experiment), observe_start=lambda *told: seen.append(told)))
    assert seen
    assert {clients for _, clients in seen} == {12}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize(
    ("buffer", "after", "words"),
    [
        (1, 0, r"infinite before the first server step: check the model and the data\.$"),
        (1, 1, r"at server step 3 \(its updates came from client \d+\): lower the rates\.$"),
        (3, 1, r"at server step 3 \(its updates came from clients \d+, \d+(, \d+)?\): lower the rates\.$"),
    ],
)
def test_a_loss_that_is_no_number_is_said_to_come_from_its_clients(monkeypatch, buffer, after, words):
    def broken(*given, **more):
        return evaluate(*given, **more) | ({"loss": math.nan} if next(calls) >= after else {})

    calls = itertools.count()
    monkeypatch.setattr("offbeat.training.task.evaluate", broken)
    experiment = dataclasses.replace(SMALL, buffer=buffer)
    with pytest.raises(DivergedError, match=words):
        list(run_experiment(experiment, build_run(experiment)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_records_before(
    trial, tmp_path, monkeypatch, bad
):
    def broken(*words, **more):
        scores = evaluate(*words, **more)
        return scores if next(calls) < 2 else scores | {"loss": bad}

    calls = itertools.count()
    monkeypatch.setattr("offbeat.training.task.evaluate", broken)
    with RunFolder.begin(tmp_path, {}) as folder:
        with pytest.raises(DivergedError, match=r"the loss .* at server step 6 .*clients \d+, \d+") as caught:
            list(run_experiment(SMALL, trial, folder, save_every=1))
        assert folder.version == 5
    last = list(read_jsonl(tmp_path, "trace"))[-1]
    clients = sorted({task[0] for task in last["tasks"]})
    assert f"clients {', '.join(map(str, clients))})" in str(caught.value)
    assert [record["version"] for record in read_jsonl(tmp_path, "records")] == [0, 3]


def test_a_folder_keeps_why_training_diverged_until_it_goes_on(trial, tmp_path):
    high = dataclasses.replace(SMALL, parameters=(("local_lr", 1e30),))
    with RunFolder.begin(tmp_path, high.settings()) as folder:
        with pytest.raises(DivergedError) as caught:
            list(run_experiment(high, build_run(high), folder))
        assert json.loads((tmp_path / FAILURE_FILE).read_text()) == {"diverged": str(caught.value)}
    RunFolder.resume(tmp_path, high.settings()).close()
    assert not (tmp_path / FAILURE_FILE).exists()
    assert [path.name for path in tmp_path.glob(".*")] == []


@pytest.mark.parametrize(("rounds", "every"), [(4000, 33), (4000, 200), (4000, 1), (40, 7), (5, 1), (30, 30)])
def test_epsilon_is_told_about_twenty_times_whatever_is_recorded(rounds, every):
    experiment = dataclasses.replace(SMALL, rounds=rounds, eval_every=every)
    due = range(0, rounds, every)
    told = [version for version in due if runner._epsilon_due(version, experiment)]
    assert told[0] == 0
    assert len(told) <= 21
    apart = max(every, rounds // 20 + every)
    assert all(later - earlier <= apart for earlier, later in itertools.pairwise([*told, due[-1]]))


def test_the_model_is_the_same_whether_or_not_it_is_written(trial, tmp_path):
    with RunFolder.begin(tmp_path, {}) as folder:
        written = [step.record for step in run_experiment(SMALL, trial, folder) if step.record]
    kept = [step.record for step in run_experiment(SMALL, trial) if step.record]
    assert [record | {"elapsed": 0} for record in written] == [record | {"elapsed": 0} for record in kept]


@pytest.mark.parametrize("first", [1, 3, 5])
def test_a_run_that_goes_past_its_end_has_the_records_of_a_longer_one(trial, tmp_path, first):
    whole = dataclasses.replace(SMALL, ema_decay=0.9)
    with RunFolder.begin(tmp_path / "whole", {}) as folder:
        list(run_experiment(whole, trial, folder))
    with RunFolder.begin(tmp_path / "cut", {}) as folder:
        list(run_experiment(dataclasses.replace(whole, rounds=first), trial, folder))
    assert [line["version"] for line in read_jsonl(tmp_path / "cut", "records")][-1] == first
    with RunFolder.resume(tmp_path / "cut", {}) as folder:
        next(run_experiment(whole, trial, folder))  # killed after a step that was not saved
    with RunFolder.resume(tmp_path / "cut", {}) as folder:
        list(run_experiment(whole, trial, folder))
    one, other = (
        [line | {"elapsed": 0} for line in read_jsonl(tmp_path / p, "records")] for p in ("cut", "whole")
    )
    assert one == other
    traces = [(tmp_path / p / "trace.jsonl").read_bytes() for p in ("cut", "whole")]
    assert traces[0] == traces[1]
