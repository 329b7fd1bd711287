"""A classifier of `transformers` as a function of token ids."""

from typing import Any

import torch
from torch import Tensor, nn

from offbeat.errors import InputError


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
        words: dict[str, Tensor] = {"attention_mask": _wide_mask(seen, _dtype(self.model)) if wide else seen}
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
        ids = torch.tensor([row, [*row[:2], self._pad, self._pad]], device=_device(self.model))
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


def _wide_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """(examples, 1, length, length) to add to attention."""
    hidden = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(
        ~seen, torch.finfo(dtype).min
    )
    return hidden[:, None, None, :].expand(-1, 1, seen.shape[-1], -1)


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
