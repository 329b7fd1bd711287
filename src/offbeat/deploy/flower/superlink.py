"""The process of a SuperLink: Flower's SuperLink, and the gateway through which sites reach it.

A SuperLink has one port for everything, and obeys whoever reaches it: it registers keys, and runs code at the
server and at every site. So it listens on the loopback interface only, and connections from other machines
come to a gateway in the same process, which passes on the requests that sites need and refuses all others.
Where sites have keys, it is the gateway that knows them: it verifies the signature in the head of a request
before any of its body is read, because Flower keeps a body in memory before it looks at the signature.
"""

import argparse
import asyncio
import base64
import collections
import contextlib
import json
import logging
import math
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from starlette.requests import ClientDisconnect

from offbeat.deploy.flower.private_api import SuperLink
from offbeat.deploy.keys import find_site_keys
from offbeat.deploy.network import (
    Connection,
    Doorbell,
    HttpLimits,
    TlsFiles,
    http_server,
    tls_context,
    waits_for,
)
from offbeat.deploy.protocol.strict_json import quote
from offbeat.errors import InputError

if TYPE_CHECKING:
    import uvicorn

_FLEET_METHODS = (
    *("register-node", "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages"),
    *("push-messages", "pull-object", "push-object", "confirm-message-received"),
)
HEALTH = (b"GET", b"/health")
# The requests of a site, and the one with which a monitor finds out whether a server is there. They are
# compared byte by byte: nothing is decoded or normalised that the SuperLink might read in another way.
ALLOWED_REQUESTS = frozenset({HEALTH, *((b"POST", f"/v1/fleet/{name}".encode()) for name in _FLEET_METHODS)})
# The headers with which a SuperNode signs the time of a request, and how old they may be, in seconds.
PUBLIC_KEY_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER = (
    b"flwr-public-key",
    b"flwr-timestamp",
    b"flwr-signature",
)
MIN_AGE, MAX_AGE = -5.0, 305.0
_PULL_MESSAGES, _PUSH_OBJECT = b"/v1/fleet/pull-messages", b"/v1/fleet/push-object"
_MAX_KEPT_BYTES = 16 * 1024  # of a request for messages, which is kept until there is one
_PIECE_BYTES = 256 * 1024  # of a response, that are given to the network at once
_MAX_DISCARD = 1024 * 1024  # bytes of a refused request that are read, so that its sender gets the response
_LOG_INTERVAL = 10.0  # seconds between two lines of the same kind
_KEY_INTERVAL = 2.0  # seconds between two looks for keys that were added or removed
_PEM = Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
_LOG = logging.getLogger("offbeat.gateway")
_Data = TypeVar("_Data", bytes, memoryview)
_CONNECTIONS = HttpLimits(connections=400, per_address=100, per_identity=16, head=15.0, idle=90.0)
_OWN_CONNECTIONS = HttpLimits(connections=1000, per_address=1000, per_identity=0, head=60.0)


