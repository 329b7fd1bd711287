import contextlib
import gzip
import json
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from offbeat.cli import main
from offbeat.training import progress, task
from offbeat.training.experiment import Experiment
from offbeat.training.folder import RunFolder
from offbeat.training.runner import Progress, run_experiment

SMALL = shlex.split("--clients 12 --buffer 3 --concurrency 5 --local-steps 1 --batch-size 4 --rounds 6")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Each test has a folder of its own to run in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def last_line(text: str) -> dict[str, object]:
    value = json.loads(text.splitlines()[-1])
    assert isinstance(value, dict)
    return value


def idx(values: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return head + values.astype(np.uint8).tobytes()


def write_mnist(folder: Path) -> None:
    folder.mkdir()
    for kind in ("train", "t10k"):
        (folder / f"{kind}-images-idx3-ubyte").write_bytes(idx(np.zeros((30, 28, 28))))
        (folder / f"{kind}-labels-idx1-ubyte").write_bytes(idx(np.arange(30) % 10))


# What is said of each; none of them needs the data to be found out.
EARLY = {
    "run adamas": "unknown algorithm 'adamas': did you mean adamasfl",
    "run --data digit": "unknown data set 'digit': did you mean digits?",
    "run --dispatch async": "unknown dispatch 'async': did you mean asynchronous",
    "run --hand-out never": "unknown hand-out 'never'",
    "run --delays tier:mild": "unknown delay 'tier': did you mean tiers?",
    "run --delays tiers:milt": "unknown kind of tiers 'milt': did you mean mild?",
    "run --delays exponential": "write it as exponential:MEAN",
    "run --delays exponential:x": "'x' in the delay 'exponential:x' is not a number",
    "run --delays constant:nan": "a constant delay is nan",
    "run --delays recorded:missing.csv": "missing.csv: No such file",
    "run --delays recorded:words.csv": "line 2",
    "run --partition dirichlett:1": "unknown partition 'dirichlett': did you mean dirichlet?",
    "run --partition dirichlet:x": "has a value that is not a number",
    "run --weights hing": "unknown staleness weights 'hing': did you mean hinge?",
    "run --availability cycle:0:1": "the period of a cycle is 0.0",
    "run --model ml": "unknown model 'ml': did you mean mlp?",
    "run --engine vector": "unknown engine 'vector': did you mean vectorised?",
    "run --device gpu": "unknown device 'gpu': choose cpu or cuda.",
    "run --device cuda:99": "the device 'cuda:99' is not available: use --device cpu.",
    "run --roundz 3": "unknown option '--roundz': did you mean --rounds",
    "run --roun 3": "unknown option '--roun': did you mean --rounds",
    "run --rounds": "--rounds: expected one argument; see 'offbeat run --help'.",
    "run --out=": "--out: it is empty: name a folder, or leave it out",
    "compare fedbuff fedavg --out=": "--out: it is empty",
    "serve plan.toml --out=": "--out: it is empty",
    "keys --out=": "--out: it is empty",
    "run --rounds ten": "--rounds: 'ten' is not a whole number",
    "run --rounds 1.5": "--rounds: '1.5' is not a whole number",
    "run --rounds 1e99": "--rounds: '1e99' is too large",
    "run --lr 0.1": "'--lr' is not an option but a parameter of methods: write --set local_lr=VALUE",
    "run --server-lr=1": "'--server-lr' is not an option but a parameter of methods",
    "run --num-clients 3": "unknown option '--num-clients': did you mean --clients?",
    "run --batch 3": "unknown option '--batch': did you mean --batch-size?",
    "run fedbuff --set lr=1": "unknown parameter of fedbuff 'lr': did you mean local_lr or server_lr?",
    "list": "unknown command 'list': did you mean algorithms?",
    "train": "unknown command 'train': did you mean run?",
    "run --dropout much": "--dropout: 'much' is not a number",
    "run fedavg fedadam": "unexpected argument 'fedadam'",
    "run --set beta": "--set takes NAME=VALUE, not 'beta'.",
    "run adamasfl --set betta=1": "unknown parameter of adamasfl 'betta': did you mean beta?",
    "run adamasfl --set beta=x": "the parameter beta of adamasfl must be a finite number, not 'x'.",
    "run adamasfl --set beta=nan": "the parameter beta of adamasfl must be a finite number, not 'nan'.",
    "run fedavgm --set averaged=maybe": (
        "the parameter averaged of fedavgm must be true or false, not 'maybe'."
    ),
    "run --set beta=0.1": "unknown parameter of cadence 'beta'",
    "run adamasfl --set beta=0.1 --set beta=0.2": "--set gives beta twice",
    "run --set fedavg.local_lr=0.1": "unknown method in --set 'fedavg'",
    "run --buffer 30": "the buffer of 30 exceeds the concurrency of 20: make it at most 20.",
    "run --concurrency 101": "the concurrency of 101 exceeds the 100 clients",
    "run --rounds -1": "--rounds must be at least 1",
    "run --clients 0": "--clients must be at least 1",
    "run --clients 99999999999": "--clients must be at least 1 and below 2^31",
    "run --batch-size 0": "--batch-size must be at least 1",
    "run --local-epochs 0": "--local-epochs must be at least 1",
    "run --local-steps 2 --local-epochs 2": "exclude each other: give one of them.",
    "run --eval-every 0": "--eval-every must be at least 1",
    "run --dropout 1.5": "--dropout must be at least 0 and below 1, not 1.5.",
    "run --dropout nan": "--dropout must be at least 0 and below 1, not nan.",
    "run --seed -1": "--seed must be at least 0",
    "run --ema-decay 2": "--ema-decay must be above 0 and below 1, not 2.0.",
    "run fedbuff --set local_lr=1e300": "the local_lr of FedOpt must lie in [0, 1e+38], not be 1e+300.",
    "run fedbuff --local-lr-schedule warmup:3,warmup:3": "only the first must be a warm-up",
    "run fedbuff --local-lr-schedule math:pi": "is a float, not a function: name a function.",
    "run --availability by-examples": "'by-examples' is not an availability: write it as",
    "run --aggregate trimmed-mean": "'trimmed-mean' is not an aggregation: write it as",
    "run --ema-decay nan": "--ema-decay must be above 0 and below 1, not nan.",
    "run --max-staleness -1": "--max-staleness must be at least 0, not -1.",
    "run --weight-decay inf": "--weight-decay must be at least 0 and finite, not inf.",
    "run --save-every 0": "--save-every must be at least 1, not 0.",
    "run --data-dir nowhere": "digits ships with scikit-learn and needs no --data-dir: leave it out.",
    "run --resume": "--resume needs --out",
    "run --resume --out nowhere": "nowhere contains no run to resume: leave out --resume",
    "run --out words.csv": "words.csv is a file: name a folder with --out.",
    "run --out words.csv/deeper": "words.csv is a file: name a folder with --out.",
    "run --out taken": "taken already contains a run: name another --out, or resume it with",
    "run --out foreign": "foreign contains a 'records.jsonl' but no settings of a run",
    "run --out damaged --resume": "settings.json is damaged",
    "run --out hollow --resume": "the settings of this run are damaged (clients is [])",
    "run --out taken --resume --rounds 5": "other settings (--rounds was 6 and is now 5): give these",
    "run fedbuff --out taken --resume --set local_lr=0.5": (
        "(the method was fedavg and is now fedbuff; --set local_lr was not set and is now 0.5)"
    ),
    "compare fedavg": "compare takes two or more different methods",
    "compare fedavg fedavg": "compare takes two or more different methods",
    "compare fedavg nosuch": "unknown algorithm 'nosuch'",
    "compare fedavg fedadam --target nan": "--target must be above 0 and at most 1, not nan.",
    "compare fedavg fedadam --set beta1=0.5": "fedavg has no parameter beta1: write METHOD.beta1=VALUE",
    "compare fedavg fedadam --set adamasfl.beta=1": "unknown method in --set 'adamasfl'",
    "compare fedavg fedadam --out taken": "taken already contains a run",
    "schedule --concurrency 300": "the concurrency of 300 exceeds the 100 clients",
    "schedule --dropout 1.5": "--dropout must be",
    "schedule --data digits": "unknown option '--data'",
    "algorithms fedav": "unknown algorithm 'fedav': did you mean fedavg",
    "rum": "unknown command 'rum': did you mean run?",
    "--verson": "unknown command '--verson'",
    "": "name a command, one of run, compare, tune, schedule, advise, algorithms, ",
}

# These need the data.
LATE = {
    "run --precision tf32": "a CPU does not round products to tf32: use --device cuda",
    "run --engine sequential --execution mapped": "the engine 'sequential' has no --execution: leave it out",
    "run --execution streamed": "streams of graphs need a GPU: use --device cuda",
    "run --execution fastest": "unknown execution 'fastest'",
    "run --precision half": "unknown precision 'half'",
    "run --clients 2000": "1437 examples are too few for 2000 clients: use fewer clients.",
    "run --clients 300 --partition dirichlet:0.01:0": "has no examples: use fewer clients",
    "run --partition natural": "the partition natural needs the natural client id",
    "run --model cnn": "the model 'cnn' cannot take inputs of shape (64,)",
    "run --data mnist --data-dir nowhere": "is not in",
    "run --data mnist --data-dir truncated": "train-images-idx3-ubyte",
    "run --data mnist --data-dir corrupt": "train-images-idx3-ubyte.gz is truncated or corrupt",
    "run --data mnist --data-dir unlike": "30 images",
}


@pytest.fixture
def places(here):
    """Folders and files that some of the bad input is about."""
    (here / "words.csv").write_text("1.0\nsoon\n")
    settings = Experiment.of(algorithm="fedavg", rounds=6, clients=12).settings()
    with RunFolder.begin(here / "taken", settings):
        pass
    for name, text in {"damaged": "{", "hollow": '{"clients": []}'}.items():
        (here / name).mkdir()
        (here / name / "settings.json").write_text(text)
    (here / "foreign").mkdir()
    (here / "foreign" / "records.jsonl").write_text("precious\n")
    for name in ("truncated", "corrupt", "unlike"):
        write_mnist(here / name)
    images = here / "truncated" / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-100])
    images = here / "corrupt" / "train-images-idx3-ubyte"
    images.rename(images.with_suffix(".raw"))
    images.with_suffix(".gz").write_bytes(gzip.compress(b"something")[:-9])
    (here / "unlike" / "train-labels-idx1-ubyte").write_bytes(idx(np.arange(20) % 10))
    return here


