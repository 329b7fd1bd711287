"""The optional packages without their chatter, or one sentence on how to get them.

Text as rows of token ids.

A classifier of `transformers` as a function of token ids.

Adapters of low rank (Hu et al. 2021) on a frozen model.

BERT with adapters, from random weights.

Weights and tokenizers from a folder that `save_pretrained` wrote, or that was downloaded whole.

Transformers of Hugging Face as modules to train: token ids in, scores out, adapters on a frozen body.

`transformers`, `peft` and `tokenizers` are imported when something here is called.
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


def optional_package(name: str) -> Any:
    """A package of the extra `language`."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(
            f"transformers need the package {error.name}: install it with pip install 'offbeat[language]'."
        ) from None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """A stretch without progress bars and advice of `transformers`, which then speaks as it did before."""
    voice = optional_package("transformers.utils.logging")
    level, bars = voice.get_verbosity(), voice.is_progress_bar_enabled()
    voice.set_verbosity_error()
    voice.disable_progress_bar()
    try:
        yield
    finally:
        voice.set_verbosity(level)
        if bars:
            voice.enable_progress_bar()


PAD, UNKNOWN, START, SEPARATOR = range(4)
_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def train_tokenizer(texts: Iterable[str], size: int) -> Any:
    """A tokenizer of the text's most frequent words; other words are spelled.

    Ties go by the alphabet, so that the same text gives the same ids, which the trainers of `tokenizers` do
    not promise.
    """
    tokenizers = optional_package("tokenizers")
    normal = tokenizers.normalizers.BertNormalizer(lowercase=True)
    split = tokenizers.pre_tokenizers.BertPreTokenizer()
    whole = normal.normalize_str("\n".join(texts))
    counts = Counter(word for word, _ in split.pre_tokenize_str(whole))
    symbols = sorted({symbol for word in counts for symbol in word})
    pieces = dict.fromkeys((*_SPECIAL_TOKENS, *symbols, *(f"##{symbol}" for symbol in symbols)))
    if len(pieces) > size:
        raise InputError(f"{size} tokens are too few for the text's {len(symbols)} symbols: ask for more.")
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
    """(texts, length) token ids, cut or padded at the end; `pairs` are second sentences."""
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
    """Token ids to scores: padding is not attended to, and a second sentence is marked as one.

    The model is any of `transformers` for sequence classification, with adapters of `peft` or without.
    Where it computes attention in the eager way and draws nothing, clients are computed together.
    """

    def __init__(self, model: nn.Module, pad: int, separator: int | None = None) -> None:
        super().__init__()
        self.model = model
        self._pad = pad
        settings: Any = model.config
        self._separator = separator if getattr(settings, "type_vocab_size", 0) > 1 else None
        self._wide = self._takes_wide(getattr(settings, "vocab_size", 3))

    @classmethod
    def of(cls, model: nn.Module, tokenizer: Any) -> "Classifier":
        """With the tokenizer's padding and separator."""
        if tokenizer.pad_token_id is None:
            raise InputError("the tokenizer has no padding token: set its pad_token.")
        return cls(model, tokenizer.pad_token_id, tokenizer.sep_token_id)

    def forward(self, ids: Tensor) -> Tensor:
        """(examples, length) whole numbers of any type to (examples, classes)."""
        return self._scores(ids.long(), self._wide)

    def _scores(self, ids: Tensor, wide: bool) -> Tensor:
        seen = ids != self._pad
        words: dict[str, Tensor] = {
            "attention_mask": _attention_bias(seen, _model_dtype(self.model)) if wide else seen
        }
        if self._separator is not None:
            ends = (ids == self._separator).long()
            second = (ends.cumsum(-1) - ends).clamp(max=1)  # what comes after the first separator
            words["token_type_ids"] = torch.where(seen, second, 0)
        scores: Tensor = self.model(input_ids=ids, **words).logits
        return scores

    @torch.no_grad()
    def _takes_wide(self, tokens: int) -> bool:
        """Whether a mask of four axes means the same; one of two is looked into, which cannot be mapped."""
        first, second = [token for token in range(tokens) if token != self._pad][:2]
        row = [first, second, first, second]
        ids = torch.tensor([row, [*row[:2], self._pad, self._pad]], device=_model_device(self.model))
        training = self.model.training
        self.model.eval()
        try:
            narrow, wide = self._scores(ids, False), self._scores(ids, True)
            told = (narrow[0] - narrow[1]).abs().max()  # a head of zeros, say, tells nothing
            return bool((narrow - wide).abs().max() < 1e-3 * told)
        except (RuntimeError, ValueError, TypeError, IndexError):
            return False
        finally:
            self.model.train(training)


