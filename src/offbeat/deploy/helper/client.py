"""The leader's connection to a helper on another machine.

It waits while the helper is down, and trusts only a helper with the right certificate.
"""

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

from offbeat.aggregate.secure import HelperInfo
from offbeat.core import Task
from offbeat.deploy.helper.protocol import answer_size, read_answer, write_request
from offbeat.deploy.network import is_loopback
from offbeat.deploy.protocol.transport import Backoff
from offbeat.errors import InputError
from offbeat.privacy.secure.encoding import Residues
from offbeat.privacy.secure.servers import SealedSeed, SumRequest
from offbeat.privacy.secure.terms import RefusedError, SecureTerms

_CONNECT_TIMEOUT, _READ_TIMEOUT = 10.0, 300.0  # seconds; a sum of many long reports takes time
_FIRST_PAUSE, _MAX_PAUSE = 0.5, 30.0  # seconds between two attempts
_MAX_ANSWER_BYTES = 8 << 20  # of an answer that is not a sum
_LOG = logging.getLogger(__name__)
_REFUSAL_TYPES = {kind.__name__: kind for kind in RefusedError.__subclasses__()}


class _UnavailableError(Exception):
    """There is no answer at the moment; the text says why."""


@dataclass(frozen=True)
class HttpsHelperConnection:
    """The address of a helper, the token to show it, and how long to wait for it.

    Implements `HelperConnection`.
    """

    url: str
    token: str = field(repr=False)
    certificate: Path | None = None  # of the authority to trust; None: the authorities of this machine
    patience: float = 600.0  # seconds
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)
    on_failure: Callable[[str], None] = field(default=lambda sentence: None, repr=False)  # while it is down
    on_recovery: Callable[[], None] = field(default=lambda: None, repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise self._invalid_address()
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            raise InputError(f"the helper at {self.url} is on another machine: use https.")
        if self.certificate is not None and not self.certificate.is_file():
            raise InputError(
                f"there is no file {self.certificate}: name the certificate of the helper's authority."
            )

    def known(self) -> HelperInfo:
        facts = _json_object(self.request("GET", "key", b"", _MAX_ANSWER_BYTES))
        key, signed, minimum, sums = (facts.get(name) for name in HelperInfo._fields)
        try:
            public = bytes.fromhex(key)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            public = b""
        if len(public) != 32 or type(signed) is not bool or type(minimum) is not int or type(sums) is not int:
            raise InputError(f"the server at {self.url} is not a helper: check the address.")
        return HelperInfo(public, signed, minimum, sums)

    def under(self, terms: SecureTerms) -> "RemoteHelper":
        return RemoteHelper(self, terms)

    def request(self, method: str, path: str, body: bytes, max_bytes: int) -> bytes:
        """Return the answer or raise the refusal; a helper that is down is retried for `patience` seconds."""
        began, backoff, failed = self.clock(), Backoff(_FIRST_PAUSE, _MAX_PAUSE, self.clock), False
        while True:
            try:
                answer = self._attempt(method, path, body, max_bytes)
                if failed:
                    self.on_recovery()
                return answer
            except _UnavailableError as error:
                waited, pause = self.clock() - began, backoff.fail()
                if waited + pause > self.patience:
                    raise InputError(
                        f"the helper at {self.url} has not answered for {waited:.0f} seconds ({error}): "
                        "start it and resume the run; no sum is computed without it."
                    ) from None
                failed = True
                sentence = f"the helper at {self.url} does not answer ({error}); the run waits for it"
                _LOG.warning("%s", sentence)
                self.on_failure(sentence)
            self.sleep(pause)

    def _attempt(self, method: str, path: str, body: bytes, max_bytes: int) -> bytes:
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/octet-stream"}
        timeout = httpx.Timeout(_READ_TIMEOUT, connect=_CONNECT_TIMEOUT)
        try:
            with (
                httpx.Client(verify=self._ssl_context(), timeout=timeout, trust_env=False) as client,
                client.stream(
                    method, f"{self.url.rstrip('/')}/{path}", content=body, headers=headers
                ) as response,
            ):
                status = response.status_code
                data = _read_body(response, max_bytes if status == 200 else _MAX_ANSWER_BYTES)
        except httpx.InvalidURL:
            raise self._invalid_address() from None
        except httpx.TransportError as error:
            self._check_certificate_error(error)
            raise _UnavailableError(str(error).strip() or type(error).__name__) from None
        if status == 200:
            return data
        self._raise_refusal(status, data)
        sentence = str(_json_object(data).get("sentence", ""))[:200]
        raise _UnavailableError(f"status {status}{': ' if sentence else ''}{sentence}")

    def _raise_refusal(self, status: int, data: bytes) -> None:
        """Raise an error that no further attempt would change."""
        if status == 401:
            raise InputError(f"the helper at {self.url} does not accept this token: give both the same.")
        if status in (409, 422):
            facts = _json_object(data)
            kind = _REFUSAL_TYPES.get(str(facts.get("refusal")), RefusedError)
            raise kind(str(facts.get("sentence", "the helper refused."))[:1000], _tasks(facts.get("tasks")))
        if status in (404, 405, 411, 413):
            raise InputError(f"the server at {self.url} is not a helper of this version (status {status}).")

    def _ssl_context(self) -> ssl.SSLContext | bool:
        if self.url.startswith("http:"):
            return True
        try:
            return ssl.create_default_context(
                cafile=None if self.certificate is None else str(self.certificate)
            )
        except (ssl.SSLError, OSError):
            raise InputError(f"{self.certificate} is not the certificate of an authority as PEM.") from None

    def _invalid_address(self) -> InputError:
        return InputError(f"the helper's address must be such as https://host:port, not '{self.url}'.")

    def _check_certificate_error(self, error: BaseException | None) -> None:
        """Raise an `InputError` if the certificate was not accepted: another attempt would not help."""
        while error is not None:
            if isinstance(error, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise InputError(
                    f"the certificate of the helper at {self.url} was not accepted: check it, the "
                    "authority's certificate, and the host in the address."
                ) from None
            error = error.__cause__ or error.__context__


@dataclass(frozen=True)
class RemoteHelper:
    """A helper on another machine, for one run; implements `ExaminingHelper`."""

    connection: HttpsHelperConnection
    terms: SecureTerms

    def add(self, request: SumRequest) -> Residues:
        body = write_request(self.terms, request)
        return read_answer(self.connection.request("POST", "add", body, answer_size(self.terms)), self.terms)

    def examine(self, task: Task, sealed: bytes, signature: bytes) -> None:
        request = SumRequest(
            self.terms.run, task.version, self.terms.length, (SealedSeed(task, sealed),), (signature,)
        )
        self.connection.request("POST", "examine", write_request(self.terms, request), _MAX_ANSWER_BYTES)


def _read_body(response: Any, max_bytes: int) -> bytes:
    data = bytearray()
    for chunk in response.iter_raw():
        data += chunk
        if len(data) > max_bytes:
            raise InputError(
                "the helper's answer is longer than expected: install the same version of offbeat on both."
            )
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
