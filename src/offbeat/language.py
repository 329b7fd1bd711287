"""The former place of `offbeat.nn.language`, which says so."""

from typing import NoReturn

from offbeat.errors import InputError

_RENAMED = {
    "classifier_in": "load_classifier",
    "learn_tokenizer": "train_tokenizer",
    "tokenizer_in": "load_tokenizer",
}


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise InputError(f"offbeat.language.{name} is now offbeat.nn.language.{_RENAMED.get(name, name)}.")
