"""Weights and tokenizers from a folder that `save_pretrained` wrote, or that was downloaded whole."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from offbeat import draws
from offbeat.errors import InputError
from offbeat.language.classifier import Classifier
from offbeat.language.lora import Lora, with_lora
from offbeat.language.packages import package


def tokenizer_in(folder: Path | str) -> Any:
    """The tokenizer of a folder."""
    tokenizer = _loaded(package("transformers").AutoTokenizer, folder, "a tokenizer")
    if tokenizer.pad_token_id is None:
        raise InputError(f"the tokenizer in {folder} has no padding token: set pad_token and save it.")
    return tokenizer


def classifier_in(folder: Path | str, classes: int, lora: Lora = Lora(), seed: int = 0) -> Classifier:
    """The folder's model with adapters, as a function of token ids; the seed is for what is new in it."""
    kind = package("transformers").AutoModelForSequenceClassification
    tokenizer = tokenizer_in(folder)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(draws.torch_seed(seed, "model"))
        model: nn.Module = _loaded(
            kind, folder, "a model", num_labels=classes, attn_implementation="eager", dtype=torch.float32
        )
        return Classifier.of(with_lora(model, lora), tokenizer)


def _loaded(kind: Any, folder: Path | str, what: str, **settings: Any) -> Any:
    if not Path(folder).is_dir():
        raise InputError(f"{folder} is not a folder: name one with a model and its tokenizer.")
    try:
        return kind.from_pretrained(str(folder), local_files_only=True, **settings)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"{folder} does not hold {what} that transformers can read ({reason}): fill it with "
            "save_pretrained of both model and tokenizer."
        ) from error
