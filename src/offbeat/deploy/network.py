"""Addresses, ports, TLS files and HTTP servers on this machine."""

import asyncio
import contextlib
import errno
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from offbeat.errors import InputError

if TYPE_CHECKING:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

_KEEP_ALIVE_TIMEOUT, _SHUTDOWN_TIMEOUT = 5, 10  # seconds
_START_TIMEOUT, _START_POLL = 10.0, 0.005  # seconds


def parse_address(text: str, option: str = "--superlink") -> tuple[str, int]:
    """Split `host:port`, or `[host]:port` for IPv6."""
    host, colon, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or "/" in text or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"{option} must be an address such as server.example:8000, not '{text}'.")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Join host and port into one string, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def free_port() -> int:
    """Return a port of 127.0.0.1 that is not in use now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_port_free(host: str, port: int, option: str = "--port") -> None:
    """Raise an `InputError` if the port cannot be bound."""
    bind_socket(host, port, option).close()


def bind_socket(host: str, port: int, option: str = "--port") -> socket.socket:
    """Listen on a TCP port; the `InputError` of a failure names the option to change."""
    if not 0 <= port < 65536:
        raise InputError(f"there is no port {port}: give {option} a number up to 65535.")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, OverflowError, UnicodeError):
        raise InputError(f"port {port} of {host} cannot be used (unknown host): change {option}.") from None
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen()
    except OSError as error:
        bound.close()
        in_use = error.errno == errno.EADDRINUSE
        reason = "is in use" if in_use else f"cannot be used ({error.strerror or error})"
        raise InputError(f"port {port} of {host} {reason}: choose another with {option}.") from None
    return bound


class TlsFiles(NamedTuple):
    """The certificate chain and the private key of a server, both as PEM files."""

    certificate: Path
    key: Path


def check_tls(tls: TlsFiles) -> None:
    """Raise an `InputError` if a server could not start with these files."""
    for path in tls:
        if not path.is_file():
            raise InputError(f"there is no file {path}: name the server's certificate and its key.")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*tls, password=lambda: b"")
    except (ssl.SSLError, OSError, ValueError):
        raise InputError(
            f"{tls.certificate} and {tls.key} are not a certificate and its key, both as PEM: "
            "make them with offbeat keys."
        ) from None


def http_server(
    app: Any, tls: TlsFiles | None, *, max_connections: int, idle_timeout: float
) -> "uvicorn.Server":
    """Configure a uvicorn server, to be run on a socket that is bound already.

    It closes a connection that sends no request for `idle_timeout` seconds. Without that limit, a few
    silent clients could occupy all of the `max_connections`.
    """
    # Imported here, because addresses are needed without the extra that brings uvicorn.
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class IdleTimeoutProtocol(H11Protocol):  # type: ignore[misc, unused-ignore]
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override, unused-ignore]
            super().connection_made(transport)
            self._expect_request_after(None)

        def on_response_complete(self) -> None:
            answered = self.cycle
            super().on_response_complete()  # may start the next request of the connection
            self._expect_request_after(answered)

        def _expect_request_after(self, last: "RequestResponseCycle | None") -> None:
            self.loop.call_later(idle_timeout, lambda: self.transport.close() if self.cycle is last else None)

    tls_options: dict[str, Any] = (
        {} if tls is None else {"ssl_certfile": str(tls.certificate), "ssl_keyfile": str(tls.key)}
    )
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=IdleTimeoutProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=max_connections,
            timeout_keep_alive=_KEEP_ALIVE_TIMEOUT,
            timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT,
            **tls_options,
        )
    )


@contextlib.contextmanager
def running_in_thread(server: "uvicorn.Server", listener: socket.socket) -> Iterator[None]:
    """Serve on a bound socket in a thread until the block is left."""
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + _START_TIMEOUT
        while not server.started:
            if not thread.is_alive() or time.monotonic() > deadline:
                raise InputError("the HTTP server did not start: see the log.")
            time.sleep(_START_POLL)
        yield
    finally:
        server.should_exit = True
        thread.join(_SHUTDOWN_TIMEOUT + 1)
