"""Dropout whose draws are a function of a key, so that every engine draws the same.

A generator has a state, which cannot be mapped over clients nor recorded in a graph. Here a number's
place and the key are mixed by a hash into 32 bits, and the key, a buffer of the layer, counts on
with each call. Engines set it anew for each task.

Convolutions as products of matrices, which map over clients well.

Under `vmap` a convolution becomes one with a group per client, and GPU libraries are slow at many
groups of few channels. Patches laid out as columns make it one batched product instead. Where a
patch is small, its gradients are taken through the same product; where it is not, only the way
forward is a product, and the way back is the library's, which has fast kernels for that.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

_HASH_MULTIPLIER = 0x9E3779B1 - 2**32  # numbers of 32 bits with a sign: products wrap around
_HASH_MIX = 0x45D9F3B


class KeyedDropout(nn.Dropout):
    """The same law as the layer it stands for."""

    key: Tensor  # () int64

    def forward(self, input: Tensor) -> Tensor:
        """Each number zero with probability p, the others scaled."""
        if not self.training or self.p == 0:
            return input
        if self.p == 1:
            return input * 0
        kept = _hash_bits(input, self.key) >= round(self.p * 2**32) - 2**31
        self.key.add_(1)
        return input * (kept.to(input.dtype) * (1 / (1 - self.p)))


def with_keyed_dropout(module: nn.Module) -> nn.Module:
    """The module itself, its plain dropout layers made so."""
    device = next((p.device for p in module.parameters()), None)
    for part in module.modules():
        if type(part) is nn.Dropout:
            part.__class__ = KeyedDropout
            part.register_buffer("key", torch.zeros((), dtype=torch.int64, device=device))
    return module


def dropout_keys(module: nn.Module) -> list[str]:
    """The names of the buffers that hold keys."""
    return [f"{path}.key".lstrip(".") for path, part in module.named_modules() if type(part) is KeyedDropout]


def _hash_bits(input: Tensor, key: Tensor) -> Tensor:
    """32 bits for each number; the upper ones, which decide, depend on all of its place and the key."""
    short = ((key ^ (key >> 31)) & 0x7FFFFFFF).to(torch.int32)
    bits = torch.arange(input.numel(), dtype=torch.int32, device=input.device).view(input.shape)
    bits = bits * _HASH_MULTIPLIER + short
    for _ in range(2):
        bits = (((bits >> 16) & 0xFFFF) ^ bits) * _HASH_MIX
    return bits


SMALL_PATCH, LARGE_PATCH = 32, 1024  # numbers in a patch


class Im2colConv2d(nn.Conv2d):
    """The same function of the same parameters, for small patches."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        outputs = _im2col_conv(input, weight, _pair(self.stride), _pair(self.padding))
        return outputs if bias is None else outputs + bias[:, None, None]


class Im2colForwardConv2d(nn.Conv2d):
    """The same function of the same parameters, for larger ones."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shape = _pair(self.stride), _pair(self.padding)
        outputs: Tensor = _Im2colForward.apply(input, weight, *shape)  # type: ignore[no-untyped-call]
        return outputs if bias is None else outputs + bias[:, None, None]


def with_im2col(module: nn.Module, most: int = SMALL_PATCH) -> nn.Module:
    """A copy in which convolutions with at most so many numbers in a patch are computed so."""
    copied = copy.deepcopy(module)
    for part in copied.modules():
        if _is_supported(part, most):
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
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        stride, padding = ctx.shape
        slope = slope.to(ctx.saved_tensors[0].dtype)  # autocast may have rounded it
        needed = [*ctx.needs_input_grad[:2], False]
        inputs, weights, _ = torch.ops.aten.convolution_backward(
            slope, *ctx.saved_tensors, None, stride, padding, (1, 1), False, (0, 0), 1, needed
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


def _is_supported(part: nn.Module, most: int) -> bool:
    return (
        type(part) is nn.Conv2d
        and part.groups == 1
        and part.dilation == (1, 1)
        and part.padding_mode == "zeros"
        and not isinstance(part.padding, str)
        and _patch_size(part) <= most
    )
