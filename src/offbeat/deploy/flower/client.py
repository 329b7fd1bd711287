"""A note and its payload as the content of a Flower message, and back; shared by both ends.

A site as Flower's client: each message goes to the site's resident process, or is done here.

Nothing here imports torch unless the work is done here, for Flower starts a process for every message.
"""

import json
import logging
import os
import platform
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from offbeat.deploy.site.relay import ask_site, site_folder, time_limit
from offbeat.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from offbeat.data.population import Examples
    from offbeat.deploy.site.site import Site
    from offbeat.nn.problem import Loss


MESSAGE_RECORD, PAYLOAD_RECORD = (
    "offbeat",
    "offbeat.payload",
)  # two records of one message cannot have the same name
_STYPE = "offbeat.bytes"


class RecordError(Exception):
    """A message's content is not what this project sends; the text is a sentence."""


def to_records(note: str, payload: bytes) -> Any:
    """The content of a message."""
    records: dict[str, Any] = {MESSAGE_RECORD: ConfigRecord({"note": note})}
    if payload:
        # never as an array of NumPy's: reading one back would parse what a stranger sent
        array = Array(dtype="uint8", shape=(len(payload),), stype=_STYPE, data=bytes(payload))
        records[PAYLOAD_RECORD] = ArrayRecord({"payload": array})
    return RecordDict(records)


def from_records(content: Any, most: int | None = None) -> tuple[str, bytes]:
    """The note and the payload; nothing but them may be there."""
    if not set(content) <= {MESSAGE_RECORD, PAYLOAD_RECORD}:
        raise RecordError("the message holds records that offbeat does not send.")
    config, arrays = content.get(MESSAGE_RECORD), content.get(PAYLOAD_RECORD)
    if not isinstance(config, ConfigRecord) or set(config) != {"note"} or type(config["note"]) is not str:
        raise RecordError("the message has no note.")
    if arrays is None:
        return config["note"], b""
    if not isinstance(arrays, ArrayRecord) or set(arrays) != {"payload"}:
        raise RecordError("the message has something else in the place of its payload.")
    array = arrays["payload"]
    if array.stype != _STYPE or array.dtype != "uint8" or array.shape != (len(array.data),):
        raise RecordError("the payload of the message is not plain bytes.")
    if most is not None and len(array.data) > most:
        raise RecordError(f"the payload of the message has {len(array.data)} bytes, and {most} are allowed.")
    return config["note"], array.data


SOCKET_VARIABLE = "OFFBEAT_SITE"  # the environment variable that names a resident's socket


class SiteSetupError(Exception):
    """The site cannot work; what Flower passes on of it is this sentence alone."""


class NodeContext(Protocol):
    """What is used of Flower's own."""

    @property
    def node_config(self) -> dict[str, Any]: ...


def client_app(
    load: "Callable[[str], Examples] | None" = None,
    module: "Callable[[], nn.Module] | None" = None,
    losses: "Loss | None" = None,
) -> Any:
    """Flower's ClientApp; the functions are needed only where there is no resident process."""
    app = ClientApp()

    def answer(kind: str, message: Any, context: NodeContext) -> Any:
        note, payload = from_records(message.content)
        place, seconds = os.environ.get(SOCKET_VARIABLE), answer_timeout(note, message.metadata.ttl)
        if place:
            note, payload = ask_site(place, kind, note, payload, seconds)
        else:
            with time_limit(seconds), closing(_open_site(context.node_config, load, module, losses)) as site:
                note, payload = site.answer(kind, note, payload)
        return Message(to_records(note, payload), reply_to=message)

    @app.query("hello")  # type: ignore[untyped-decorator, unused-ignore]
    def hello(message: Any, context: NodeContext) -> Any:
        return answer("hello", message, context)

    @app.train("task")  # type: ignore[untyped-decorator, unused-ignore]
    def task(message: Any, context: NodeContext) -> Any:
        return answer("task", message, context)

    return app


def answer_timeout(note: str, ttl: float) -> float:
    """How long an answer may take: what the note says, and no longer than the message lives."""
    try:
        said = json.loads(note)["seconds"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ttl
    return min(float(said), ttl) if type(said) in (int, float) and said > 0 else ttl


def _open_site(
    given: dict[str, Any],
    load: "Callable[[str], Examples] | None",
    module: "Callable[[], nn.Module] | None",
    losses: "Loss | None",
) -> "Site":
    if load is None or module is None:
        raise SiteSetupError(
            "this site has no resident process and no functions of its own: start it by 'offbeat join', "
            "or give client_app its load and module."
        )
    from offbeat.deploy.site.site import Site

    name = str(given.get("name", platform.node() or "site"))
    folder, key, helper_key = (
        Path(str(given[word])) if word in given else None for word in ("folder", "key", "helper-key")
    )
    try:
        return Site(name, folder or site_folder(name), load, module, losses, key, helper_key)
    except InputError as error:
        logging.getLogger("offbeat").error("%s", error)
        raise SiteSetupError("the site cannot be set up: its log says why.") from None
