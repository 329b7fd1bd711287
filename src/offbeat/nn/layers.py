"""Layers that take the place of torch's own where clients are computed together.

Dropout draws from a key, so that every engine draws the same numbers. A generator has a state, which
can neither be mapped over clients nor recorded in a graph. Here each element's position and the key
are hashed to 32 bits; the key is a buffer of the layer that is incremented at each call, and engines
set it for each task.

Convolutions become matrix products (im2col). Under `vmap` a convolution becomes one with a group per
client, and GPU libraries are slow at many groups of few channels; with patches as columns it is one
batched product. For small patches the gradients go through the same product; for larger ones only the
forward pass is a product, and the backward pass uses the library's kernels, which are fast there.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

SMALL_PATCH, LARGE_PATCH = 32, 1024  # elements of a convolution's patch
_HASH_MULTIPLIER = 0x9E3779B1 - 2**32  # signed 32-bit integers, whose products wrap around
_HASH_MIX = 0x45D9F3B


class KeyedDropout(nn.Dropout):
    """Dropout with the same distribution as `nn.Dropout`, drawn by a key."""

    key: Tensor  # () int64

    def forward(self, input: Tensor) -> Tensor:
        """Set each element to zero with probability p and scale the others."""
        if not self.training or self.p == 0:
            return input
        if self.p == 1:
            return input * 0
        kept = _hash_bits(input, self.key) >= round(self.p * 2**32) - 2**31
        self.key.add_(1)
        return input * (kept.to(input.dtype) * (1 / (1 - self.p)))


def with_keyed_dropout(module: nn.Module) -> nn.Module:
    """The module itself, with its `nn.Dropout` layers replaced by `KeyedDropout`."""
    device = next((p.device for p in module.parameters()), None)
    for part in module.modules():
        if type(part) is nn.Dropout:
            part.__class__ = KeyedDropout
            part.register_buffer("key", torch.zeros((), dtype=torch.int64, device=device))
    return module


def dropout_keys(module: nn.Module) -> list[str]:
    """The names of the buffers that hold dropout keys."""
    return [f"{path}.key".lstrip(".") for path, part in module.named_modules() if type(part) is KeyedDropout]


def _hash_bits(input: Tensor, key: Tensor) -> Tensor:
    """32 bits for each element; the upper bits, which decide, depend on its whole position and the key."""
    short = ((key ^ (key >> 31)) & 0x7FFFFFFF).to(torch.int32)
    bits = torch.arange(input.numel(), dtype=torch.int32, device=input.device).view(input.shape)
    bits = bits * _HASH_MULTIPLIER + short
    for _ in range(2):
        bits = (((bits >> 16) & 0xFFFF) ^ bits) * _HASH_MIX
    return bits


class Im2colConv2d(nn.Conv2d):
    """`nn.Conv2d` as a matrix product, for small patches."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        outputs = _im2col_conv(input, weight, _pair(self.stride), _pair(self.padding))
        return outputs if bias is None else outputs + bias[:, None, None]


class Im2colForwardConv2d(nn.Conv2d):
    """`nn.Conv2d` whose forward pass is a matrix product, for larger patches."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shape = _pair(self.stride), _pair(self.padding)
        outputs: Tensor = _Im2colForward.apply(input, weight, *shape)  # type: ignore[no-untyped-call]
        return outputs if bias is None else outputs + bias[:, None, None]


def with_im2col(module: nn.Module, max_patch: int = SMALL_PATCH) -> nn.Module:
    """A copy in which convolutions with at most `max_patch` elements in a patch are matrix products."""
    copied = copy.deepcopy(module)
    for part in copied.modules():
        if _is_supported(part, max_patch):
            part.__class__ = Im2colConv2d if _patch_size(part) <= SMALL_PATCH else Im2colForwardConv2d
    return copied


class _Im2colForward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
        return _im2col_conv(input, weight, stride, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.shape = inputs[2:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        stride, padding = ctx.shape
        grad = grad.to(ctx.saved_tensors[0].dtype)  # autocast may have rounded it
        needed = [*ctx.needs_input_grad[:2], False]
        inputs, weights, _ = torch.ops.aten.convolution_backward(
            grad, *ctx.saved_tensors, None, stride, padding, (1, 1), False, (0, 0), 1, needed
        )
        return inputs, weights, None, None


def _im2col_conv(input: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
    """(examples, channels, height, width) to (examples, out, height, width)."""
    up, across = padding
    patches = pad(input, (across, across, up, up)).unfold(-2, weight.shape[-2], stride[0])
    patches = patches.unfold(-2, weight.shape[-1], stride[1])
    examples, _, rows, columns = patches.shape[:4]
    flat = patches.permute(1, 4, 5, 0, 2, 3).reshape(-1, examples * rows * columns)
    return (weight.flatten(1) @ flat).view(-1, examples, rows, columns).transpose(0, 1)


def _pair(numbers: Any) -> tuple[int, int]:
    up, across = (int(number) for number in numbers)
    return up, across


def _patch_size(part: nn.Module) -> int:
    assert isinstance(part, nn.Conv2d)
    return math.prod(part.weight.shape[1:])


def _is_supported(part: nn.Module, max_patch: int) -> bool:
    return (
        type(part) is nn.Conv2d
        and part.groups == 1
        and part.dilation == (1, 1)
        and part.padding_mode == "zeros"
        and not isinstance(part.padding, str)
        and _patch_size(part) <= max_patch
    )
