"""Uploads in fixed point mod 2^32, and the seeds of secret shares.

Negative numbers are the upper half of the residues. A seed expands to one share, and travels to the helper
sealed to its key.
"""

import math
from collections.abc import Iterator
from typing import TypeAlias

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
from offbeat.privacy.secure.terms import BindingError, SecureTerms, report_name

Residues: TypeAlias = npt.NDArray[np.uint32]
CHUNK = 1 << 15  # numbers at a time, so that what is done to them is done in the cache


def check_range(values: Tensor, terms: SecureTerms, client: int) -> None:
    """Refuse what could make a sum overflow; only the client can, for nobody else sees its numbers."""
    if not values.numel():
        return
    low, high = (float(end) for end in torch.aminmax(values))
    worst = max(abs(low), abs(high))  # NaN comes through
    if not (math.isfinite(worst) and worst * 2.0**terms.bits <= terms.max_units):
        weights = f", weights of {terms.weight_bits} bits" if terms.weight_bits else ""
        raise InputError(
            f"the upload of client {client} has a value of size {worst:g}, but secure aggregation of up to "
            f"{terms.max_reports} reports with {terms.bits} fractional bits{weights} holds {terms.largest:g} "
            "a coordinate: clip, or lower the bits."
        )


def encode(values: Tensor, bits: int, out: Residues, rounding: torch.Generator | None = None) -> None:
    """Flat CPU values into residues, to the nearest, ties to even; or up or down at random, unbiased."""
    whole = torch.from_numpy(out.view(np.int32))
    for start in range(0, len(values), CHUNK):
        # Times a power of two is exact, so float32 is as good as the numbers that came in it.
        units = values[start : start + CHUNK] * 2.0**bits
        if rounding is None:
            units.round_()
        else:
            below = units.floor()
            up = torch.rand(units.shape, generator=rounding, dtype=units.dtype) < units - below
            units = below + up
        whole[start : start + CHUNK] = units


def decode(residues: Residues, unit: float) -> Tensor:
    """As float64, which holds every residue exactly."""
    return torch.from_numpy(residues.view(np.int32)).double().mul_(unit)


SEED_BYTES = 16  # bytes
DIGEST_BYTES = 32  # of the message that a report answers
SEALED_BYTES = 32 + SEED_BYTES + 16 + DIGEST_BYTES  # the sender's one-time key, the seed, the tag, the digest
NO_MESSAGE = bytes(DIGEST_BYTES)  # the digest where client and servers are in one process


def expand_seed(seed: bytes, length: int) -> Iterator[tuple[slice, Residues]]:
    """Where and what: AES-128 in counter mode, good for one share a seed; a piece lasts until the next."""
    encryptor = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    piece = min(CHUNK, length)
    zeros = memoryview(bytes(4 * piece))
    room = bytearray(4 * piece + 16)
    numbers = np.frombuffer(room, dtype="<u4")
    for start in range(0, length, piece):
        count = min(piece, length - start)
        encryptor.update_into(zeros[: 4 * count], room)
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