def refused(line: str, sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = found(folder)
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("offbeat: ")
    assert err.count("\n") == 1
    assert err.rstrip().endswith((".", "?"))
    assert sentence in err
    assert found(folder) == before


@pytest.mark.parametrize("line", EARLY)
def test_bad_input_is_refused_in_one_sentence_before_the_data_is_loaded(line, places, monkeypatch, capsys):
    def too_late(*words):
        raise AssertionError("the data was loaded first")

    monkeypatch.setattr(task, "load", too_late)
    refused(line, EARLY[line], places, capsys)


@pytest.mark.parametrize("line", LATE)
def test_what_the_data_does_not_allow_is_refused_in_one_sentence(line, places, capsys):
    refused(line, LATE[line], places, capsys)


def test_a_folder_in_use_by_a_live_run_is_refused(here, capsys):
    experiment = Experiment.of(clients=12)
    with RunFolder.begin(here / "busy", experiment.settings()):
        refused("run --out busy", "busy is in use by another run: wait for it", here, capsys)
        refused("run --out busy --resume", "busy is in use by another run: wait for it", here, capsys)


def test_a_folder_that_cannot_be_written_is_refused(here, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    refused("run --out new", "cannot be written to: name another --out.", here, capsys)

    def denied(*words, **more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.undo()
    monkeypatch.chdir(here)
    monkeypatch.setattr(Path, "mkdir", denied)
    refused("run --out new", "new cannot be written to (Permission denied)", here, capsys)
    refused("run", "cannot be made (Permission denied): name a folder with --out.", here, capsys)


def test_a_checkpoint_that_is_damaged_is_refused(here, capsys):
    assert main(["run", *SMALL, "--out", "a"]) == 0
    state = here / "a" / "checkpoint" / "state.safetensors"
    previous = state.with_name("previous.safetensors")
    good = previous.read_bytes()
    for generation in (state, previous):
        generation.write_bytes(generation.read_bytes()[:-3])
    capsys.readouterr()
    refused("run --out a --resume", "safetensors cannot be read", here, capsys)
    previous.write_bytes(good)
    assert main(["run", "--out", "a", "--resume"]) == 0


def test_a_disk_that_fails_in_the_middle_is_said_in_one_sentence(here, monkeypatch, capsys):
    def full(file):
        raise OSError(28, "No space left on device", "records.jsonl")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["run", *SMALL]) == 1
    assert "records.jsonl could not be read or written (the disk is full)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "run --json",
        "compare fedavg fedbuff --json",
        "schedule --rounds 5 --json",
        "algorithms --json",
        "algorithms fedavg --json",
    ],
)
def test_the_last_line_with_json_is_one_object(line, capsys):
    command, *rest = line.split()
    small = SMALL if command in ("run", "compare") else []
    assert main([command, *rest, *small]) == 0
    value = last_line(capsys.readouterr().out)
    assert "error" not in value or value["error"] is None


