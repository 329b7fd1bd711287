"""Amplification by sampling does not hold for a buffer of fixed size: what simulates it always says so."""

import html
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments.reproduce.records import present_key
from experiments.reproduce.study import Cell
from scipy.stats import norm

from offbeat.cli import main
from offbeat.errors import InputError
from offbeat.privacy.accountant import PldAccountant, Releases, calibrate
from offbeat.privacy.ledger import correct_statement
from offbeat.report.build import make_report
from offbeat.training import checkpoint
from offbeat.training.checkpoint import Checkpoint
from offbeat.training.experiment import Experiment
from offbeat.training.settings_file import read
from report_world import SMALL, change_settings, lines, make_unfinished_run, write_lines

NONE = "SIMULATION: this is not a privacy guarantee"
CLAIM: dict[str, Any] = {"clip": "0.5", "noise": 1.0, "delta": 1e-5, "dispatch": "poisson"}
SIMULATED: dict[str, Any] = CLAIM | {"simulate_amplification": True, "weights": "constant"}
WORDS = shlex.split(
    "--clients 12 --buffer 3 --concurrency 5 --local-steps 1 --rounds 6 --eval-every 2 --weights constant "
    "--clip 0.5 --noise 1 --delta 1e-5 --dispatch poisson --simulate-amplification"
)
STATE = Path("checkpoint") / "state.safetensors"

RATE, STEPS, DELTA = 0.05, 100, 1e-5


def least_epsilon(noise: float, one: tuple[float, float], other: tuple[float, float]) -> float:
    """Of STEPS releases from one mixture or from the other; losses are rounded down, so it is never more.

    A mixture is Gaussian around its first mean, or with probability RATE around its second.
    """
    cell = 1e-3
    edges = np.linspace(-40 * noise, 40 * noise, 400_001)

    def masses(means: tuple[float, float]) -> Any:
        usual, rare = (np.diff(norm.cdf(edges, mean, noise)) for mean in means)
        return (1 - RATE) * usual + RATE * rare

    first, second = masses(one), masses(other)
    there = (first > 1e-300) & (second > 1e-300)
    cells = np.floor(np.log(first[there] / second[there]) / cell).astype(np.int64)
    lowest = int(cells.min())
    single = np.bincount(cells - lowest, weights=first[there])
    size = 1 << (len(single) * STEPS - 1).bit_length()
    together = np.maximum(np.fft.irfft(np.fft.rfft(single, size) ** STEPS, size), 0)
    losses = (np.arange(size) + lowest * STEPS) * cell

    def delta(epsilon: float) -> float:
        above = losses > epsilon
        return float(-(together[above] * np.expm1(epsilon - losses[above])).sum())

    low, high = 0.0, 50.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if delta(middle) > DELTA else (low, middle)
    return low


def test_a_buffer_of_fixed_size_tells_more_than_poisson_sampling_would() -> None:
    # All other clients upload -1 and the target 1. When the target is absent, another client is in its
    # place, so that the sum moves by 2, or, where the target sends zeros instead, from 1 to 0.
    noise = calibrate(2.0, DELTA, STEPS, RATE)
    claimed = PldAccountant().epsilon([Releases(noise, STEPS, RATE)], DELTA)
    assert claimed == pytest.approx(2.0, rel=0.01)
    assert 1.9 < least_epsilon(noise, (0.0, 1.0), (0.0, 0.0)) <= claimed  # what was claimed
    assert least_epsilon(noise, (-1.0, 1.0), (-1.0, 0.0)) > 5.7  # zeros in its place
    assert least_epsilon(noise, (-1.0, 1.0), (-1.0, -1.0)) > 8.6  # added or removed


def test_amplification_is_refused_in_one_sentence_that_says_why_and_what_to_do() -> None:
    with pytest.raises(InputError) as error:
        Experiment.of(algorithm="fedbuff", **CLAIM, amplified=True)
    assert str(error.value) == (
        "amplification by sampling does not hold for a buffer of fixed size, where another client takes the "
        "place of one that is absent: bound how often a client contributes with max_participations, or give "
        "simulate_amplification for a figure that is not a guarantee."
    )


def ongoing(folder: Path, after: int) -> Path:
    """A simulation of which there is a checkpoint of that version."""
    return make_unfinished_run(folder, after, **SIMULATED, noise_seed=1)


def of_before(folder: Path) -> Path:
    """The same folder as it was written when a buffer of fixed size was taken to amplify."""
    settings = json.loads((folder / "settings.json").read_text())
    settings["amplified"] = settings.pop("simulate_amplification")
    settings.pop("checksum", None)  # earlier versions wrote none
    (folder / "settings.json").write_text(json.dumps(settings))
    records = lines(folder, "records")
    records = [{name.removeprefix("simulated_"): record[name] for name in record} for record in records]
    write_lines(folder, "records", records)
    facts, tensors = checkpoint.load(folder / STATE)
    old = (
        "amplified by Poisson sampling at rate 0.416667, taking a buffer of fixed size to amplify as much, "
        "which is assumed and not proved, and the sample to be secret, and so the run's checkpoint, trace "
        "and records, which tell of it; accountant pld."
    )
    facts["aggregate"]["spent"]["terms"] = old
    named = facts["settings"]["aggregate"].replace("simulate_amplification=", "amplified=")
    facts["settings"]["aggregate"] = named
    if facts["running"]["outcome"][1] is not None:
        facts["running"]["outcome"][1][3] = old
    del facts["checksums"]  # as above
    facts["lengths"]["records"] = (folder / "records.jsonl").stat().st_size
    checkpoint.save(folder / STATE, Checkpoint(facts, tensors))
    return folder


def plain(text: str) -> str:
    return " ".join(text.split())


