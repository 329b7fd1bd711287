"""The helper over HTTPS: its key for anybody, and sums for the leader that knows the token."""

import asyncio
import hmac
import logging
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
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

from offbeat.deploy.helper_desk import Desk
from offbeat.deploy.helper_frames import MOST_BYTES, Asking, read_request
from offbeat.deploy.helper_store import Store
from offbeat.errors import InputError
from offbeat.privacy.secure.refusals import OverlapError, RefusedError, ReplayError

_SLOW = 60.0  # seconds for a request to come in
_SILENT = 10.0  # seconds for a request to begin
_AT_ONCE = 32  # connections
_LOG = logging.getLogger(__name__)


class Tls(NamedTuple):
    """What a helper proves itself with."""

    certificate: Path
    key: Path


def application(desk: Desk, token: str) -> Starlette:
    """What is answered, and to whom."""

    async def key(request: Request) -> Response:
        known = desk.known
        return JSONResponse(known._asdict() | {"key": known.key.hex()})

    async def add(request: Request) -> Response:
        return await _answer(request, token, lambda asking: Response(desk.add(asking), media_type=_BYTES))

    async def examine(request: Request) -> Response:
        def look(asking: Asking) -> Response:
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


class _Brisk(H11Protocol):  # type: ignore[misc, unused-ignore]
    """Hangs up on who asks for nothing: a few of them could else take up all the connections."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override, unused-ignore]
        super().connection_made(transport)
        self._await_request(None)

    def on_response_complete(self) -> None:
        answered = self.cycle
        super().on_response_complete()  # may begin with the next request
        self._await_request(answered)

    def _await_request(self, last: RequestResponseCycle | None) -> None:
        self.loop.call_later(_SILENT, lambda: self.transport.close() if self.cycle is last else None)


def server(app: Starlette, tls: Tls | None) -> uvicorn.Server:
    """To be run on a socket that is bound already."""
    proof: dict[str, Any] = (
        {} if tls is None else {"ssl_certfile": str(tls.certificate), "ssl_keyfile": str(tls.key)}
    )
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=_Brisk,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=_AT_ONCE,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=10,
            **proof,
        )
    )


def check_tls(tls: Tls) -> None:
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


def bound(host: str, port: int) -> socket.socket:
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
        taken.listen(_AT_ONCE)
    except OSError as error:
        taken.close()
        raise InputError(
            f"port {port} of {host} cannot be used ({error.strerror}): give another --port."
        ) from None
    return taken


def open_store(key_file: Path, store: Path) -> tuple[X25519PrivateKey, Store]:
    """Key and store, made together where neither is there; the public key is written beside the other."""
    if key_file.exists():
        if not store.exists():
            raise InputError(
                f"{key_file} is there but {store} is not, and with it what was counted under this key: "
                "bring the store back, or name a key file that is not there yet."
            )
        key = _read_key(key_file)
        return key, Store(store, key.public_key().public_bytes_raw().hex())
    key = X25519PrivateKey.generate()
    public = key.public_key().public_bytes_raw().hex()
    kept = Store(store, public)  # first: a key without its store is refused from then on
    try:
        _write(key_file.with_name(f"{key_file.name}.pub"), f"{public}\n".encode(), 0o644)
        _write(key_file, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    except OSError as error:
        kept.close()
        raise InputError(f"{key_file} cannot be written ({error.strerror}): name a place that can.") from None
    return key, kept


_BYTES = "application/octet-stream"


async def _answer(request: Request, token: str, act: Callable[[Asking], Response]) -> Response:
    shown = request.headers.get("authorization", "")
    if not hmac.compare_digest(shown.encode(), f"Bearer {token}".encode()):
        return JSONResponse({"sentence": "the token is not this helper's."}, 401)
    size = request.headers.get("content-length", "")
    if not size.isdecimal() or len(size) > 12:
        return JSONResponse({"sentence": "a request must say how long it is."}, 411)
    if int(size) > MOST_BYTES:
        return JSONResponse({"sentence": f"a request has at most {MOST_BYTES} bytes."}, 413)
    try:
        async with asyncio.timeout(_SLOW):
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


def _write(path: Path, data: bytes, mode: int) -> None:
    """Whole and on disk, or not at all; what is there is replaced."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
