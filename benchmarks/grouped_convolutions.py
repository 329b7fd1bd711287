"""How far a GPU's convolutions are from float64 where nothing may be rounded, by the number of groups.

`vmap` over clients with weights of their own makes a convolution of one group per client. Prints the
relative error of its result and of both gradients, in float32 with TF32 off, with the library and without.
"""

import argparse
import json

import torch
from torch import Tensor
from torch.nn.functional import conv2d

GROUPS = (1, 2, 8, 16, 50, 64)
KERNELS = (3, 5, 7)
CHANNELS, OUTPUTS, EXAMPLES, SIDE = 32, 64, 10, 14


def errors(groups: int, kernel: int, device: str, cudnn: bool) -> tuple[float, ...]:
    """Of the outputs, the gradient by the inputs, and that by the weights."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(EXAMPLES, groups * CHANNELS, SIDE, SIDE, generator=generator)
    weights = 0.1 * torch.randn(groups * OUTPUTS, CHANNELS, kernel, kernel, generator=generator)
    slope = torch.randn(EXAMPLES, groups * OUTPUTS, SIDE, SIDE, generator=generator)

    def all_three(dtype: torch.dtype, place: str) -> list[Tensor]:
        x, w = (leaf.to(place, dtype).requires_grad_() for leaf in (inputs, weights))
        y = conv2d(x, w, padding=kernel // 2, groups=groups)
        return [y.detach(), *torch.autograd.grad(y, (x, w), slope.to(place, dtype))]

    with torch.backends.cudnn.flags(enabled=cudnn, benchmark=False, deterministic=True, allow_tf32=False):
        found = all_three(torch.float32, device)
    exact = all_three(torch.float64, "cpu")
    pairs = zip(found, exact, strict=True)
    return tuple(((a.cpu().double() - b).norm() / b.norm()).item() for a, b in pairs)


def main() -> None:
    """Print a table and JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="two shapes, to see that it runs")
    given = parser.parse_args()
    shapes = [(groups, kernel) for kernel in KERNELS for groups in GROUPS]
    found = []
    print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {given.device}")
    print("kernel  groups  library       outputs     by inputs    by weights")
    for groups, kernel in shapes[:2] if given.quick else shapes:
        for cudnn in (True, False):
            three = errors(groups, kernel, given.device, cudnn)
            found.append({"kernel": kernel, "groups": groups, "cudnn": cudnn, "errors": three})
            row = "  ".join(f"{error:12.1e}" for error in three)
            print(f"{kernel}x{kernel}     {groups:4}    {'cuDNN' if cudnn else 'none ':7}{row}")
    print(json.dumps({"device": given.device, "found": found}))


if __name__ == "__main__":
    main()
