"""Seeds: how one becomes a share, and how it travels to the helper alone."""

from collections.abc import Iterator

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from offbeat.core import Task
from offbeat.privacy.secure.fixed import PIECE, Residues
from offbeat.privacy.secure.refusals import BindingError, name
from offbeat.privacy.secure.terms import Terms

SEED = 16  # bytes
SEALED = 32 + SEED + 16  # the sender's one-time key, the seed, the tag


def stream(seed: bytes, length: int) -> Iterator[tuple[slice, Residues]]:
    """Where and what: AES-128 in counter mode, good for one share a seed; a piece lasts until the next."""
    encryptor = Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()
    piece = min(PIECE, length)
    zeros = memoryview(bytes(4 * piece))
    room = bytearray(4 * piece + 16)
    numbers = np.frombuffer(room, dtype="<u4")
    for start in range(0, length, piece):
        count = min(piece, length - start)
        encryptor.update_into(zeros[: 4 * count], room)
        yield slice(start, start + count), numbers[:count]


def seal(seed: bytes, task: Task, terms: Terms, key: X25519PublicKey) -> bytes:
    """For the helper's eyes, and for this report only."""
    return _suite().encrypt(seed, key, info=terms.binding(task))


def unseal(sealed: bytes, task: Task, terms: Terms, key: X25519PrivateKey) -> bytes:
    """The seed, if it was sealed for just that."""
    try:
        return _suite().decrypt(sealed, key, info=terms.binding(task))
    except (InvalidTag, ValueError):
        raise BindingError(
            f"the seed given for {name(task)} does not open: it was sealed for another run, version, client, "
            "visit, length, bound or key, or changed on its way; leave that report out.",
            [task],
        ) from None


def _suite() -> Suite:
    return Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_128_GCM)
