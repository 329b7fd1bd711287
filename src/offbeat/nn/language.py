"""Transformers of Hugging Face as modules to train: token ids in, scores out, adapters on a frozen model.

`transformers`, `peft` and `tokenizers` are optional and are imported when a function here is called.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offbeat import draws
from offbeat.errors import InputError

__all__ = [
    "Classifier",
    "Lora",
    "bert_base",
    "bert_tiny",
    "encode",
    "load_classifier",
    "load_tokenizer",
    "train_tokenizer",
    "with_lora",
]

PAD, UNKNOWN, START, SEPARATOR = range(4)
_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
VOCABULARY_SIZE = 8000


def optional_package(name: str) -> Any:
    """Import a package of the extra `language`."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(
            f"transformers need the package {error.name}: install it with pip install 'offbeat[language]'."
        ) from None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the progress bars and warnings of `transformers`; restore its settings afterwards."""
    logs = optional_package("transformers.utils.logging")
    level, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(level)
        if bars:
            logs.enable_progress_bar()


def train_tokenizer(texts: Iterable[str], size: int) -> Any:
    """A WordPiece tokenizer with the most frequent words; other words are split into characters.

    Ties are broken alphabetically, so that the same text gives the same ids, which the trainers of
    `tokenizers` do not guarantee.
    """
    tokenizers = optional_package("tokenizers")
    normal = tokenizers.normalizers.BertNormalizer(lowercase=True)
    split = tokenizers.pre_tokenizers.BertPreTokenizer()
    whole = normal.normalize_str("\n".join(texts))
    counts = Counter(word for word, _ in split.pre_tokenize_str(whole))
    symbols = sorted({symbol for word in counts for symbol in word})
    pieces = dict.fromkeys((*_SPECIAL_TOKENS, *symbols, *(f"##{symbol}" for symbol in symbols)))
    if len(pieces) > size:
        raise InputError(f"{size} tokens are too few for the text's {len(symbols)} characters: ask for more.")
    words = (word for word, _ in sorted(counts.items(), key=lambda one: (-one[1], one[0])))
    pieces |= dict.fromkeys(islice((word for word in words if word not in pieces), size - len(pieces)))
    ids = {piece: number for number, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token=_SPECIAL_TOKENS[UNKNOWN]))
    made.normalizer, made.pre_tokenizer = normal, split
    made.post_processor = tokenizers.processors.BertProcessing(
        (_SPECIAL_TOKENS[SEPARATOR], SEPARATOR), (_SPECIAL_TOKENS[START], START)
    )
    pad, unknown, start, separator = _SPECIAL_TOKENS
    return optional_package("transformers").PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, unk_token=unknown, cls_token=start, sep_token=separator
    )


def encode(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None = None, *, length: int
) -> Tensor:
    """(texts, length) token ids, truncated or padded at the end; `pairs` are second sentences."""
    if not texts:
        return torch.empty(0, length, dtype=torch.int32)
    with quiet_transformers():
        rows = tokenizer(
            list(texts),
            None if pairs is None else list(pairs),
            padding="max_length",
            truncation=True,
            max_length=length,
            padding_side="right",
            return_attention_mask=False,
            return_token_type_ids=False,
        )
    return torch.tensor(rows["input_ids"], dtype=torch.int32)


class Classifier(nn.Module):
    """Token ids to scores: padding is masked, and a second sentence has token type 1.

    The model is any of `transformers` for sequence classification, with adapters of `peft` or without.
    With eager attention and without dropout, clients are computed together.
    """

    def __init__(self, model: nn.Module, pad: int, separator: int | None = None) -> None:
        super().__init__()
        self.model = model
        self._pad = pad
        config: Any = model.config
        self._separator = separator if getattr(config, "type_vocab_size", 0) > 1 else None
        self._wide = self._takes_wide(getattr(config, "vocab_size", 3))

    @classmethod
    def of(cls, model: nn.Module, tokenizer: Any) -> "Classifier":
        """A classifier with the tokenizer's padding and separator tokens."""
        if tokenizer.pad_token_id is None:
            raise InputError("the tokenizer has no padding token: set its pad_token.")
        return cls(model, tokenizer.pad_token_id, tokenizer.sep_token_id)

    def forward(self, ids: Tensor) -> Tensor:
        """(examples, length) integers of any type to (examples, classes)."""
        return self._scores(ids.long(), self._wide)

    def _scores(self, ids: Tensor, wide: bool) -> Tensor:
        seen = ids != self._pad
        kwargs: dict[str, Tensor] = {
            "attention_mask": _attention_bias(seen, _model_dtype(self.model)) if wide else seen
        }
        if self._separator is not None:
            ends = (ids == self._separator).long()
            second = (ends.cumsum(-1) - ends).clamp(max=1)  # positions after the first separator
            kwargs["token_type_ids"] = torch.where(seen, second, 0)
        scores: Tensor = self.model(input_ids=ids, **kwargs).logits
        return scores

    @torch.no_grad()
    def _takes_wide(self, tokens: int) -> bool:
        """Whether a mask with four axes gives the same scores.

        A mask with two axes is inspected by `transformers`, and `vmap` cannot map that.
        """
        first, second = [token for token in range(tokens) if token != self._pad][:2]
        row = [first, second, first, second]
        ids = torch.tensor([row, [*row[:2], self._pad, self._pad]], device=_model_device(self.model))
        training = self.model.training
        self.model.eval()
        try:
            narrow, wide = self._scores(ids, False), self._scores(ids, True)
            difference = (narrow[0] - narrow[1]).abs().max()  # zero where the head ignores its inputs
            return bool((narrow - wide).abs().max() < 1e-3 * difference)
        except (RuntimeError, ValueError, TypeError, IndexError):
            return False
        finally:
            self.model.train(training)


