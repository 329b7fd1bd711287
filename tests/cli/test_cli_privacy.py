"""`offbeat privacy`: what it answers, what it says it rests on, and what it refuses."""

import json
import shlex

import pytest
import torch

from offbeat.cli import main
from offbeat.privacy.accountant import PldAccountant, RdpAccountant, Releases, calibrate
from offbeat.privacy.correlated import BandedNoise, TreeNoise
from offbeat.training import checkpoint
from offbeat.training.checkpoint import Checkpoint
from offbeat.training.folder import read_jsonl

SAMPLED = "--delta 1e-7 --population 1e7 --cohort 5000 --rounds 2000"
RUN = "run fedbuff --clients 12 --buffer 3 --concurrency 5 --local-steps 1 --rounds 6 --out there"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def ask(capsys):
    def ask(words: str) -> dict[str, object]:
        assert main(shlex.split(f"privacy {words} --json")) == 0
        value = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert isinstance(value, dict)
        return value

    return ask


def test_noise_for_sampled_clients_is_that_of_the_accountant_rounded_up(ask):
    answer = ask(f"--epsilon 2 --accountant rdp {SAMPLED}")
    assert answer["noise"] == pytest.approx(0.723, rel=0.01)
    assert answer["noise"] >= calibrate(2, 1e-7, 2000, 5e-4, RdpAccountant())
    assert answer["epsilon"] == RdpAccountant().epsilon([Releases(answer["noise"], 2000, 5e-4)], 1e-7) <= 2
    assert answer["epsilons"]["pld"] == PldAccountant().epsilon([Releases(answer["noise"], 2000, 5e-4)], 1e-7)
    assert answer["rate"] == 5e-4
    assert "amplified by Poisson sampling" in answer["assumption"]
    assert answer["assumption"].endswith(
        "releases whatever was drawn at each step, as runs with --dispatch timed-poisson do, and a run with "
        "a buffer of fixed size does not"
    )
    assert "differ by one client" in answer["neighbours"]


def test_epsilon_of_a_noise_is_by_either_accountant(ask):
    answer = ask(f"--noise 0.7 {SAMPLED}")
    assert answer["accountant"] == "pld"
    assert answer["epsilon"] == answer["epsilons"]["pld"] < answer["epsilons"]["rdp"]


def test_without_sampling_it_rests_on_the_number_of_contributions(ask):
    answer = ask("--epsilon 2 --delta 1e-7 --max-participations 5")
    assert answer["noise"] == pytest.approx(calibrate(2, 1e-7, 5), rel=1e-3)
    assert answer["epsilon"] <= 2
    assert answer["rate"] is None
    assert answer["assumption"].startswith("no amplification: each client contributes at most 5 times")
    # one client cannot contribute to more server steps than there are
    assert ask("--epsilon 2 --delta 1e-7 --max-participations 5 --rounds 3")["noise"] < answer["noise"]
    assert (
        ask("--epsilon 2 --delta 1e-7 --max-participations 5 --rounds 100 --min-separation 50")["noise"]
        < answer["noise"]
    )


@pytest.mark.parametrize(
    ("words", "shape", "apart"), [("tree", TreeNoise(), 1), ("banded:8", BandedNoise(8), 8)]
)
def test_correlated_noise_is_scaled_by_its_sensitivity(ask, words, shape, apart):
    answer = ask(f"--epsilon 2 --delta 1e-7 --max-participations 5 --rounds 500 --noise-correlation {words}")
    sensitivity = shape.sensitivity(500, 5, apart)
    assert answer["noise"] == pytest.approx(calibrate(2, 1e-7, 1) * sensitivity, rel=1e-3)
    assert (
        answer["epsilon"] == PldAccountant().epsilon([Releases(answer["noise"] / sensitivity, 1)], 1e-7) <= 2
    )
    assert f"correlated over 500 server steps ({words})" in answer["assumption"]
    back = ask(
        f"--noise {answer['noise']} --delta 1e-7 --max-participations 5 --rounds 500 "
        f"--noise-correlation {words}"
    )
    assert back["epsilon"] == answer["epsilon"]


