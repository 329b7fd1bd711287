"""A site's part in secure aggregation: its upload is clipped, encoded, split, sealed and signed.

Neither of the two servers can read the upload from what it receives.
"""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
from msgspec import Meta, Struct, structs
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
from offbeat.deploy.protocol.strict_json import convert
from offbeat.errors import InputError
from offbeat.nn.problem import Statistics
from offbeat.privacy.secure.encoding import make_report
from offbeat.privacy.secure.terms import DEFAULT_MINIMUM, RefusedError, SecureTerms
from offbeat.trees import Tree

_HELPER_KEY = r"\A[0-9a-f]{64}\Z"  # an X25519 public key
_Bounds: TypeAlias = dict[str, Annotated[float, Meta(gt=0)] | None]


class _SecureFields(Struct, frozen=True):
    """What the server's message has beside the terms."""

    key: Annotated[str, Meta(pattern=_HELPER_KEY)]
    stochastic: bool
    signed: bool
    bounds: Annotated[_Bounds, Meta(min_length=1)] | None
    moving: list[str]
    noise: Any


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
    request: SecureRequest,
    seed: int,
    sign: Callable[[bytes], bytes] | None,
    before: Statistics,
    message: bytes,
) -> list[Tensor]:
    """Return what is sent in place of the upload: the site's share, the sealed seed, and the signature.

    `before` are the running statistics that the task started with. `message` is the digest of the server's
    message, to which the seed is sealed: the helper adds only answers to the same one.
    """
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
    secure: dict[str, Any] | None, trusted_helper: str | None, minimum: int | None
) -> SecureRequest:
    """Check a server's request against what the site accepts, and return it.

    `trusted_helper` is the helper's public key, which the site was given by another way than the server, and
    `minimum` the smallest number of clients in a sum that the site takes part in (None: `DEFAULT_MINIMUM`).
    """
    if secure is None:
        raise InputError(
            "this site takes part in secure aggregation only, and the server asks for a plain upload."
        )
    unexpected = set(secure) ^ {*TERM_NAMES, *_SecureFields.__struct_fields__}
    if unexpected:
        names = ", ".join(sorted(unexpected)[:3])
        raise InputError(
            f"the server's terms of secure aggregation have missing or unknown fields ({names})."
        )
    key, stochastic, signed, given, moving, noise = structs.astuple(convert(secure, _SecureFields))
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
    bounds = given and {name: math.inf if bound is None else bound for name, bound in given.items()}
    if not set(moving) <= set(bounds or ()):
        raise InputError("the server's terms of secure aggregation adapt a bound that they do not have.")
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
    if not re.match(_HELPER_KEY, key):
        raise InputError(f"{path} is not a helper's public key, which has 64 hexadecimal digits.")
    return key


def _check_statistics(after: Statistics, before: Statistics) -> None:
    """Refuse a module that has changed its running statistics, because these would be sent unprotected."""
    for name, value in after.items():
        if name not in before or not torch.equal(value, before[name]):
            raise InputError(
                f"the running statistic {name} would be sent unprotected: "
                "use a module with GroupNorm in place of BatchNorm."
            )


def _byte_tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())