@pytest.mark.parametrize(
    "line", ["run adamas --json", "run --json --rounds x", "schedule --json --max-staleness -1", "rum --json"]
)
def test_with_json_an_error_is_an_object_too(line, capsys):
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert err == f"offbeat: {last_line(out)['error']}\n"


def test_a_run_without_out_takes_the_next_free_folder(here, capsys):
    for _ in range(2):
        assert main(["run", *SMALL]) == 0
    assert {path.name for path in (here / "runs").iterdir()} == {"cadence-digits-1", "cadence-digits-2"}
    out = capsys.readouterr().out
    assert out.rstrip().endswith("written to runs/cadence-digits-2")
    assert "accuracy" in out
    run = here / "runs" / "cadence-digits-1"
    assert {"settings.json", "records.jsonl", "trace.jsonl", "checkpoint"} <= {
        path.name for path in run.iterdir()
    }
    settings = json.loads((run / "settings.json").read_text())
    assert {"version", "commit", "seed", "resolved"} <= settings.keys()
    assert settings["model"] == "mlp"
    assert set(settings["resolved"]["hyperparameters"]) == {"variates", "noisy"}


def test_options_may_stand_before_and_between_names(capsys):
    assert main(["run", *SMALL, "fedavg", "--json"]) == 0
    assert last_line(capsys.readouterr().out)["algorithm"] == "fedavg"
    assert main(["compare", "fedavg", *SMALL, "fedbuff", "--json"]) == 0
    assert list(last_line(capsys.readouterr().out)["methods"]) == ["fedavg", "fedbuff"]


