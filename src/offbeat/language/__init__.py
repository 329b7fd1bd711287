"""Transformers of Hugging Face as modules to train: token ids in, scores out, adapters on a frozen body.

`transformers`, `peft` and `tokenizers` are imported when something here is called.
"""

from offbeat.language.bert import bert_base, bert_tiny
from offbeat.language.classifier import Classifier
from offbeat.language.lora import Lora, with_lora
from offbeat.language.pretrained import classifier_in, tokenizer_in
from offbeat.language.tokens import encode, learn_tokenizer

__all__ = [
    "Classifier",
    "Lora",
    "bert_base",
    "bert_tiny",
    "classifier_in",
    "encode",
    "learn_tokenizer",
    "tokenizer_in",
    "with_lora",
]
