"""Finding Ray, and a cluster: one of our own on this machine, or one that runs already."""

import contextlib
import os
import secrets
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from offbeat.errors import InputError

_PATIENCE = 5.0  # seconds for an answer
# How HTTP/2 begins, which Ray speaks: the client's words and an empty frame of settings.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
_SETTINGS = 4  # the kind of frame that is the answer


def find_ray() -> Any:
    """The package, if it is there."""
    try:
        return import_module("ray")
    except ImportError:
        raise InputError(
            "the engine 'ray' needs the package ray: install it with pip install 'offbeat[ray]'."
        ) from None


def check_cluster(address: str | None) -> None:
    """Refuse an address where no cluster answers, before anything is begun."""
    ray = find_ray()
    if address is not None and connect(address, 1):
        disconnect(ray)


def connect(address: str | None, cpus: int) -> bool:
    """Connect to a cluster, or start one here; false if this process was connected already."""
    ray = find_ray()
    if address not in (None, "auto"):
        _knock(str(address))
    if ray.is_initialized():
        return False
    own: dict[str, Any] = {} if address else {"num_cpus": cpus, "include_dashboard": False}
    if address is None:
        _secure()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with _signals():
        try:
            ray.init(address=address or "local", logging_level="ERROR", log_to_driver=False, **own)
        except (ConnectionError, RuntimeError, SystemExit, ray.exceptions.RayError) as error:
            raise _refused(address, str(error).strip().partition("\n")[0]) from None
    return True


def disconnect(ray: Any) -> None:
    """Leave a cluster, and end it if it was started here.

    Ray kills its processes and forgets them a second later, whether or not they are gone; where one is not,
    Python would warn of it.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"subprocess \d+ is still running", ResourceWarning)
        ray.shutdown()


def _knock(address: str) -> None:
    """See whether somebody answers; Ray itself would try for two minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise InputError(f"'{address}' is no address of a cluster: give HOST:PORT of its head, or auto.")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _PATIENCE) as line:
            if not os.environ.get("RAY_USE_TLS"):
                line.sendall(_HELLO)
                answer = line.recv(9)
                if len(answer) < 4 or answer[3] != _SETTINGS:
                    raise ConnectionError
    except OSError:
        raise _nobody(address) from None


def _secure() -> None:
    """Ray's ports are open to the network: a secret for this process, unless the user has seen to it.

    Without one in the environment, which Ray reads once, it would write one to the home folder.
    """
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Ray takes the signal to stop; it is given back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _nobody(address: str) -> InputError:
    return InputError(f"no Ray cluster answers at {address}: start one there, or leave out --ray-address.")


def _refused(address: str | None, reason: str) -> InputError:
    if address is None:
        return InputError(f"Ray does not start here ({reason}): use the engine 'workers'.")
    if address == "auto":
        return InputError("no Ray cluster runs here: give the address of one, or leave out --ray-address.")
    return InputError(
        f"the Ray cluster at {address} refuses ({reason}): use its version of Ray, and if it wants a token, "
        "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN."
    )