def test_a_finished_run_is_not_run_again_but_shown(here, monkeypatch, capsys):
    assert main(["run", *SMALL, "--out", "a"]) == 0
    table = capsys.readouterr().out
    before = {path: path.read_bytes() for path in (here / "a").rglob("*") if path.is_file()}
    monkeypatch.setattr(task, "load", None)  # the data is not needed
    assert main(["run", "--out", "a", "--resume", "--rounds", "6"]) == 0
    out, err = capsys.readouterr()
    assert out == table
    assert err == "offbeat: the run in a had finished already.\n"
    assert {path: path.read_bytes() for path in (here / "a").rglob("*") if path.is_file()} == before


def test_paths_are_kept_whole_so_that_a_run_resumes_from_anywhere(here, monkeypatch):
    (here / "delays.csv").write_text("1.0\n2.5\n")
    write_mnist(here / "data")
    words = "--data mnist --data-dir data --model logistic --partition iid --delays recorded:delays.csv"
    assert main(["run", *SMALL, *words.split(), "--out", "a"]) == 0
    settings = json.loads((here / "a" / "settings.json").read_text())
    assert settings["delays"] == f"recorded:{here / 'delays.csv'}"
    assert settings["data_dir"] == str(here / "data")
    (here / "a" / "checkpoint" / "state.safetensors").unlink()
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert main(["run", "--out", "../a", "--resume"]) == 0


