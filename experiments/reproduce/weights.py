"""Weights that a reader provides, for the studies that fine-tune."""

import hashlib
from collections.abc import Iterable
from functools import lru_cache

from torch import Tensor, nn

from experiments.reproduce.records import Curve
from offbeat.errors import InputError
from offbeat.nn.language import check_folder, load_classifier
from offbeat.training.experiment import Experiment

FINE_TUNED = "bert-base"  # the model whose weights are the reader's
# Weights; settings of the model and of its tokenizer; words and pieces of words.
_TOLD = (".safetensors", ".bin", ".json", ".txt", ".model", ".tiktoken")


def check_weights(made: Experiment, folder: str | None) -> None:
    """Refuse weights that would not be used, and to go without those that are needed."""
    if made.model == FINE_TUNED and folder is None:
        raise InputError(
            "this study fine-tunes a model of yours: name the folder of its weights and tokenizer with "
            "--weights; python -m experiments.language.pretrain makes a small one."
        )
    if made.model != FINE_TUNED and folder is not None:
        raise InputError(f"the model '{made.model}' starts from random weights: leave --weights out.")


def check_same_weights(known: Iterable[Curve], folder: str | None) -> None:
    """Refuse to go on with records that started from other weights."""
    told = {curve.weights for curve in known} - {None}
    if folder is not None and told and told != {digest(folder)}:
        raise InputError(
            f"the records here are of other weights, or another tokenizer, than those in {folder}: name "
            "another --out."
        )


def module_in(folder: str | None, classes: int, seed: int, rows: Tensor) -> nn.Module | None:
    """The reader's model with adapters, tried on the rarest word of rows of token ids; or none."""
    if folder is None:
        return None
    made = load_classifier(folder, classes, seed=seed)
    try:
        made(rows[rows.amax(1).argmax()][None])
    except (IndexError, RuntimeError) as error:
        raise InputError(
            f"the model in {folder} cannot take {rows.shape[1]} tokens up to number {int(rows.max())} "
            f"({str(error).splitlines()[0]}): use one with longer rows, and its own tokenizer."
        ) from error
    return made


@lru_cache(maxsize=1)
def digest(folder: str) -> str:
    """What tells these weights, settings and tokenizer from others."""
    found = hashlib.sha256()
    for path in sorted(check_folder(folder).iterdir()):
        if path.suffix in _TOLD and path.is_file():
            with path.open("rb") as file:
                found.update(hashlib.sha256(path.name.encode()).digest())
                found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()
