"""Layers that take the place of torch's own where clients are computed together.

Dropout and random crops draw from a key, so that every engine draws the same numbers. A generator has
a state, which can neither be mapped over clients nor recorded in a graph. Here each element's position
and the key are hashed to 32 bits; the key is a buffer of the layer that is incremented at each call, and
engines set it for each task.

Convolutions become matrix products of patches (im2col) in the channels-last layout. Under `vmap` a
convolution becomes one with a group per client, and GPU libraries are slow at many groups of few channels;
with patches as rows it is one batched product, and so are both of its gradients.

On a CPU, convolutions of one client are faster in the channels-last layout, which later layers keep. Torch
copies images between layouts in the gradient of max pooling and in dropout; here gradient and mask have that
layout at once. ReLU is taken after max pooling, where fewer numbers are left. The weight gradient of a large
linear layer is the product of two small factors; a step of SGD adds it to the weight without writing it to
memory. The layer's other products are oneDNN's, which are twice as fast on some processors as those of the
library that torch uses for them.
"""

import copy
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear, pad

log = logging.getLogger(__name__)

_HASH_MULTIPLIER = 0x9E3779B1 - 2**32  # signed 32-bit integers, whose products wrap around
_HASH_MIX = 0x45D9F3B

_LARGE_WEIGHT = 1 << 18  # elements from which on memory limits a linear layer
_FEW_ROWS = 4  # of inputs, below which oneDNN's products are slower
_ONEDNN_LINEAR = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # None in a torch without oneDNN

Factors: TypeAlias = dict[int, list[tuple[Tensor, Tensor]]]  # by id of a weight: gradients and inputs, by row
_factors: ContextVar[Factors | None] = ContextVar("factors", default=None)

Result = TypeVar("Result")
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
            outputs = (rows[0] @ columns[0]).view(*batch, -1)
        else:
            outputs = (rows @ columns).movedim(0, 1).reshape(*batch, -1)
        if bias is not None:
            outputs = _AddedBias.apply(outputs, bias.to(outputs.dtype))  # type: ignore[no-untyped-call]
        permuted: Tensor = outputs.permute(0, 3, 1, 2)
        return permuted


class _AddedBias(torch.autograd.Function):
    """Images with their channels last and a bias, whose gradient is summed in two parts.

    The compiler makes a slow kernel of the sum over all pixels of all images at once.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, bias: Tensor) -> Tensor:
        return images + bias

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.sum(2).sum((0, 1))


def with_matmul_convolutions(module: nn.Module, max_patch: float = math.inf) -> nn.Module:
    """A copy of the module; `nn.Conv2d` layers with at most `max_patch` elements per patch are products."""
    copied = copy.deepcopy(module)
    for part in copied.modules():
        if type(part) is nn.Conv2d and part.weight[0].numel() <= max_patch:
            part.__class__ = MatmulConv2d
    return copied


class ChannelsLastConv2d(nn.Conv2d):
    """`nn.Conv2d` of images in the channels-last layout, whatever layout they come in."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        images = input.contiguous(memory_format=torch.channels_last) if input.ndim == 4 else input
        outputs: Tensor = super()._conv_forward(images, weight, bias)
        return outputs


def with_channels_last(module: nn.Module) -> nn.Module:
    """A copy of the module, which shares its tensors, whose `nn.Conv2d` layers compute with channels last."""
    copied = copy_sharing_tensors(module)
    for part in copied.modules():
        if type(part) is nn.Conv2d:
            part.__class__ = ChannelsLastConv2d
    return copied


