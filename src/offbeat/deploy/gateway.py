"""The HTTP gateway in front of a SuperLink, which forwards only the requests that sites need.

A SuperLink has one port for everything, and obeys whoever reaches it: it registers keys, and runs code at the
server and at every site. So it listens on the loopback interface only, and this process accepts connections
from other machines. Where sites have keys, the signature in the head of a request is verified before any of
its body is read, because the SuperLink keeps a body in memory before it looks at the signature.
"""

import argparse
import asyncio
import base64
import binascii
import collections
import contextlib
import json
import logging
import os
import resource
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import httpx
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from starlette.requests import ClientDisconnect

from offbeat.deploy.keys import fingerprint, read_site_keys
from offbeat.deploy.network import Connection, Doorbell, HttpLimits, TlsFiles, http_server, waits_for
from offbeat.deploy.protocol.strict_json import quote
from offbeat.errors import InputError

_FLEET_METHODS = (
    *("register-node", "activate-node", "deactivate-node", "unregister-node", "send-node-heartbeat"),
    *("pull-messages", "push-messages", "get-run", "get-fab"),
    *("pull-object", "push-object", "confirm-message-received"),
)
HEALTH = (b"GET", b"/health")
# The requests of a SuperNode, and the one with which `offbeat join` finds out whether a server is there. They
# are compared byte by byte: nothing is decoded or normalised that the SuperLink might read in another way.
ALLOWED_REQUESTS = frozenset({HEALTH, *((b"POST", f"/v1/fleet/{name}".encode()) for name in _FLEET_METHODS)})
# The headers with which a SuperNode signs the time of a request, and how old they may be, in seconds.
PUBLIC_KEY_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER = (
    b"flwr-public-key",
    b"flwr-timestamp",
    b"flwr-signature",
)
MIN_AGE, MAX_AGE = -5.0, 305.0
_HOP_BY_HOP_HEADERS = frozenset(
    {
        *(b"connection", b"expect", b"keep-alive", b"proxy-authenticate", b"proxy-authorization"),
        *(b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    }
)
_ORIGIN_HEADERS = (b"forwarded", b"x-forwarded-")  # a SuperLink trusts these on the loopback interface
_KEEP_ALIVE = (
    2.0  # seconds that a connection to the SuperLink may be idle; the SuperLink closes it after five
)
_PULL_MESSAGES, _PUSH_OBJECT = b"/v1/fleet/pull-messages", b"/v1/fleet/push-object"
_WAIT_HEADER = b"offbeat-wait"  # the seconds that a site's request for messages may be kept
_MAX_WAIT = 30.0
# Requests whose responses are short, and the most bytes that such a request may have to be forwarded at once.
_SHORT = frozenset(
    f"/v1/fleet/{name}".encode()
    for name in ("activate-node", "send-node-heartbeat", "pull-messages", "push-messages")
)
_SHORT_BYTES, _MAX_SHORT, _PIECE_BYTES = 16 * 1024, 8, 64 * 1024
_MAX_UPSTREAM = 100  # connections to the SuperLink; further requests wait
_MAX_DISCARD = 1024 * 1024  # bytes of a refused request that are read, so that its sender gets the response
_LOG_INTERVAL = 10.0  # seconds between two lines of the same kind
_KEY_INTERVAL = 2.0  # seconds between two looks for keys that were added or removed
_LOG = logging.getLogger("offbeat.gateway")
_CONNECTIONS = HttpLimits(connections=400, per_address=100, per_identity=16, head=15.0, idle=90.0)


class RequestLimits(NamedTuple):
    """The limits of one request; times are in seconds."""

    max_bytes: int = 32 * 1024 * 1024  # Flower splits large objects into 5 MiB
    per_key: int = 8  # requests at a time
    grace: float = 30.0  # for a body, in addition to its bytes at `rate`
    rate: float = 16 * 1024.0  # bytes per second
    connect: float = 10.0  # to connect to the SuperLink
    response: float = 60.0  # for the head of the SuperLink's response


class RefusalLog:
    """Counts what was refused, by kind, and logs it from time to time."""

    def __init__(self, log: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self.counts: collections.Counter[str] = collections.Counter()
        self._next: dict[str, float] = {}

    def __call__(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        if self._clock() >= self._next.get(kind, 0.0):
            self._next[kind] = self._clock() + _LOG_INTERVAL
            self._log(f"{kind} ({self.counts[kind]} so far): {what}")


class SiteKeys:
    """The public keys of a folder; keys that are added or removed count within seconds."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = folder, clock
        self._files = self._list()
        self._keys: Mapping[str, ec.EllipticCurvePublicKey] = read_site_keys(folder)
        self._next = time.monotonic() + _KEY_INTERVAL

    def identify(self, headers: Mapping[bytes, bytes]) -> str:
        """The fingerprint of the key that signed a request; a `ValueError` says why it is refused."""
        self._refresh()
        timestamp = headers.get(TIMESTAMP_HEADER, b"")
        try:
            age = self._clock() - _as_utc(datetime.fromisoformat(timestamp.decode("ascii"))).timestamp()
            pem = base64.b64decode(headers[PUBLIC_KEY_HEADER], validate=True)
            signature = base64.b64decode(headers[SIGNATURE_HEADER], validate=True)
            claimed = load_pem_public_key(pem)
        except (KeyError, ValueError, OverflowError, UnsupportedAlgorithm, binascii.Error):
            raise ValueError("a request needs the signature of a site's key.") from None
        known = fingerprint(claimed) if isinstance(claimed, ec.EllipticCurvePublicKey) else ""
        key = self._keys.get(known)
        if key is None:
            raise ValueError("the server does not know this key: ask its operator to add it.")
        if not MIN_AGE < age < MAX_AGE:
            raise ValueError(
                f"the site's clock is {abs(age):.0f} seconds {'behind' if age > 0 else 'ahead'}."
            )
        try:
            key.verify(signature, timestamp, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            raise ValueError("the signature does not belong to this key.") from None
        return known

    def _refresh(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _KEY_INTERVAL
        try:
            files = self._list()
            if files != self._files:
                self._keys = read_site_keys(self._folder) if files else {}
                self._files = files
        except (InputError, OSError) as error:  # the keys of before still count
            _LOG.warning("%s", error)

    def _list(self) -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in self._folder.rglob("*.pub")}


def _as_utc(time: datetime) -> datetime:
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


class _Refusal(NamedTuple):
    status: int
    sentence: str


class Gateway:
    """Forwards requests to one SuperLink, or refuses them; an ASGI application.

    Without `keys`, nobody is asked for a signature: then only the limits by address hold.
    """

    def __init__(
        self,
        superlink: str,
        context: ssl.SSLContext | None,
        keys: SiteKeys | None,
        log: RefusalLog,
        limits: RequestLimits = RequestLimits(),
        bell: Doorbell | None = None,
    ) -> None:
        self._superlink, self._bell = superlink, bell
        self._waiting: dict[bytes, set[asyncio.Event]] = {}  # requests for messages, by node
        self._quiet: set[bytes] = set()  # nodes for which there was no message, and no ring since
        self._url = f"{'http' if context is None else 'https'}://{superlink}"
        self._keys, self._log, self._limits = keys, log, limits
        # Short requests do not wait for long ones, and few connections are enough for them. These are the
        # transports alone, without httpx's client: no redirects, no proxies, no headers of its own.
        self._upstream, self._short = (
            httpx.AsyncHTTPTransport(
                verify=context or False,
                limits=httpx.Limits(
                    max_connections=most, max_keepalive_connections=most, keepalive_expiry=_KEEP_ALIVE
                ),
            )
            for most in (_MAX_UPSTREAM, _MAX_SHORT)
        )
        self._active: collections.Counter[str] = collections.Counter()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                await receive()
                if event == "startup" and self._bell is not None:
                    asyncio.get_running_loop().add_reader(self._bell.socket, self._rung)
                if event == "shutdown":
                    await self._upstream.aclose()
                    await self._short.aclose()
                await send({"type": f"lifespan.{event}.complete"})
            return
        connection: Connection = scope["state"]["connection"]
        refusal = self._check(scope, connection)
        if refusal is not None:
            await self._refuse(refusal, receive, send)
            return
        name = connection.identity or connection.address
        connection.busy = True
        self._active[name] += 1
        try:
            if scope["raw_path"] in _SHORT and int(dict(scope["headers"])[b"content-length"]) <= _SHORT_BYTES:
                await self._answer_short(scope, receive, send, connection)
            else:
                await self._forward(scope, receive, send, connection)
            if self._bell is not None and scope["raw_path"] == _PUSH_OBJECT:
                self._bell.ring()
        except Exception:
            _LOG.exception("a request from %s failed", connection.address)
            connection.close()
        finally:
            connection.busy = False
            self._active[name] -= 1
            if not self._active[name]:
                del self._active[name]

    def _check(self, scope: Any, connection: Connection) -> _Refusal | None:
        """Why a request is refused; None if it is allowed."""
        headers, peer = dict(scope["headers"]), connection.address
        request = (scope["method"].encode(), scope["raw_path"])
        if request not in ALLOWED_REQUESTS or scope["query_string"]:
            wanted = b"%s %s?%s" % (*request, scope["query_string"])
            self._log("forbidden", f"{quote(wanted.rstrip(b'?').decode('latin-1'))} from {peer}")
            return _Refusal(403, "the gateway of 'offbeat serve' forwards only what sites need.")
        length = headers.get(b"content-length", b"0" if request == HEALTH else None)
        if length is None or b"transfer-encoding" in headers:
            self._log("malformed", f"a request from {peer} has no content length")
            return _Refusal(411, "a request needs a content length.")
        if int(length) > (self._limits.max_bytes if request != HEALTH else 0):
            self._log("size", f"a request of {int(length)} bytes from {peer}")
            return _Refusal(413, f"a request has at most {self._limits.max_bytes} bytes.")
        if self._keys is None or request == HEALTH:
            return None
        try:
            key = self._keys.identify(headers)
        except ValueError as error:
            self._log("unsigned", f"{peer}: {error}")
            return _Refusal(401, str(error))
        if self._active[key] >= self._limits.per_key or not connection.identify(key):
            self._log("busy", f"the key {key[:16]} of {peer} has too many requests or connections")
            return _Refusal(429, "there are too many requests with this key: wait until they are answered.")
        return None

    def _rung(self) -> None:
        """Let those requests for messages go on that the server rang for."""
        assert self._bell is not None
        for whom in self._bell.heard():
            everybody = whom == Doorbell.EVERYBODY
            self._quiet = set() if everybody else self._quiet - {whom}
            events = self._waiting.values() if everybody else [self._waiting.get(whom, set())]
            for event in [event for each in events for event in each]:
                event.set()

    def _waits(self, scope: Any) -> float:
        """How many seconds a request for messages may be kept; 0 for every other request."""
        headers = dict(scope["headers"])
        if self._bell is None or scope["raw_path"] != _PULL_MESSAGES:
            return 0.0
        try:
            base64.b64decode(headers[PUBLIC_KEY_HEADER], validate=True)
            seconds = float(headers[_WAIT_HEADER])
        except (KeyError, ValueError):
            return 0.0
        return min(seconds, _MAX_WAIT) if seconds > 0 else 0.0

    async def _answer_short(self, scope: Any, receive: Any, send: Any, connection: Connection) -> None:
        """Forward a request whose body and response are short; one for messages may be kept."""
        try:
            async with asyncio.timeout(self._limits.grace):
                body = b"".join([chunk async for chunk in _chunks(receive)])
        except TimeoutError:
            self._log("slow", f"a request from {connection.address} took too long")
            await self._refuse(_Refusal(504, "the request took too long."), receive, send)
            return
        except ClientDisconnect:
            connection.close()
            return
        seconds = self._waits(scope)
        if seconds:
            response = await self._wait_for_message(scope, receive, connection, body, seconds)
        else:
            response = await self._ask(scope, body, connection)
        if response is None:
            self._log("away", f"the SuperLink at {self._superlink} is unreachable")
            await self._refuse(_Refusal(502, "the SuperLink is unreachable."), receive, send)
        elif isinstance(response, httpx.Response):
            await send(_head(response.status_code, _returned_headers(response)))
            starts = range(0, len(response.content), _PIECE_BYTES)
            pieces = [response.content[start : start + _PIECE_BYTES] for start in starts]
            try:
                for piece in [*pieces, b""]:
                    async with asyncio.timeout(self._limits.grace):
                        await send(_body(piece, more=bool(piece)))
            except TimeoutError:
                self._log("slow", f"{connection.address} does not read a response")
                connection.close()

    async def _wait_for_message(
        self, scope: Any, receive: Any, connection: Connection, body: bytes, seconds: float
    ) -> httpx.Response | Literal["gone"] | None:
        """The response to a request for messages once there is one, or when the time is up.

        Nothing is asked of the SuperLink for a client that has gone: it gives out a message only once.
        """
        node = waits_for(base64.b64decode(dict(scope["headers"])[PUBLIC_KEY_HEADER]))
        event, now = asyncio.Event(), asyncio.get_running_loop().time
        until, gone = now() + seconds, asyncio.ensure_future(receive())
        self._waiting.setdefault(node, set()).add(event)
        connection.busy = False  # it makes room for another, if it has to
        try:
            while True:
                event.clear()
                if node in self._quiet:
                    ringing = asyncio.ensure_future(event.wait())
                    await asyncio.wait(
                        (gone, ringing), timeout=until - now(), return_when=asyncio.FIRST_COMPLETED
                    )
                    ringing.cancel()
                if gone.done():
                    return "gone"
                self._quiet.add(node)  # before the SuperLink is asked, so that no ring is missed
                response = await self._ask(scope, body, connection)
                if response is None or response.content or response.status_code != 200:
                    self._quiet.discard(node)
                    return response
                if now() >= until:
                    return response
        finally:
            gone.cancel()
            self._waiting[node].discard(event)
            if not self._waiting[node]:
                del self._waiting[node]

    async def _ask(self, scope: Any, body: bytes, connection: Connection) -> httpx.Response | None:
        """The SuperLink's response to a short request; None if it is away."""
        request = httpx.Request(
            scope["method"],
            self._url + scope["raw_path"].decode(),
            headers=_forwarded_headers(scope["headers"], connection.address),
            content=body,
            extensions={"timeout": {"connect": self._limits.connect}},
        )
        try:
            async with asyncio.timeout(self._limits.connect + self._limits.response):
                response = await self._short.handle_async_request(request)
                await response.aread()
                return response
        except (TimeoutError, httpx.HTTPError):
            return None

    async def _forward(self, scope: Any, receive: Any, send: Any, connection: Connection) -> None:
        limits, now, started = self._limits, asyncio.get_running_loop().time, False
        request_is_empty = dict(scope["headers"]).get(b"content-length", b"0").strip(b"0") == b""
        try:
            first = limits.response if request_is_empty else limits.grace
            async with asyncio.timeout(limits.connect + first) as timeout:

                def paced(grace: float) -> Callable[[bytes], None]:
                    until = now() + grace
                    timeout.reschedule(until)

                    def passed(chunk: bytes) -> None:
                        nonlocal until
                        until += len(chunk) / limits.rate
                        timeout.reschedule(until)

                    return passed

                async def body() -> AsyncIterator[bytes]:
                    passed = paced(limits.grace)
                    async for chunk in _chunks(receive):
                        yield chunk
                        passed(chunk)
                    paced(limits.response)

                request = httpx.Request(
                    scope["method"],
                    self._url + scope["raw_path"].decode(),
                    headers=_forwarded_headers(scope["headers"], connection.address),
                    content=None if request_is_empty else body(),  # otherwise httpx would add an encoding
                    extensions={"timeout": {"connect": limits.connect}},
                )
                response = await self._upstream.handle_async_request(request)
                try:
                    started, passed = True, paced(limits.grace)
                    await send(_head(response.status_code, _returned_headers(response)))
                    async for chunk in response.aiter_raw():
                        await send(_body(chunk, more=True))
                        passed(chunk)
                    await send(_body(b"", more=False))
                finally:
                    await response.aclose()
                return
        except TimeoutError:
            refusal = _Refusal(504, "the request took too long.")
            self._log("slow", f"a request from {connection.address} took too long")
        except httpx.HTTPError:
            refusal = _Refusal(502, "the SuperLink is unreachable.")
            self._log("away", f"the SuperLink at {self._superlink} is unreachable")
        except ClientDisconnect:
            connection.close()
            return
        if started:  # abort, so that half a response is not taken for a whole one
            connection.close()
            await _wait_for_end(receive)
        else:
            await self._refuse(refusal, receive, send, self._limits.max_bytes)

    async def _refuse(self, refusal: _Refusal, receive: Any, send: Any, discard: int = _MAX_DISCARD) -> None:
        """Answer with an error; then some of the body is read, so that the sender gets the response."""
        body = json.dumps({"detail": refusal.sentence}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send(_head(refusal.status, [*headers, (b"connection", b"close")]))
        await send(_body(body, more=True))
        limits, until = self._limits, asyncio.get_running_loop().time() + self._limits.grace
        with contextlib.suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout_at(until) as timeout:
                async for chunk in _chunks(receive):
                    discard -= len(chunk)
                    if discard <= 0:
                        break
                    until += len(chunk) / limits.rate
                    timeout.reschedule(until)
        await send(_body(b"", more=False))


async def _chunks(receive: Any) -> AsyncIterator[bytes]:
    """The body of a request as it arrives."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        if message["body"]:
            yield message["body"]
        if not message["more_body"]:
            return


async def _wait_for_end(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _head(status: int, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


def _body(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _returned_headers(response: httpx.Response) -> list[tuple[bytes, bytes]]:
    headers = ((name.lower(), value) for name, value in response.headers.raw)
    return [(name, value) for name, value in headers if name not in _HOP_BY_HOP_HEADERS]


def _forwarded_headers(headers: Sequence[tuple[bytes, bytes]], peer: str) -> list[tuple[bytes, bytes]]:
    """Without hop-by-hop headers, and with the address of the peer."""
    kept = [
        (name, value)
        for name, value in headers
        if name not in _HOP_BY_HOP_HEADERS and not name.startswith(_ORIGIN_HEADERS)
    ]
    return [*kept, (b"x-forwarded-for", peer.encode())]


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve on an inherited socket until the parent process ends."""
    parser = argparse.ArgumentParser(prog="python -m offbeat.deploy.gateway", description=__doc__)
    parser.add_argument("--listener", required=True, type=int, metavar="N", help="the socket's number")
    parser.add_argument("--superlink", required=True, metavar="HOST:PORT")
    parser.add_argument("--doorbell", type=int, metavar="N", help="the number of a socket to the server")
    parser.add_argument("--authority", type=Path, metavar="FILE", help="vouches for the SuperLink")
    parser.add_argument("--certificate", type=Path, metavar="FILE")
    parser.add_argument("--key", type=Path, metavar="FILE")
    parser.add_argument("--sites", type=Path, metavar="FOLDER", help="the public keys of sites")
    given = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a site may have several connections
    secure = given.authority is not None
    context = ssl.create_default_context(cafile=given.authority) if secure else None
    log = RefusalLog(_LOG.warning)
    keys = None if given.sites is None else SiteKeys(given.sites)
    tls = TlsFiles(given.certificate, given.key) if secure else None

    async def serve() -> None:
        asyncio.get_running_loop().add_reader(0, _end_with_parent)
        bell = None if given.doorbell is None else Doorbell(socket.socket(fileno=given.doorbell))
        app = Gateway(given.superlink, context, keys, log, bell=bell)
        await http_server(app, tls, _CONNECTIONS, log).serve([socket.socket(fileno=given.listener)])

    asyncio.run(serve())


def _end_with_parent() -> None:
    if not os.read(0, 1024):
        os._exit(0)


if __name__ == "__main__":
    main()
