"""Convolutions as products of matrices, which map over clients well.

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

SMALL, LARGE = 32, 1024  # numbers in a patch


class Columns(nn.Conv2d):
    """The same function of the same parameters, for small patches."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        outputs = _product(input, weight, _pair(self.stride), _pair(self.padding))
        return outputs if bias is None else outputs + bias[:, None, None]


class ForwardColumns(nn.Conv2d):
    """The same function of the same parameters, for larger ones."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shape = _pair(self.stride), _pair(self.padding)
        outputs: Tensor = _Forward.apply(input, weight, *shape)  # type: ignore[no-untyped-call]
        return outputs if bias is None else outputs + bias[:, None, None]


def as_columns(module: nn.Module, most: int = SMALL) -> nn.Module:
    """A copy in which convolutions with at most so many numbers in a patch are computed so."""
    copied = copy.deepcopy(module)
    for part in copied.modules():
        if _suits(part, most):
            part.__class__ = Columns if _patch(part) <= SMALL else ForwardColumns
    return copied


class _Forward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
        return _product(input, weight, stride, padding)

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


def _product(input: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
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


def _patch(part: nn.Module) -> int:
    assert isinstance(part, nn.Conv2d)
    return math.prod(part.weight.shape[1:])


def _suits(part: nn.Module, most: int) -> bool:
    return (
        type(part) is nn.Conv2d
        and part.groups == 1
        and part.dilation == (1, 1)
        and part.padding_mode == "zeros"
        and not isinstance(part.padding, str)
        and _patch(part) <= most
    )