def copy_sharing_tensors(module: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are those of the module."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


class ChannelsLastMaxPool2d(nn.MaxPool2d):
    """`nn.MaxPool2d` whose gradient in training keeps the channels-last layout; the numbers are the same."""

    def forward(self, input: Tensor) -> Any:
        """As `nn.MaxPool2d`."""
        layout = torch.channels_last
        plain = self.return_indices or not self.training
        if plain or input.ndim != 4 or not input.is_contiguous(memory_format=layout):
            return super().forward(input)
        sides = (self.kernel_size, self.stride, self.padding, self.dilation)
        window = [(side,) * 2 if isinstance(side, int) else _pair(side) for side in sides]
        return _ChannelsLastMaxPool.apply(input, *window, self.ceil_mode)  # type: ignore[no-untyped-call]


class PoolingFirst(nn.Sequential):
    """`nn.Sequential` that takes ReLU after the max pooling that follows it; the numbers are the same."""

    def forward(self, input: Any) -> Any:
        """As `nn.Sequential`."""
        layers = list(self)
        for place in range(len(layers) - 1):
            first, second = layers[place : place + 2]
            if _can_swap(first, second):
                layers[place : place + 2] = second, first
        for layer in layers:
            input = layer(input)
        return input


def _can_swap(first: nn.Module, second: nn.Module) -> bool:
    """Whether these are ReLU and max pooling, and nothing observes what is between them."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return (
        type(first) is nn.ReLU
        and type(second) in (nn.MaxPool2d, ChannelsLastMaxPool2d)
        and not second.return_indices
        and not any(getattr(layer, name) for layer in (first, second) for name in hooks)
    )


class SameLayoutDropout(KeyedDropout):
    """`KeyedDropout` whose mask has its input's layout in memory; the numbers are the same."""

    def forward(self, input: Tensor) -> Tensor:
        """As `KeyedDropout`."""
        if not self.training or self.p in (0, 1):
            return super().forward(input)
        key = int(self.key)
        self.key.add_(1)
        bits = _multiplied_positions(input.shape, input.stride()) + ((key ^ (key >> 31)) & 0x7FFFFFFF)
        high = torch.empty_like(bits)
        for _ in range(2):  # as `hash_bits`
            torch.bitwise_right_shift(bits, 16, out=high)
            bits.bitwise_xor_(high.bitwise_and_(0xFFFF)).mul_(_HASH_MIX)
        # as integers, since torch's comparison to booleans or to floating point is slow
        mask = bits.ge_(round(self.p * 2**32) - 2**31).to(input.dtype).mul_(1 / (1 - self.p))
        masked: Tensor = _Masked.apply(input, mask)  # type: ignore[no-untyped-call]
        return masked


@lru_cache(maxsize=8)
def _multiplied_positions(shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """The position of each element times the hash's multiplier, in a layout like this one."""
    positions = torch.arange(shape.numel(), dtype=torch.int32).mul_(_HASH_MULTIPLIER).view(shape)
    layout = torch.empty_strided(shape, strides, dtype=torch.int32, device="meta")
    return torch.empty_like(layout, device="cpu").copy_(positions)


class _Masked(torch.autograd.Function):
    """A product with a mask, whose gradient has the mask's layout."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return input * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        if grad.stride() == mask.stride():
            return grad * mask, None
        return torch.empty_like(mask).copy_(grad).mul_(mask), None


class FactoredLinear(nn.Linear):
    """`nn.Linear` whose weight has no gradient inside `collect_factors`, which is given its factors."""

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Linear`."""
        factors = _factors.get()
        if factors is None or torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        outputs: Tensor = _Factored.apply(input, self.weight, self.bias, factors)  # type: ignore[no-untyped-call]
        return outputs


@contextmanager
def collect_factors(wanted: bool = True) -> Iterator[Factors]:
    """The weight gradients of layers that are called in here, as factors, once the backward pass is done."""
    factors: Factors = {}
    token = _factors.set(factors if wanted else None)
    try:
        yield factors
    finally:
        _factors.reset(token)


class _Factored(torch.autograd.Function):
    """A linear layer; the gradient of its weight is `gradients.T @ inputs`."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, factors: Factors) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.place = factors.setdefault(id(weight), [])
        return _linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[1]:
            ctx.place.append((rows, input.reshape(-1, input.shape[-1])))
        return (
            _linear(grad, weight.t(), None) if ctx.needs_input_grad[0] else None,
            None,
            rows.sum(0) if ctx.needs_input_grad[2] else None,
            None,
        )


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear`, by oneDNN where that is faster."""
    rows = input.numel() // max(1, input.shape[-1])
    if _ONEDNN_LINEAR is None or input.dtype != torch.float32 or rows < _FEW_ROWS:
        return linear(input, weight, bias)
    outputs: Tensor = _ONEDNN_LINEAR(input, weight, bias, "none", [], "")
    return outputs


def for_one_client(module: nn.Module) -> nn.Module:
    """A copy of the module, which shares its tensors, for plain autograd on a CPU, or for evaluation."""
    copied = with_channels_last(module)
    for part in copied.modules():
        if type(part) is nn.MaxPool2d:
            part.__class__ = ChannelsLastMaxPool2d
        elif type(part) is nn.Sequential and any(map(_can_swap, part, list(part)[1:])):
            part.__class__ = PoolingFirst
        elif type(part) is KeyedDropout:
            part.__class__ = SameLayoutDropout
        elif type(part) is nn.Linear and part.weight.numel() >= _LARGE_WEIGHT:
            part.__class__ = FactoredLinear
    return copied


class FasterModule:
    """A copy of a module with faster layers, for which the original stands in where they do not suit it.

    They keep another layout of images in memory, and a module whose own code has a `view` of images, as many
    do, needs torch's. An error that is the module's own is raised by the original as well. `differs` is
    whether any layer was replaced.
    """

    def __init__(self, original: nn.Module, replace: Callable[[nn.Module], nn.Module] | None) -> None:
        self._original = original
        self.module = original if replace is None else replace(original)
        self.differs = [*map(type, self.module.modules())] != [*map(type, original.modules())]

    def compute(self, function: Callable[[nn.Module], Result]) -> Result:
        """A function of the module, with the same random draws for either."""
        if self.module is self._original:
            return function(self._original)
        gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        recording = gpu and torch.cuda.is_current_stream_capturing()
        state = torch.get_rng_state()
        on_gpu = torch.cuda.get_rng_state() if gpu and not recording else None
        try:
            return function(self.module)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if recording:
                raise  # a recording that failed cannot go on
            reason = (str(error).splitlines() or [""])[0]
        torch.set_rng_state(state)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)
        result = function(self._original)
        self.module = self._original
        log.info("this module keeps torch's own layers, since faster ones do not suit it: %s", reason)
        return result


_Places: TypeAlias = dict[str, tuple[dict[str, Any], str]]  # by full name: where a module has its tensor
_places: WeakKeyDictionary[nn.Module, _Places] = WeakKeyDictionary()


def call_with(module: nn.Module, tensors: dict[str, Tensor], args: tuple[Any, ...], kwargs: Any) -> Any:
    """`functional_call` of a module without tied weights; where tensors belong is looked up only once."""
    if torch.compiler.is_compiling():  # which knows `functional_call`
        return functional_call(module, tensors, args, kwargs, tie_weights=False)
    places = _places.get(module)
    if places is None:
        places = _places[module] = _find_places(module)
    if not tensors.keys() <= places.keys():
        return functional_call(module, tensors, args, kwargs, tie_weights=False)
    held = []
    try:
        for name, tensor in tensors.items():
            owner, key = places[name]
            held.append((owner, key, owner[key]))
            owner[key] = tensor
        return module(*args, **kwargs)
    finally:
        for owner, key, own in held:
            owner[key] = own


def _find_places(module: nn.Module) -> _Places:
    """Of parameters and buffers; none of a script, which `functional_call` refuses."""
    return {
        f"{path}.{key}".lstrip("."): (owner, key)
        for path, part in module.named_modules()
        for owner in (part._parameters, part._buffers)
        if type(owner) is dict
        for key in owner
    }


class _ChannelsLastMaxPool(torch.autograd.Function):
    """Torch's own kernels; given where to write, the second one needs no copies."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, *window: Any) -> Tensor:
        pooled, indices = torch.ops.aten.max_pool2d_with_indices(images, *window)
        ctx.save_for_backward(images, indices)
        ctx.window = window
        return pooled  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        images, indices = ctx.saved_tensors
        out = torch.empty_like(images)
        torch.ops.aten.max_pool2d_with_indices_backward.grad_input(
            grad.contiguous(memory_format=torch.channels_last),
            images,
            *ctx.window,
            indices,
            grad_input=out,
        )
        return out, *(None for _ in ctx.window)


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
