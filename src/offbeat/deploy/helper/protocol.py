"""Requests of a leader to a helper as bytes, and the token that they share."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from offbeat.aggregate.secure import TERM_NAMES, read_noise, read_terms, write_noise, write_terms
from offbeat.core import Task
from offbeat.deploy.keys import SIGNATURE_BYTES
from offbeat.deploy.protocol.strict_json import Rejected, convert, decode_json
from offbeat.errors import InputError
from offbeat.privacy.secure.encoding import SEALED_BYTES, Residues
from offbeat.privacy.secure.servers import SealedSeed, SumRequest, check_request
from offbeat.privacy.secure.terms import MalformedError, SecureTerms, WeightError

MAX_REQUEST_BYTES = 8 << 20  # tens of thousands of reports
MAX_SUM_LENGTH = 1 << 27  # numbers of a sum: half a gigabyte
_DIGEST_BYTES = 32  # of the noise in an answer
_LENGTH_BYTES = 4  # for the length of the header
_MIN_TOKEN_CHARS, _MAX_TOKEN_CHARS = 16, 1024
_Count = Annotated[int, Meta(ge=0, lt=1 << 62)]


class _RequestFields(Struct, frozen=True):
    """The header of a request, beside the terms."""

    clipping: Annotated[str, Meta(pattern=r"\A(?:[0-9a-f]{64})?\Z")]  # a digest of the clipping bounds
    version: _Count
    tasks: list[tuple[_Count, _Count, _Count]]
    counts: list[int]
    signed: bool
    noise: Any


def write_request(terms: SecureTerms, request: SumRequest) -> bytes:
    """Encode a request under these terms: a header in JSON, the sealed seeds, and the signatures, if any."""
    tasks = [task for task, _ in request.reports]
    header = write_terms(terms) | {
        "clipping": terms.clipping,
        "version": request.version,
        "tasks": [list(task) for task in tasks],
        "counts": [terms.weight(task, request.version) for task in tasks],
        "signed": any(request.signatures),
        "noise": write_noise(terms.noise),
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    seeds = b"".join(seed for _, seed in request.reports)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + seeds + b"".join(request.signatures)


def read_request(data: bytes) -> tuple[SecureTerms, SumRequest]:
    """Decode an untrusted request, and the terms under which it is made."""
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    if len(data) < end:
        raise MalformedError("the request ends before its header does.")
    try:
        header = decode_json(data[_LENGTH_BYTES:end].decode("ascii", "replace"), MAX_REQUEST_BYTES)
        fields = convert(header, _RequestFields)
    except Rejected as error:
        raise MalformedError(f"the request cannot be read: {error.sentence}") from None
    if set(header) != {*TERM_NAMES, *_RequestFields.__struct_fields__}:
        raise MalformedError("the request has other fields than it should.")
    try:
        terms = replace(read_terms(header), clipping=fields.clipping, noise=read_noise(fields.noise))
    except InputError as error:
        raise MalformedError(f"the request's terms are invalid: {error}") from None
    if terms.length > MAX_SUM_LENGTH:
        raise MalformedError(f"sums of {terms.length} numbers are too long: {MAX_SUM_LENGTH} is the most.")
    version, signed, tasks = fields.version, fields.signed, [Task(*task) for task in fields.tasks]
    each = SEALED_BYTES + SIGNATURE_BYTES * signed
    if len(data) != end + each * len(tasks) or len(fields.counts) != len(tasks):
        raise MalformedError(f"the request does not have {each} bytes and one count for each of its reports.")
    middle = end + SEALED_BYTES * len(tasks)
    reports = tuple(
        SealedSeed(task, data[start : start + SEALED_BYTES])
        for task, start in zip(tasks, range(end, middle, SEALED_BYTES), strict=True)
    )
    signatures = tuple(
        data[start : start + SIGNATURE_BYTES] for start in range(middle, len(data), SIGNATURE_BYTES) if signed
    )
    request = SumRequest(terms.run, version, terms.length, reports, signatures)
    check_request(request)
    # If the two servers weighed shares differently, the sum would be noise.
    for task, count in zip(tasks, fields.counts, strict=True):
        if terms.weight(task, version) != count:
            raise WeightError(
                "leader and helper compute different weights: install the same version of offbeat on both.",
                [task],
            )
    return terms, request


def write_answer(terms: SecureTerms, total: Residues) -> bytes:
    """Encode a sum: a digest of the noise that was added, and little-endian 32-bit integers."""
    return _noise_digest(terms) + total.astype("<u4", copy=False).tobytes()


def read_answer(data: bytes, terms: SecureTerms) -> Residues:
    """Decode a sum, or refuse one that is not of these terms."""
    if len(data) != answer_size(terms):
        raise InputError(
            f"the helper's sum has {len(data)} bytes, not {answer_size(terms)}: "
            "install the same version of offbeat on both."
        )
    if data[:_DIGEST_BYTES] != _noise_digest(terms):
        raise InputError(
            "the helper added other noise to a sum than the terms of this run have, so nothing was released: "
            "use a helper that knows the terms."
        )
    return np.frombuffer(bytearray(data[_DIGEST_BYTES:]), "<u4").astype(np.uint32, copy=False)


def answer_size(terms: SecureTerms) -> int:
    """The bytes of an answer."""
    return _DIGEST_BYTES + 4 * terms.length


def _noise_digest(terms: SecureTerms) -> bytes:
    return hashlib.sha256(("" if terms.noise is None else terms.noise.text()).encode()).digest()


def read_token(path: Path) -> str:
    """Read the secret that leader and helper share."""
    try:
        token = path.read_text("ascii").strip()
    except (OSError, UnicodeError):
        raise InputError(f"the token {path} cannot be read: name the file that contains it.") from None
    if not _MIN_TOKEN_CHARS <= len(token) <= _MAX_TOKEN_CHARS or not token.isprintable() or " " in token:
        raise InputError(
            f"{path} does not contain a token, which is one word of at least {_MIN_TOKEN_CHARS} characters: "
            "make one with offbeat keys."
        )
    return token
