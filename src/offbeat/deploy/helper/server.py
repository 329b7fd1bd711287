"""What a helper does with a request: whether it may be answered, whether it was before, and the answer.

The helper over HTTPS: its key for anybody, and sums for the leader that knows the token.
"""

import asyncio
import hmac
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from offbeat.aggregate.secure import HelperInfo
from offbeat.core import Task
from offbeat.deploy.helper.protocol import MAX_REQUEST_BYTES, HelperRequest, read_request
from offbeat.deploy.helper.store import HelperStore, RunTransaction, request_digest
from offbeat.deploy.keys import signed_statement, verify_signature
from offbeat.errors import InputError
from offbeat.privacy.secure.encoding import unseal
from offbeat.privacy.secure.servers import SeenReportRanges, SeenReports, add_shares
from offbeat.privacy.secure.terms import (
    OverlapError,
    RefusedError,
    ReplayError,
    RunError,
    SecureTerms,
    SignatureError,
    report_name,
)


class HelperService:
    """A helper of any number of runs, one request at a time.

    With the public keys of `sites`, a report counts only if one of them signed it; each client of a
    run is one of them for good, and no two clients are the same one. So a leader cannot make up the
    clients between which it would find a single upload. Reports of one sum were all clipped to the same
    bounds, and no run is served whose sums may be of fewer clients than `minimum`.

    What remains rests on a leader that follows the protocol. It chooses which of the real reports to
    sum, and what sites are sent: with other models or plans for some, whose updates come to nothing,
    it learns of the rest from a sum. Sites that help it count as real ones.
    """

    def __init__(
        self,
        key: X25519PrivateKey,
        store: HelperStore,
        sites: Mapping[str, EllipticCurvePublicKey] | None = None,
        minimum: int = 2,
    ) -> None:
        self._key = key
        self._store = store
        self._sites = sites
        self._minimum = minimum
        self._turn = threading.Lock()  # also a bound on memory: one sum at a time

    @property
    def known(self) -> HelperInfo:
        """What anybody may know of it."""
        return HelperInfo(self._key.public_key().public_bytes_raw(), self._sites is not None, self._minimum)

    def close(self) -> None:
        """Let go of the store."""
        self._store.close()

    def add(self, asking: HelperRequest) -> bytes:
        """The sum as little-endian numbers of 32 bits, or a refusal that changes nothing."""
        terms, request = asking
        self._check(terms)
        mark = request_digest(request, terms)
        with self._turn, self._store.page(terms) as page:
            again = page.answered(mark)
            counted: SeenReports = SeenReportRanges() if again else page
            page.bind(self._signers(asking, page))
            total = add_shares(request, terms, self._key, counted)
            if not again:
                page.answer(mark)
        return total.astype("<u4", copy=False).tobytes()

    def examine(self, asking: HelperRequest) -> None:
        """Refuse reports that could not be added; nothing is counted."""
        terms, request = asking
        self._check(terms)
        with self._turn, self._store.page(terms) as page:
            page.bind(self._signers(asking, page))
            for task, seed in request.reports:
                unseal(seed, task, terms, self._key)

    def _check(self, terms: SecureTerms) -> None:
        if terms.minimum < self._minimum:
            raise RunError(
                f"this helper adds the reports of at least {self._minimum} clients, and the run's sums may "
                f"be of {terms.minimum}: begin a run with a higher minimum."
            )

    def _signers(self, asking: HelperRequest, page: RunTransaction) -> dict[Task, str]:
        """Whose key each report is signed with."""
        if self._sites is None:
            return {}
        terms, request = asking
        signatures = request.signatures or (b"",) * len(request.reports)
        found = {}
        for (task, seed), signature in zip(request.reports, signatures, strict=True):
            message = signed_statement(terms, task, seed)
            own = page.site(task.client)
            tried = self._sites if own is None else {own} & self._sites.keys()
            key = next((one for one in tried if verify_signature(self._sites[one], message, signature)), None)
            if key is None:
                who = "a site that is known" if own is None else "the site that its client is"
                raise SignatureError(
                    f"{report_name(task)} is not signed by {who}: leave that report out.", [task]
                )
            found[task] = key
        return found


_BODY_TIMEOUT = 60.0  # seconds for a request to come in
_IDLE_TIMEOUT = 10.0  # seconds for a request to begin
_MAX_CONNECTIONS = 32  # connections
_LOG = logging.getLogger(__name__)


class TlsFiles(NamedTuple):
    """What a helper proves itself with."""

    certificate: Path
    key: Path


def build_app(desk: HelperService, token: str) -> Starlette:
    """What is answered, and to whom."""

    async def key(request: Request) -> Response:
        known = desk.known
        return JSONResponse(known._asdict() | {"key": known.key.hex()})

    async def add(request: Request) -> Response:
        return await _answer(
            request, token, lambda asking: Response(desk.add(asking), media_type=_OCTET_STREAM)
        )

    async def examine(request: Request) -> Response:
        def look(asking: HelperRequest) -> Response:
            desk.examine(asking)
            return JSONResponse({})

        return await _answer(request, token, look)

    return Starlette(
        routes=[
            Route("/key", key, methods=["GET"]),
            Route("/add", add, methods=["POST"]),
            Route("/examine", examine, methods=["POST"]),
        ]
    )


