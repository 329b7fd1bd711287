"""Layers that take the place of torch's own where clients are computed together.

Dropout and random crops draw from a key, so that every engine draws the same numbers. A generator has
a state, which can neither be mapped over clients nor recorded in a graph. Here each element's position
and the key are hashed to 32 bits; the key is a buffer of the layer that is incremented at each call, and
engines set it for each task.

Convolutions become matrix products of patches (im2col) in the channels-last layout. Under `vmap` a
convolution becomes one with a group per client, and GPU libraries are slow at many groups of few channels;
with patches as rows it is one batched product, and so are both of its gradients.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

_HASH_MULTIPLIER = 0x9E3779B1 - 2**32  # signed 32-bit integers, whose products wrap around
_HASH_MIX = 0x45D9F3B

_Pair: TypeAlias = tuple[int, int]
_Window: TypeAlias = tuple[_Pair, _Pair, _Pair]  # kernel size, stride and dilation, each (height, width)


class KeyedDropout(nn.Dropout):
    """Dropout with the same distribution as `nn.Dropout`, drawn by a key."""

    key: Tensor  # () int64

    def forward(self, input: Tensor) -> Tensor:
        """Set each element to zero with probability p and scale the others."""
        if not self.training or self.p == 0:
            return input
        if self.p == 1:
            return input * 0
        kept = hash_bits(input, self.key) >= round(self.p * 2**32) - 2**31
        self.key.add_(1)
        return input * (kept.to(input.dtype) * (1 / (1 - self.p)))


class Standardise(nn.Module):
    """Subtract a mean and divide by a scale, for each feature of a table or channel of images."""

    mean: Tensor  # (features,) float64
    scale: Tensor

    def __init__(self, mean: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean.double())
        self.register_buffer("scale", scale.double())

    def forward(self, input: Tensor) -> Tensor:
        """(examples, features, ...) to the same; computed in float64, where a mean may be large."""
        shape = (-1, *(1,) * (input.ndim - 2))
        scaled = (input.double() - self.mean.view(shape)) / self.scale.view(shape)
        return scaled.to(input.dtype)


SCALING = ("standardise.mean", "standardise.scale")  # what the state of a standardised module has


def standardised(module: nn.Module, mean: Tensor, scale: Tensor) -> nn.Module:
    """The module behind a layer that scales its inputs."""
    return nn.Sequential(OrderedDict(standardise=Standardise(mean, scale), module=module))


def below_scaling(patterns: Iterable[str]) -> tuple[str, ...]:
    """Patterns for the layers of a module as those of the standardised one."""
    return tuple(f"module.{pattern}" for pattern in patterns)


class RandomCropFlip(nn.Module):
    """Crop each image at random after padding it, and mirror every second one, in training alone.

    The usual augmentation of CIFAR (torchvision's `RandomCrop(size, padding)` and `RandomHorizontalFlip`),
    drawn by a key. `fill` is the value of the padding for each channel, such as that of black.
    """

    key: Tensor  # () int64
    fill: Tensor  # (channels, 1, 1)

    def __init__(self, fill: Tensor, padding: int = 4) -> None:
        super().__init__()
        self.padding = padding
        self.register_buffer("fill", fill.reshape(-1, 1, 1), persistent=False)
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """(examples, channels, height, width) to the same."""
        if not self.training:
            return input
        count, _, height, width = input.shape
        draws = hash_bits(input.new_zeros(count, 3, dtype=torch.int32), self.key)
        self.key.add_(1)
        places = 2 * self.padding + 1
        down, right = ((((draws[:, axis] >> 8) & 0xFFFFFF) % places)[:, None] for axis in (0, 1))
        rows = down + torch.arange(height, device=input.device)
        columns = torch.arange(width, device=input.device)
        columns = right + torch.where(draws[:, 2, None] < 0, width - 1 - columns, columns)
        padded = pad(input - self.fill, [self.padding] * 4) + self.fill
        cropped = padded.gather(
            2, rows[:, None, :, None].long().expand(-1, padded.shape[1], -1, padded.shape[3])
        )
        index = columns[:, None, None, :].long().expand(-1, padded.shape[1], height, -1)
        return cropped.gather(3, index)


def with_keyed_dropout(module: nn.Module) -> nn.Module:
    """The module itself, with its `nn.Dropout` layers replaced by `KeyedDropout`."""
    device = next((p.device for p in module.parameters()), None)
    for part in module.modules():
        if type(part) is nn.Dropout:
            part.__class__ = KeyedDropout
            part.register_buffer("key", torch.zeros((), dtype=torch.int64, device=device))
    return module


def dropout_keys(module: nn.Module) -> list[str]:
    """The names of the buffers that hold the keys of dropout and of random crops."""
    keyed = (KeyedDropout, RandomCropFlip)
    return [f"{path}.key".lstrip(".") for path, part in module.named_modules() if isinstance(part, keyed)]


def hash_bits(input: Tensor, key: Tensor) -> Tensor:
    """32 bits for each element; the upper bits, which decide, depend on its whole position and the key."""
    short = ((key ^ (key >> 31)) & 0x7FFFFFFF).to(torch.int32)
    bits = torch.arange(input.numel(), dtype=torch.int32, device=input.device).view(input.shape)
    # not a constant, which the compiler would fold into 64-bit index arithmetic, and not a sum, whose
    # constants it rounds to float32
    multiplier = (short & 0) ^ _HASH_MULTIPLIER
    bits = bits * multiplier + short
    for _ in range(2):
        bits = (((bits >> 16) & 0xFFFF) ^ bits) * _HASH_MIX
    return bits


class MatmulConv2d(nn.Conv2d):
    """`nn.Conv2d` as a product of patches and weights, which `vmap` turns into one batched product."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        edges = self._reversed_padding_repeated_twice
        if self.padding_mode == "zeros":
            images = input.permute(0, 2, 3, 1)
            images = pad(images, (0, 0, *edges)) if any(edges) else images
        else:
            images = pad(input, edges, mode=self.padding_mode).permute(0, 2, 3, 1)
        if torch.is_autocast_enabled(input.device.type) and input.dtype == torch.float32:
            images = images.to(torch.get_autocast_dtype(input.device.type))
        window: _Window = (_pair(self.kernel_size), _pair(self.stride), _pair(self.dilation))
        patches = extract_patches(images, window)  # (N, H, W, size, channels)
        batch, groups = patches.shape[:3], self.groups
        # (groups, N * H * W, size * channels / groups) @ (groups, size * channels / groups, out / groups)
        rows = (
            patches.reshape(*patches.shape[:4], groups, -1).movedim(-2, 0).reshape(groups, batch.numel(), -1)
        )
        columns = weight.view(groups, -1, *weight.shape[1:]).permute(0, 3, 4, 2, 1).flatten(1, 3)
        if groups == 1:
            outputs: Tensor = (rows[0] @ columns[0]).view(*batch, -1)
        else:
            outputs = (rows @ columns).movedim(0, 1).reshape(*batch, -1)
        if bias is not None:
            outputs = outputs + bias.to(outputs.dtype)
        return outputs.permute(0, 3, 1, 2)


def with_matmul_convolutions(module: nn.Module, max_patch: float = math.inf) -> nn.Module:
    """A copy of the module; `nn.Conv2d` layers with at most `max_patch` elements per patch are products."""
    copied = copy.deepcopy(module)
    for part in copied.modules():
        if type(part) is nn.Conv2d and part.weight[0].numel() <= max_patch:
            part.__class__ = MatmulConv2d
    return copied


def extract_patches(images: Tensor, window: _Window) -> Tensor:
    """(N, height, width, channels) to (N, H, W, size of the kernel, channels)."""
    if window == ((1, 1), (1, 1), (1, 1)):
        return images.unsqueeze(3)
    patches: Tensor = _Patches.apply(images, window)  # type: ignore[no-untyped-call]
    return patches


class _Patches(torch.autograd.Function):
    """Patches of images; the gradient is a sum of shifted images, one for each element of the kernel."""

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, window: _Window) -> Tensor:
        for axis, size, stride, dilation in zip((1, 2), *window, strict=True):
            images = images.unfold(axis, (size - 1) * dilation + 1, stride)[..., ::dilation]
        return images.permute(0, 1, 2, 4, 5, 3).flatten(3, 4).contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.shape, ctx.window = inputs[0].shape, inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        parts, shape = iter(grad.unbind(3)), ctx.shape
        shifts = [
            [(at * dilation, length - (size - 1 - at) * dilation, stride) for at in range(size)]
            for length, size, stride, dilation in zip(shape[1:3], *ctx.window, strict=True)
        ]
        images: Tensor | None = None
        for row in shifts[0]:
            rows: Tensor | None = None
            for column in shifts[1]:
                part = next(parts)
                wide = (shape[0], part.shape[1], *shape[2:])
                part = torch.ops.aten.slice_backward(part, wide, 2, *column)
                rows = part if rows is None else rows + part
            assert rows is not None
            whole = torch.ops.aten.slice_backward(rows, shape, 1, *row)
            images = whole if images is None else images + whole
        assert images is not None
        return images, None


def _pair(numbers: Any) -> _Pair:
    up, across = (int(number) for number in numbers)
    return up, across
