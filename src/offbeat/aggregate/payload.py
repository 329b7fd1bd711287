"""What one client adds to a sum, made ready by whoever may see it: the server, or the client itself."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat import trees
from offbeat.errors import InputError
from offbeat.privacy import clipping
from offbeat.trees import Tree


class Payload(NamedTuple):
    """What is summed where sums are private."""

    uploads: Tree
    answers: Tree = ()  # (moving fields,): plus a half where the norm was within the bound, else minus


class Clip(NamedTuple):
    """How clients that hide their payloads make them ready."""

    bounds: Mapping[str, float]
    moving: Sequence[str] = ()


class Shares(NamedTuple):
    """What is left for the server of payloads that their clients hid."""

    share: Tensor  # (tasks, length) int32: numbers mod 2^32
    sealed: Tensor  # (tasks, bytes) uint8: the helper's half
    signature: Tensor | None = None  # (tasks, bytes) uint8, where the helper asks for one
    clip: Clip | None = None  # what their clients were told; None: not to clip


def prepare(uploads: Tree, bounds: Mapping[str, float], moving: Sequence[str]) -> Payload:
    """Each field shortened to its bound, and whether those of `moving` were within; leaves (tasks, ...)."""
    clipped, within = {}, {}
    for name, part in clipping.fields(uploads).items():
        if name not in bounds:
            raise InputError(f"the upload's field {name} has no bound, so no noise would hide it.")
        clipped[name], within[name] = clipping.clip(part, bounds[name])
    payload = Payload(clipping.replace(uploads, clipped))
    if not moving:
        return payload
    answers = torch.stack([within[name] for name in moving], 1)
    like = trees.leaves(uploads)[0]
    return payload._replace(answers=answers.to(like.dtype).to(like.device) - 0.5)
