"""A site's part in a secure sum: clip, encode, split, seal and sign, so that no server sees the upload."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from torch import Tensor

from offbeat import trees
from offbeat.aggregate.secure import (
    TERM_NAMES,
    clipping_digest,
    read_terms,
    rounding_generator,
    to_fixed_point_input,
)
from offbeat.aggregate.uploads import clip_uploads
from offbeat.core import Task
from offbeat.deploy.keys import SIGNATURE_BYTES, signed_statement
from offbeat.errors import InputError
from offbeat.nn.problem import Statistics
from offbeat.privacy.secure.client import make_report
from offbeat.privacy.secure.terms import RefusedError, SecureTerms
from offbeat.trees import Tree

_KEY_BYTES = 32  # bytes
_OTHER_KEYS = ("key", "stochastic", "signed", "bounds", "moving")


class SecureRequest(NamedTuple):
    """What a server says of its secure sums."""

    terms: SecureTerms
    key: bytes  # the helper's
    stochastic: bool
    signed: bool
    bounds: dict[str, float] | None  # None: nothing is clipped
    moving: list[str]


def secure_encode(
    upload: Tree,
    statistics: Statistics,
    task: Task,
    secure: dict[str, Any],
    plan: dict[str, Any],
    sign: Callable[[bytes], bytes] | None,
    before: Statistics | None = None,
    pinned: str | None = None,
    least: int | None = None,
) -> list[Tensor]:
    """The leaves that leave the site in place of the upload: its share, the sealed seed, the signature.

    `before` are the running statistics that the task began with; `pinned` is the helper's key that
    the site was given by other means than the server, and `least` the fewest clients it is summed with.
    """
    told = read_secure_request(secure, pinned, least)
    _check_statistics(statistics, before)
    stacked = trees.map(lambda leaf: leaf[None], upload)
    payload = stacked if told.bounds is None else clip_uploads(stacked, told.bounds, told.moving)
    parts = [to_fixed_point_input(leaf).reshape(-1) for leaf in trees.leaves(payload)]
    draw = rounding_generator(plan["seed"], task) if told.stochastic else None
    try:
        made = make_report(parts, task, told.terms, X25519PublicKey.from_public_bytes(told.key), draw)
    except RefusedError:
        raise
    except InputError:  # which names the size of a number that the server is not to know
        raise InputError(
            f"the server's secure sums hold {told.terms.largest:g} a number, and the upload has one beyond: "
            "clip, or lower the bits."
        ) from None
    signature = b""
    if told.signed:
        if sign is None:
            raise InputError("the server wants signed reports, and this site has no key: join with --key.")
        signature = sign(signed_statement(told.terms, task, made.sealed))
        if len(signature) != SIGNATURE_BYTES:
            raise InputError(f"the site's signature has {len(signature)} bytes, not {SIGNATURE_BYTES}.")
    return [torch.from_numpy(made.share.view(np.int32)), _byte_tensor(made.sealed), _byte_tensor(signature)]


def read_secure_request(
    secure: dict[str, Any] | None, pinned: str | None = None, least: int | None = None
) -> SecureRequest:
    """What is to be done, if it hides anything from anybody."""
    if secure is None:
        raise InputError("this site reports to secure sums alone, and the server asks for a plain upload.")
    odd = set(secure) ^ {*TERM_NAMES, *_OTHER_KEYS}
    if odd:
        raise InputError(f"the server's terms of secure sums are not whole ({', '.join(sorted(odd)[:3])}).")
    key, stochastic, signed, bounds, moving = (secure[name] for name in _OTHER_KEYS)
    if type(stochastic) is not bool or type(signed) is not bool:
        raise InputError("the server's terms of secure sums need true or false as stochastic and signed.")
    if type(key) is not str or len(key) != 2 * _KEY_BYTES or not set(key) <= set("0123456789abcdef"):
        raise InputError("the server's terms of secure sums need the helper's key, as 64 hexadecimal digits.")
    if pinned not in (None, key):
        raise InputError(
            "the server names another helper than the one this site was given the key of: "
            "whoever has that key could read uploads, so nothing was sent."
        )
    if bounds is not None:
        bounds = _bounds(bounds)
    if type(moving) is not list or not all(type(name) is str and name in (bounds or ()) for name in moving):
        raise InputError("the server's terms of secure sums move a bound that there is not.")
    terms = replace(read_terms(secure), clipping=clipping_digest(bounds, moving))
    if least is not None and terms.minimum < least:
        raise InputError(
            f"the server's secure sums may be of {terms.minimum} clients, and this site takes part in those "
            f"of {least} or more alone: raise the server's minimum."
        )
    return SecureRequest(terms, bytes.fromhex(key), stochastic, signed, bounds, moving)


def read_helper_key(path: Path) -> str:
    """The helper's public key in a file that its owner handed over."""
    try:
        text = path.read_text("ascii").strip()
    except (OSError, UnicodeError):
        raise InputError(f"the helper's key {path} cannot be read: name the file that it wrote.") from None
    if len(text) != 2 * _KEY_BYTES or not set(text) <= set("0123456789abcdef"):
        raise InputError(f"{path} does not hold a helper's public key, which is 64 hexadecimal digits.")
    return text


def _bounds(given: Any) -> dict[str, float]:
    if type(given) is not dict or not given:
        raise InputError("the server's terms of secure sums need a bound for each field.")
    bounds = {}
    for name, bound in given.items():
        if bound is not None and (type(bound) not in (int, float) or not 0 < bound < math.inf):
            raise InputError("the server's terms of secure sums need bounds that are numbers above 0.")
        bounds[name] = math.inf if bound is None else float(bound)
    return bounds


def _check_statistics(after: Statistics, before: Statistics | None) -> None:
    """Refuse a module that learns beside its parameters: that part cannot be hidden."""
    for name, value in after.items():
        if before is None or name not in before or not torch.equal(value, before[name]):
            raise InputError(
                f"the running statistic {name} would leave this site in plain sight: "
                "use a module with GroupNorm in place of BatchNorm."
            )


def _byte_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())
