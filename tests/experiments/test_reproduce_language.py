"""The study on language runs from files and weights that its reader has."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from experiments.__main__ import main
from experiments.reproduce.measures import LastRounds
from experiments.reproduce.outcome import ComputeOptions, run_cell
from experiments.reproduce.page import terms
from experiments.reproduce.records import Curve, append, recorded
from experiments.reproduce.tables import entries_of
from experiments.reproduce.weights import digest
from experiments.studies.language import GLUE, SMALL, TASKS
from transformers import BertConfig, BertForSequenceClassification

from offbeat.nn.language import train_tokenizer

WORDS = ("fine", "bad", "film", "plot", "great", "dull")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A hundred sentences and pairs for each task, too few to learn from."""
    rows = [(f"{WORDS[n % 6]} {WORDS[n % 5]}", WORDS[n % 4], n % 2) for n in range(100)]
    for kind, some in (("train", rows[:80]), ("dev", rows[80:])):
        answers = ("entailment", "not_entailment")
        single = "".join(f"{one}\t{label}\n" for one, _, label in some)
        pairs = "".join(f"{n}\t{one}\t{two}\t{answers[label]}\n" for n, (one, two, label) in enumerate(some))
        write(tmp_path / "glue" / "SST-2" / f"{kind}.tsv", f"sentence\tlabel\n{single}")
        write(tmp_path / "glue" / "RTE" / f"{kind}.tsv", f"index\tsentence1\tsentence2\tlabel\n{pairs}")
    both = "".join(f"{label}\t{n}\t{n}\t{one}\t{two}\n" for n, (one, two, label) in enumerate(rows))
    head = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    write(tmp_path / "glue" / "MRPC" / "msr_paraphrase_train.txt", head + both)
    write(tmp_path / "glue" / "MRPC" / "mrpc_dev_ids.tsv", "".join(f"{n}\t{n}\n" for n in range(80, 100)))
    return tmp_path


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    torch.manual_seed(0)
    tokenizer = train_tokenizer(WORDS, 60)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=60, max_position_embeddings=256, **size))
    model.bert.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.slow
