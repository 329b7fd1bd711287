"""BERT with adapters, from random weights."""

from typing import Any

from torch import nn

from offbeat.errors import InputError
from offbeat.language.classifier import Classifier
from offbeat.language.lora import Lora, with_lora
from offbeat.language.packages import package
from offbeat.language.tokens import PAD, SEPARATOR

TOKENS = 8000  # of the vocabulary
# A frozen body of random weights tells too little of its words, so these have adapters, too.
_TINY_LORA = Lora(layers=("query", "value", "word_embeddings"))
_TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.1,  # at the usual 0.02 attention hardly changes what passes through
}


def bert_tiny(length: int, classes: int, lora: Lora = _TINY_LORA, **more: Any) -> nn.Module:
    """BERT of one layer, 32 wide; more settings are those of `BertConfig`."""
    return bert_base(length, classes, lora, **_TINY | more)


def bert_base(length: int, classes: int, lora: Lora = Lora(), **more: Any) -> nn.Module:
    """BERT of its usual size, whose weights torch's generator draws; nothing is dropped out."""
    transformers = package("transformers")
    settings: dict[str, Any] = {
        "vocab_size": TOKENS,
        "max_position_embeddings": length,
        "num_labels": classes,
        "pad_token_id": PAD,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "attn_implementation": "eager",
    }
    try:
        made = transformers.BertForSequenceClassification(transformers.BertConfig(**settings | more))
    except ValueError as error:
        raise InputError(f"BERT cannot be made so: {error}") from error
    return Classifier(with_lora(made, lora), PAD, SEPARATOR)
