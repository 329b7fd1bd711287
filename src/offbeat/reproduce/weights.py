"""Weights that a reader provides, for the studies that fine-tune."""

import hashlib
from functools import lru_cache
from pathlib import Path

from torch import nn

from offbeat.errors import InputError
from offbeat.experiment import Experiment
from offbeat.language.pretrained import classifier_in

FINE_TUNED = "bert-base"  # the model whose weights are the reader's


def check_weights(made: Experiment, folder: str | None) -> None:
    """Refuse weights that would not be used, and to go without those that are needed."""
    if made.model == FINE_TUNED and folder is None:
        raise InputError(
            "this study fine-tunes a model of yours: name the folder of its weights and tokenizer with "
            "--weights, or add --quick to start from random weights."
        )
    if made.model != FINE_TUNED and folder is not None:
        raise InputError(f"the model '{made.model}' starts from random weights: leave --weights out.")


def module_in(folder: str | None, classes: int, seed: int) -> nn.Module | None:
    """The reader's model with adapters, or none."""
    return None if folder is None else classifier_in(folder, classes, seed=seed)


@lru_cache(maxsize=1)
def digest(folder: str) -> str:
    """What tells these weights from others."""
    found = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.suffix in (".safetensors", ".bin"):
            with path.open("rb") as file:
                found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()
