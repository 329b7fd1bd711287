"""A SuperNode's standing at its SuperLink, beyond what Flower's commands can ask.

Flower refuses a SuperNode for a minute if the last one with its key was killed, and so did not sign off.
Whoever has the key may sign off in its place. The same call tells a key that the SuperLink does not know
from one that is still in use, which Flower's own error does not.
"""

import re
from enum import Enum
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from offbeat.deploy.flower_home import Link
from offbeat.errors import InputError

_NUMBER = re.compile(rb"SuperNode ID: (\d+)")
_REFUSED = re.compile(rb"\[code: (\d+)\] ([^\n]*)")
_TAIL = 65536  # bytes of a log that are looked at
KEY_REFUSED, KEY_WANTED = 2004, 2001  # what a SuperLink says to a key, and to a node without


class Standing(Enum):
    """What a SuperLink makes of a node and its key."""

    FREE = "nobody uses the key now"
    UNKNOWN = "the key is not that node's"
    UNCLEAR = "no usable answer"


def load_key(path: Path) -> EllipticCurvePrivateKey:
    """A site's private key."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise InputError(
            f"the key {path} cannot be read ({error.strerror or error}): name another."
        ) from None
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise InputError(f"{path} is no private key of a site: make one with 'offbeat keys'.")
    return key


def sign_off(link: Link, key: EllipticCurvePrivateKey, node: int) -> Standing:
    """Say that a node is gone, which was killed; only for whoever knows that it is."""
    # imported here, since it takes a second that only a restart has to spend
    import httpx
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    authority = None if link.authority is None else link.authority.read_bytes()
    with FleetHttpClient.from_server_address(
        link.address,
        authority is None,
        authority,
        [
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(key, key.public_key()),
        ],
    ) as client:
        try:
            client.DeactivateNode(DeactivateNodeRequest(node_id=node))
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            return {401: Standing.UNKNOWN, 412: Standing.FREE}.get(code, Standing.UNCLEAR)
        except (httpx.HTTPError, RuntimeError):
            return Standing.UNCLEAR
        return Standing.FREE


def node_in(log: Path) -> int | None:
    """The number that a SuperLink gave the node of this log, last."""
    found = _NUMBER.findall(_tail(log))
    return int(found[-1]) if found else None


def refusal_in(log: Path) -> tuple[int, str] | None:
    """Why the SuperLink refused it, last: a code and its words."""
    found = _REFUSED.findall(_tail(log))
    return (int(found[-1][0]), found[-1][1].decode(errors="replace")) if found else None


def _tail(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL))
        return file.read()
