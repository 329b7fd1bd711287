"""A site as Flower's client: each message goes to the site's resident process, or is done here.

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

from flwr.app import Message
from flwr.clientapp import ClientApp

from offbeat.deploy import flower_records
from offbeat.deploy.lifetime import lifetime
from offbeat.deploy.relay import ask
from offbeat.deploy.states import site_folder
from offbeat.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from offbeat.deploy.site import Site
    from offbeat.population.population import Examples
    from offbeat.problem import Loss

SOCKET = "OFFBEAT_SITE"  # the environment variable that names a resident's socket


class SetUpError(Exception):
    """The site cannot work; what Flower passes on of it is this sentence alone."""


class Context(Protocol):
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

    def answer(kind: str, message: Any, context: Context) -> Any:
        note, payload = flower_records.unwrap(message.content)
        place, seconds = os.environ.get(SOCKET), seconds_for(note, message.metadata.ttl)
        if place:
            note, payload = ask(place, kind, note, payload, seconds)
        else:
            with lifetime(seconds), closing(_site(context.node_config, load, module, losses)) as site:
                note, payload = site.answer(kind, note, payload)
        return Message(flower_records.wrap(note, payload), reply_to=message)

    @app.query("hello")  # type: ignore[untyped-decorator, unused-ignore]
    def hello(message: Any, context: Context) -> Any:
        return answer("hello", message, context)

    @app.train("task")  # type: ignore[untyped-decorator, unused-ignore]
    def task(message: Any, context: Context) -> Any:
        return answer("task", message, context)

    return app


def seconds_for(note: str, ttl: float) -> float:
    """How long an answer may take: what the note says, and no longer than the message lives."""
    try:
        said = json.loads(note)["seconds"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ttl
    return min(float(said), ttl) if type(said) in (int, float) and said > 0 else ttl


def _site(
    given: dict[str, Any],
    load: "Callable[[str], Examples] | None",
    module: "Callable[[], nn.Module] | None",
    losses: "Loss | None",
) -> "Site":
    if load is None or module is None:
        raise SetUpError(
            "this site has no resident process and no functions of its own: start it by 'offbeat join', "
            "or give client_app its load and module."
        )
    from offbeat.deploy.site import Site

    name = str(given.get("name", platform.node() or "site"))
    folder, key, helper_key = (
        Path(str(given[word])) if word in given else None for word in ("folder", "key", "helper-key")
    )
    try:
        return Site(name, folder or site_folder(name), load, module, losses, key, helper_key)
    except InputError as error:
        logging.getLogger("offbeat").error("%s", error)
        raise SetUpError("the site cannot be set up: its log says why.") from None
