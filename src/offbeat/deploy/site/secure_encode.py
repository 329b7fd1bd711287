"""A site's part in secure aggregation: its upload is clipped, encoded, split, sealed and signed.

Neither of the two servers can read the upload from what it receives.
"""

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
    read_noise,
    read_terms,
    rounding_generator,
    to_fixed_point_input,
)
from offbeat.aggregate.uploads import clip_uploads
from offbeat.core import Task
from offbeat.deploy.keys import SIGNATURE_BYTES, signed_statement
from offbeat.errors import InputError
from offbeat.nn.problem import Statistics
from offbeat.privacy.secure.encoding import NO_MESSAGE, make_report
from offbeat.privacy.secure.terms import DEFAULT_MINIMUM, RefusedError, SecureTerms
from offbeat.trees import Tree

_KEY_DIGITS = 64  # hexadecimal digits of an X25519 public key
_OTHER_KEYS = ("key", "stochastic", "signed", "bounds", "moving", "noise")


class SecureRequest(NamedTuple):
    """What a server asks for: the terms of secure aggregation, and how uploads are prepared for it."""

    terms: SecureTerms
    helper_key: bytes
    stochastic: bool  # whether numbers are rounded at random
    signed: bool
    bounds: dict[str, float] | None  # clipping bounds by field; None: no clipping
    moving: list[str]  # the fields whose bounds adapt


def secure_encode(
    upload: Tree,
    statistics: Statistics,
    task: Task,
    secure: dict[str, Any],
    seed: int,
    sign: Callable[[bytes], bytes] | None,
    before: Statistics | None = None,
    trusted_helper: str | None = None,
    minimum: int | None = None,
    message: bytes = NO_MESSAGE,
) -> list[Tensor]:
    """Return what is sent in place of the upload: the site's share, the sealed seed, and the signature.

    `before` are the running statistics that the task started with. `trusted_helper` is the helper's public
    key, which the site was given by another way than the server, and `minimum` the smallest number of clients
    whose uploads may be summed with this one (None: `DEFAULT_MINIMUM`). `message` is the digest of the
    server's message, to which the seed is sealed: the helper adds only answers to the same one.
    """
    request = read_secure_request(secure, trusted_helper, minimum)
    _check_statistics(statistics, before)
    batch = trees.map(lambda leaf: leaf[None], upload)
    clipped = batch if request.bounds is None else clip_uploads(batch, request.bounds, request.moving)
    parts = [to_fixed_point_input(leaf).reshape(-1) for leaf in trees.leaves(clipped)]
    rounding = rounding_generator(seed, task) if request.stochastic else None
    try:
        helper_key = X25519PublicKey.from_public_bytes(request.helper_key)
        report = make_report(parts, task, request.terms, helper_key, rounding, message)
    except RefusedError:
        raise
    except InputError:  # its text has the size of a number, which the server must not learn
        raise InputError(
            f"the upload has a number beyond {request.terms.largest:g}, the largest that the server's secure "
            "aggregation can represent: clip uploads, or lower the bits."
        ) from None
    signature = b""
    if request.signed:
        if sign is None:
            raise InputError("the server requires signed reports, and this site has no key: join with --key.")
        signature = sign(signed_statement(request.terms, task, report.sealed))
        if len(signature) != SIGNATURE_BYTES:
            raise InputError(f"the site's signature has {len(signature)} bytes, not {SIGNATURE_BYTES}.")
    share = torch.from_numpy(report.share.view(np.int32))
    return [share, _byte_tensor(report.sealed), _byte_tensor(signature)]


def read_secure_request(
    secure: dict[str, Any] | None, trusted_helper: str | None = None, minimum: int | None = None
) -> SecureRequest:
    """Check a server's request against what the site accepts, and return it."""
    if secure is None:
        raise InputError(
            "this site takes part in secure aggregation only, and the server asks for a plain upload."
        )
    unexpected = set(secure) ^ {*TERM_NAMES, *_OTHER_KEYS}
    if unexpected:
        names = ", ".join(sorted(unexpected)[:3])
        raise InputError(
            f"the server's terms of secure aggregation have missing or unknown fields ({names})."
        )
    key, stochastic, signed, bounds, moving, noise = (secure[name] for name in _OTHER_KEYS)
    if type(stochastic) is not bool or type(signed) is not bool:
        raise _invalid_terms("stochastic and signed must be true or false")
    if not _is_helper_key(key):
        raise _invalid_terms(f"the helper's key must have {_KEY_DIGITS} hexadecimal digits")
    if trusted_helper is None:
        raise InputError(
            "the server asks for secure aggregation with a helper whose key this site was not given, and the "
            "owner of that key could read uploads: join with --helper-key, the file that the operator of the "
            "helper provides."
        )
    if trusted_helper != key:
        raise InputError(
            "the server names another helper than the one whose key this site was given: the owner of that "
            "key could read uploads, so nothing was sent."
        )
    if bounds is not None:
        bounds = _read_bounds(bounds)
    if type(moving) is not list or not all(type(name) is str and name in (bounds or ()) for name in moving):
        raise _invalid_terms("moving names a field without a bound")
    terms = replace(read_terms(secure), clipping=clipping_digest(bounds, moving), noise=read_noise(noise))
    least = DEFAULT_MINIMUM if minimum is None else minimum
    if terms.minimum < least:
        raise InputError(
            f"the server's sums may be of {terms.minimum} clients, and this site takes part in sums of "
            f"{least} or more only: raise the server's minimum, or lower --minimum of the site."
        )
    return SecureRequest(terms, bytes.fromhex(key), stochastic, signed, bounds, moving)


def read_helper_key(path: Path) -> str:
    """Read the helper's public key from a file that the helper's operator provided."""
    try:
        key = path.read_text("ascii").strip()
    except (OSError, UnicodeError):
        raise InputError(
            f"the helper's key {path} cannot be read: name the file that the helper wrote."
        ) from None
    if not _is_helper_key(key):
        raise InputError(f"{path} is not a helper's public key, which has {_KEY_DIGITS} hexadecimal digits.")
    return key


def _is_helper_key(key: object) -> bool:
    return type(key) is str and len(key) == _KEY_DIGITS and set(key) <= set("0123456789abcdef")


def _read_bounds(given: Any) -> dict[str, float]:
    if type(given) is not dict or not given:
        raise _invalid_terms("bounds must have a bound for each field")
    bounds = {}
    for name, bound in given.items():
        if bound is not None and (type(bound) not in (int, float) or not 0 < bound < math.inf):
            raise _invalid_terms("bounds must be numbers above 0")
        bounds[name] = math.inf if bound is None else float(bound)
    return bounds


def _invalid_terms(problem: str) -> InputError:
    return InputError(f"the server's terms of secure aggregation are invalid: {problem}.")


def _check_statistics(after: Statistics, before: Statistics | None) -> None:
    """Refuse a module that has changed its running statistics, because these would be sent unprotected."""
    for name, value in after.items():
        if before is None or name not in before or not torch.equal(value, before[name]):
            raise InputError(
                f"the running statistic {name} would be sent unprotected: "
                "use a module with GroupNorm in place of BatchNorm."
            )


def _byte_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())
