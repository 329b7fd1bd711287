"""Text as rows of token ids."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from offbeat.errors import InputError
from offbeat.language.packages import package, quiet

PAD, UNKNOWN, START, SEPARATOR = range(4)
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def learn_tokenizer(texts: Iterable[str], size: int) -> Any:
    """A tokenizer of the text's most frequent words; other words are spelled.

    Ties go by the alphabet, so that the same text gives the same ids, which the trainers of `tokenizers` do
    not promise.
    """
    tokenizers = package("tokenizers")
    normal = tokenizers.normalizers.BertNormalizer(lowercase=True)
    split = tokenizers.pre_tokenizers.BertPreTokenizer()
    whole = normal.normalize_str("\n".join(texts))
    counts = Counter(word for word, _ in split.pre_tokenize_str(whole))
    symbols = sorted({symbol for word in counts for symbol in word})
    pieces = dict.fromkeys((*_SPECIAL, *symbols, *(f"##{symbol}" for symbol in symbols)))
    if len(pieces) > size:
        raise InputError(f"{size} tokens are too few for the text's {len(symbols)} symbols: ask for more.")
    words = (word for word, _ in sorted(counts.items(), key=lambda one: (-one[1], one[0])))
    pieces |= dict.fromkeys(islice((word for word in words if word not in pieces), size - len(pieces)))
    ids = {piece: number for number, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(ids, unk_token=_SPECIAL[UNKNOWN]))
    made.normalizer, made.pre_tokenizer = normal, split
    made.post_processor = tokenizers.processors.BertProcessing(
        (_SPECIAL[SEPARATOR], SEPARATOR), (_SPECIAL[START], START)
    )
    pad, unknown, start, separator = _SPECIAL
    return package("transformers").PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, unk_token=unknown, cls_token=start, sep_token=separator
    )


def encode(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None = None, *, length: int
) -> Tensor:
    """(texts, length) token ids, cut or padded at the end; `pairs` are second sentences."""
    if not texts:
        return torch.empty(0, length, dtype=torch.int32)
    with quiet():
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