def test_a_run_says_so_wherever_it_prints_its_epsilon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "fedbuff", *WORDS, "--out", str(tmp_path / "a")]) == 0
    said = plain(capsys.readouterr().out)
    assert "simulated epsilon" in said
    assert "simulated: (epsilon, delta) = (" in said
    assert f"1e-05); {NONE}, since amplification by sampling does not hold" in said
    assert "private: " not in said
    assert all("epsilon" not in record for record in lines(tmp_path / "a", "records"))
    assert lines(tmp_path / "a", "records")[-1]["simulated_epsilon"] > 0
    assert main(["privacy", str(tmp_path / "a")]) == 0
    said = plain(capsys.readouterr().out)
    assert said.startswith("SIMULATION, not a privacy guarantee: epsilon ")
    assert f"assumption {NONE}" in said
    assert main(["compare", "fedbuff", "fedavg", *WORDS, "--out", str(tmp_path / "b")]) == 0
    said = plain(capsys.readouterr().out)
    assert said.count(NONE) == said.count("(epsilon, delta)") == 2
    assert main(["run", "fedbuff", *WORDS, "--out", str(tmp_path / "c"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["privacy"]["terms"].startswith(NONE)
    assert "epsilon" not in summary["last"]


def test_a_tracker_is_told_of_a_simulated_epsilon(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, logs = tmp_path / "run", tmp_path / "logs"
    assert main(["run", "fedbuff", *WORDS, "--out", str(out), "--tensorboard", str(logs)]) == 0
    events = EventAccumulator(str(logs / "run"))
    events.Reload()
    assert "simulated_epsilon" in events.Tags()["scalars"]
    assert "epsilon" not in events.Tags()["scalars"]


@pytest.mark.slow
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("after", [5, 8])
def test_a_report_says_so_wherever_it_shows_epsilon(tmp_path: Path, old: bool, after: int) -> None:
    folder = ongoing(tmp_path / "a", after)
    if old:
        of_before(folder)
    made = make_report([folder], tmp_path / "page.html")
    page = html.unescape(made.page.read_text())
    assert page.count("SIMULATION, not a privacy guarantee: (epsilon, delta) = (") == 1
    assert page.count("(epsilon, delta) = (") == 1
    assert f"{NONE}, since amplification by sampling does not hold for a buffer of fixed size" in page
    assert "assumed and not proved" not in page
    assert "SIMULATION, not a privacy guarantee: a." in page
    assert "Privacy spent (simulation, not a guarantee)" in page
    assert page.count("(simulation, not a guarantee)") > 2  # in the summary, too
    table = (made.folder / "privacy.csv").read_text()
    assert table.startswith('run,server steps,"epsilon (simulation, not a guarantee)"')
    assert '"a (simulation, not a guarantee)",2,' in table
    assert "epsilon (simulation, not a guarantee)" in (made.folder / "privacy.svg").read_text()


def test_the_ledger_of_a_run_of_before_is_told_as_a_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = of_before(ongoing(tmp_path / "a", 8))
    for terms in (None, "words that are not known;"):
        if terms is not None:  # then the rate in the ledger tells
            facts, tensors = checkpoint.load(folder / STATE)
            facts["aggregate"]["spent"]["terms"] = terms
            checkpoint.save(folder / STATE, Checkpoint(facts, tensors))
        capsys.readouterr()
        assert main(["privacy", str(folder), "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["assumption"].startswith(f"{NONE}, since amplification by sampling does not hold")
        assert "assumed and not proved" not in answer["assumption"]
        assert main(["privacy", str(folder)]) == 0
        assert capsys.readouterr().out.startswith("SIMULATION, not a privacy guarantee: epsilon ")


@pytest.mark.parametrize("after", [4, 8])
def test_a_run_of_before_is_resumed_as_a_simulation(
    tmp_path: Path, after: int, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = ongoing(tmp_path / "whole", 8)
    folder = of_before(ongoing(tmp_path / "a", after))
    assert read(folder)["simulate_amplification"] is True
    assert main(["run", "--out", str(folder), "--resume"]) == 0
    said = plain(capsys.readouterr().out)
    assert f"{NONE}, since" in said
    assert "assumed and not proved" not in said
    assert "simulated epsilon" in said
    assert "private: " not in said
    last, expected = lines(folder, "records")[-1], lines(whole, "records")[-1]
    assert last["accuracy"] == expected["accuracy"]
    assert last.get("simulated_epsilon", last.get("epsilon")) == expected["simulated_epsilon"]


def test_terms_and_settings_that_claim_nothing_stay_as_they_are(tmp_path: Path) -> None:
    said = "no amplification: no client contributes more than 5 times, and when it did is public."
    assert correct_statement(said, [Releases(1.0, 5)]) == said
    folder = ongoing(tmp_path / "a", 1)
    settings = json.loads((folder / "settings.json").read_text())
    del settings["simulate_amplification"]
    settings.pop("checksum", None)  # earlier versions wrote none
    (folder / "settings.json").write_text(json.dumps(settings))
    change_settings(folder, amplified=False)
    assert read(folder)["simulate_amplification"] is False
    assert "amplified" not in read(folder)
    own = Experiment.of(**{"algorithm": "fedbuff"} | SMALL | SIMULATED).settings()
    own["amplified"] = own.pop("simulate_amplification")
    assert Experiment.from_settings(own).simulate_amplification


def test_records_of_studies_are_found_whatever_names_they_were_written_with() -> None:
    key = Cell("", "", Experiment.of(algorithm="fedbuff")).key
    former = key.replace('"simulate_amplification"', '"amplified"').replace('"max_staleness"', '"limit"')
    assert former != key
    assert present_key(former) == key
