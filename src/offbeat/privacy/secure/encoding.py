"""Uploads in fixed point mod 2^32, the seeds of secret shares, and the reports that clients make of them.

Negative numbers are the upper half of the residues. A seed expands to one share, and travels to the helper
sealed to its key; the leader gets the other share.
"""

import math
import secrets
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from torch import Tensor

from offbeat.core import Task
from offbeat.errors import InputError
from offbeat.privacy.secure.terms import BindingError, LengthError, SecureTerms, report_name

Residues: TypeAlias = npt.NDArray[np.uint32]
CHUNK = 1 << 15  # numbers that are processed at a time, so that they stay in the cache


def check_range(values: Tensor, terms: SecureTerms, client: int) -> None:
    """Reject values that could make a sum overflow; only the client can, since nobody else sees them."""
    if not values.numel():
        return
    low, high = (float(end) for end in torch.aminmax(values))
    worst = max(abs(low), abs(high))  # may be NaN
    if not (math.isfinite(worst) and worst * 2.0**terms.bits <= terms.max_units):
        weights = f", weights of {terms.weight_bits} bits" if terms.weight_bits else ""
        raise InputError(
            f"the upload of client {client} has a value of size {worst:g}, but secure aggregation of up to "
            f"{terms.max_reports} reports with {terms.bits} fractional bits{weights} holds {terms.largest:g} "
            "a coordinate: clip, or lower the bits."
        )


def encode(values: Tensor, bits: int, out: Residues, rounding: torch.Generator | None = None) -> None:
    """Write flat CPU values to `out` as residues, rounded to nearest, or at random without bias."""
    whole = torch.from_numpy(out.view(np.int32))
    for start in range(0, len(values), CHUNK):
        # A multiplication by a power of two is exact, also in float32.
        units = values[start : start + CHUNK] * 2.0**bits
        if rounding is None:
            units.round_()
        else:
            below = units.floor()
            up = torch.rand(units.shape, generator=rounding, dtype=units.dtype) < units - below
            units = below + up
        whole[start : start + CHUNK] = units


def decode(residues: Residues, unit: float) -> Tensor:
    """Residues as float64, which represents every residue exactly."""
    return torch.from_numpy(residues.view(np.int32)).double().mul_(unit)


SEED_BYTES = 16  # bytes
DIGEST_BYTES = 32  # of the message that a report answers
SEALED_BYTES = 32 + SEED_BYTES + 16 + DIGEST_BYTES  # the sender's one-time key, the seed, the tag, the digest
NO_MESSAGE = bytes(DIGEST_BYTES)  # the digest where client and servers are in one process


def expand_seed(seed: bytes, length: int) -> Iterator[tuple[slice, Residues]]:
    """Slices and numbers of a seed's share, by AES-128 in counter mode; each piece overwrites the last."""
    encryptor = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    piece = min(CHUNK, length)
    zeros = memoryview(bytes(4 * piece))
    buffer = bytearray(4 * piece + 16)
    numbers = np.frombuffer(buffer, dtype="<u4")
    for start in range(0, length, piece):
        count = min(piece, length - start)
        encryptor.update_into(zeros[: 4 * count], buffer)
        yield slice(start, start + count), numbers[:count]


def seal(
    seed: bytes, task: Task, terms: SecureTerms, key: X25519PublicKey, message: bytes = NO_MESSAGE
) -> bytes:
    """Encrypt a seed to the helper, for this report only, as an answer to the message of this digest."""
    return _suite().encrypt(seed, key, info=terms.binding(task) + message) + message


def answered_message(sealed: bytes) -> bytes:
    """The digest of the message that a report answers; `unseal` fails if it was changed."""
    return sealed[-DIGEST_BYTES:]


def unseal(sealed: bytes, task: Task, terms: SecureTerms, key: X25519PrivateKey) -> bytes:
    """Decrypt a seed, if it was sealed for this report under these terms."""
    try:
        message = answered_message(sealed)
        return _suite().decrypt(sealed[:-DIGEST_BYTES], key, info=terms.binding(task) + message)
    except (InvalidTag, ValueError):
        raise BindingError(
            f"the seed given for {report_name(task)} does not open: it was sealed for another run, "
            "version, client, "
            "visit, length, bound, message or key, or changed on its way; leave that report out.",
            [task],
        ) from None


def _suite() -> Suite:
    return Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_128_GCM)


class Report(NamedTuple):
    """What a client sends: the share for the leader, and the seed for the helper, forwarded by the leader."""

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
    for piece, numbers in expand_seed(seed, len(residues)):
        residues[piece] -= numbers
