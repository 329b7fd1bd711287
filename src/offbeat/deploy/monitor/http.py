"""The live page of a run, its status as JSON and its metrics, served read-only by a thread.

`/` is the page; `/status.json`, `/metrics` (for Prometheus), `/healthz` (the server is alive) and `/readyz`
(it waits for nothing but its sites) are for programs. There is no authentication, so the server listens on
the loopback interface unless it is configured otherwise.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from offbeat.deploy.monitor.observer import METRICS_CONTENT_TYPE, Monitor
from offbeat.deploy.network import (
    HttpLimits,
    bind_socket,
    format_address,
    http_server,
    is_loopback,
    running_in_thread,
)

_LIMITS = HttpLimits(connections=16, per_address=16, per_identity=0, head=5.0)


@contextmanager
def serve_page(watch: Monitor, port: int, host: str = "127.0.0.1") -> Iterator[str]:
    """Serve the page while the block runs; its address. Port 0 selects any free port."""
    app = build_app(watch, local=is_loopback(host))
    with (
        bind_socket(host, port, "[watch] port") as listener,
        running_in_thread(http_server(app, None, _LIMITS), listener),
    ):
        yield f"http://{format_address(host, listener.getsockname()[1])}/"


def build_app(watch: Monitor, *, local: bool) -> Any:
    """Return the ASGI application of the page; a `local` one answers only to names of this machine."""
    page, policy = load_page()
    headers = {
        "Cache-Control": "no-store",
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    plain = "text/plain"

    def answer(request: Request) -> tuple[int, str, bytes]:
        host = request.headers.get("host")
        if local and host is not None and not is_loopback(_without_port(host)):
            # DNS rebinding: another site's page must not read this one under its own name.
            return 403, plain, b"request this page as 127.0.0.1 or localhost\n"
        if request.method != "GET":
            return 405, plain, b"Method Not Allowed\n"
        match request.url.path:
            case "/":
                return 200, "text/html", page
            case "/status.json":
                return 200, "application/json", json.dumps(watch.status(), allow_nan=False).encode()
            case "/metrics":
                return 200, METRICS_CONTENT_TYPE, watch.metrics()
            case "/healthz":
                return 200, plain, b"ok\n"
            case "/readyz":
                now = watch.status()
                reason = "the run has ended" if now["ended"] else now["trouble"]
                return (200, plain, b"ready\n") if reason is None else (503, plain, f"{reason}\n".encode())
        return 404, plain, b"not found\n"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope)
        status, kind, body = answer(request)
        allowed = {"Allow": "GET"} if status == 405 else {}
        closed = {} if request.method == "GET" else {"Connection": "close"}  # a body is not read
        await Response(body, status, headers | allowed | closed, kind)(scope, receive, send)

    return app


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


def _without_port(header: str) -> str:
    """A Host header without its port."""
    return header[1:].split("]", 1)[0] if header.startswith("[") else header.rsplit(":", 1)[0]