# Each local step multiplies the model by about a hundred thousand.
GROWING = [*SMALL, "--local-steps", "2", "--weight-decay", "1e6"]
DIVERGING = ["run", "fedavg", *GROWING, "--save-every", "1"]


def test_a_run_that_diverges_stops_says_where_and_keeps_what_was_good(here, capsys):
    assert main([*DIVERGING, "--out", "a"]) == 1
    out, err = capsys.readouterr()
    assert "became NaN or infinite" in err
    step = int(re.search(r"at server step (\d+)", err)[1])
    assert step > 1
    last = json.loads((here / "a" / "trace.jsonl").read_text().splitlines()[-1])
    assert last["version"] == step
    clients = re.search(r"from clients ([\d, ]+)", err)[1]
    assert set(map(int, clients.split(","))) == {task[0] for task in last["tasks"]}
    assert err.rstrip().endswith(f"version {step - 1} is saved in a.")
    assert "accuracy" in out
    versions = [
        json.loads(line)["version"] for line in (here / "a" / "records.jsonl").read_text().splitlines()
    ]
    assert versions == list(range(step))
    assert main(["run", "--out", "a", "--resume"]) == 1  # it is as bound to diverge
    assert capsys.readouterr().err == err


def test_a_run_that_diverges_says_so_in_json(capsys):
    assert main([*DIVERGING, "--json"]) == 1
    out, err = capsys.readouterr()
    told = last_line(out)
    assert err == f"offbeat: {told['error']}\n"
    assert not told["finished"]
    assert told["last"]["version"] == told["version"]


def test_a_comparison_goes_on_when_one_method_diverges(capsys):
    assert main(["compare", "fedavg", "fedbuff", *GROWING, "--set", "fedbuff.local_lr=0", "--json"]) == 0
    methods = last_line(capsys.readouterr().out)["methods"]
    assert "NaN or infinite" in methods["fedavg"]["failure"]
    assert methods["fedbuff"]["failure"] is None
    assert main(["compare", "fedavg", "fedbuff", *GROWING]) == 1
    assert re.search("fedavg did not finish: .* NaN or infinite", capsys.readouterr().out)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_once_saves_the_step_and_twice_stops_at_once(times, monkeypatch, capsys):
    def pressing(*words, **more):
        for step in run_experiment(*words, **more):
            yield step
            if step.version == 2:
                for _ in range(times):
                    os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("offbeat.api.run_experiment", pressing)
        assert main(["run", *SMALL, "--out", "a"]) == 130
    saved = 3 if times == 1 else 0  # the checkpoint of the beginning
    command = "offbeat run --out a --resume"
    assert capsys.readouterr().err == f"offbeat: stopped; version {saved} is saved; resume with:\n{command}\n"
    assert main(command.split()[1:]) == 0
    assert main(["run", *SMALL, "--out", "b"]) == 0
    assert Path("a/trace.jsonl").read_bytes() == Path("b/trace.jsonl").read_bytes()