class _IdleTimeoutProtocol(H11Protocol):  # type: ignore[misc, unused-ignore]
    """Hangs up on who asks for nothing: a few of them could else take up all the connections."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override, unused-ignore]
        super().connection_made(transport)
        self._await_request(None)

    def on_response_complete(self) -> None:
        answered = self.cycle
        super().on_response_complete()  # may begin with the next request
        self._await_request(answered)

    def _await_request(self, last: RequestResponseCycle | None) -> None:
        self.loop.call_later(_IDLE_TIMEOUT, lambda: self.transport.close() if self.cycle is last else None)


def build_server(app: Starlette, tls: TlsFiles | None) -> uvicorn.Server:
    """To be run on a socket that is bound already."""
    proof: dict[str, Any] = (
        {} if tls is None else {"ssl_certfile": str(tls.certificate), "ssl_keyfile": str(tls.key)}
    )
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=_IdleTimeoutProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=10,
            **proof,
        )
    )


def check_tls(tls: TlsFiles) -> None:
    """Refuse files that no server could start with."""
    for path in tls:
        if not path.is_file():
            raise InputError(f"there is no file {path}: name the helper's certificate and its key.")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*tls, password=lambda: b"")
    except (ssl.SSLError, OSError, ValueError):
        raise InputError(
            f"{tls.certificate} and {tls.key} are not a certificate and its key, both as PEM: "
            "make them with offbeat keys."
        ) from None


def bind_listener(host: str, port: int) -> socket.socket:
    """A socket of ours, or one sentence."""
    if not 0 <= port < 1 << 16:
        raise InputError(f"there is no port {port}: give --port a number up to 65535.")
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError, UnicodeError):
        raise InputError(
            f"{host}:{port} is not an address of this machine: give --host and --port."
        ) from None
    taken = socket.socket(family, socket.SOCK_STREAM)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(place)
        taken.listen(_MAX_CONNECTIONS)
    except OSError as error:
        taken.close()
        raise InputError(
            f"port {port} of {host} cannot be used ({error.strerror}): give another --port."
        ) from None
    return taken


def open_key_and_store(key_file: Path, store: Path) -> tuple[X25519PrivateKey, HelperStore]:
    """Key and store, made together where neither is there; the public key is written beside the other."""
    if key_file.exists():
        if not store.exists():
            raise InputError(
                f"{key_file} is there but {store} is not, and with it what was counted under this key: "
                "bring the store back, or name a key file that is not there yet."
            )
        key = _read_key(key_file)
        return key, HelperStore(store, key.public_key().public_bytes_raw().hex())
    key = X25519PrivateKey.generate()
    public = key.public_key().public_bytes_raw().hex()
    kept = HelperStore(store, public)  # first: a key without its store is refused from then on
    try:
        _write_key_file(key_file.with_name(f"{key_file.name}.pub"), f"{public}\n".encode(), 0o644)
        _write_key_file(key_file, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    except OSError as error:
        kept.close()
        raise InputError(f"{key_file} cannot be written ({error.strerror}): name a place that can.") from None
    return key, kept


_OCTET_STREAM = "application/octet-stream"


async def _answer(request: Request, token: str, act: Callable[[HelperRequest], Response]) -> Response:
    shown = request.headers.get("authorization", "")
    if not hmac.compare_digest(shown.encode(), f"Bearer {token}".encode()):
        return JSONResponse({"sentence": "the token is not this helper's."}, 401)
    size = request.headers.get("content-length", "")
    if not size.isdecimal() or len(size) > 12:
        return JSONResponse({"sentence": "a request must say how long it is."}, 411)
    if int(size) > MAX_REQUEST_BYTES:
        return JSONResponse({"sentence": f"a request has at most {MAX_REQUEST_BYTES} bytes."}, 413)
    try:
        async with asyncio.timeout(_BODY_TIMEOUT):
            body = bytearray()
            async for piece in request.stream():  # in chunks it may be longer than it said
                body += piece
                if len(body) > int(size):
                    return JSONResponse({"sentence": "the request is longer than it said."}, 413)
        return await run_in_threadpool(lambda: act(read_request(bytes(body))))
    except TimeoutError:
        return JSONResponse({"sentence": "the request came too slowly."}, 408)
    except ClientDisconnect:
        return JSONResponse({}, 400)
    except RefusedError as refusal:
        kind = type(refusal).__name__
        _LOG.warning("refused (%s): %s", kind, refusal)
        facts = {"refusal": kind, "sentence": str(refusal), "tasks": [list(task) for task in refusal.tasks]}
        return JSONResponse(facts, 409 if isinstance(refusal, ReplayError | OverlapError) else 422)


def _read_key(path: Path) -> X25519PrivateKey:
    try:
        mode, data = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise InputError(f"the helper's key {path} cannot be read ({error.strerror}).") from None
    if mode & 0o077:
        raise InputError(f"others can read {path}, which is secret: take their rights away (chmod 600).")
    try:
        key = load_pem_private_key(data, None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, X25519PrivateKey):
        raise InputError(f"{path} is not a key that a helper wrote: name another file.")
    return key


def _write_key_file(path: Path, data: bytes, mode: int) -> None:
    """Whole and on disk, or not at all; what is there is replaced."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
