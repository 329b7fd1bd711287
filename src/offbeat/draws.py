"""Random draws without state: each is a function of (seed, purpose, numbers).

Engines, worker counts and restarts therefore agree to the bit, and no generator has to be saved.
"""

import hashlib
import struct

import numpy as np
import numpy.typing as npt


def _digest(size: int, seed: int, purpose: str, numbers: tuple[int, ...]) -> int:
    packed = struct.pack(f"<{len(numbers) + 1}q", seed, *numbers)
    digest = hashlib.blake2b(packed, digest_size=size, person=purpose.encode())
    return int.from_bytes(digest.digest(), "little")


def uniform(seed: int, purpose: str, *numbers: int) -> float:
    """A number in [0, 1)."""
    return (_digest(8, seed, purpose, numbers) >> 11) * 2.0**-53


def randbelow(bound: int, seed: int, purpose: str, *numbers: int) -> int:
    """A whole number in [0, bound)."""
    return _digest(8, seed, purpose, numbers) * bound >> 64


def generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """A NumPy generator, for draws of many numbers."""
    return np.random.Generator(np.random.PCG64(_digest(16, seed, purpose, numbers)))


def secret_words(secret: int, purpose: str, number: int, count: int) -> npt.NDArray[np.uint64]:
    """Pseudo-random 64-bit numbers of which any can be known without the others becoming predictable.

    They follow from a secret of up to 256 bits by SHAKE-256. A NumPy generator would not be safe where each
    client learns its own number: its state, and so all other numbers, can be computed from enough of them.
    """
    stream = hashlib.shake_256(secret.to_bytes(32, "little") + struct.pack("<q", number) + purpose.encode())
    return np.frombuffer(stream.digest(8 * count), dtype="<u8")


def torch_seed(seed: int, purpose: str, *numbers: int) -> int:
    """A seed for a torch generator, for noise and for modules that draw as they compute."""
    return _digest(8, seed, purpose, numbers) >> 1
