"""Tasks of GLUE are read from the benchmark's own files, and what is wrong with them is said."""

import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from experiments.__main__ import main as experiments_main

from offbeat.cli.main import main
from offbeat.data.datasets import load, load_glue
from offbeat.data.glue import read
from offbeat.errors import InputError
from offbeat.training.build import build_run
from offbeat.training.experiment import Experiment
from offbeat.training.task import named_task

FILES = {
    "SST-2/train.tsv": 'sentence\tlabel\na "fine film \t1\na bore\t0\nso fine\t1\nso so\t0\n',
    "SST-2/dev.tsv": "sentence\tlabel\nfine\t1\nbore\t0\n",
    "RTE/train.tsv": (
        "index\tsentence1\tsentence2\tlabel\n0\tIt rains.\tIt is wet.\tentailment\n"
        "1\tIt rains.\tIt is dry.\tnot_entailment\n"
    ),
    "RTE/dev.tsv": "index\tsentence1\tsentence2\tlabel\r\n0\tIt is wet.\tIt rains.\tnot_entailment\r\n",
    "MRPC/msr_paraphrase_train.txt": (
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t11\t12\tHe said so .\tSo he said .\n"
        '0\t13\t14\tHe said so .\tHe said " no " .\n1\t15\t16\tYes .\tIndeed .\n'
    ),
    "MRPC/mrpc_dev_ids.tsv": "15\t16\n",
}


def write(folder: Path, packed: bool = False) -> Path:
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if packed:
            path.with_name(f"{path.name}.xz").write_bytes(lzma.compress(text.encode()))
        else:
            path.write_bytes(text.encode())
    return folder


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("place", [".", "glue"])
def test_files_are_found_packed_or_not_in_the_folder_or_in_one_of_its_own(
    place: str, packed: bool, tmp_path: Path
) -> None:
    write(tmp_path / place, packed)
    assert read("sst2", tmp_path).train.labels.tolist() == [1, 0, 1, 0]
    assert read("sst2", tmp_path / place / "SST-2").test.first == ("fine", "bore")


def test_sentences_keep_their_quotes(tmp_path: Path) -> None:
    train, test = read("sst2", write(tmp_path))
    assert train.first == ('a "fine film ', "a bore", "so fine", "so so")
    assert train.second is test.second is None
    assert test.first == ("fine", "bore")


def test_pairs_have_the_order_and_the_labels_of_the_benchmark(tmp_path: Path) -> None:
    train, test = read("rte", write(tmp_path))
    assert train.first == ("It rains.", "It rains.")
    assert train.second == ("It is wet.", "It is dry.")
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 1], [1])


def test_pairs_of_mrpc_are_for_testing_where_their_ids_are_listed(tmp_path: Path) -> None:
    train, test = read("mrpc", write(tmp_path))
    assert train.second == ("So he said .", 'He said " no " .')
    assert train.labels.tolist() == [1, 0]
    assert (test.first, test.second, test.labels.tolist()) == (("Yes .",), ("Indeed .",), [1])


@pytest.mark.parametrize(("name", "length"), [("sst2", 64), ("rte", 256), ("mrpc", 128)])
def test_a_task_is_a_data_set_like_any_other(name: str, length: int, tmp_path: Path) -> None:
    source = load(name, write(tmp_path))
    assert source.train.inputs.shape == (len(source.labels), length)
    assert source.train.inputs.dtype == torch.int32
    assert (source.name, source.classes, source.groups) == (name, 2, None)
    assert source.test.total == len(source.test.targets) > 0
    made = Experiment.of(data=name, algorithm="fedbuff", clients=2, partition="iid", concurrency=2, buffer=1)
    assert made.model == "bert-tiny"
    trial = build_run(made, named_task(made, source))
    # adapters on 8,000 words, query and value, 32 wide, and a head for 2 classes
    assert trial.problem.size == (8000 + 32) + 2 * (32 + 32) + (2 * 32 + 2)


def test_a_tokenizer_of_ones_own_gives_its_own_ids(tmp_path: Path) -> None:
    def numbered(
        first: list[str], second: list[str] | None, max_length: int, **_: object
    ) -> dict[str, object]:
        return {"input_ids": [[len(text)] * max_length for text in first]}

    source = load_glue("sst2", write(tmp_path), numbered)
    assert source.test.inputs[:, 0].tolist() == [4, 4]
    assert source.test.inputs.shape[1] == 64
    numbered.model_max_length = 16  # type: ignore[attr-defined]
    assert load_glue("sst2", write(tmp_path), numbered).test.inputs.shape[1] == 16


@pytest.mark.parametrize(
    ("name", "file", "text", "sentence"),
    [
        ("sst2", "SST-2/dev.tsv", None, "the file dev.tsv of GLUE's SST-2 is not in .*: get it from"),
        ("mrpc", "MRPC/mrpc_dev_ids.tsv", None, "mrpc_dev_ids.tsv of GLUE's MRPC is not in"),
        ("sst2", "SST-2/dev.tsv", "text\tlabel\nfine\t1\n", "no column 'sentence'"),
        ("sst2", "SST-2/dev.tsv", "sentence\tlabel\nfine\n", "do not have 2 columns each"),
        ("sst2", "SST-2/dev.tsv", "sentence\tlabel\n", "do not have 2 columns each"),
        ("sst2", "SST-2/dev.tsv", "", "no column 'sentence'"),
        ("sst2", "SST-2/dev.tsv", "sentence\tlabel\nfine\t2\n", "label '2', which is not one of 0, 1"),
        ("rte", "RTE/train.tsv", FILES["RTE/train.tsv"].replace("not_", "no "), "label 'no entailment'"),
        ("mrpc", "MRPC/mrpc_dev_ids.tsv", "1\t2\n", "leave no training or no test examples"),
    ],
)
def test_bad_files_are_one_sentence(
    name: str, file: str, text: str | None, sentence: str, tmp_path: Path
) -> None:
    path = write(tmp_path) / file
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(InputError, match=sentence):
        read(name, tmp_path)


def test_without_a_folder_one_is_told_where_to_get_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path))
    with pytest.raises(InputError, match=r"gluebenchmark\.com/tasks and unpack it there"):
        load("rte")


@pytest.mark.parametrize(
    ("program", "command", "place"),
    [
        (main, "run fedbuff --data sst2", "SST-2"),
        (experiments_main, "language-glue --quick", "glue/SST-2"),
    ],
)
def test_both_commands_tell_a_place_where_they_would_find_the_file(
    program: Callable[[list[str]], int],
    command: str,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*command.split(), "--data-dir", str(tmp_path), "--out", "out"]
    for file in ("train.tsv", "dev.tsv"):
        assert program(words) == 2
        error = capsys.readouterr().err
        assert f"unpack it there, as {tmp_path / place / file}, or" in error
        assert error.count("\n") == 1
        assert not (tmp_path / "out").exists()
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / place / file).write_text(FILES["SST-2/train.tsv"] if file == "train.tsv" else "other")
    assert program(words) == 2
    assert f"the data file {tmp_path / place / 'dev.tsv'} cannot be used" in capsys.readouterr().err