def test_a_quick_run_is_recorded_and_shown_beside_what_is_claimed(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "records"
    words = ["language-glue", "--quick", "--data-dir", str(data), "--out", str(out)]
    assert main([*words, "--rounds", "2", "--runs", "2", "--processes", "1"]) == 0
    shown = capsys.readouterr().out
    assert "2 of 14 runs, seed 42, CPU" in shown
    assert "--quick --data-dir DIR --rounds 2`" in shown
    assert "78.37 ± 4.86" in shown
    assert "here from random weights" in shown
    lines = [json.loads(line) for line in (out / "quick.jsonl").read_text().splitlines()]
    assert [line["version"] for line in lines] == [[0, 1, 2]] * 2
    assert "weights" not in lines[0]


def test_in_full_it_starts_from_the_readers_weights(data: Path, weights: Path) -> None:
    cells = {cell.column: cell for cell in GLUE.full.cells if cell.row == "fadas"}
    assert set(cells) == set(TASKS.values())
    spot = ComputeOptions(data_dir=str(data), weights=str(weights))
    record = run_cell(cells["RTE"].shortened(2), spot)
    assert record["failure"] is None
    assert len(record["accuracy"]) == 3
    assert len(record["weights"]) == 64
    again = run_cell(cells["RTE"].shortened(2), spot)
    assert (again["weights"], again["loss"]) == (record["weights"], record["loss"])
    assert terms(GLUE, GLUE.full, {}, quick=False).endswith("--device cuda --data-dir DIR --weights DIR`")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["language-glue"], "name the folder of its weights and tokenizer with --weights"),
        (["language-glue", "--weights", "absent"], "absent is not a folder"),
        (["language-glue", "--quick", "--weights", "absent"], "leave --weights out"),
        (["fadas-table7", "--quick", "--weights", "absent"], "leave --weights out"),
    ],
)
def test_weights_that_are_missing_or_of_no_use_are_one_sentence(
    words: list[str], sentence: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "records"
    assert main([*words, "--data-dir", str(data), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_weights_that_do_not_fit_or_are_broken_are_one_sentence(
    data: Path, weights: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["language-glue", "--data-dir", str(data), "--weights", str(weights)]
    tokenizer = (weights / "tokenizer.json").read_text()
    settings = json.loads((weights / "config.json").read_text())
    for change, sentence in (
        ({"max_position_embeddings": 64}, "cannot take 256 tokens"),
        ({"vocab_size": 6}, "cannot take 256 tokens up to number"),
    ):
        sizes = settings | change
        BertForSequenceClassification(BertConfig(**sizes)).save_pretrained(weights)
        (weights / "tokenizer.json").write_text(tokenizer)
        capfd.readouterr()
        assert main([*words, "--out", str(tmp_path / "records")]) == 2
        assert sentence in capfd.readouterr().err
    (weights / "model.safetensors").write_bytes(b"cut short")
    assert main([*words, "--out", str(tmp_path / "records")]) == 2
    assert "does not hold a model that transformers can read" in capfd.readouterr().err
    assert not (tmp_path / "records").exists()


def test_records_of_other_weights_are_not_gone_on_with(
    data: Path, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "records"
    words = ["language-glue", "--data-dir", str(data), "--out", str(out), "--rounds", "1"]
    cell = next(cell for cell in GLUE.full.cells if cell.column == "SST-2").shortened(1)
    append(out / "full.jsonl", run_cell(cell, ComputeOptions(data_dir=str(data), weights=str(weights))))
    assert main([*words, "--table", "--weights", str(weights)]) == 0
    assert main([*words, "--table"]) == 0
    capsys.readouterr()
    assert main([*words, "--weights", str(tmp_path / "absent")]) == 2
    assert "absent is not a folder" in capsys.readouterr().err
    others = tmp_path / "others"
    write(others / "model.safetensors", "others")
    assert main([*words, "--weights", str(others)]) == 2
    error = capsys.readouterr().err
    assert "are of other weights, or another tokenizer, than those in" in error
    assert error.count("\n") == 1


def test_another_tokenizer_or_config_is_another_start_and_a_note_is_not(weights: Path) -> None:
    def copied(name: str) -> Path:
        return Path(shutil.copytree(weights, weights.parent / name))

    first = digest(str(weights))
    assert digest(str(copied("same"))) == first
    noted = copied("noted")
    write(noted / "README.md", "# A model")
    assert digest(str(noted)) == first
    seen = {first}
    for file in ("tokenizer.json", "config.json", "tokenizer_config.json", "model.safetensors", "vocab.txt"):
        other = copied(file)
        (other / file).write_bytes((b"" if file == "vocab.txt" else (other / file).read_bytes()) + b"\n")
        seen.add(digest(str(other)))
    assert len(seen) == 6
    renamed = copied("renamed")
    (renamed / "config.json").rename(renamed / "settings.json")
    assert digest(str(renamed)) not in seen


def test_the_page_says_which_weights_its_runs_started_from() -> None:
    start = Curve((0,), (0.0,), (0.5,), None, None, 60.0, "NVIDIA H200", "2026-01-02", "0123456789abcdef" * 4)
    first, second, *_ = (cell.key for cell in GLUE.full.cells)
    text = terms(GLUE, GLUE.full, {first: start}, quick=False)
    assert "1 minutes of processes, from weights and a tokenizer of digest 0123456789abcdef: `" in text
    other = start._replace(weights="f" * 64)
    text = terms(GLUE, GLUE.full, {first: start, second: other}, quick=False)
    assert "of digest 0123456789abcdef and ffffffffffffffff: `" in text
    assert "digest" not in terms(GLUE, GLUE.full, {first: start._replace(weights=None)}, quick=False)


def test_files_that_are_missing_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["language-glue", "--quick", "--data-dir", str(tmp_path), "--out", str(tmp_path / "records")]
    assert main([*words]) == 2
    assert "train.tsv of GLUE's SST-2 is not in" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_the_page_says_holds() -> None:
    folder = Path(__file__).parent.parent.parent / "experiments" / "language"
    page, found = (folder / "README.md").read_text(), recorded(folder / "records" / "quick.jsonl")
    best = entries_of(GLUE.quick.cells, found, LastRounds())
    merits = {place: entry.figure.merit for place, entry in best.items()}
    for method in ("fadas", "fadas-da"):
        assert merits[method, "SST-2"] > max(merits["fedbuff", "SST-2"], merits["fedasync", "SST-2"])
    gap = merits["fadas-da", "SST-2"] - merits["fadas", "SST-2"]
    assert round(gap / 100 * 872) == 4
    assert round(merits["fadas", "SST-2"] - merits["fedasync", "SST-2"]) == 9
    servers = [float(best[method, "SST-2"].rates.split()[-1]) for method in ("fadas", "fadas-da")]
    assert servers == sorted(set(servers))
    slow = next(cell for cell in GLUE.quick.cells if cell.rates == "local 0.03, server 1")
    curve = found[slow.key]
    assert f"{100 * curve.best:.1f} in round {curve.versions[curve.accuracies.index(curve.best)]}" in page
    assert f"falls to {100 * curve.accuracies[-1]:.1f} in the last" in page
    assert curve.worst is not None
    assert curve.worst[0] == 4
    for task in ("RTE", "MRPC"):
        assert f"{merits['fadas', task]:.2f} on {task}" in page


def test_what_the_page_says_of_the_pretrained_model_holds() -> None:
    folder = Path(__file__).parent.parent.parent / "experiments" / "language"
    page, found = (folder / "README.md").read_text(), recorded(folder / "records" / "quick.jsonl")
    lines = (folder / "records" / "pretraining.jsonl").read_text().splitlines()
    settings, first, *_, last = [json.loads(line) for line in lines]
    assert f"{settings['weights']:,} weights" in page
    assert f"for {settings['minutes']:g} minutes" in page
    assert f"from {first['loss']:.2f} to {last['loss']:.2f} in {last['step']:,} steps" in page
    assert f"{100 * last['pair_accuracy']:.1f} per cent of the held-out pairs" in page
    best = entries_of(SMALL.quick.cells, found, LastRounds())
    merits = {place: entry.figure.merit for place, entry in best.items()}
    assert max(merit for (_, task), merit in merits.items() if task == "MRPC") < 68.4
    assert f"delay-adaptive FADAS comes nearest with {merits['fadas-da', 'MRPC']:.2f}" in page
    assert merits["fedbuff", "RTE"] == max(merit for (_, task), merit in merits.items() if task == "RTE")
    assert f"FedBuff with {merits['fedbuff', 'RTE']:.2f}" in page
    assert round(2.77 * merits["fedbuff", "RTE"]) - 146 == 6  # of 277 sentences 146 have one answer
    assert f"FADAS ends at {merits['fadas', 'SST-2']:.2f} where" in page


def test_the_settings_are_the_papers() -> None:
    for cell in (*GLUE.full.cells, *GLUE.quick.cells, *SMALL.full.cells, *SMALL.quick.cells):
        made = cell.experiment
        assert (made.clients, made.concurrency, made.partition) == (10, 5, "dirichlet:0.6")
        assert made.buffer * cell.scale == 3
        assert (made.batch_size, made.delays) == (32, "tiers:mild")
    assert {cell.experiment.local_epochs for cell in GLUE.full.cells} == {1}
    assert {(cell.row, cell.column) for cell in GLUE.full.cells} == {
        (row, column)
        for row in ("fedasync", "fedbuff", "fadas", "fadas-da")
        for column in ("RTE", "MRPC", "SST-2")
    }
