"""A site as a Flower ClientApp, and the content of Flower messages in both directions.

Flower starts a process for every message. So nothing here imports torch, unless this process has to do the
site's work itself because no site process was started.
"""

import json
import logging
import os
import platform
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from offbeat.deploy.site.relay import SOCKET_VARIABLE, ask_site, site_folder, time_limit
from offbeat.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from offbeat.data.population import Examples
    from offbeat.deploy.site.site import Site
    from offbeat.nn.problem import Loss

HEADER_RECORD, PAYLOAD_RECORD = "offbeat", "offbeat.payload"
_STYPE = "offbeat.bytes"


class RecordError(Exception):
    """The content of a message is not what offbeat sends; the text is a sentence."""


class SiteSetupError(Exception):
    """The site cannot work; Flower passes only this sentence on to the server."""


def to_records(header: str, payload: bytes) -> RecordDict:
    """Return the content of a message."""
    records: dict[str, Any] = {HEADER_RECORD: ConfigRecord({"note": header})}
    if payload:
        # As plain bytes, because reading a serialized NumPy array back would parse untrusted input.
        array = Array(dtype="uint8", shape=(len(payload),), stype=_STYPE, data=bytes(payload))
        records[PAYLOAD_RECORD] = ArrayRecord({"payload": array})
    return RecordDict(records)


def from_records(content: RecordDict, max_bytes: int | None = None) -> tuple[str, bytes]:
    """Return header and payload of a message that has nothing else."""
    if not set(content) <= {HEADER_RECORD, PAYLOAD_RECORD}:
        raise RecordError("the message has records that offbeat does not send.")
    config, arrays = content.get(HEADER_RECORD), content.get(PAYLOAD_RECORD)
    if not isinstance(config, ConfigRecord) or set(config) != {"note"} or type(config["note"]) is not str:
        raise RecordError("the message has no header.")
    if arrays is None:
        return config["note"], b""
    if not isinstance(arrays, ArrayRecord) or set(arrays) != {"payload"}:
        raise RecordError("the message has something else in place of its payload.")
    array = arrays["payload"]
    if array.stype != _STYPE or array.dtype != "uint8" or array.shape != (len(array.data),):
        raise RecordError("the payload of the message is not plain bytes.")
    if max_bytes is not None and len(array.data) > max_bytes:
        raise RecordError(f"the payload of the message has {len(array.data)} bytes; {max_bytes} are allowed.")
    return config["note"], array.data


def client_app(
    load: "Callable[[str], Examples] | None" = None,
    module: "Callable[[], nn.Module] | None" = None,
    losses: "Loss | None" = None,
) -> ClientApp:
    """Return the ClientApp of a site; the functions are needed only where `offbeat join` does not run."""
    app = ClientApp()

    def answer(kind: str, message: Any, context: Any) -> Any:
        header, payload = from_records(message.content)
        socket, timeout = os.environ.get(SOCKET_VARIABLE), answer_timeout(header, message.metadata.ttl)
        if socket:
            header, payload = ask_site(socket, kind, header, payload, timeout)
        else:
            with time_limit(timeout), closing(_open_site(context.node_config, load, module, losses)) as site:
                header, payload = site.answer(kind, header, payload)
        return Message(to_records(header, payload), reply_to=message)

    @app.query("hello")  # type: ignore[untyped-decorator, unused-ignore]
    def hello(message: Any, context: Any) -> Any:
        return answer("hello", message, context)

    @app.train("task")  # type: ignore[untyped-decorator, unused-ignore]
    def task(message: Any, context: Any) -> Any:
        return answer("task", message, context)

    return app


def answer_timeout(header: str, ttl: float) -> float:
    """Return how many seconds an answer may take: those in the header, and at most the message's TTL."""
    try:
        seconds = json.loads(header)["seconds"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ttl
    return min(float(seconds), ttl) if type(seconds) in (int, float) and seconds > 0 else ttl


def _open_site(
    config: dict[str, Any],
    load: "Callable[[str], Examples] | None",
    module: "Callable[[], nn.Module] | None",
    losses: "Loss | None",
) -> "Site":
    if load is None or module is None:
        raise SiteSetupError(
            "this site has neither a process of its own nor functions: start it with 'offbeat join', "
            "or give client_app its load and module."
        )
    from offbeat.deploy.site.site import Site

    name = str(config.get("name", platform.node() or "site"))
    folder, key, helper_key = (
        Path(str(config[option])) if option in config else None for option in ("folder", "key", "helper-key")
    )
    try:
        return Site(name, folder or site_folder(name), load, module, losses, key, helper_key)
    except InputError as error:
        logging.getLogger("offbeat").error("%s", error)
        raise SiteSetupError("the site cannot be set up: see its log.") from None
