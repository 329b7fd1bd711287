"""Gaussian draws from a secret key, each a function of (key, numbers).

The bits are AES-256 in counter mode under a key of their own for each draw, so whoever has seen
any number of draws cannot foresee another. A torch generator would not do: on the CPU it keeps
32 bits of its seed, which can be tried out, and two of many draws would be the same. Draws are made
on the CPU in double precision and then moved, so that devices agree. A `mark` makes a draw that of what it
is to hide: a step that is taken again after a resume has the same noise for the same sum, and fresh
noise for any other, so that noise never cancels between two releases. Rounding is not hidden: the
last bits of a noised float can tell more than the real numbers of the theory would.
"""

import hashlib
import math
import secrets
import struct
from collections.abc import Iterable

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from torch import Tensor

KEY_BYTES = 32


def secret_key() -> bytes:
    """A key that nobody can guess."""
    return secrets.token_bytes(KEY_BYTES)


def seeded_key(seed: int) -> bytes:
    """A key that anybody can repeat: for simulations."""
    return hashlib.blake2b(struct.pack("<q", seed), digest_size=KEY_BYTES, person=b"noise seed").digest()


def subkey(key: bytes, purpose: str) -> bytes:
    """A key of its own for one purpose."""
    return hashlib.blake2b(key=key, digest_size=KEY_BYTES, person=purpose.encode()).digest()


def mark_of(key: bytes, leaves: Iterable[Tensor]) -> bytes:
    """What tells these numbers from any others, and nothing about them to who has no key."""
    digest = hashlib.blake2b(key=key, digest_size=KEY_BYTES, person=b"mark")
    for leaf in leaves:
        digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
        digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def standard_normal(key: bytes, numbers: tuple[int, ...], like: Tensor, mark: bytes = b"") -> Tensor:
    """Independent draws of mean 0 and standard deviation 1, in the shape, type and place of `like`."""
    count = like.numel()
    pairs = (count + 1) // 2
    packed = struct.pack(f"<{len(numbers)}q", *numbers) + mark
    stream = hashlib.blake2b(packed, key=key, digest_size=KEY_BYTES, person=b"noise").digest()
    cipher = Cipher(AES(stream), CTR(bytes(16))).encryptor()
    words = np.frombuffer(cipher.update(bytes(16 * pairs)), dtype="<u8") >> np.uint64(11)
    # Box and Muller; a radius needs a uniform number above 0
    radius = np.sqrt(-2 * np.log((words[:pairs] + np.uint64(1)) * 2.0**-53))
    angle = words[pairs:] * (2 * math.pi * 2.0**-53)
    draws = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
    return torch.from_numpy(draws).to(like.dtype).to(like.device).view(like.shape)
