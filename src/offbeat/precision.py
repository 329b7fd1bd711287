"""How far a GPU may round the products it computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import torch


class Precision(Enum):
    """What a GPU may round products to; sums, weights and updates keep the module's own type."""

    TORCH = "as torch is set"
    FLOAT32 = "not at all"
    TF32 = "to TensorFloat-32"
    BFLOAT16 = "to bfloat16, by autocast"


@contextmanager
def switches(precision: Precision, device: torch.device) -> Iterator[None]:
    """Torch's own switches as the precision asks, put back afterwards; a run repeats itself to the bit."""
    if device.type != "cuda":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    if precision is not Precision.TORCH:
        matmul.allow_tf32 = cudnn.allow_tf32 = precision is not Precision.FLOAT32
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before
