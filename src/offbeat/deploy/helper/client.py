"""The leader's way to a helper on another machine: it waits while the helper is down, and trusts no other."""

import ipaddress
import json
import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from offbeat.aggregate.secure import HelperInfo
from offbeat.core import Task
from offbeat.deploy.helper.protocol import HelperRequest, write_request
from offbeat.errors import InputError
from offbeat.privacy.secure import terms
from offbeat.privacy.secure.encoding import Residues
from offbeat.privacy.secure.servers import SealedSeed, SumRequest
from offbeat.privacy.secure.terms import RefusedError, SecureTerms

_CONNECT_TIMEOUT, _READ_TIMEOUT = 10.0, 300.0  # seconds; a sum of many long reports takes some
_FIRST_PAUSE, _MAX_PAUSE = 0.5, 30.0  # seconds between two attempts
_MAX_ANSWER_BYTES = 8 << 20  # bytes of an answer that is not a sum
_LOG = logging.getLogger(__name__)
_REFUSAL_TYPES = {
    kind.__name__: kind
    for kind in (
        terms.RunError,
        terms.LengthError,
        terms.MalformedError,
        terms.ReplayError,
        terms.OverlapError,
        terms.ShortBatchError,
        terms.LongBatchError,
        terms.WeightError,
        terms.BindingError,
        terms.SignatureError,
    )
}


class _UnavailableError(Exception):
    """No answer for now; the words say why."""


@dataclass(frozen=True)
class HttpsHelperConnection:
    """Where the helper is, what it is shown, and how long it is waited for; a `Reached`."""

    url: str
    token: str = field(repr=False)
    certificate: Path | None = None  # of the authority that vouches for it; None: those of this machine
    patience: float = 600.0  # seconds
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"the helper's address must be such as https://host:port, not '{self.url}'.")
        if parts.scheme == "http" and not is_loopback_host(parts.hostname):
            raise InputError(f"the helper at {self.url} is on another machine: reach it by https.")
        if self.certificate is not None and not self.certificate.is_file():
            raise InputError(f"there is no file {self.certificate}: name the helper's authority.")

    def known(self) -> HelperInfo:
        facts = _json_object(self.ask("GET", "key", b"", _MAX_ANSWER_BYTES))
        key, signed, minimum = (facts.get(name) for name in HelperInfo._fields)
        try:
            public = bytes.fromhex(key)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            public = b""
        if len(public) != 32 or type(signed) is not bool or type(minimum) is not int:
            raise InputError(f"what answers at {self.url} is not a helper: check the address.")
        return HelperInfo(public, signed, minimum)

    def under(self, terms: SecureTerms) -> "RemoteHelper":
        return RemoteHelper(self, terms)

    def ask(self, method: str, what: str, body: bytes, most: int) -> bytes:
        """The answer of at most so many bytes, or the refusal; attempts go on until patience ends."""
        began, pause = self.clock(), _FIRST_PAUSE
        while True:
            try:
                return self._try(method, what, body, most)
            except _UnavailableError as error:
                waited = self.clock() - began
                if waited + pause > self.patience:
                    raise InputError(
                        f"the helper at {self.url} has not answered for {waited:.0f} seconds ({error}): "
                        "start it and resume the run; sums are never made without it."
                    ) from None
                _LOG.warning("the helper at %s does not answer (%s): trying again", self.url, error)
            self.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)

    def _try(self, method: str, what: str, body: bytes, most: int) -> bytes:
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/octet-stream"}
        timeout = httpx.Timeout(_READ_TIMEOUT, connect=_CONNECT_TIMEOUT)
        try:
            with (
                httpx.Client(verify=self._trust(), timeout=timeout, trust_env=False) as client,
                client.stream(
                    method, f"{self.url.rstrip('/')}/{what}", content=body, headers=headers
                ) as answer,
            ):
                good = answer.status_code == 200
                data = _read_answer(answer, most if good else _MAX_ANSWER_BYTES)
                status = answer.status_code
        except httpx.InvalidURL:
            raise InputError(
                f"the helper's address must be such as https://host:port, not '{self.url}'."
            ) from None
        except httpx.TransportError as error:
            self._check_trust(error)
            raise _UnavailableError(str(error).strip() or type(error).__name__) from None
        if good:
            return data
        self._refuse(status, data)
        raise _UnavailableError(f"status {status}")

    def _refuse(self, status: int, data: bytes) -> None:
        """Raise what no further attempt would change."""
        if status == 401:
            raise InputError(f"the helper at {self.url} does not know this token: give both the same.")
        if status in (409, 422):
            facts = _json_object(data)
            kind = _REFUSAL_TYPES.get(str(facts.get("refusal")), RefusedError)
            raise kind(str(facts.get("sentence", "the helper refused."))[:1000], _tasks(facts.get("tasks")))
        if status in (404, 405, 411, 413):
            raise InputError(f"what answers at {self.url} is not a helper of this version (status {status}).")

    def _trust(self) -> ssl.SSLContext | bool:
        if self.url.startswith("http:"):
            return True
        try:
            return ssl.create_default_context(
                cafile=None if self.certificate is None else str(self.certificate)
            )
        except (ssl.SSLError, OSError):
            raise InputError(f"{self.certificate} is not a certificate of an authority, as PEM.") from None

    def _check_trust(self, error: BaseException | None) -> None:
        """A helper that proves to be somebody else will do so again."""
        while error is not None:
            if isinstance(error, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise InputError(
                    f"what answers at {self.url} cannot prove that it is the helper: check its certificate, "
                    "the authority's, and the name in the address."
                ) from None
            error = error.__cause__ or error.__context__


@dataclass(frozen=True)
class RemoteHelper:
    """A helper elsewhere, for one run; an `Asked`."""

    link: HttpsHelperConnection
    terms: SecureTerms

    def add(self, request: SumRequest) -> Residues:
        size = 4 * request.length
        data = self.link.ask("POST", "add", write_request(HelperRequest(self.terms, request)), size)
        if len(data) != size:
            raise InputError(
                f"the helper's sum has {len(data)} bytes, not {size}: run one version of offbeat."
            )
        return np.frombuffer(bytearray(data), "<u4").astype(np.uint32, copy=False)

    def examine(self, task: Task, sealed: bytes, signature: bytes) -> None:
        request = SumRequest(
            self.terms.run, task.version, self.terms.length, (SealedSeed(task, sealed),), (signature,)
        )
        self.link.ask("POST", "examine", write_request(HelperRequest(self.terms, request)), _MAX_ANSWER_BYTES)


def is_loopback_host(host: str) -> bool:
    """Whether it is this machine, to which nobody else can listen."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _read_answer(answer: Any, most: int) -> bytes:
    data = bytearray()
    for piece in answer.iter_raw():
        data += piece
        if len(data) > most:
            raise InputError("the helper's answer is longer than it should be: run one version of offbeat.")
    return bytes(data)


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError):
        facts = {}
    return facts if isinstance(facts, dict) else {}


def _tasks(value: Any) -> list[Task]:
    try:
        return [Task(*(int(number) for number in task)) for task in value]
    except (TypeError, ValueError):
        return []