def _attention_bias(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """(examples, 1, length, length) to add to attention."""
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
    """Adapters on layers by the ends of their names; by default, those of `peft`: in BERT query and value."""

    rank: int = 1
    alpha: int = 8
    layers: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha < 1:
            raise InputError(f"rank and alpha must be at least 1, not {self.rank} and {self.alpha}.")


def with_lora(model: nn.Module, lora: Lora = Lora()) -> nn.Module:
    """The model itself, frozen, with adapters; they and the head for the classes are what is trained."""
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


VOCABULARY_SIZE = 8000  # of the vocabulary
# A frozen body of random weights tells too little of its words, so these have adapters, too.
_TINY_LORA = Lora(layers=("query", "value", "word_embeddings"))
_TINY_CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.1,  # at the usual 0.02 attention hardly changes what passes through
}


def bert_tiny(length: int, classes: int, lora: Lora = _TINY_LORA, **more: Any) -> nn.Module:
    """BERT of one layer, 32 wide; more settings are those of `BertConfig`."""
    return bert_base(length, classes, lora, **_TINY_CONFIG | more)


def bert_base(length: int, classes: int, lora: Lora = Lora(), **more: Any) -> nn.Module:
    """BERT of its usual size, whose weights torch's generator draws; nothing is dropped out."""
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
        raise InputError(f"BERT cannot be made so: {error}") from error
    return Classifier(with_lora(made, lora), PAD, SEPARATOR)


def load_tokenizer(folder: Path | str) -> Any:
    """The tokenizer of a folder."""
    tokenizer = _from_pretrained(optional_package("transformers").AutoTokenizer, folder, "a tokenizer")
    if tokenizer.pad_token_id is None:
        raise InputError(f"the tokenizer in {folder} has no padding token: set pad_token and save it.")
    return tokenizer


def load_classifier(folder: Path | str, classes: int, lora: Lora = Lora(), seed: int = 0) -> Classifier:
    """The folder's model with adapters, as a function of token ids; the seed is for what is new in it."""
    kind = optional_package("transformers").AutoModelForSequenceClassification
    tokenizer = load_tokenizer(folder)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(draws.torch_seed(seed, "model"))
        settings = {"num_labels": classes, "attn_implementation": "eager", "dtype": torch.float32}
        model, told = _from_pretrained(kind, folder, "a model", output_loading_info=True, **settings)
        _check_backbone(model, told["missing_keys"], folder)
        return Classifier.of(with_lora(model, lora), tokenizer)


def check_folder(weights: Path | str) -> Path:
    """The folder that somebody names, or one sentence."""
    if not Path(weights).is_dir():
        raise InputError(f"{weights} is not a folder: name one with a model and its tokenizer.")
    return Path(weights)


def _check_backbone(model: Any, missing: Iterable[str], folder: Path | str) -> None:
    """Refuse what would start from random weights elsewhere than at its top, of which nobody is told."""
    body = f"{model.base_model_prefix}."
    lacking = sorted(name for name in missing if name.startswith(body) and ".pooler." not in name)
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
    except Exception as error:  # of several packages, some with no base but this
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{folder} does not hold {what} that transformers can read ({reason}): fill it with "
            "save_pretrained of both model and tokenizer."
        ) from error


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