def _attention_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """(examples, 1, length, length), added to the attention scores."""
    hidden = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(
        ~seen, torch.finfo(dtype).min
    )
    return hidden[:, None, None, :].expand(-1, 1, seen.shape[-1], -1)


def _model_dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _model_device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (Hu et al. 2021) on layers whose names end so; by default those that `peft` chooses.

    In BERT these are query and value.
    """

    rank: int = 1
    alpha: int = 8
    layers: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha < 1:
            raise InputError(f"rank and alpha must be at least 1, not {self.rank} and {self.alpha}.")


def with_lora(model: nn.Module, lora: Lora = Lora()) -> nn.Module:
    """The model itself, frozen, with adapters; the adapters and the classification head are trained."""
    peft = optional_package("peft")
    settings = peft.LoraConfig(
        task_type="SEQ_CLS",
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=None if lora.layers is None else list(lora.layers),
    )
    try:
        made: nn.Module = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise InputError(f"peft cannot put adapters on this model: {str(error).splitlines()[0]}") from error
    return made


# A frozen model of random weights tells words apart poorly, so its embeddings have adapters, too.
_TINY_LORA = Lora(layers=("query", "value", "word_embeddings"))
_TINY_CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.1,  # at the usual 0.02 attention hardly changes its inputs
}


def bert_tiny(length: int, classes: int, lora: Lora = _TINY_LORA, **more: Any) -> nn.Module:
    """BERT with one layer of width 32; further settings are those of `BertConfig`."""
    return bert_base(length, classes, lora, **_TINY_CONFIG | more)


def bert_base(length: int, classes: int, lora: Lora = Lora(), **more: Any) -> nn.Module:
    """BERT of its usual size with weights from torch's generator, without dropout."""
    transformers = optional_package("transformers")
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY_SIZE,
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
        raise InputError(f"BERT cannot be built with these settings: {error}") from error
    return Classifier(with_lora(made, lora), PAD, SEPARATOR)


def load_tokenizer(folder: Path | str) -> Any:
    """The tokenizer in a folder that `save_pretrained` wrote."""
    tokenizer = _from_pretrained(optional_package("transformers").AutoTokenizer, folder, "a tokenizer")
    if tokenizer.pad_token_id is None:
        raise InputError(f"the tokenizer in {folder} has no padding token: set pad_token and save it.")
    return tokenizer


def load_classifier(folder: Path | str, classes: int, lora: Lora = Lora(), seed: int = 0) -> Classifier:
    """The model in a folder that `save_pretrained` wrote, with adapters; new weights come from the seed."""
    kind = optional_package("transformers").AutoModelForSequenceClassification
    tokenizer = load_tokenizer(folder)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(draws.torch_seed(seed, "model"))
        settings = {"num_labels": classes, "attn_implementation": "eager", "dtype": torch.float32}
        model, info = _from_pretrained(kind, folder, "a model", output_loading_info=True, **settings)
        _check_backbone(model, info["missing_keys"], folder)
        return Classifier.of(with_lora(model, lora), tokenizer)


def check_folder(weights: Path | str) -> Path:
    """Refuse a path that is not a folder."""
    if not Path(weights).is_dir():
        raise InputError(f"{weights} is not a folder: name one with a model and its tokenizer.")
    return Path(weights)


def _check_backbone(model: Any, missing: Iterable[str], folder: Path | str) -> None:
    """Refuse a model with random weights anywhere but in its head, which would go unnoticed."""
    backbone = f"{model.base_model_prefix}."
    lacking = sorted(name for name in missing if name.startswith(backbone) and ".pooler." not in name)
    if lacking:
        raise InputError(
            f"the weights in {folder} are not those of its config.json, for {lacking[0]} is not among them: "
            "fill it with save_pretrained of both model and tokenizer."
        )


def _from_pretrained(kind: Any, folder: Path | str, what: str, **settings: Any) -> Any:
    place = check_folder(folder)
    try:
        with quiet_transformers():
            return kind.from_pretrained(str(place), local_files_only=True, **settings)
    except Exception as error:  # of several packages, without a common base class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{folder} does not hold {what} that transformers can read ({reason}): fill it with "
            "save_pretrained of both model and tokenizer."
        ) from error
