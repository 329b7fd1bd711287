"""Signatures of sites under their reports, by which a helper knows that the clients it counts exist."""

from collections.abc import Callable, Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from offbeat.core import Task
from offbeat.errors import InputError
from offbeat.privacy.secure.terms import Terms

SIGNATURE = 96  # bytes: two numbers of 384 bits
_HALF = SIGNATURE // 2
_MOST_KEYS = 10_000


def statement(terms: Terms, task: Task, sealed: bytes) -> bytes:
    """What a site signs: that this sealed seed is its own report, under these terms."""
    return b"offbeat signed report" + terms.binding(task) + sealed


def read_signer(path: Path) -> tuple[str, Callable[[bytes], bytes]]:
    """The public key that an OpenSSH private key goes with, in hexadecimal, and a function that signs."""
    try:
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise InputError(
            f"the site's key {path} cannot be read ({error.strerror}): name a key file."
        ) from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise InputError(
            f"the site's key {path} is not an OpenSSH private key of the curve P-384 without a passphrase: "
            "make one with offbeat keys."
        )
    private = key

    def sign(message: bytes) -> bytes:
        numbers = decode_dss_signature(private.sign(message, ec.ECDSA(hashes.SHA384())))
        return b"".join(number.to_bytes(_HALF, "big") for number in numbers)

    return fingerprint(private.public_key()), sign


def read_sites(folder: Path) -> Mapping[str, ec.EllipticCurvePublicKey]:
    """The public keys in a folder and in those below it, each by its fingerprint."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}: name the one that holds the sites' public keys.")
    found: dict[str, ec.EllipticCurvePublicKey] = {}
    for path in sorted(folder.rglob("*.pub")):
        try:
            key = load_ssh_public_key(path.read_bytes())
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
            raise InputError(f"{path} is not an OpenSSH public key of the curve P-384: take it away.")
        if found.setdefault(fingerprint(key), key) is not key:
            raise InputError(f"the key in {path} is there twice: a site needs a key of its own.")
    if not found or len(found) > _MOST_KEYS:
        raise InputError(f"{folder} holds {len(found)} public keys: give 1 to {_MOST_KEYS}, as files *.pub.")
    return found


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """The key itself, in hexadecimal: it is short."""
    return key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint).hex()


def signs(key: ec.EllipticCurvePublicKey, message: bytes, signature: bytes) -> bool:
    """Whether this key signed that."""
    if len(signature) != SIGNATURE:
        return False
    numbers = (int.from_bytes(part, "big") for part in (signature[:_HALF], signature[_HALF:]))
    try:
        key.verify(encode_dss_signature(*numbers), message, ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        return False
    return True
