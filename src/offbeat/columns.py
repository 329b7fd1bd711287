"""Convolutions of few input channels as products of matrices, which map over clients well.

Under `vmap` a convolution becomes one with a group per client, and GPU libraries are slow at groups
of one or three channels. Patches laid out as columns make it one batched product instead.
"""

import copy
import math

from torch import Tensor, nn
from torch.nn.functional import pad

_FEW = 32  # numbers in a patch; more would take too much memory


class Columns(nn.Conv2d):
    """The same function of the same parameters."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(examples, channels, height, width) to (examples, out, height, width)."""
        up, across = (int(number) for number in self.padding)
        padded = pad(input, (across, across, up, up))
        patches = padded.unfold(-2, weight.shape[-2], self.stride[0])
        patches = patches.unfold(-2, weight.shape[-1], self.stride[1])
        examples, _, rows, columns = patches.shape[:4]
        flat = patches.permute(1, 4, 5, 0, 2, 3).reshape(-1, examples * rows * columns)
        outputs = weight.flatten(1) @ flat
        if bias is not None:
            outputs = outputs + bias[:, None]
        return outputs.view(-1, examples, rows, columns).transpose(0, 1)


def as_columns(module: nn.Module) -> nn.Module:
    """A copy in which convolutions of few input channels are computed so."""
    copied = copy.deepcopy(module)
    for part in copied.modules():
        if _suits(part):
            part.__class__ = Columns
    return copied


def _suits(part: nn.Module) -> bool:
    return (
        type(part) is nn.Conv2d
        and part.groups == 1
        and part.dilation == (1, 1)
        and part.padding_mode == "zeros"
        and not isinstance(part.padding, str)
        and math.prod(part.weight.shape[1:]) <= _FEW
    )
