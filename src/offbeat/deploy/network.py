"""Addresses, ports, TLS files and HTTP servers on this machine."""

import asyncio
import collections
import contextlib
import errno
import hashlib
import ipaddress
import math
import select
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from offbeat.errors import InputError

if TYPE_CHECKING:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

_SHUTDOWN_TIMEOUT = 10  # seconds
_ACCEPT_PAUSE = 0.5  # seconds
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


def bind_socket(host: str, port: int, option: str = "--port") -> socket.socket:
    """Listen on a TCP port; the `InputError` of a failure names the option to change."""
    if not 0 <= port < 65536:
        raise InputError(f"there is no port {port}: give {option} a number up to 65535.")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, OverflowError, UnicodeError):
        raise InputError(f"port {port} of {host} cannot be used (unknown host): change {option}.") from None
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio sets no TCP_NODELAY
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


class Doorbell:
    """One end of a pair of sockets, by which two processes of one server wake each other.

    A ring that is lost costs time and nothing else: whoever waits also looks from time to time.
    """

    EVERYBODY = b"*"

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        end.setblocking(False)
        self._lost = False

    @classmethod
    def pair(cls) -> "tuple[Doorbell, Doorbell]":
        """Both ends, for processes that inherit them."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        return cls(one), cls(other)

    def ring(self, whom: bytes = EVERYBODY) -> None:
        """Wake the other side; `whom` says which of those that wait there is meant."""
        try:
            self.socket.send(self.EVERYBODY if self._lost else whom)
            self._lost = False
        except OSError:  # the other side does not listen now
            self._lost = True

    def heard(self) -> list[bytes]:
        """Return whom the other side rang for since the last call."""
        rings = []
        with contextlib.suppress(OSError):
            while True:
                rings.append(self.socket.recv(64))
        return rings

    def wait(self, seconds: float) -> None:
        """Sleep so long, or until the other side rings."""
        if self._lost:
            self.ring()
        select.select([self.socket], [], [], seconds)
        self.heard()

    def close(self) -> None:
        self.socket.close()


def waits_for(public_key: bytes) -> bytes:
    """How a doorbell names a node with this public key, as PEM in base 64."""
    return hashlib.sha256(public_key).digest()


class TlsFiles(NamedTuple):
    """The certificate chain and the private key of a server, both as PEM files."""

    certificate: Path
    key: Path


def tls_context(tls: TlsFiles) -> ssl.SSLContext:
    """The TLS of a server with these files; an `InputError` is raised if it could not start with them."""
    for path in tls:
        if not path.is_file():
            raise InputError(f"there is no file {path}: name the server's certificate and its key.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(*tls, password=lambda: b"")
    except (ssl.SSLError, OSError, ValueError):
        raise InputError(
            f"{tls.certificate} and {tls.key} are not a certificate and its key, both as PEM: "
            "make them with offbeat keys."
        ) from None
    return context


class HttpLimits(NamedTuple):
    """The limits of an HTTP server; times are in seconds."""

    connections: int  # of clients that the application has not identified
    per_address: int  # of these, from one address
    per_identity: int  # connections of one client that it has identified
    head: float  # for the TLS handshake, and for the head of a request, also on an idle connection
    idle: float = 0.0  # for the next request of an identified client, if that is longer
    head_bytes: int = 16 * 1024
    linger: float = 2.0  # for the end of TLS


class Connection:
    """One accepted connection, from its TLS handshake to its end.

    An application finds it as `scope["state"]["connection"]`.
    """

    def __init__(self, address: str, table: "ConnectionTable") -> None:
        self.address = address
        self.identity: str | None = None
        self.busy = False  # a busy connection does not make room for another
        self.close: Callable[[], object] = lambda: None  # aborts it, set by the server
        self._table = table

    def identify(self, identity: str) -> bool:
        """Count the connection by who its client is; whether that client may have one more."""
        return self._table.identify(self, identity)


class ConnectionTable:
    """The open connections: of unknown clients by address, of known ones by identity.

    Where unknown clients have too many, the one that was accepted first and is not busy makes room. A client
    that identifies itself quickly is therefore served, however many others are silent.
    """

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._unknown: dict[Connection, None] = {}  # in order of arrival
        self._addresses: collections.Counter[str] = collections.Counter()
        self._identities: collections.Counter[str] = collections.Counter()

    def admit(self, connection: Connection) -> str | None:
        """Add a connection, or say why there is no room for it; `remove` follows in either case."""
        full = None
        if self._addresses[connection.address] >= self._limits.per_address:
            full = connection.address
        elif len(self._unknown) >= self._limits.connections:
            full = self._addresses.most_common(1)[0][0]  # so that a few addresses cannot occupy everything
        if full is not None:
            silent = (each for each in self._unknown if each.address == full and not each.busy)
            oldest = next(silent, None)
            if oldest is None:
                return "full"
            self.remove(oldest)
            oldest.close()
        self._unknown[connection] = None
        self._addresses[connection.address] += 1
        return None if full is None else "dropped"

    def identify(self, connection: Connection, identity: str) -> bool:
        if connection.identity == identity:
            return True
        if self._identities[identity] >= self._limits.per_identity:
            return False
        self.remove(connection)
        connection.identity = identity
        self._identities[identity] += 1
        return True

    def remove(self, connection: Connection) -> None:
        counter, name = self._addresses, connection.address
        if connection.identity is not None:
            counter, name = self._identities, connection.identity
            connection.identity = None
        elif connection in self._unknown:
            del self._unknown[connection]
        else:
            return
        counter[name] -= 1
        if not counter[name]:
            del counter[name]


def http_server(
    app: Any,
    tls: TlsFiles | None,
    limits: HttpLimits,
    note: Callable[[str, str], None] = lambda kind, what: None,
) -> "uvicorn.Server":
    """Configure a uvicorn server, to be run on a socket that is bound already.

    It accepts connections itself, because uvicorn has no limit for the TLS handshake nor for the connections
    of one address. `note` is called with the kind and a description of what was refused.
    """
    # Imported here, because addresses are needed without the extra that brings uvicorn.
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    table = ConnectionTable(limits)

    class Protocol(H11Protocol):  # type: ignore[misc, unused-ignore]
        """Closes a connection that sends no complete head of a request in time."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override, unused-ignore]
            super().connection_made(transport)
            connection: Connection = self.app_state["connection"]
            connection.close = transport.abort
            self._peer = connection.address
            self._expect_request_after(None)

        def connection_lost(self, exc: Exception | None) -> None:
            table.remove(self.app_state["connection"])
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            answered = self.cycle
            super().on_response_complete()  # may start the next request of the connection
            if not self.transport.is_closing():
                self._expect_request_after(answered)

        def send_400_response(self, msg: str) -> None:
            note("malformed", f"what {self._peer} sent is not HTTP/1.1")
            error = sys.exception()
            if getattr(error, "error_status_hint", 400) == 431:
                body = b"the head of a request has at most %d bytes" % limits.head_bytes
                head = b"HTTP/1.1 431 \r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
                self.transport.write(head + body)
                self.transport.close()
            else:
                super().send_400_response(msg)

        def _expect_request_after(self, last: "RequestResponseCycle | None") -> None:
            def close() -> None:
                if self.cycle is last and not self.transport.is_closing():
                    if self.conn.trailing_data[0]:
                        note("slow", f"a request from {self._peer} was not completed in time")
                    self.transport.close()

            known = self.app_state["connection"].identity is not None
            self.loop.call_later(max(limits.head, limits.idle if known else 0.0), close)

    class Server(uvicorn.Server):  # type: ignore[misc, unused-ignore]
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await self.lifespan.startup()
            self.servers: list[asyncio.Server] = []
            loop = asyncio.get_running_loop()
            self._accepting = [loop.create_task(self._accept(each)) for each in sockets or ()]
            self._handshakes: set[asyncio.Task[bool]] = set()
            self.started = True

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            for task in (*self._accepting, *self._handshakes):
                task.cancel()
            await super().shutdown(sockets)  # also tells the application

        async def _accept(self, listener: socket.socket) -> None:
            listener.setblocking(False)
            loop = asyncio.get_running_loop()
            while True:
                try:
                    accepted, address = await loop.sock_accept(listener)
                except ConnectionError:
                    continue
                except OSError:  # out of file descriptors
                    await asyncio.sleep(_ACCEPT_PAUSE)
                    continue
                connection = Connection(str(address[0]), table)
                if refused := table.admit(connection):
                    note("full", f"too many connections; the last one is from {connection.address}")
                if refused == "full":
                    accepted.close()
                    continue
                task = loop.create_task(self._open(accepted, connection))
                connection.close = task.cancel
                self._handshakes.add(task)
                task.add_done_callback(partial(self._opened, accepted, connection))

        def _opened(self, accepted: socket.socket, connection: Connection, task: asyncio.Task[bool]) -> None:
            self._handshakes.discard(task)
            if task.cancelled() or not task.result():
                accepted.close()
                table.remove(connection)

        async def _open(self, accepted: socket.socket, connection: Connection) -> bool:
            seconds = None if self.config.ssl is None else limits.head
            protocol = Protocol(self.config, self.server_state, {"connection": connection})
            try:
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: protocol,
                    accepted,
                    ssl=self.config.ssl,
                    ssl_handshake_timeout=seconds,
                    ssl_shutdown_timeout=seconds and limits.linger,
                )
            except OSError:
                note("malformed", f"{connection.address} failed the TLS handshake")
                return False
            return True

    tls_options: dict[str, Any] = (
        {} if tls is None else {"ssl_certfile": str(tls.certificate), "ssl_keyfile": str(tls.key)}
    )
    return Server(
        uvicorn.Config(
            app,
            loop="asyncio",
            interface="asgi3",
            proxy_headers=False,
            ws="none",
            lifespan="auto",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            date_header=False,
            h11_max_incomplete_event_size=limits.head_bytes,
            timeout_keep_alive=math.ceil(max(limits.head, limits.idle)),
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