def test_a_person_is_told_the_same(capsys):
    assert main(shlex.split("privacy --noise 5 --delta 1e-7 --max-participations 3")) == 0
    said = " ".join(capsys.readouterr().out.split())
    epsilon = PldAccountant().epsilon([Releases(5.0, 3)], 1e-7)
    assert f"epsilon {epsilon:.4g} at delta 1e-07 with noise of 5 times the sensitivity" in said
    for part in ("accountant pld", "no amplification", "neighbours runs that differ", "epsilon by rdp"):
        assert part in said


def test_an_accountant_that_cannot_tell_is_left_out_beside_one_that_can(ask):
    answer = ask("--noise 1 --delta 1e-12 --population 1e7 --cohort 5000 --rounds 20 --accountant rdp")
    assert answer["epsilon"] > 0
    assert answer["epsilons"]["pld"] is None


REFUSED = {
    f"--epsilon 0 {SAMPLED}": "epsilon is 0",
    f"--epsilon -1 {SAMPLED}": "epsilon is -1",
    f"--epsilon nan {SAMPLED}": "epsilon is nan",
    f"--epsilon inf {SAMPLED}": "epsilon is inf",
    f"--epsilon two {SAMPLED}": "'two' is not a number",
    f"--epsilon 2 --noise 1 {SAMPLED}": "give either --epsilon",
    SAMPLED: "give either --epsilon",
    f"--noise 0 {SAMPLED}": "--noise is 0",
    f"--noise nan {SAMPLED}": "--noise is nan",
    "--epsilon 2 --max-participations 5": "give --delta",
    "--epsilon 2 --max-participations 5 --delta 0": "delta is 0",
    "--epsilon 2 --max-participations 5 --delta 1": "delta is 1",
    "--epsilon 2 --delta 1e-7 --cohort 5 --rounds 9": "give --population too",
    "--epsilon 2 --delta 1e-7 --population 9 --rounds 9": "give --cohort too",
    "--epsilon 2 --delta 1e-7 --population 9 --cohort 9": "give --rounds too",
    "--epsilon 2 --delta 1e-7 --population 100 --cohort 101 --rounds 9": "a cohort of 101 cannot come",
    "--epsilon 2 --delta 1e-7 --population 100 --cohort 0 --rounds 9": "--cohort is 0",
    "--epsilon 2 --delta 1e-7 --population 0 --cohort 1 --rounds 9": "--population is 0",
    "--epsilon 2 --delta 1e-7 --population 100 --cohort 10 --rounds 0": "--rounds is 0",
    "--epsilon 2 --delta 1e-7 --population 1.5 --cohort 1 --rounds 9": "'1.5' is not a whole number",
    "--epsilon 2 --delta 1e-7 --population nan --cohort 1 --rounds 9": "'nan' is not a whole number",
    "--epsilon 2 --delta 1e-7 --population 1e99 --cohort 1 --rounds 9": "'1e99' is too large",
    "--epsilon 2 --delta 1e-7 --population 10 --cohort 5 --rounds 9 --max-participations "
    "4": "more than 4 contributions",
    "--epsilon 2 --delta 1e-12 --population 100 --cohort 10 --rounds 9": "use rdp",
    "--epsilon 2 --delta 1e-7 --max-participations 0": "--max-participations is 0",
    "--epsilon 2 --delta 1e-7 --max-participations 2 --min-separation 0": "--min-separation is 0",
    "--epsilon 2 --delta 1e-7 --max-participations 2 --noise-correlation tree": "give --rounds",
    "--epsilon 2 --delta 1e-7 --max-participations 2 --rounds 9 --noise-correlation "
    "trees": "did you mean tree?",
    "--epsilon 2 --delta 1e-7 --max-participations 2 --rounds 9 --noise-correlation "
    "banded": "such as banded:8",
    "--epsilon 2 --delta 1e-7 --max-participations 2 --accountant pdl": "did you mean pld?",
    f"--epsilon 2 {SAMPLED} --noise-correlation tree": "give --max-participations",
    f"--epsilon 2 {SAMPLED} --min-separation 3": "give --max-participations",
    "--epsilon 2 --delta 1e-7 --max-participations 1e9 --rounds 1e9 --noise-correlation banded:2 "
    "--min-separation 1": "takes too long",
    "nowhere": "nowhere contains no run with a checkpoint",
    "nowhere --epsilon 2": "--epsilon does not apply to a run",
    "--epsilons 2": "unknown option '--epsilons': did you mean --epsilon",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_question_that_makes_no_sense_is_refused_in_one_sentence(words, capsys, here):
    assert main(shlex.split(f"privacy {words}")) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("offbeat: ")
    assert len(err.splitlines()) == 1
    assert REFUSED[words] in err
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        "--max-participations 4",
        "--simulate-amplification --dispatch poisson --weights constant --accountant rdp",
        "--max-participations 4 --noise-correlation banded:2",
    ],
)
def test_the_ledger_of_a_run_tells_epsilon_so_far(words, ask, capsys, here):
    assert main(shlex.split(f"{RUN} --clip 1 --noise 3 --delta 1e-5 {words} --json")) == 0
    *_, record = read_jsonl(here / "there", "records")
    capsys.readouterr()
    answer = ask("there")
    name = "simulated_epsilon" if "--simulate" in words else "epsilon"
    assert answer["epsilon"] == pytest.approx(record[name], rel=1e-12)
    assert answer["epsilon"] > 0
    assert answer["delta"] == 1e-5
    assert answer["releases"] == 6
    assert answer["assumption"].startswith("SIMULATION: this is not") == ("--simulate" in words)
    looser = ask("there --delta 1e-4 --accountant rdp")
    assert looser["accountant"] == "rdp"
    assert looser["epsilons"]["pld"] < answer["epsilons"]["pld"]


