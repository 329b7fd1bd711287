"""The live page of a run, its status as JSON and its metrics, served read-only by a thread.

`/` is the page; `/status.json`, `/metrics` (for Prometheus) and `/healthz` are for programs. There is no
authentication, so the server listens on the loopback interface unless it is configured otherwise.
"""

import base64
import hashlib
import ipaddress
import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from threading import BoundedSemaphore, Thread
from typing import Any, Protocol

from offbeat.deploy.monitor.observer import METRICS_CONTENT_TYPE
from offbeat.errors import InputError

_MAX_REQUESTS = 16  # at a time
_REQUEST_TIMEOUT = 5.0  # seconds for a request to arrive


class StatusSource(Protocol):
    """What the page shows: a `Monitor`."""

    def status(self) -> dict[str, Any]: ...

    def metrics(self) -> bytes: ...


@contextmanager
def serve_page(watch: StatusSource, port: int, host: str = "127.0.0.1") -> Iterator[str]:
    """Serve the page while the block runs; its address. Port 0 selects any free port."""
    server = _bind(watch, host, port)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="page", daemon=True)
    thread.start()
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def load_page() -> tuple[bytes, str]:
    """The page, and a content security policy that allows nothing but what is in it."""
    text = files("offbeat.deploy.monitor").joinpath("page.html").read_text(encoding="utf-8")
    rules = [
        "default-src 'none'",
        f"script-src {_hashes('script', text)}",
        f"style-src {_hashes('style', text)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ]
    return text.encode(), "; ".join(rules)


def _hashes(tag: str, text: str) -> str:
    parts = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _bind(watch: StatusSource, host: str, port: int) -> "_Server":
    if not 0 <= port < 1 << 16:
        raise InputError(f"{port} is not a port: give one from 1 to 65535.")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return _Server(watch, host, port, family)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"the page cannot listen at {host} port {port} ({reason}): name another under [watch]."
        ) from None


class _Server(ThreadingHTTPServer):
    """Requests are few and small; more than `_MAX_REQUESTS` at a time are refused."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, watch: StatusSource, host: str, port: int, family: socket.AddressFamily) -> None:
        self.watch = watch
        self.page, self.policy = load_page()
        self.local = _is_local_host(host)
        self.address_family = family
        self._free = BoundedSemaphore(_MAX_REQUESTS)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # The inherited method resolves the host name, which can take seconds.
        socket.socket.setsockopt(self.socket, socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _REQUEST_TIMEOUT
    server_version = "offbeat"
    sys_version = ""

    def do_GET(self) -> None:
        host = self.headers.get("Host")
        if self.server.local and host is not None and not _is_local_host(_host_without_port(host)):
            # DNS rebinding: another site's page must not read this one under its own name.
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"request this page as 127.0.0.1 or localhost\n")
            return
        path = self.path.split("?", 1)[0]
        if path == "/":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)
        elif path == "/status.json":
            text = json.dumps(self.server.watch.status(), allow_nan=False)
            self._answer(HTTPStatus.OK, "application/json", text.encode())
        elif path == "/metrics":
            self._answer(HTTPStatus.OK, METRICS_CONTENT_TYPE, self.server.watch.metrics())
        elif path == "/healthz":
            self._answer(HTTPStatus.OK, "text/plain", b"ok\n")
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer other methods and malformed requests without repeating any of them."""
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self.close_connection = True
        self._answer(status, "text/plain", f"{status.phrase}\n".encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", self.server.policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.end_headers()
        self.wfile.write(body)


def _host_without_port(header: str) -> str:
    """A Host header without its port."""
    return header[1:].split("]", 1)[0] if header.startswith("[") else header.rsplit(":", 1)[0]


def _is_local_host(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
