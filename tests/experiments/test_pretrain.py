"""Pretraining ends in a folder that the study on language reads, and learns from no dev sentence."""

import json
from pathlib import Path

import pytest
import torch
from experiments.language.pretrain import LOG, main
from experiments.language.text import IGNORED, Rows, masked, plain, read_text
from experiments.reproduce.outcome import ComputeOptions, run_cell
from experiments.studies.language import SMALL

from offbeat.data import glue
from offbeat.nn.language import load_tokenizer, train_tokenizer

WORDS = ("fine", "bad", "film", "plot", "great", "dull", "the", "story")
SIZE = [
    "--layers",
    "1",
    "--width",
    "16",
    "--length",
    "32",
    "--vocabulary",
    "100",
    "--lr",
    "0.01",
    "--batch-tokens",
    "256",
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Sentences of three words; some dev sentences are training sentences, too."""
    sentences = [f"{WORDS[n % 8]} {WORDS[n // 8]} number {n}" for n in range(40)]
    rows = [(one, f"{one} {WORDS[n % 7]}", n % 2) for n, one in enumerate(sentences)]
    glue_folder = tmp_path / "data" / "glue"
    for kind, some in (("train", rows), ("dev", rows[:4])):
        answers = ("entailment", "not_entailment")
        single = "".join(f"{one}\t{label}\n" for one, _, label in some)
        pairs = "".join(f"{n}\t{one}\t{two}\t{answers[label]}\n" for n, (one, two, label) in enumerate(some))
        write(glue_folder / "SST-2" / f"{kind}.tsv", f"sentence\tlabel\n{single}")
        write(glue_folder / "RTE" / f"{kind}.tsv", f"index\tsentence1\tsentence2\tlabel\n{pairs}")
    both = "".join(f"{label}\t{n}\t{n}\t{one}\t{two}\n" for n, (one, two, label) in enumerate(rows))
    head = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    write(glue_folder / "MRPC" / "msr_paraphrase_train.txt", head + both)
    write(glue_folder / "MRPC" / "mrpc_dev_ids.tsv", "".join(f"{n}\t{n}\n" for n in range(30, 40)))
    told = ["\n".join(f"the story {n} of film {k}" for k in range(160)) for n in range(3)]
    spoken = {f"role {n}": {"text": words} for n, words in enumerate(told)}
    write(tmp_path / "data" / "shakespeare" / "by_role.json", json.dumps(spoken))
    return tmp_path / "data"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_loss_falls_and_the_study_reads_the_folder(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "weights"
    assert main(["--data-dir", str(data), "--out", str(out), "--steps", "60", *SIZE]) == 0
    _, *lines = [json.loads(line) for line in (out / LOG).read_text().splitlines()]
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
    assert lines[-1]["step"] == 60
    assert f"masked-word loss {lines[-1]['loss']:.3f}" in capsys.readouterr().out
    assert load_tokenizer(out).mask_token == "[MASK]"
    cell = next(cell for cell in SMALL.quick.cells if cell.column == "RTE").shortened(1)
    record = run_cell(cell, ComputeOptions(data_dir=str(data), weights=str(out)))
    assert record["failure"] is None
    again = tmp_path / "again"
    assert main(["--data-dir", str(data), "--out", str(again), "--steps", "60", *SIZE]) == 0
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_no_dev_sentence_and_no_held_out_sentence_is_trained_on(data: Path) -> None:
    text = read_text(data, 0)
    trained = {plain(each) for each in text.sentences()}
    for name in glue.NAMES:
        tested = glue.read(name, data / "glue").test
        assert not trained & {plain(each) for each in (*tested.first, *(tested.second or ()))}
    assert text.held_out
    assert not trained & {plain(each) for pair in text.held_out for each in pair if each}


def test_words_are_masked_as_in_bert() -> None:
    tokenizer = train_tokenizer([" ".join(WORDS)], 60)
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    ids = torch.full((400, 50), tokenizer.vocab["film"])
    ids[:, 0] = tokenizer.cls_token_id
    shown, words = masked(ids, tokenizer, torch.Generator().manual_seed(0))
    chosen = words != IGNORED
    assert not chosen[:, 0].any()
    assert abs(chosen[:, 1:].float().mean() - 0.15) < 0.01
    assert abs((shown[chosen] == tokenizer.mask_token_id).float().mean() - 0.8) < 0.03
    assert (shown[~chosen] == ids[~chosen]).all()
    assert (words[chosen] == ids[chosen]).all()


def test_rows_are_no_longer_than_asked_and_batches_no_larger() -> None:
    tokenizer = train_tokenizer([" ".join(WORDS)], 60)
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    pairs = [(" ".join(WORDS[: n % 7 + 1] * 3), None if n % 3 else " ".join(WORDS)) for n in range(50)]
    batches = Rows(pairs, tokenizer, 16).batches(64, seed=0, epoch=0)
    assert sum(len(batch.ids) for batch in batches) == 50
    assert all(batch.ids.shape[1] <= 16 and batch.ids.numel() <= 64 for batch in batches)
    pairless = torch.cat([batch.follows for batch in batches]) == IGNORED
    assert pairless.sum() == sum(two is None for _, two in pairs)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--minutes", "0"], "--minutes must be above 0"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--heads", "3"], "is not a multiple of --heads"),
        (["--data-dir", "absent"], "absent is not a folder"),
        (["--data-dir", "empty"], "of GLUE's MRPC is not in"),
        (["--out", "taken"], "already exists"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(
    words: list[str],
    sentence: str,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = tmp_path / "place"
    for name in ("empty", "taken"):
        (place / name).mkdir(parents=True)
    monkeypatch.chdir(place)
    assert main(["--data-dir", str(data), "--out", "weights", *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert sorted(each.name for each in place.iterdir()) == ["empty", "taken"]