@pytest.mark.usefixtures("interruptible")
def test_a_comparison_that_is_stopped_shows_what_it_has(monkeypatch, capsys):
    def pressing(*words, **more):
        for step in run_experiment(*words, **more):
            yield step
            if step.version == 2:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("offbeat.api.run_experiment", pressing)
    assert main(["compare", "fedavg", "fedbuff", *SMALL, "--json"]) == 130
    out, err = capsys.readouterr()
    assert err == "offbeat: stopped; the runs so far are in runs/compare-1.\n"
    told = last_line(out)
    assert told["methods"]["fedavg"]["failure"] == "it was stopped at version 3."
    assert "fedbuff" not in told["methods"]


def versions_shown(text: str) -> list[int]:
    return [int(line.split()[0]) for line in text.splitlines() if line[:1].isdigit()]


@pytest.mark.parametrize(
    ("rounds", "versions"),
    [
        (6, [0, 1, 2, 3, 4, 5, 6]),
        (20, list(range(0, 21, 2))),
        (26, [*range(0, 26, 3), 26]),  # no few equal gaps make it up
    ],
)
def test_the_table_at_the_end_has_rows_at_equal_gaps(rounds, versions, capsys):
    assert main(["run", "fedavg", *SMALL, "--rounds", str(rounds), "--eval-every", "1"]) == 0
    assert versions_shown(capsys.readouterr().out) == versions


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ([], []),
        (["--dropout", "0.4"], ["lost"]),
        (["--dropout", "0.4", "--max-staleness", "0"], ["dropped", "lost"]),
    ],
)
def test_tasks_that_came_to_nothing_are_in_the_table_where_there_are_any(more, shown, capsys):
    assert main(["run", "fedbuff", *SMALL, *more]) == 0
    _, header, *rest = capsys.readouterr().out.splitlines()
    assert re.split("  +", header.strip())[6:] == ["at most", *shown]
    last = json.loads(Path("runs/fedbuff-digits-1/records.jsonl").read_text().splitlines()[-1])
    final = next(line for line in rest if line.startswith(str(last["version"])))
    assert all(last[name] > 0 for name in shown)
    assert final.split()[7:] == [str(last[name]) for name in shown]


def test_the_bar_is_told_of_the_start_and_of_every_step(monkeypatch):
    starts, steps = [], []

    @contextlib.contextmanager
    def bar(*words, shown):
        yield progress.ProgressBar(steps.append, lambda *told: starts.append(told))

    monkeypatch.setattr("offbeat.api.bar", bar)
    monkeypatch.setattr("offbeat.training.loop._MIN_PIECE", 3)
    assert main(["run", "adamasfl", *SMALL]) == 0
    assert {clients for _, clients in starts} == {12}
    assert [step.version for step in steps] == list(range(7))
    assert main(["compare", "adamasfl", "fedavg", *SMALL]) == 0
    assert [step.version for step in steps[7:]] == [*range(7), *range(7)]


def test_the_bar_says_how_far_the_start_and_the_run_are(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with progress.bar("fedavg", 5) as bar:
        bar.start(3, 12)
    assert "starting: 3 of 12 clients" in capsys.readouterr().err
    with progress.bar("fedavg", 5) as bar:
        bar.step(Progress(1, 2.5, 10, 0.5, {"accuracy": 0.75}))
        bar.step(Progress(2, 4.5, 20, 1.5, None))
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert re.search(r"2/5 time 4\.5  staleness 1\.5  accuracy 0\.750 left [-\d]+:", plain)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run fedavg --concurrency 5", "with synchronous dispatch"),
        ("run fedbuff --dispatch synchronous --concurrency 5", "with synchronous dispatch"),
        ("compare fedavg mime --concurrency 5", "with phases or synchronous dispatch"),
        ("schedule --dispatch phases --concurrency 5", "with phases dispatch"),
        ("run fedavg", None),
        ("run fedbuff --concurrency 5", None),
        ("compare fedavg fedbuff --concurrency 5", None),
        ("schedule --concurrency 5", None),
    ],
)
def test_a_concurrency_that_nobody_asks_for_is_worth_a_warning(line, said, caplog):
    words = line.split()
    small = shlex.split("--clients 12 --buffer 3 --rounds 2")
    work = [] if words[0] == "schedule" else shlex.split("--local-steps 1 --batch-size 4")
    assert main([*words, *small, *work]) == 0
    texts = [record.getMessage() for record in caplog.records]
    if said:
        (text,) = texts
        assert text.startswith(f"--concurrency is ignored: {said}")
    else:
        assert texts == []