class RequestLimits(NamedTuple):
    """The limits of one request; times are in seconds."""

    max_bytes: int = 16 * 1024 * 1024  # Flower splits large objects into 5 MiB, offbeat into 4
    grace: float = 30.0  # for a body, in addition to its bytes at `rate`
    rate: float = 16 * 1024.0  # bytes per second
    response: float = 60.0  # for the SuperLink to answer
    wait: float = 20.0  # for a message, if there is none yet


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
        self._files: dict[Path, int] = {}
        # By the one PEM that a site sends: Flower would take another form of the same key for another node.
        self._keys: dict[bytes, tuple[str, ec.EllipticCurvePublicKey]] = {}
        self._next = -math.inf
        self._refresh()

    def find(self, headers: Mapping[bytes, bytes]) -> tuple[str, ec.EllipticCurvePublicKey]:
        """The fingerprint and the key that a request names; a `ValueError` says why it is refused."""
        self._refresh()
        try:
            return self._keys[base64.b64decode(headers.get(PUBLIC_KEY_HEADER, b""), validate=True)]
        except (KeyError, ValueError):
            raise ValueError("the server does not know this key: ask its operator to add it.") from None

    def identify(self, headers: Mapping[bytes, bytes]) -> str:
        """The fingerprint of the key that signed a request; a `ValueError` says why it is refused."""
        timestamp = headers.get(TIMESTAMP_HEADER, b"")
        try:
            age = self._clock() - datetime.fromisoformat(timestamp.decode("ascii")).timestamp()
            signature = base64.b64decode(headers[SIGNATURE_HEADER], validate=True)
        except (KeyError, ValueError, OverflowError):
            raise ValueError("a request needs the signature of a site's key.") from None
        known, key = self.find(headers)
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
            files = {path: path.stat().st_mtime_ns for path in self._folder.rglob("*.pub")}
        except OSError as error:  # one was removed meanwhile: look again
            _LOG.warning("%s", error)
            return
        if files != self._files:
            self._files, (found, problems) = files, find_site_keys(self._folder)
            self._keys = {key.public_bytes(*_PEM): (name, key) for name, key in found.items()}
            for problem in problems:
                _LOG.warning("%s", problem)


class _Pace:
    """The time that bytes may take on their way to or from a client."""

    def __init__(self, limits: RequestLimits) -> None:
        self._rate, self._until = limits.rate, asyncio.get_running_loop().time() + limits.grace
        self.timeout = asyncio.timeout_at(self._until)

    def extend(self, data: _Data) -> _Data:
        """Give more time for these bytes, which are on their way."""
        self._until += len(data) / self._rate
        self.timeout.reschedule(self._until)
        return data


class _Refusal(NamedTuple):
    status: int
    sentence: str


