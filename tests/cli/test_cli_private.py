"""Privacy as a user of `offbeat run` meets it."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offbeat.cli import main
from offbeat.nn import models
from offbeat.training import build, checkpoint
from offbeat.training.experiment import Experiment
from offbeat.training.folder import RunFolder, read_jsonl
from offbeat.training.runner import run_experiment
from offbeat.training.settings_file import read

SMALL = shlex.split("--clients 30 --buffer 5 --concurrency 8 --local-steps 1 --batch-size 4")
COUNTED = shlex.split("--clip 0.5 --delta 1e-5 --max-participations 5")
LAST = "checkpoint/state.safetensors"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has a folder of its own to run in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *words: str, method: str = "fedbuff") -> dict[str, Any]:
    """A run's own summary."""
    assert main(["run", method, *SMALL, *words, "--json"]) == 0
    summary: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return summary


def records(out: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if key != "elapsed"} for line in read_jsonl(out, "records")
    ]


ALONE = {
    name: f"{name.split()[0]} needs --clip, the most that a client may add to a sum"
    for name in (
        "--noise 1",
        "--epsilon 2",
        "--delta 1e-5",
        "--max-participations 3",
        "--min-separation 2",
        "--simulate-amplification",
        "--noise-correlation tree",
        "--accountant rdp",
        "--adaptive-clip 0.5",
        "--nominal-cohort 50",
        "--noise-seed 1",
    )
}
COUPLE = "--clip 1 --noise 1 --delta 1e-5"
WHOLE = f"{COUPLE} --max-participations 5"
REFUSED = ALONE | {
    "--clip 1": "privacy needs noise: give --noise, or --epsilon",
    "--clip 1 --noise 1": "privacy needs --delta",
    COUPLE: "give --max-participations, or --dispatch allocation and --release-period for releases by a "
    "clock, or --dispatch poisson and --simulate-amplification for a figure that is not a",
    f"{COUPLE} --simulate-amplification": "is for clients that are drawn by --dispatch poisson",
    f"{COUPLE} --amplified": "amplification by sampling does not hold for a buffer of fixed size, where",
    f"{COUPLE} --dispatch poisson --amplified": "takes the place of one that is absent: bound how often",
    "--amplified": "with --max-participations, or give --simulate-amplification for a figure that "
    "is not a guarantee.",
    "--clip 0 --noise 1 --delta 1e-5 --max-participations 5": "--clip must be above 0, not 0.",
    "--clip nan --noise 1 --delta 1e-5 --max-participations 5": "--clip must be above 0, not nan.",
    "--clip delta=-1 --noise 1 --delta 1e-5 --max-participations 5": "--clip must be above 0, not delta=-1.",
    "--clip tight --noise 1 --delta 1e-5 --max-participations "
    "5": "--clip takes BOUND or FIELD=BOUND, not 'tight'.",
    "--clip inf --noise 1 --delta 1e-5 --max-participations 5": "infinite, so no noise hides it",
    f"{WHOLE} --clip delta=2": "--clip takes one BOUND for all, or FIELD=BOUND for each field",
    "--clip delta=1 --clip delta=2 --noise 1 --delta 1e-5 --max-participations 5": "--clip gives delta twice",
    "--clip dleta=1 --noise 1 --delta 1e-5 --max-participations "
    "5": "unknown upload field 'dleta': did you mean delta?",
    "--clip 1 --noise -1 --delta 1e-5 --max-participations "
    "5": "--noise must be at least 0 and finite, not -1.0.",
    "--clip 1 --noise nan --delta 1e-5 --max-participations "
    "5": "--noise must be at least 0 and finite, not nan.",
    "--clip 1 --epsilon 0 --delta 1e-5 --max-participations "
    "5": "--epsilon must be above 0 and finite, not 0.0.",
    "--clip 1 --epsilon inf --delta 1e-5 --max-participations "
    "5": "--epsilon must be above 0 and finite, not inf.",
    "--clip 1 --noise 0 --epsilon 2 --delta 1e-5 --max-participations 5": "a privacy budget but no noise",
    "--clip 1 --noise 0.1 --epsilon 2 --delta 1e-5 --max-participations "
    "5": "not one server step fits a budget",
    "--clip 1 --noise 1 --delta 0 --max-participations 5": "--delta must be above 0 and below 1, not 0.0.",
    "--clip 1 --noise 1 --delta 1 --max-participations 5": "--delta must be above 0 and below 1, not 1.0.",
    f"{COUPLE} --max-participations 0": "--max-participations must be at least 1",
    f"{WHOLE} --min-separation 0": "--min-separation must be at least 1",
    f"{WHOLE} --min-separation 7": "contributions 7 server steps apart take 35 clients with a buffer of 5",
    f"{WHOLE} --dispatch phases": "cannot be bounded under phases or queues",
    f"{WHOLE} --dispatch queues": "cannot be bounded under phases or queues",
    f"{WHOLE} --noise-correlation trees": "unknown shape of noise 'trees': did you mean tree?",
    f"{WHOLE} --noise-correlation tree:3": "tree noise takes no number",
    f"{WHOLE} --noise-correlation banded": "write banded noise as banded:B",
    f"{WHOLE} --noise-correlation banded:x": "write banded noise as banded:B",
    f"{WHOLE} --noise-correlation banded:0": "banded noise cannot have 0 bands",
    f"{WHOLE} --noise-correlation tree --adaptive-clip 0.5": "correlated noise needs fixed bounds",
    f"{COUPLE} --noise-correlation tree --simulate-amplification --dispatch "
    "poisson": "not amplified by sampling",
    f"{COUPLE} --weights polynomial:0.5 --simulate-amplification --dispatch poisson": "staleness weights",
    f"{WHOLE} --accountant plt": "unknown accountant 'plt': did you mean pld",
    f"{WHOLE} --adaptive-clip 1": "--adaptive-clip must be above 0 and below 1, not 1.0.",
    f"{WHOLE} --nominal-cohort 3": "the nominal cohort of 3 is below the buffer of 5",
    f"{WHOLE} --noise-seed -1": "--noise-seed must be at least 0",
    "--secure --buffer 3": "secure aggregation needs 5 distinct clients, and a buffer of 3",
}


