"""ResNet-18 for small images: a 3 x 3 stem, and GroupNorm, which keeps no statistics of clients.

He et al. 2016; GroupNorm in place of BatchNorm for clients that differ as in Hsieh et al. 2020.
"""

from torch import Tensor, nn

from offbeat.errors import InputError

_STAGES = ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1))
_GROUPS = 32


class Residual(nn.Module):
    """Two convolutions beside a short cut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.GroupNorm(_GROUPS, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.GroupNorm(_GROUPS, width),
        )
        same = stride == 1 and before == width
        self.short = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.GroupNorm(_GROUPS, width))
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """(examples, before, height, width) to (examples, width, height / stride, width / stride)."""
        outputs: Tensor = (self.path(inputs) + self.short(inputs)).relu()
        return outputs


def resnet18(shape: tuple[int, ...], classes: int) -> nn.Module:
    """11,173,962 weights on three channels and 10 classes."""
    if len(shape) != 3 or min(shape[1:]) < 8:
        raise InputError(
            f"the model 'resnet18' cannot take inputs of shape {shape}: use images, or the model 'mlp'."
        )
    widths = [64, *(width for width, _ in _STAGES)]
    blocks = [
        Residual(before, width, stride) for before, (width, stride) in zip(widths, _STAGES, strict=False)
    ]
    return nn.Sequential(
        nn.Conv2d(shape[0], 64, 3, 1, 1, bias=False),
        nn.GroupNorm(_GROUPS, 64),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, classes),
    )
