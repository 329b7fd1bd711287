"""The client: it splits an upload into a share for the leader and a sealed seed for the helper."""

import secrets
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from torch import Tensor

from offbeat.core import Task
from offbeat.privacy.secure.encoding import (
    NO_MESSAGE,
    SEED_BYTES,
    Residues,
    check_range,
    encode,
    expand_seed,
    seal,
)
from offbeat.privacy.secure.terms import LengthError, SecureTerms, report_name


class Report(NamedTuple):
    """What leaves a client: the share is for the leader, the seed for the helper, by way of the leader."""

    task: Task
    share: Residues  # (length,)
    sealed: bytes
    signature: bytes = b""  # of the site that the client is, where the helper asks for one


def make_report(
    parts: Sequence[Tensor],
    task: Task,
    terms: SecureTerms,
    key: X25519PublicKey,
    rounding: torch.Generator | None = None,
    message: bytes = NO_MESSAGE,
) -> Report:
    """Split an upload, given as the flat CPU vectors that it consists of.

    `message` is the digest of the server's message that it answers.
    """
    length = sum(len(part) for part in parts)
    if length != terms.length:
        raise LengthError(
            f"{report_name(task)} has {length} numbers, not the {terms.length} agreed on.", [task]
        )
    for part in parts:
        check_range(part, terms, task.client)
    share = np.empty(length, np.uint32)
    start = 0
    for part in parts:
        encode(part, terms.bits, share[start : start + len(part)], rounding)
        start += len(part)
    # Never from a keyed draw: whoever knows the seed and the share knows the upload.
    seed = secrets.token_bytes(SEED_BYTES)
    subtract_share(share, seed)
    return Report(task, share, seal(seed, task, terms, key, message))


def subtract_share(residues: Residues, seed: bytes) -> None:
    """Subtract the seed's share in place; the rest is the other share."""
    for place, numbers in expand_seed(seed, len(residues)):
        residues[place] -= numbers