@pytest.mark.parametrize("line", REFUSED)
def test_options_that_cannot_be_kept_are_refused_in_one_sentence_before_the_data_is_loaded(
    line: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_late(*words: object) -> None:
        raise AssertionError("the data was loaded first")

    monkeypatch.setattr("offbeat.training.task.load", too_late)
    assert main(["run", "fedbuff", *SMALL, "--out", "out", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("offbeat: ")
    assert err.count("\n") == 1
    assert err.rstrip().endswith((".", "?"))
    assert REFUSED[line] in err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("method", "words", "said"),
    [
        ("scaffold", WHOLE, "delta and shift: give bounds by field."),
        ("adamasfl", f"{COUPLE} --max-participations 1", "the start with all clients is a contribution"),
        (
            "adamasfl",
            "--noise 1 --delta 1e-5 --max-participations 5",
            "--noise needs --clip, the most that a client may",
        ),
        ("cadence", WHOLE, "itself (descent by 1, shift by 2): leave clip out, or give bounds by field."),
        ("cadence", "--max-participations 5 --delta 1e-5", "privacy needs noise: give --noise, or --epsilon"),
        ("cadence", "--noise 1 --max-participations 5", "privacy needs --delta"),
        (
            "cadence",
            "--noise 1 --delta 1e-5",
            "give --max-participations, or --dispatch allocation and --release-period for releases by a "
            "clock, or --dispatch poisson and --simulate-",
        ),
    ],
)
def test_what_a_method_does_not_allow_is_refused_in_one_sentence(
    method: str, words: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", method, *SMALL, "--out", "out", *words.split()]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("words", [WHOLE.split(), ["--secure", "--weights", "constant"]])
def test_a_model_with_running_statistics_is_refused(
    words: list[str], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    normed = nn.Sequential(nn.Linear(64, 10), nn.BatchNorm1d(10))
    monkeypatch.setattr(models, "build", lambda *setting: normed)
    assert main(["run", "fedbuff", *SMALL, *words, "--out", "out"]) == 2
    assert "keeps running statistics" in capsys.readouterr().err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        "--max-participations 3",
        "--max-participations 3 --accountant rdp",
        "--max-participations 3 --noise-correlation tree",
        "--max-participations 3 --noise-correlation banded:3",
        "--max-participations 3 --adaptive-clip 0.5",
        "--dispatch poisson --simulate-amplification --weights constant --eval-every 12",
    ],
)
def test_noise_is_computed_from_epsilon_so_that_the_run_just_fits(
    words: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = shlex.split(f"--clip 0.5 --epsilon 8 --delta 1e-5 --rounds 12 --out out {words}")
    assert main(["run", "fedbuff", *SMALL, *asked, "--json"]) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out.splitlines()[-1])
    said = ", as a simulation and not a privacy guarantee." if "--simulate" in words else "."
    assert f"multiplier {summary['settings']['noise']} keeps 12 server steps below epsilon 8{said}\n" in err
    assert summary["finished"]
    assert summary["ended"] is None
    assert summary["settings"]["noise"] == read(here / "out")["noise"] > 0.1
    assert summary["privacy"]["delta"] == 1e-5
    assert 7.0 < summary["privacy"]["epsilon"] <= 8
    name, other = ("epsilon", "simulated_epsilon")[:: -1 if "--simulate" in words else 1]
    assert summary["privacy"]["epsilon"] == summary["last"][name]
    assert other not in summary["last"]
    made = [record[name] for record in records(here / "out")]
    assert made[0] == 0
    assert made == sorted(made)
    assert read(here / "out")["epsilon"] == 8


def test_the_start_of_everyone_is_within_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    asked = shlex.split(
        "--clip shift=1 --epsilon 8 --delta 1e-5 --max-participations 3 --rounds 8 --eval-every 8"
    )
    for more in ([], shlex.split("--dispatch poisson --simulate-amplification")):
        summary = run(capsys, *asked, *more, method="adamasfl")
        assert summary["finished"]
        assert 7.0 < summary["privacy"]["epsilon"] <= 8
        assert summary["privacy"]["releases"] == 9


def test_a_budget_that_is_spent_ends_the_run_which_says_so_and_is_whole(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*COUNTED, *shlex.split("--noise 1.1 --epsilon 8 --rounds 40 --out out")]
    assert main(["run", "fedbuff", *SMALL, *asked]) == 0
    out, err = capsys.readouterr()
    assert "offbeat: the privacy budget is spent: too few clients" in err
    assert "is saved in out." in err
    assert "private: (epsilon, delta) = (" in out
    assert "no client contributes more than 3 times" in out
    assert "accountant pld" in out
    last = records(here / "out")[-1]
    assert 0 < last["version"] < 40
    assert last["version"] == checkpoint.load(here / "out" / LAST).facts["version"]
    assert 0 < last["epsilon"] <= 8

    monkeypatch.setattr("offbeat.api.build_run", lambda *words, **more: pytest.fail("it went on"))
    before = {path: path.read_bytes() for path in (here / "out").rglob("*") if path.is_file()}
    assert main(["run", "--out", "out", "--resume", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "offbeat: the privacy budget is spent: too few clients" in err
    again = json.loads(out.splitlines()[-1])
    assert not again["finished"]
    assert again["ended"].startswith("the privacy budget is spent: too few clients")
    assert again["resume"] is None
    assert again["error"] is None
    assert again["privacy"]["epsilon"] == last["epsilon"]
    assert before == {path: path.read_bytes() for path in (here / "out").rglob("*") if path.is_file()}


def test_a_larger_budget_is_no_way_round_one_that_is_spent(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, *COUNTED, *shlex.split("--noise 1.1 --epsilon 8 --rounds 40 --out out"))
    assert main(shlex.split("run --out out --resume --epsilon 80")) == 2
    assert "--epsilon was 8.0 and is now 80.0" in capsys.readouterr().err


def test_a_run_ends_when_no_client_may_contribute_any_more(
    here: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    summary = run(capsys, *COUNTED, *shlex.split("--noise 1 --max-participations 2 --rounds 40 --out out"))
    assert "30 clients that contribute 2 times at most last for 12 of the 40 server steps" in caplog.text
    assert "too few clients may still contribute" in summary["ended"]
    counts: dict[int, int] = {}
    for line in read_jsonl(here / "out", "trace"):
        for client, *_ in line["tasks"]:
            counts[client] = counts.get(client, 0) + 1
    assert max(counts.values()) == 2
    assert sum(counts.values()) == 5 * summary["version"] > 50


def test_a_run_that_was_cut_goes_on_with_the_same_noise_and_the_same_count(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = shlex.split("--noise 1 --noise-seed 3 --adaptive-clip 0.5 --rounds 9 --eval-every 1")
    run(capsys, *COUNTED, *asked, "--out", "whole")
    experiment = Experiment.from_settings(read(here / "whole"))
    versions = iter([False] * 4 + [True])
    with RunFolder.begin(here / "cut", experiment.settings()) as folder:
        list(run_experiment(experiment, build.build_run(experiment), folder, stop=lambda: next(versions)))
    assert len(records(here / "cut")) == 5
    assert main(shlex.split("run --out cut --resume")) == 0
    assert records(here / "cut") == records(here / "whole")
    final = [checkpoint.load(here / name / LAST) for name in ("cut", "whole")]
    assert torch.equal(*[each.tensors["state.0"] for each in final])
    assert "SIMULATION: noise and sample follow from a seed" in capsys.readouterr().out


def test_the_key_of_the_noise_is_in_the_checkpoint_alone(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = run(capsys, *COUNTED, *shlex.split("--noise 1 --rounds 4 --out out"))
    key = checkpoint.load(here / "out" / LAST).facts["aggregate"]["key"]
    assert len(bytes.fromhex(key)) == 32
    assert key not in json.dumps(summary)
    for name in ("settings.json", "records.jsonl", "trace.jsonl"):
        assert key not in (here / "out" / name).read_text()


def test_the_noise_is_another_in_each_run_unless_it_has_a_seed(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, words in {"a": "", "b": "", "c": "--noise-seed 1", "d": "--noise-seed 1"}.items():
        run(capsys, *COUNTED, *shlex.split(f"--noise 1 --rounds 3 --out {name} {words}"))
    losses = {name: records(here / name)[-1]["loss"] for name in "abcd"}
    assert losses["a"] != losses["b"]
    assert losses["c"] == losses["d"]


def test_without_a_bound_and_noise_it_is_the_plain_run_and_nothing_is_claimed(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, *shlex.split("--rounds 6 --out plain"))
    open_words = shlex.split(
        "--clip inf --noise 0 --delta 1e-5 --max-participations 50 --rounds 6 --out open"
    )
    summary = run(capsys, *open_words)
    plain, unhidden = records(here / "plain"), records(here / "open")
    assert [record["loss"] for record in unhidden] == pytest.approx([r["loss"] for r in plain], rel=1e-6)
    assert [record["epsilon"] for record in unhidden[1:]] == [None] * 6
    assert all("epsilon" not in record for record in plain)
    assert summary["privacy"]["epsilon"] is None
    assert "nothing is private" in summary["privacy"]["terms"]


def test_epsilon_is_computed_some_twenty_times_however_often_the_model_is_evaluated(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        capsys,
        *shlex.split(
            "--clip 1 --noise 1 --delta 1e-5 --max-participations 50 --rounds 60 --eval-every 1 --out out"
        ),
    )
    made = [record["epsilon"] for record in records(here / "out")]
    assert [version for version, value in enumerate(made) if value is not None] == list(range(0, 61, 3))


def test_secure_sums_change_a_run_by_rounding_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noisy = [*COUNTED, *shlex.split("--noise 0.5 --noise-seed 2 --weights constant")]
    for name, words in {"plain": ["--weights", "constant"], "noisy": noisy}.items():
        for secure in ([], ["--secure"]):
            out = name + "".join(secure)
            run(capsys, *words, *secure, "--rounds", "5", "--out", out)
        open_, hidden = records(here / name), records(here / f"{name}--secure")
        assert [r["loss"] for r in hidden] == pytest.approx([r["loss"] for r in open_], abs=0.01)
        assert [r["loss"] for r in hidden] != [r["loss"] for r in open_]


@pytest.mark.parametrize("source", ["helper", "both"])
def test_the_helper_adds_the_noise_and_the_terms_say_against_whom(
    here: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    words = [*COUNTED, *shlex.split("--noise 0.5 --noise-seed 2 --rounds 4 --weights constant --secure")]
    summary = run(capsys, *words, "--noise-source", source, "--out", "out")
    assert summary["finished"]
    expected = {"helper": "not against the helper", "both": "where the other keeps its noise secret"}[source]
    assert expected in summary["privacy"]["terms"]
    assert "accountant rdp" in summary["privacy"]["terms"]
    assert summary["settings"]["accountant"] == "rdp"
    run(capsys, *words, "--out", "server")
    losses = [[record["loss"] for record in records(here / name)] for name in ("out", "server")]
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("--noise-source helper", "--noise-source helper needs secure aggregation"),
        ("--noise-source helper --secure --accountant pld", "use the rdp accountant"),
        ("--noise-source nobody --secure", "unknown source of noise 'nobody'"),
        ("--noise-source both --secure --noise-correlation tree", "use independent noise"),
    ],
)
def test_noise_from_a_helper_that_cannot_be_is_one_sentence(
    here: Path, capsys: pytest.CaptureFixture[str], more: str, sentence: str
) -> None:
    words = [*COUNTED, *shlex.split(f"--noise 0.5 --rounds 4 --weights constant --out out {more}")]
    assert main(["run", "fedbuff", *SMALL, *words]) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert err.count("\n") == 1
    assert not (here / "out").exists()


def test_noise_secure_sums_and_momentum_approximation_go_together(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*COUNTED, *shlex.split("--noise 0.5 --noise-seed 2 --rounds 6")]
    for name, more in {"open": [], "secure": ["--secure"]}.items():
        summary = run(capsys, *words, *more, "--out", name, method="ma-fedavgm")
        assert summary["finished"]
        assert summary["privacy"]["epsilon"] > 0
    open_, hidden = (records(here / name) for name in ("open", "secure"))
    assert [r["loss"] for r in hidden] == pytest.approx([r["loss"] for r in open_], abs=0.05)


def test_a_comparison_says_what_each_method_spent_and_which_ended(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split("--epsilon 8 --rounds 40 --out out")
    assert main(["compare", "fedbuff", "fedavgm", *SMALL, *COUNTED, *words]) == 0
    out = capsys.readouterr().out
    for name in ("fedbuff", "fedavgm"):
        assert f"{name} ended early: the privacy budget is spent: too few clients may still contribute" in out
        assert f"{name}: (epsilon, delta) = (" in out
        assert read(here / "out" / name)["noise"] > 1


def test_a_private_run_that_lost_its_checkpoint_does_not_go_on(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, *COUNTED, *shlex.split("--noise 1 --rounds 6 --out out"))
    shutil.rmtree(here / "out" / "checkpoint")
    assert main(shlex.split("run --out out --resume")) == 2
    assert "is missing, which counts what this private run has released" in capsys.readouterr().err


UNBOUNDED = shlex.split(
    "--noise 0.5 --delta 1e-5 --max-participations 5 --noise-seed 4 --rounds 8 --eval-every 2"
)


@pytest.mark.parametrize(
    ("asked", "in_full", "clip"),
    [
        ("", "--set variates=false --set noisy=true", "descent=1"),
        ("--set variates=true", "--set variates=true --set noisy=true", "descent=1,shift=2"),
        ("--secure", "--secure --set variates=false --set noisy=true", "descent=1"),
    ],
)
def test_a_method_that_bounds_its_uploads_needs_no_clip_and_says_what_holds(
    asked: str, in_full: str, clip: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = run(capsys, *UNBOUNDED, *shlex.split(f"{asked} --out own"), method="cadence")
    told = run(capsys, *UNBOUNDED, *shlex.split(f"{in_full} --clip {clip} --out told"), method="cadence")
    assert own["settings"]["clip"] == read(here / "own")["clip"] == clip
    assert read(here / "own")["parameters"] == read(here / "told")["parameters"] != {}
    assert own["privacy"] == told["privacy"]
    assert own["privacy"]["epsilon"] > 0
    assert records(here / "own") == records(here / "told")
    assert main(shlex.split("run --out own --resume")) == 0
    assert f"multiplier of 0.5, and uploads are clipped to {clip}." in capsys.readouterr().out


def test_noise_for_an_epsilon_is_the_same_without_a_clip(capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split("--epsilon 8 --delta 1e-5 --max-participations 3 --rounds 4")
    found = [
        run(capsys, *words, *shlex.split(clip), method=method)["settings"]["noise"]
        for method, clip in (("cadence", ""), ("cadence", "--clip shift=0.1"), ("fedbuff", "--clip 1"))
    ]
    assert found[0] == found[1] == found[2] > 0  # a multiplier, in units of whatever the bounds are


def test_a_private_run_without_a_clip_is_cut_resumed_and_replayed(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, *UNBOUNDED, "--out", "whole", method="cadence")
    experiment = Experiment.from_settings(read(here / "whole"))
    versions = iter([False] * 3 + [True])
    with RunFolder.begin(here / "cut", experiment.settings()) as folder:
        list(run_experiment(experiment, build.build_run(experiment), folder, stop=lambda: next(versions)))
    assert main(shlex.split("run --out cut --resume --noise 0.5")) == 0
    assert records(here / "cut") == records(here / "whole")
    assert main(shlex.split("replay cut --compare")) == 0
    assert main(shlex.split("privacy cut")) == 0


def test_a_bound_for_what_others_leave_open_is_left_out_for_a_method_that_has_its_own(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split("--clip 0.5 --noise 1 --delta 1e-5 --max-participations 5 --rounds 3 --out out")
    assert main(["compare", "cadence", "fedbuff", *SMALL, *words]) == 0
    assert read(here / "out" / "cadence")["clip"] == "descent=1"
    assert read(here / "out" / "cadence")["parameters"] == {"variates": False, "noisy": True}
    assert read(here / "out" / "fedbuff")["clip"] == "0.5"


def test_bounds_that_a_method_sets_can_move(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    run(
        capsys,
        *UNBOUNDED,
        *shlex.split("--adaptive-clip 0.5 --set variates=true --out out"),
        method="cadence",
    )
    bounds = checkpoint.load(here / "out" / LAST).facts["aggregate"]["bounds"]
    assert bounds["descent"] != 1
    assert bounds["shift"] != 2
    assert main(shlex.split("run --out out --resume")) == 0
    assert "uploads are clipped to descent=1,shift=2 at first." in capsys.readouterr().out


TIMED = "--dispatch allocation --release-period 2 --clients 40 --buffer 4 --rounds 12 --local-steps 1"
PRIVATE = "--clip 0.5 --noise 1 --delta 1e-5"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--dispatch allocation", "give the seconds between two releases as --release-period"),
        ("--dispatch timed-poisson", "give the seconds between two releases as --release-period"),
        (f"{TIMED} --buffer 41", "the nominal cohort of 41 is not between 1 and the 40 clients"),
        (f"{TIMED} --release-period 0", "--release-period must be above 0"),
        (f"{TIMED} --lead 0", "--lead must be at least 1"),
        ("--release-period 3", "--release-period is for releases by a clock"),
        (f"{TIMED} {PRIVATE} --max-participations 3", "leave --max-participations out"),
        (f"{TIMED} {PRIVATE} --noise-correlation tree", "correlated noise is not amplified"),
        (
            f"{TIMED} {PRIVATE} --buffer 8 --weights constant --secure",
            "is reached reveals who was drawn",
        ),
        (f"{TIMED} {PRIVATE} --accountant rdp", "rdp accountant does not count random allocation"),
    ],
)
def test_timed_releases_that_cannot_be_are_refused_in_one_sentence(
    words: str, sentence: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["run", "fedbuff", *words.split(), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert sentence in " ".join(said.split())
    assert "Traceback" not in said


def test_timed_releases_print_two_epsilons(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    assert main(["run", "fedbuff", *TIMED.split(), *PRIVATE.split(), "--out", out, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["privacy"]
    assert 0 < told["epsilon"] < told["unamplified"]
    assert main(["privacy", out]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "SIMULATION" not in shown
    assert f"epsilon where connections are seen {told['unamplified']:.4g}" in shown
    assert main(["run", "--out", out, "--resume"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"({told['epsilon']:.4g}, 1e-05) against those who see the models" in shown
    assert f"({told['unamplified']:.4g}, 1e-05) against those who also see which clients connect" in shown


def test_the_calculator_knows_random_allocation(capsys: pytest.CaptureFixture[str]) -> None:
    words = "privacy --noise 1.5 --delta 1e-5 --population 1000 --cohort 100 --rounds 20 --json"
    assert main([*words.split(), "--dispatch", "allocation"]) == 0
    allocated = json.loads(capsys.readouterr().out)
    assert main(words.split()) == 0
    poisson = json.loads(capsys.readouterr().out)
    assert (allocated["slots"], allocated["rate"], poisson["rate"]) == (10, None, 0.1)
    assert 0.7 * poisson["epsilon"] < allocated["epsilon"] < poisson["epsilon"]
    assert main([*words.split(), "--dispatch", "asynchronous"]) == 2
    assert "unknown dispatch by a clock" in capsys.readouterr().err
