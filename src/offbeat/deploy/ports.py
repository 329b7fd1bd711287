"""Addresses and ports of this machine."""

import errno
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
    try:
        with _socket(host) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        reason = (
            "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror or error})"
        )
        raise InputError(f"port {port} of {host} {reason}: name another with {option}.") from None


def free_port() -> int:
    """One of this machine's that nobody uses now."""
    with _socket("127.0.0.1") as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
