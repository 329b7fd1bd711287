"""Weights and tokenizers from a folder that `save_pretrained` wrote, or that was downloaded whole."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from offbeat import draws
from offbeat.errors import InputError
from offbeat.language.classifier import Classifier
from offbeat.language.lora import Lora, with_lora
from offbeat.language.packages import package, quiet


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
        settings = {"num_labels": classes, "attn_implementation": "eager", "dtype": torch.float32}
        model, told = _loaded(kind, folder, "a model", output_loading_info=True, **settings)
        _check_body(model, told["missing_keys"], folder)
        return Classifier.of(with_lora(model, lora), tokenizer)


def folder_of(weights: Path | str) -> Path:
    """The folder that somebody names, or one sentence."""
    if not Path(weights).is_dir():
        raise InputError(f"{weights} is not a folder: name one with a model and its tokenizer.")
    return Path(weights)


def _check_body(model: Any, missing: Iterable[str], folder: Path | str) -> None:
    """Refuse what would start from random weights elsewhere than at its top, of which nobody is told."""
    body = f"{model.base_model_prefix}."
    lacking = sorted(name for name in missing if name.startswith(body) and ".pooler." not in name)
    if lacking:
        raise InputError(
            f"the weights in {folder} are not those of its config.json, for {lacking[0]} is not among them: "
            "fill it with save_pretrained of both model and tokenizer."
        )


def _loaded(kind: Any, folder: Path | str, what: str, **settings: Any) -> Any:
    place = folder_of(folder)
    try:
        with quiet():
            return kind.from_pretrained(str(place), local_files_only=True, **settings)
    except Exception as error:  # of several packages, some with no base but this
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{folder} does not hold {what} that transformers can read ({reason}): fill it with "
            "save_pretrained of both model and tokenizer."
        ) from error
