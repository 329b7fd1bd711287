"""Numbers in fixed point mod 2^32; negative ones are the upper half of the residues."""

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offbeat.errors import InputError
from offbeat.privacy.secure.terms import Terms

Residues: TypeAlias = npt.NDArray[np.uint32]
PIECE = 1 << 15  # numbers at a time, so that what is done to them is done in the cache


def check_range(values: Tensor, terms: Terms, client: int) -> None:
    """Refuse what could make a sum overflow; only the client can, for nobody else sees its numbers."""
    if not values.numel():
        return
    low, high = (float(end) for end in torch.aminmax(values))
    worst = max(abs(low), abs(high))  # NaN comes through
    if not (math.isfinite(worst) and worst * 2.0**terms.bits <= terms.limit):
        weights = f", weights of {terms.weight_bits} bits" if terms.weight_bits else ""
        raise InputError(
            f"the upload of client {client} has a value of size {worst:g}, but secure sums of up to "
            f"{terms.most} reports with {terms.bits} fractional bits{weights} hold {terms.largest:g} a "
            "coordinate: clip, or lower the bits."
        )


def encode(values: Tensor, bits: int, out: Residues, rounding: torch.Generator | None = None) -> None:
    """Flat CPU values into residues, to the nearest, ties to even; or up or down at random, unbiased."""
    whole = torch.from_numpy(out.view(np.int32))
    for start in range(0, len(values), PIECE):
        # Times a power of two is exact, so float32 is as good as the numbers that came in it.
        units = values[start : start + PIECE] * 2.0**bits
        if rounding is None:
            units.round_()
        else:
            below = units.floor()
            up = torch.rand(units.shape, generator=rounding, dtype=units.dtype) < units - below
            units = below + up
        whole[start : start + PIECE] = units


def decode(residues: Residues, unit: float) -> Tensor:
    """As float64, which holds every residue exactly."""
    return torch.from_numpy(residues.view(np.int32)).double().mul_(unit)
