"""Three tasks of GLUE (Wang et al. 2018) in the benchmark's own files: RTE, MRPC and SST-2.

`train` is the training set and `dev` the test set, since the labels of `test` are not public.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.data.download import MissingFileError, find_file, parse_file
from offbeat.data.population import Examples
from offbeat.errors import setting_name
from offbeat.nn.language import VOCABULARY_SIZE, encode, train_tokenizer

NAMES = ("mrpc", "rte", "sst2")
_FOLDERS = {"mrpc": "MRPC", "rte": "RTE", "sst2": "SST-2"}
_LENGTHS = {"mrpc": 128, "rte": 256, "sst2": 64}  # tokens; longer examples are cut
_BINARY = MappingProxyType({"0": 0, "1": 1})
_ENTAILMENT = MappingProxyType({"entailment": 0, "not_entailment": 1})

_Rows = list[tuple[str, ...]]


class GlueTexts(NamedTuple):
    """Sentences, second sentences where there are pairs, and labels."""

    first: tuple[str, ...]
    second: tuple[str, ...] | None
    labels: NDArray[np.int64]


class GlueTask(NamedTuple):
    """The training and the test set."""

    train: GlueTexts
    test: GlueTexts


def read(name: str, folder: Path | str) -> GlueTask:
    """Read a task from a folder with GLUE's files or with the task's folder; files may be compressed."""
    folder = Path(folder)
    if name == "mrpc":
        return _paraphrases(folder)
    parse = _sentences if name == "sst2" else _entailments
    return GlueTask(*(parse_file(_find(name, folder, f"{kind}.tsv"), parse) for kind in ("train", "dev")))


def examples(name: str, task: GlueTask, tokenizer: Any = None) -> tuple[Examples, Examples]:
    """Training and test examples, cut at the tokenizer's `model_max_length` where that is shorter.

    By default the tokenizer is trained on the training sentences.
    """
    if tokenizer is None:
        trained = task.train
        tokenizer = train_tokenizer((*trained.first, *(trained.second or ())), VOCABULARY_SIZE)
    length = min(_LENGTHS[name], getattr(tokenizer, "model_max_length", _LENGTHS[name]))
    train, test = (
        Examples(
            encode(tokenizer, part.first, part.second, length=length),
            torch.from_numpy(part.labels),
        )
        for part in task
    )
    return train, test


def _find(name: str, folder: Path, file: str) -> Path:
    own = _FOLDERS[name]
    try:
        return find_file(folder, [file], (".", own, f"glue/{own}"))
    except MissingFileError:
        raise MissingFileError(
            f"the file {file} of GLUE's {own} is not in {folder}: get it from gluebenchmark.com/tasks and "
            f"unpack it there, as {folder / own / file}, or choose another folder with "
            f"{setting_name('data_dir')}."
        ) from None


def _sentences(data: bytes) -> GlueTexts:
    rows = _columns(data, ("sentence", "label"))
    first, labels = zip(*rows, strict=True)
    return GlueTexts(first, None, _numbers(labels, _BINARY))


def _entailments(data: bytes) -> GlueTexts:
    return _pairs(_columns(data, ("sentence1", "sentence2", "label")), _ENTAILMENT)


def _paraphrases(folder: Path) -> GlueTask:
    """MRPC has one file with all pairs, and another one with the ids of the test pairs."""
    tested = set(parse_file(_find("mrpc", folder, "mrpc_dev_ids.tsv"), _rows))
    path = _find("mrpc", folder, "msr_paraphrase_train.txt")

    def split(data: bytes) -> GlueTask:
        rows = _columns(data, ("#1 ID", "#2 ID", "#1 String", "#2 String", "Quality"))
        train, test = ([row[2:] for row in rows if (row[:2] in tested) is kind] for kind in (False, True))
        if not train or not test:
            raise ValueError("the ids in mrpc_dev_ids.tsv leave no training or no test examples")
        return GlueTask(_pairs(train, _BINARY), _pairs(test, _BINARY))

    return parse_file(path, split)


def _pairs(rows: _Rows, meaning: Mapping[str, int]) -> GlueTexts:
    first, second, labels = zip(*rows, strict=True)
    return GlueTexts(first, second, _numbers(labels, meaning))


def _numbers(labels: Sequence[str], meaning: Mapping[str, int]) -> NDArray[np.int64]:
    odd = sorted(set(labels) - meaning.keys())
    if odd:
        raise ValueError(f"it has the label {odd[0]!r}, which is not one of {', '.join(meaning)}")
    return np.array([meaning[label] for label in labels], np.int64)


def _columns(data: bytes, names: Sequence[str]) -> _Rows:
    """The named columns, row by row; at least one row."""
    head, *rows = _rows(data)
    missing = [name for name in names if name not in head]
    if missing:
        raise ValueError(f"its first line has no column {missing[0]!r}")
    if not rows or any(len(row) != len(head) for row in rows):
        raise ValueError(f"its rows do not have {len(head)} columns each")
    columns = [head.index(name) for name in names]
    return [tuple(row[column] for column in columns) for row in rows]


def _rows(data: bytes) -> _Rows:
    """The fields between tabs; quotes are part of the text."""
    lines = data.decode("utf-8-sig").replace("\r\n", "\n").strip("\n").split("\n")
    return [tuple(line.split("\t")) for line in lines]
