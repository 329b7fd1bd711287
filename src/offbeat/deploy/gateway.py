"""The HTTP gateway in front of a SuperLink, which forwards only the requests that sites need.

A SuperLink has one port for everything, and obeys whoever reaches it: it registers keys, and runs code at the
server and at every site. So it listens on the loopback interface only, and this process accepts connections
from other machines.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import logging
import os
import socket
import ssl
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import h11

from offbeat.deploy.network import parse_address
from offbeat.deploy.protocol.strict_json import quote

CHUNK_BYTES = 256 * 1024  # read at a time
_MAX_HEADER_BYTES = 16 * 1024


class ConnectionLostError(Exception):
    """A connection ended, or its peer does not speak HTTP/1.1: then there is a status to answer with."""

    def __init__(self, side: "HttpConnection | None", status: int | None = None) -> None:
        super().__init__()
        self.side, self.status = side, status


class HttpConnection:
    """A connection with its HTTP/1.1 state: to a site, or to the SuperLink."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, role: Any) -> None:
        self._reader, self.writer = reader, writer
        self._http = h11.Connection(role, max_incomplete_event_size=_MAX_HEADER_BYTES)
        self._cut = False

    @property
    def waits(self) -> bool:
        """Whether an incomplete request was received."""
        return bool(self._http.trailing_data[0])

    async def next(self) -> Any:
        """The next event of h11."""
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(CHUNK_BYTES))
        except OSError:
            raise ConnectionLostError(self) from None
        except h11.RemoteProtocolError as error:
            raise ConnectionLostError(self, error.error_status_hint) from None
        return event

    async def answer(self) -> Any:
        """The head of the response."""
        while isinstance(event := await self.next(), h11.InformationalResponse):
            pass
        if not isinstance(event, h11.Response):
            raise ConnectionLostError(self)
        return event

    async def send(self, event: Any) -> None:
        """Send an event, and wait until most of it has left."""
        try:
            self.writer.write(self._http.send(event) or b"")
            await self.writer.drain()
        except (OSError, h11.LocalProtocolError):
            raise ConnectionLostError(self) from None

    def again(self) -> bool:
        """Prepare for another request; whether that is possible."""
        if self._reader.at_eof() or not self._http.our_state is self._http.their_state is h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    async def close(self, seconds: float) -> None:
        """Close the connection in order, unless it was aborted or the peer takes too long."""
        if not self._cut:
            _set_linger(self.writer.get_extra_info("socket"), reset=False)
        self.writer.close()
        try:
            async with asyncio.timeout(seconds):
                await self.writer.wait_closed()
        except OSError:  # also a TimeoutError
            self.writer.transport.abort()

    def cut(self) -> None:
        """Abort the connection, so that an incomplete message is not taken for a complete one."""
        self._cut = True
        self.writer.transport.abort()


async def accept_connection(
    line: socket.socket, context: ssl.SSLContext | None, seconds: float
) -> HttpConnection:
    """A connection from a site, which sees a reset however this process ends.

    Flower's nodes do not retry after a plain end in the middle of TLS, which looks like broken TLS.
    """
    _set_linger(line, reset=True)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(CHUNK_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    limits = {} if context is None else {"ssl_handshake_timeout": seconds, "ssl_shutdown_timeout": seconds}
    try:
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, line, ssl=context, **limits)
    except OSError:
        raise ConnectionLostError(None) from None
    return HttpConnection(reader, asyncio.StreamWriter(transport, protocol, reader, loop), h11.SERVER)


def _set_linger(line: Any, *, reset: bool) -> None:
    with contextlib.suppress(OSError):
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", reset, 0))


async def open_connection(
    host: str, port: int, context: ssl.SSLContext | None, seconds: float
) -> HttpConnection:
    """A connection to the SuperLink."""
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(host, port, ssl=context, limit=CHUNK_BYTES)
    except OSError:  # also a TimeoutError
        raise ConnectionLostError(None) from None
    return HttpConnection(reader, writer, h11.CLIENT)


