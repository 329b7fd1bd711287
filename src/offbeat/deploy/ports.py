"""Addresses and ports of this machine."""

import errno
import ipaddress
import socket

from offbeat.errors import InputError


def parse_address(text: str, option: str = "--superlink") -> tuple[str, int]:
    """`host:port`, or `[host]:port` for IPv6."""
    host, colon, port = text.strip().rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or "/" in text or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"{option} must be such as server.example:8000, not '{text}'.")
    return bare, int(port)


def joined(host: str, port: int) -> str:
    """As one text."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_free(host: str, port: int, option: str = "--port") -> None:
    """Refuse a port that somebody else listens on."""
    bound(host, port, option).close()


def bound(host: str, port: int, option: str = "--port") -> socket.socket:
    """A socket of ours there, or one sentence."""
    taken = _socket(host)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, port))
    except OSError as error:
        taken.close()
        reason = (
            "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror or error})"
        )
        raise InputError(f"port {port} of {host} {reason}: name another with {option}.") from None
    return taken


def is_loopback(host: str) -> bool:
    """Whether this machine alone reaches what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def free_port() -> int:
    """One of this machine's that nobody uses now."""
    with _socket("127.0.0.1") as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
