"""Dropout whose draws are a function of a key, so that every engine draws the same.

A generator has a state, which cannot be mapped over clients nor recorded in a graph. Here a number's
place and the key are mixed by a hash into 32 bits, and the key, a buffer of the layer, counts on
with each call. Engines set it anew for each task.
"""

import torch
from torch import Tensor, nn

_SPREAD = 0x9E3779B1 - 2**32  # numbers of 32 bits with a sign: products wrap around
_MIX = 0x45D9F3B


class KeyedDropout(nn.Dropout):
    """The same law as the layer it stands for."""

    key: Tensor  # () int64

    def forward(self, input: Tensor) -> Tensor:
        """Each number zero with probability p, the others scaled."""
        if not self.training or self.p == 0:
            return input
        if self.p == 1:
            return input * 0
        kept = _mixed(input, self.key) >= round(self.p * 2**32) - 2**31
        self.key.add_(1)
        return input * (kept.to(input.dtype) * (1 / (1 - self.p)))


def keyed(module: nn.Module) -> nn.Module:
    """The module itself, its plain dropout layers made so."""
    device = next((p.device for p in module.parameters()), None)
    for part in module.modules():
        if type(part) is nn.Dropout:
            part.__class__ = KeyedDropout
            part.register_buffer("key", torch.zeros((), dtype=torch.int64, device=device))
    return module


def keys(module: nn.Module) -> list[str]:
    """The names of the buffers that hold keys."""
    return [f"{path}.key".lstrip(".") for path, part in module.named_modules() if type(part) is KeyedDropout]


def _mixed(input: Tensor, key: Tensor) -> Tensor:
    """32 bits for each number; the upper ones, which decide, depend on all of its place and the key."""
    short = ((key ^ (key >> 31)) & 0x7FFFFFFF).to(torch.int32)
    bits = torch.arange(input.numel(), dtype=torch.int32, device=input.device).view(input.shape)
    bits = bits * _SPREAD + short
    for _ in range(2):
        bits = (((bits >> 16) & 0xFFFF) ^ bits) * _MIX
    return bits
