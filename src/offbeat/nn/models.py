"""The built-in models.

ResNet-18 (He et al. 2016) has a 3 x 3 stem for small images, and GroupNorm in place of BatchNorm, whose
statistics suit no client where clients differ (Hsieh et al. 2020); `resnet18-bn` has BatchNorm, whose
running statistics are averaged over the clients of a buffer. The other models keep no statistics.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from offbeat import draws
from offbeat.errors import InputError, unknown_name
from offbeat.nn.language import bert_base, bert_tiny

NAMES = ("bert-base", "bert-tiny", "charformer", "cnn", "logistic", "mlp", "resnet18", "resnet18-bn")
_TOKEN_MODELS = ("bert-base", "bert-tiny", "charformer")  # their inputs are token ids
_RESNET18_STAGES = ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1))
_NORM_GROUPS = 32


def default_model(source: str) -> str:
    """The default model of a data set.

    Args:
        source: The name of the data set.
    """
    match source:
        case "mnist" | "fashion-mnist" | "cifar10":
            return "cnn"
        case "shakespeare":
            return "charformer"
        case "mrpc" | "rte" | "sst2":
            return "bert-tiny"
        case _:
            return "mlp"


def build(name: str, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """A model for inputs of that shape (without the batch axis), initialised from the seed.

    Args:
        name: The name of the model.
        shape: The shape of one input.
        classes: The number of classes.
        seed: The seed of the initial weights.
    """
    if name not in NAMES:
        raise unknown_name("model", name, NAMES)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(draws.torch_seed(seed, "model"))
        match name:
            case "bert-base" | "bert-tiny":
                return _bert(name, shape, classes)
            case "charformer":
                return _charformer(shape, classes)
            case "cnn":
                return _cnn(shape, classes)
            case "resnet18" | "resnet18-bn":
                return resnet18(shape, classes, nn.BatchNorm2d if name == "resnet18-bn" else _group_norm)
            case "mlp":
                return _mlp(shape, classes)
            case _:
                return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def check_inputs(name: str, inputs: Tensor, classes: int) -> None:
    """Refuse pixels for a model that reads tokens, and tokens for one that does not."""
    if name in _TOKEN_MODELS and inputs.is_floating_point():
        raise InputError(f"the model '{name}' reads tokens, which these inputs are not: use the model 'mlp'.")
    if name not in _TOKEN_MODELS and not inputs.is_floating_point():
        readers = " or ".join(f"'{one}'" for one in _TOKEN_MODELS)
        raise InputError(f"the model '{name}' cannot read tokens, which these inputs are: use {readers}.")
    if name == "charformer" and int(inputs.max()) >= classes:
        raise InputError(
            f"the model 'charformer' reads as many symbols as it scores, {classes}, and these inputs go up "
            f"to number {int(inputs.max())}: use 'bert-tiny'."
        )


def _mlp(shape: tuple[int, ...], classes: int, hidden: int = 64) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.ReLU(), nn.Linear(hidden, classes)
    )


def _cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two convolutions and two linear layers: 215,370 weights for 28 x 28 pixels and 10 classes."""
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise InputError(
            f"the model 'cnn' cannot take inputs of shape {shape}: use images, or the model 'mlp'."
        )
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def _bert(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Random weights with adapters; only the adapters and the head are trained."""
    if len(shape) != 1:
        raise InputError(f"the model '{name}' cannot take inputs of shape {shape}: use rows of tokens.")
    return (bert_tiny if name == "bert-tiny" else bert_base)(shape[0], classes)


def _charformer(shape: tuple[int, ...], classes: int) -> nn.Module:
    if len(shape) != 1:
        raise InputError(f"the model 'charformer' cannot take inputs of shape {shape}: use rows of symbols.")
    return Charformer(symbols=classes, length=shape[0])


class Charformer(nn.Module):
    """A small causal transformer that predicts the character after a sequence of characters."""

    def __init__(self, symbols: int, length: int, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.symbol = nn.Embedding(symbols, width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.score = nn.Linear(width, symbols)
        nn.init.normal_(self.symbol.weight, std=0.02)

    def forward(self, rows: Tensor) -> Tensor:
        """(examples, length) integers of any type to (examples, symbols)."""
        hidden = self.symbol(rows.long()) + self.place
        scores: Tensor = self.score(self.norm(self.blocks(hidden)[:, -1]))
        return scores


class TransformerBlock(nn.Module):
    """Causal self-attention, then a feed-forward layer at each position."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """(examples, length, width) to the same."""
        split = self.mix(self.norm(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.movedim(-3, 0).transpose(
            -2, -3
        )  # each (examples, heads, length, width / heads)
        seen = _causal_attention(query, key, value)
        hidden = hidden + self.out(seen.transpose(-2, -3).flatten(-2))
        thought: Tensor = self.think(hidden)
        return hidden + thought


def _causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention, written out because torch's fused kernels do not map over clients on a CPU."""
    length = query.shape[-2]
    later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    return scores.masked_fill(later, -math.inf).softmax(-1) @ value


class ResidualBlock(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, channels: int, width: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, 1, bias=False),
            norm(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            norm(width),
        )
        same = stride == 1 and channels == width
        self.short = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), norm(width))
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """(examples, channels, height, width) to (examples, width, height / stride, width / stride)."""
        outputs: Tensor = (self.path(inputs) + self.short(inputs)).relu()
        return outputs


def _group_norm(width: int) -> nn.Module:
    return nn.GroupNorm(_NORM_GROUPS, width)


def resnet18(
    shape: tuple[int, ...], classes: int, norm: Callable[[int], nn.Module] = _group_norm
) -> nn.Module:
    """ResNet-18: 11,173,962 weights for three channels and 10 classes; `norm` makes a layer of that width."""
    if len(shape) != 3 or min(shape[1:]) < 8:
        raise InputError(
            f"the model 'resnet18' cannot take inputs of shape {shape}: use images, or the model 'mlp'."
        )
    widths = [64, *(width for width, _ in _RESNET18_STAGES)]
    blocks = [
        ResidualBlock(channels, width, stride, norm)
        for channels, (width, stride) in zip(widths, _RESNET18_STAGES, strict=False)
    ]
    return nn.Sequential(
        nn.Conv2d(shape[0], 64, 3, 1, 1, bias=False),
        norm(64),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, classes),
    )