class Gateway:
    """Passes requests on to a SuperLink, or refuses them; both are ASGI applications.

    Without `keys`, nobody is asked for a signature: then only the limits by address hold.
    """

    def __init__(
        self,
        superlink: Any,
        keys: SiteKeys | None,
        log: RefusalLog,
        bell: Doorbell,
        limits: RequestLimits = RequestLimits(),
    ) -> None:
        self._superlink, self._bell = superlink, bell
        self._waiting: dict[bytes, set[asyncio.Event]] = {}  # requests for messages, by node
        self._quiet: set[bytes] = set()  # nodes for which there was no message, and no ring since
        self._keys, self._log, self._limits = keys, log, limits

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for event in ("startup", "shutdown"):
                await receive()
                if event == "startup":
                    asyncio.get_running_loop().add_reader(self._bell.socket, self._rung)
                await send({"type": f"lifespan.{event}.complete"})
            return
        connection: Connection = scope["state"]["connection"]
        refusal = self._check(scope, connection)
        if refusal is not None:
            await self._refuse(refusal, receive, send)
            return
        connection.busy = True
        try:
            await self._pass_on(scope, receive, send, connection)
            if scope["raw_path"] == _PUSH_OBJECT:
                self._bell.ring()
        except ClientDisconnect:
            connection.close()
        except Exception:
            _LOG.exception("a request from %s failed", connection.address)
            connection.close()
        finally:
            connection.busy = False

    def _check(self, scope: Any, connection: Connection) -> _Refusal | None:
        """Why a request is refused; None if it is allowed."""
        headers, peer = dict(scope["headers"]), connection.address
        request = (scope["method"].encode(), scope["raw_path"])
        if request not in ALLOWED_REQUESTS or scope["query_string"]:
            wanted = b"%s %s?%s" % (*request, scope["query_string"])
            self._log("forbidden", f"{quote(wanted.rstrip(b'?').decode('latin-1'))} from {peer}")
            return _Refusal(403, "the gateway of 'offbeat serve' forwards only what sites need.")
        if len(headers) < len(scope["headers"]):  # the SuperLink might read the other one
            self._log("malformed", f"a request from {peer} has a header twice")
            return _Refusal(400, "a request has each header once.")
        length = headers.get(b"content-length", b"0" if request == HEALTH else None)
        if length is None or b"transfer-encoding" in headers:
            self._log("malformed", f"a request from {peer} has no content length")
            return _Refusal(411, "a request needs a content length.")
        most = {b"/health": 0, _PULL_MESSAGES: _MAX_KEPT_BYTES}.get(request[1], self._limits.max_bytes)
        if int(length) > most:
            self._log("size", f"a request of {int(length)} bytes from {peer}")
            return _Refusal(413, f"a request has at most {most} bytes.")
        if self._keys is None or request == HEALTH:
            return None
        try:
            key = self._keys.identify(headers)
        except ValueError as error:
            self._log("unsigned", f"{peer}: {error}")
            return _Refusal(401, str(error))
        if not connection.identify(key):
            self._log("busy", f"the key {key[:16]} of {peer} has too many connections")
            return _Refusal(429, "there are too many requests with this key: wait until they are answered.")
        return None

    def _rung(self) -> None:
        """Let those requests for messages go on that the server rang for."""
        for whom in self._bell.heard():
            everybody = whom == Doorbell.EVERYBODY
            self._quiet = set() if everybody else self._quiet - {whom}
            events = self._waiting.values() if everybody else [self._waiting.get(whom, set())]
            for event in [event for each in events for event in each]:
                event.set()

    async def _pass_on(self, scope: Any, receive: Any, send: Any, connection: Connection) -> None:
        """Have a request answered; its body, the answer and the response may each take only so long."""
        limits, started = self._limits, False
        try:
            pace = _Pace(limits)
            async with pace.timeout:
                body = b"".join([pace.extend(chunk) async for chunk in _chunks(receive)])
            if scope["raw_path"] == _PULL_MESSAGES:
                async with asyncio.timeout(limits.wait + limits.response):
                    response = await self._wait_for_message(scope, receive, connection, body)
            else:
                async with asyncio.timeout(limits.response):
                    response = await self._ask(scope, body)
            started, pace = True, _Pace(limits)
            async with pace.timeout:
                await send(response[0])
                data = memoryview(b"".join(each.get("body", b"") for each in response[1:]))
                for start in range(0, len(data), _PIECE_BYTES):
                    await send(_body(pace.extend(data[start : start + _PIECE_BYTES]), more=True))
                await send(_body(b"", more=False))
            return
        except TimeoutError:
            self._log("slow", f"a request from {connection.address} took too long")
        if started:  # abort, so that half a response is not taken for a whole one
            connection.close()
            while (await receive())["type"] != "http.disconnect":
                pass
        else:
            refusal = _Refusal(504, "the request took too long.")
            await self._refuse(refusal, receive, send, self._limits.max_bytes)

    async def _wait_for_message(
        self, scope: Any, receive: Any, connection: Connection, body: bytes
    ) -> list[Any]:
        """The response to a request for messages once there is one, or when the time is up.

        Nothing is asked of the SuperLink for a client that has gone: it gives out a message only once.
        """
        headers = dict(scope["headers"])
        node = waits_for(headers.get(PUBLIC_KEY_HEADER, b""))
        event, now = asyncio.Event(), asyncio.get_running_loop().time
        until, gone = now() + self._limits.wait, asyncio.ensure_future(receive())
        self._waiting.setdefault(node, set()).add(event)
        try:
            while True:
                connection.busy = False  # while it waits, it makes room for another, if it has to
                if node in self._quiet:
                    ringing = asyncio.ensure_future(event.wait())
                    await asyncio.wait(
                        (gone, ringing), timeout=until - now(), return_when=asyncio.FIRST_COMPLETED
                    )
                    ringing.cancel()
                if gone.done():
                    raise ClientDisconnect
                try:
                    if self._keys is not None:
                        self._keys.find(headers)  # it may have been revoked meanwhile
                except ValueError as error:
                    return _response(_Refusal(401, str(error)))
                connection.busy = True  # a message that it is given must reach its site
                event.clear()
                response = await self._ask(scope, body)
                if response[0]["status"] != 200:  # who asks may not be that node
                    return response
                if any(each.get("body") for each in response):
                    self._quiet.discard(node)
                    return response
                if not event.is_set():  # nobody has rung since
                    self._quiet.add(node)
                if now() >= until:
                    return response
        finally:
            gone.cancel()
            self._waiting[node].discard(event)
            if not self._waiting[node]:
                del self._waiting[node]

    async def _ask(self, scope: Any, body: bytes) -> list[Any]:
        """The SuperLink's response to a request whose body is here."""
        request = iter([{"type": "http.request", "body": body, "more_body": False}])
        response: list[Any] = []

        async def read() -> Any:
            return next(request, None) or await asyncio.Event().wait()

        async def keep(message: Any) -> None:
            response.append(message)

        await self._superlink(scope, read, keep)
        return response

    async def _refuse(self, refusal: _Refusal, receive: Any, send: Any, discard: int = _MAX_DISCARD) -> None:
        """Answer with an error; then some of the body is read, so that the sender gets the response."""
        start, body = _response(refusal)
        await send(start)
        await send(body | {"more_body": True})
        pace = _Pace(self._limits)
        with contextlib.suppress(TimeoutError, ClientDisconnect):
            async with pace.timeout:
                async for chunk in _chunks(receive):
                    discard -= len(pace.extend(chunk))
                    if discard <= 0:
                        break
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


