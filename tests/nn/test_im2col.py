"""Convolutions as products."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from offbeat.nn.layers import LARGE_PATCH, Im2colConv2d, Im2colForwardConv2d, with_im2col


@pytest.mark.parametrize(
    ("channels", "size", "stride", "padding", "bias"),
    [
        (1, 5, 1, 2, True),
        (3, 3, 1, 0, True),
        (3, 3, 2, 1, False),
        (2, 4, 3, 1, True),
        (1, 1, 1, 0, True),
        (8, 3, 1, 1, True),
        (6, 4, 3, 2, False),
    ],
)
def test_a_convolution_and_its_gradients_stay_the_same(
    channels: int, size: int, stride: int, padding: int, bias: bool
) -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Conv2d(channels, 4, size, stride, padding, bias=bias)).double()
    swapped = with_im2col(plain, LARGE_PATCH)
    assert type(swapped[0]) is (Im2colForwardConv2d if channels > 3 else Im2colConv2d)
    assert type(plain[0]) is nn.Conv2d
    inputs = torch.randn(5, channels, 11, 13, dtype=torch.float64, requires_grad=True)
    for one, other in zip(
        *(
            (made := module(inputs), *torch.autograd.grad((made**2).sum(), [inputs, *module.parameters()]))
            for module in (plain, swapped)
        ),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("channels", [3, 9])
def test_it_maps_over_clients(channels: int) -> None:
    torch.manual_seed(2)
    plain = nn.Conv2d(channels, 4, 3, padding=1).double()
    swapped = with_im2col(plain, LARGE_PATCH)
    weights = {name: torch.randn(6, *p.shape, dtype=torch.float64) for name, p in plain.named_parameters()}
    inputs = torch.randn(6, 2, channels, 8, 8, dtype=torch.float64)
    slopes = [
        vmap(grad(lambda given, x, m=module: (functional_call(m, given, (x,)) ** 2).sum()))(weights, inputs)
        for module in (plain, swapped)
    ]
    for name in weights:
        torch.testing.assert_close(slopes[0][name], slopes[1][name], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(16, 4, 3),
        nn.Conv2d(2, 4, 3, groups=2),
        nn.Conv2d(1, 4, 3, dilation=2),
        nn.Conv2d(1, 4, 3, padding="same"),
        nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect"),
        nn.Linear(3, 3),
    ],
    ids=str,
)
def test_other_layers_are_left_alone(layer: nn.Module) -> None:
    assert type(with_im2col(layer)) is type(layer)