_FLEET_METHODS = (
    *("register-node", "activate-node", "deactivate-node", "unregister-node", "send-node-heartbeat"),
    *("pull-messages", "push-messages", "get-run", "get-fab"),
    *("pull-object", "push-object", "confirm-message-received"),
)
# All that a SuperNode asks for, and how `offbeat join` looks whether anybody is there. Compared as it came:
# nothing is decoded or tidied up here that the SuperLink might read in another way.
ALLOWED_REQUESTS = frozenset(
    {(b"GET", b"/health"), *((b"POST", f"/v1/fleet/{name}".encode()) for name in _FLEET_METHODS)}
)
_HOP_BY_HOP_HEADERS = frozenset(
    {
        *(b"connection", b"expect", b"keep-alive", b"proxy-authenticate", b"proxy-authorization"),
        *(b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    }
)
_ORIGIN_HEADERS = (b"forwarded", b"x-forwarded-")  # a SuperLink trusts these on the loopback interface
_KEEP_ALIVE = 2.0  # seconds that a connection may be idle; the SuperLink closes it after five
_MAX_DISCARD = 1024 * 1024  # bytes of a refused request that are read, so that its sender gets the response


class ConnectionLimits(NamedTuple):
    """The limits of one connection; times are in seconds."""

    most: int = 32 * 1024 * 1024  # bytes of a request; Flower splits large objects into 5 MiB
    head: float = 15.0  # for the head of a request, also on an idle connection
    grace: float = 30.0  # for a body, in addition to its bytes at `rate`
    rate: float = 16 * 1024.0  # bytes per second
    reach: float = 10.0  # to connect to the SuperLink
    answer: float = 60.0  # for the head of the SuperLink's response
    linger: float = 2.0  # to close a connection


class UpstreamAddress(NamedTuple):
    """How the SuperLink is reached."""

    address: str
    context: ssl.SSLContext | None


class ProxyConnection:
    """Forwards the requests of one connection to the SuperLink, or refuses them."""

    def __init__(
        self,
        front: HttpConnection,
        peer: str,
        way: UpstreamAddress,
        bounds: ConnectionLimits,
        note: Callable[[str, str], None],
    ) -> None:
        self._front, self._peer, self._way, self._bounds, self._note = front, peer, way, bounds, note
        self._back: HttpConnection | None = None
        self._used = 0.0  # when the connection to the SuperLink was used last

    async def run(self) -> None:
        """Serve until the connection ends, is idle, or a request is refused."""
        try:
            while await self._one():
                pass
        finally:
            self._drop()

    async def _one(self) -> bool:
        """Handle one request; whether there may be another."""
        try:
            async with asyncio.timeout(self._bounds.head):
                request = await self._front.next()
        except TimeoutError:
            if self._front.waits:
                self._note("slow", f"a request from {self._peer} was not completed in time")
            return False
        except ConnectionLostError as lost:
            if lost.status is not None:
                self._note("malformed", f"what {self._peer} sent is not HTTP/1.1")
                await self._refuse(lost.status, "this is not HTTP/1.1")
            return False
        if not isinstance(request, h11.Request):
            return False
        if why := self._reason(request):
            await self._refuse(*why)
            return False
        return await self._pass(request)

    def _reason(self, request: Any) -> tuple[int, str] | None:
        """Why a request is refused: a status and a sentence; None if it is allowed."""
        named = dict(request.headers)
        if (request.method, request.target) not in ALLOWED_REQUESTS:
            wanted = b"%s %s" % (request.method, request.target)
            self._note("forbidden", f"{quote(wanted.decode('latin-1'))} from {self._peer}")
            return 403, "the gateway of 'offbeat serve' forwards only what sites need."
        length = named.get(b"content-length", b"0" if request.method == b"GET" else None)
        if length is None or b"transfer-encoding" in named:
            self._note("malformed", f"a request from {self._peer} has no content length")
            return 411, "a request needs a content length."
        if int(length) > self._bounds.most:
            self._note("size", f"a request of {int(length)} bytes from {self._peer}")
            return 413, f"a request has at most {self._bounds.most} bytes."
        return None

    async def _pass(self, request: Any) -> bool:
        front, begun = self._front, False
        try:
            back = await self._reach()
            await back.send(
                h11.Request(method=request.method, target=request.target, headers=self._to(request))
            )
            await self._pour(front, back)
            async with asyncio.timeout(self._bounds.answer):
                answer = await back.answer()
            begun = True
            headers = [(name, value) for name, value in answer.headers if name not in _HOP_BY_HOP_HEADERS]
            await front.send(h11.Response(status_code=answer.status_code, headers=headers))
            await self._pour(back, front)
        except TimeoutError:
            status, sentence = 504, "the request took too long."
            self._note("slow", f"a request from {self._peer} took too long")
        except ConnectionLostError as lost:
            if lost.side is front:
                status, sentence = lost.status or 400, "the request broke off."
            else:
                status, sentence = 502, "the SuperLink is unreachable."
                self._note("away", f"the SuperLink at {self._way.address} is unreachable")
        else:
            self._used = asyncio.get_running_loop().time()
            return front.again()
        self._drop()
        if begun:
            front.cut()
        else:
            await self._refuse(status, sentence, self._bounds.most)
        return False

    async def _reach(self) -> HttpConnection:
        """A connection to the SuperLink: the last one, if it was used recently."""
        idle = asyncio.get_running_loop().time() - self._used
        if self._back is not None and idle < _KEEP_ALIVE and self._back.again():
            return self._back
        self._drop()
        host, port = parse_address(self._way.address)
        self._back = await open_connection(host, port, self._way.context, self._bounds.reach)
        return self._back

    def _to(self, request: Any) -> list[tuple[bytes, bytes]]:
        """The headers to forward: without hop-by-hop headers, and with the address of the peer."""
        kept = [
            (name, value)
            for name, value in request.headers
            if name not in _HOP_BY_HOP_HEADERS and not name.startswith(_ORIGIN_HEADERS)
        ]
        return [*kept, (b"x-forwarded-for", self._peer.encode())]

    async def _pour(self, source: HttpConnection, sink: HttpConnection) -> None:
        """Forward a body in chunks."""
        async with self._pace() as paced:
            while isinstance(event := await source.next(), h11.Data):
                await sink.send(event)
                paced(len(event.data))
            await sink.send(h11.EndOfMessage())

    @asynccontextmanager
    async def _pace(self) -> AsyncIterator[Callable[[int], None]]:
        """A time limit for the block that grows with the bytes it reports."""
        bounds, until = self._bounds, asyncio.get_running_loop().time() + self._bounds.grace
        async with asyncio.timeout_at(until) as limit:

            def paced(size: int) -> None:
                nonlocal until
                until += size / bounds.rate
                limit.reschedule(until)

            yield paced

    async def _refuse(self, status: int, sentence: str, most: int = _MAX_DISCARD) -> None:
        """Answer with an error; first some of the body is read, so that the sender gets the response."""
        body = json.dumps({"detail": sentence}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
        head = h11.Response(status_code=status, headers=[*headers, ("connection", "close")])
        with contextlib.suppress(TimeoutError, ConnectionLostError):
            async with self._pace() as paced:
                for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                    await self._front.send(event)
                while most > 0 and isinstance(event := await self._front.next(), h11.Data):
                    most -= len(event.data)
                    paced(len(event.data))

    def _drop(self) -> None:
        if self._back is not None:
            self._back.writer.close()
            self._back = None


_MAX_CONNECTIONS, _MAX_PER_ADDRESS = (
    400,
    100,
)  # connections in total and from one address; each takes up to two file descriptors
_ACCEPT_PAUSE = 0.5  # seconds, if the system is out of file descriptors
_LOG_INTERVAL = 10.0  # seconds between two lines of the same kind
_LOG = logging.getLogger("offbeat.gate")


class RefusalLog:
    """Counts what was refused, by kind, and logs it from time to time."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self.counts: collections.Counter[str] = collections.Counter()
        self._due: dict[str, float] = {}

    def __call__(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        if self._clock() >= self._due.get(kind, 0.0):
            self._due[kind] = self._clock() + _LOG_INTERVAL
            self._say(f"{kind} ({self.counts[kind]} so far): {what}")


class Gateway:
    """Accepts connections from anywhere, for one SuperLink."""

    def __init__(
        self,
        way: UpstreamAddress,
        context: ssl.SSLContext | None,
        tally: RefusalLog,
        bounds: ConnectionLimits = ConnectionLimits(),
        most: tuple[int, int] = (_MAX_CONNECTIONS, _MAX_PER_ADDRESS),
    ) -> None:
        self._way, self._context, self._tally, self._bounds = way, context, tally, bounds
        self._all, self._each = most
        self._open: collections.Counter[str] = collections.Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> NoReturn:
        """Serve forever."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            try:
                line, address = await loop.sock_accept(listener)
            except ConnectionError:
                continue
            except OSError:
                await asyncio.sleep(_ACCEPT_PAUSE)
                continue
            peer = str(address[0])
            if self._open.total() >= self._all or self._open[peer] >= self._each:
                self._tally("full", f"{peer} has {self._open[peer]} connections, all {self._open.total()}")
                line.close()
                continue
            self._open[peer] += 1
            task = loop.create_task(self._handle(line, peer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _handle(self, line: socket.socket, peer: str) -> None:
        try:
            front = await accept_connection(line, self._context, self._bounds.head)
            try:
                await ProxyConnection(front, peer, self._way, self._bounds, self._tally).run()
            finally:
                await front.close(self._bounds.linger)
        except ConnectionLostError:
            self._tally("malformed", f"{peer} failed the TLS handshake")
        except Exception:
            _LOG.exception("a connection from %s failed", peer)
        finally:
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """The TLS context of the gateway."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return context


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Serve on an inherited socket until the parent process ends."""
    parser = argparse.ArgumentParser(prog="python -m offbeat.deploy.gateway", description=__doc__)
    parser.add_argument("--listener", required=True, type=int, metavar="N", help="the socket's number")
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT")
    parser.add_argument("--authority", type=Path, metavar="FILE", help="vouches for the SuperLink")
    parser.add_argument("--certificate", type=Path, metavar="FILE")
    parser.add_argument("--key", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    secure = given.authority is not None
    way = UpstreamAddress(
        given.superlink, ssl.create_default_context(cafile=given.authority) if secure else None
    )
    context = server_context(given.certificate, given.key) if secure else None

    async def serve() -> NoReturn:
        asyncio.get_running_loop().add_reader(0, _end_with_parent)
        await Gateway(way, context, RefusalLog(_LOG.warning)).serve(socket.socket(fileno=given.listener))

    asyncio.run(serve())


def _end_with_parent() -> None:
    if not os.read(0, 1024):
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