def _response(refusal: _Refusal) -> list[dict[str, Any]]:
    body = json.dumps({"detail": refusal.sentence}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [(b"connection", b"close")]
    start = {"type": "http.response.start", "status": refusal.status, "headers": headers}
    return [start, _body(body, more=False)]


def _body(data: bytes | memoryview, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve on inherited sockets until the parent process ends."""
    parser = argparse.ArgumentParser(prog="python -m offbeat.deploy.flower.superlink", description=__doc__)
    parser.add_argument("--own", required=True, type=int, metavar="N", help="the number of a loopback socket")
    parser.add_argument("--listener", required=True, type=int, metavar="N", help="that of a socket for sites")
    parser.add_argument("--doorbell", required=True, type=int, metavar="N", help="that of one to the server")
    parser.add_argument("--certificate", type=Path, metavar="FILE")
    parser.add_argument("--key", type=Path, metavar="FILE")
    parser.add_argument("--sites", type=Path, metavar="FOLDER", help="the public keys of sites")
    given = parser.parse_args(arguments)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    _LOG.addHandler(handler)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a site may have several connections
    log, tls, keys = RefusalLog(_LOG.warning), None, None
    if given.certificate is not None:
        tls, keys = TlsFiles(given.certificate, given.key), SiteKeys(given.sites)
    superlink = SuperLink()
    bell = Doorbell(socket.socket(fileno=given.doorbell))
    fleet = superlink.app if keys is None else superlink.fleet  # which relies on the gateway for signatures
    gateway = http_server(Gateway(fleet, keys, log, bell), tls, _CONNECTIONS, log)
    own = http_server(superlink.runtime, None, _OWN_CONNECTIONS)

    async def serve() -> None:
        asyncio.get_running_loop().add_reader(0, os._exit, 0)  # the parent process has ended
        serving = [
            own.serve([socket.socket(fileno=given.own)]),
            gateway.serve([socket.socket(fileno=given.listener)]),
            *(() if tls is None else (use_renewed_certificate(gateway, tls),)),
        ]
        await asyncio.wait(map(asyncio.ensure_future, serving), return_when=asyncio.FIRST_COMPLETED)

    asyncio.run(serve())


async def use_renewed_certificate(server: "uvicorn.Server", tls: TlsFiles) -> None:
    """Use a certificate that is renewed while the server runs, for all connections from then on."""
    used = tls.certificate.stat().st_mtime_ns
    while True:
        await asyncio.sleep(_KEY_INTERVAL)
        with contextlib.suppress(InputError, OSError):  # as while only one of the files was copied
            date = tls.certificate.stat().st_mtime_ns
            if date != used:
                server.config.ssl, used = tls_context(tls), date
                _LOG.warning("the renewed certificate is used from now on.")


if __name__ == "__main__":
    main()
