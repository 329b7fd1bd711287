"""Convolutions as matrix products."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from offbeat.nn.layers import MatmulConv2d, with_matmul_convolutions

LAYERS = [
    nn.Conv2d(1, 4, 5, padding=2),
    nn.Conv2d(3, 4, 3),
    nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False),
    nn.Conv2d(2, 4, 4, stride=3, padding=1),
    nn.Conv2d(1, 4, 1),
    nn.Conv2d(8, 4, 1, stride=2),
    nn.Conv2d(8, 6, (3, 2), (1, 2), (0, 1)),
    nn.Conv2d(6, 4, 4, stride=3, padding=2, bias=False),
    nn.Conv2d(1, 4, 3, dilation=2),
    nn.Conv2d(2, 4, 3, stride=2, padding=3, dilation=(1, 3)),
    nn.Conv2d(4, 6, 3, groups=2),
    nn.Conv2d(4, 8, 3, padding=1, groups=4, stride=2),
    nn.Conv2d(2, 4, 3, padding="same"),
    nn.Conv2d(2, 4, 4, padding="same", dilation=2),
    nn.Conv2d(2, 4, 3, padding="valid"),
    nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"),
    nn.Conv2d(2, 4, 3, padding=(1, 2), padding_mode="circular"),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_outputs_and_gradients_equal_those_of_the_library(
    layer: nn.Conv2d, layout: torch.memory_format
) -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(layer).double()
    replaced = with_matmul_convolutions(plain)
    assert type(replaced[0]) is MatmulConv2d
    assert type(plain[0]) is nn.Conv2d
    images = torch.randn(5, layer.in_channels, 11, 13, dtype=torch.float64).to(memory_format=layout)
    images.requires_grad_()
    for one, other in zip(
        *(
            (made := module(images), *torch.autograd.grad((made**2).sum(), [images, *module.parameters()]))
            for module in (plain, replaced)
        ),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_clients_with_weights_of_their_own_are_mapped(layer: nn.Conv2d) -> None:
    torch.manual_seed(2)
    first = nn.Conv2d(3, layer.in_channels, 1)
    plain = nn.Sequential(first, nn.ReLU(), layer).double()
    replaced = with_matmul_convolutions(plain)
    weights = {name: torch.randn(6, *p.shape, dtype=torch.float64) for name, p in plain.named_parameters()}
    images = torch.randn(6, 2, 3, 8, 8, dtype=torch.float64)
    slopes = [
        vmap(grad(lambda given, x, m=module: (functional_call(m, given, (x,)) ** 2).sum()))(weights, images)
        for module in (plain, replaced)
    ]
    for name in weights:
        torch.testing.assert_close(slopes[0][name], slopes[1][name], rtol=1e-10, atol=1e-10)


def test_other_layers_are_not_replaced() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Conv1d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1))
    assert [type(part) for part in with_matmul_convolutions(module)] == [type(part) for part in module]