def test_bands_beyond_the_steps_and_steps_beyond_the_contributions_cost_nothing(ask):
    few = ask(
        "--epsilon 2 --delta 1e-7 --max-participations 3 --rounds 10 --noise-correlation banded:10 "
        "--min-separation 1"
    )
    many = ask(
        "--epsilon 2 --delta 1e-7 --max-participations 3 --rounds 10 --noise-correlation "
        "banded:1000000000 --min-separation 1"
    )
    assert few["noise"] == many["noise"]
    long = ask("--epsilon 2 --delta 1e-7 --max-participations 3 --rounds 1e15 --noise-correlation banded:4")
    assert (
        long["noise"]
        == ask("--epsilon 2 --delta 1e-7 --max-participations 3 --rounds 100 --noise-correlation banded:4")[
            "noise"
        ]
    )


def test_what_a_killed_run_recorded_after_its_checkpoint_is_said_not_to_be_counted(ask, capsys, here):
    assert main(shlex.split(f"{RUN} --clip 1 --noise 3 --delta 1e-5 --max-participations 4 --json")) == 0
    assert ask("there")["uncounted"] is None
    assert ask("there")["version"] == 6
    with (here / "there" / "records.jsonl").open("a") as file:
        file.write('{"version": 9}\n{"version": 1')
    assert ask("there")["uncounted"].startswith("server steps 7 to 9, made after the last checkpoint")
    assert main(["privacy", "there"]) == 0
    assert "uncounted" in capsys.readouterr().out


@pytest.mark.parametrize(
    "facts",
    [{}, {"version": 1}, {"version": 1, "aggregate": {"spent": {}}}, {"version": 1, "aggregate": None}],
)
def test_a_checkpoint_that_does_not_tell_is_refused(facts, capsys, here):
    checkpoint.save(here / "state.safetensors", Checkpoint(facts, {"x": torch.zeros(1)}))
    (here / "there" / "checkpoint").mkdir(parents=True)
    (here / "state.safetensors").rename(here / "there" / "checkpoint" / "state.safetensors")
    assert main(["privacy", "there"]) == 2
    assert "does not record what was released" in capsys.readouterr().err


def test_a_run_that_hides_nothing_has_no_epsilon(capsys):
    assert main(shlex.split(RUN)) == 0
    capsys.readouterr()
    assert main(["privacy", "there"]) == 2
    assert "the run in there is not private" in capsys.readouterr().err