def test_help_names_the_defaults_of_each_command(capsys):
    def told(command):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        return " ".join(capsys.readouterr().out.split())

    run = told("run")
    assert "see 'offbeat algorithms' [cadence]" in run
    assert "the method's own" in run
    schedule = told("schedule")
    assert "method" not in schedule
    assert "[asynchronous]" in schedule
    assert "by a clock, the nominal cohort [10]" in schedule


@pytest.mark.parametrize(
    ("more", "threads"), [([], 1), (["--engine", "vectorised"], 2), (["--engine", "sequential"], 2)]
)
def test_one_thread_is_used_where_a_small_model_made_the_choice_of_engine(more, threads, monkeypatch):
    seen, evaluate, before = set(), task.evaluate, torch.get_num_threads()

    def watched(*given, **named):
        seen.add(torch.get_num_threads())
        return evaluate(*given, **named)

    monkeypatch.setattr(task, "evaluate", watched)
    torch.set_num_threads(2)
    try:
        assert main(["run", *SMALL, *more]) == 0
        assert (seen, torch.get_num_threads()) == ({threads}, 2)
    finally:
        torch.set_num_threads(before)


def test_the_engine_that_was_chosen_is_shown_with_the_reason_and_one_that_was_named_is_not(capsys):
    assert main(["run", *SMALL]) == 0
    reason = "the model has 4,810 weights, at most 50,000"
    assert f"\nengine vectorised: {reason}\nwritten to runs" in capsys.readouterr().out
    assert main(["run", *SMALL, "--engine", "vectorised"]) == 0
    assert "engine" not in capsys.readouterr().out


def test_a_reader_that_goes_away_is_no_error():
    program = f"{sys.executable} -m offbeat algorithms | true"
    done = subprocess.run(program, shell=True, capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_the_schedule_and_the_catalogue_can_be_read_by_people(capsys):
    assert main(["schedule", "--rounds", "20"]) == 0
    assert "staleness of the updates used" in capsys.readouterr().out
    assert main(["algorithms"]) == 0
    assert "fedavg" in capsys.readouterr().out
    assert main(["algorithms", "adamasfl"]) == 0
    out = capsys.readouterr().out
    assert "from S, K and T" in out
    assert "S: updates per server step; K: local steps of a task; T: server steps." in out
    assert "Private runs use" not in out
    assert main(["algorithms", "cadence"]) == 0
    out = capsys.readouterr().out
    assert "Private runs use noisy=True, unless that is given." in out
    assert "Private runs use variates=False, unless that or --clip is given." in out


LOADING = """
import importlib.abc, os, signal, sys

class Interrupts(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "offbeat.cli.main":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
signal.signal(signal.SIGINT, {handler})
from offbeat.__main__ import main

sys.argv = ["offbeat", "algorithms"]
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("handler", "code", "said"),
    [("signal.default_int_handler", 130, "offbeat: interrupted.\n"), ("signal.SIG_IGN", 0, "")],
)
def test_ctrl_c_while_everything_is_loaded_is_one_sentence(handler: str, code: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADING.replace("{handler}", handler)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (code, said)
    assert ("cadence" in done.stdout) == (code == 0)
