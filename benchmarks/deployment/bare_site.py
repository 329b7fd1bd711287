"""A site that is as little as Flower's own connection allows, to compare `offbeat join` with.

    python bare_site.py ADDRESS CA KEY MODULE NAME FOLDER

It uses `http_request_response`, the loop of callbacks that a SuperNode uses, asks for messages every 20 ms,
and gives each to offbeat's `Site.answer`. It recovers from nothing.
"""

import sys
import time
from pathlib import Path

from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    pull_objects,
    push_objects,
)
from flwr.supernode.fleet_http_connection import http_request_response

from offbeat.deploy.flower.content import KINDS, Content, from_records, to_records
from offbeat.deploy.keys import load_site_key, reply_statement
from offbeat.deploy.site.site import Site
from offbeat.deploy.user_code import import_user_code

PAUSE = 0.02  # seconds between two requests for a message


def main(address: str, authority: str, key: str, module: str, name: str, folder: str) -> None:
    """Serve one run."""
    code = import_user_code(f"{module}:task")
    site = Site(name, Path(folder), code.load, code.module, code.losses, Path(key))
    private = load_site_key(Path(key))
    keys = private, private.public_key()
    with http_request_response(address, False, Path(authority).read_bytes(), keys) as calls:
        _, receive, send, _, _, pull, push, confirm = calls
        while True:
            got = receive()
            if got is None:
                time.sleep(PAUSE)
                continue
            message, tree = got
            about = message.metadata
            names = [each.object_id for each in iterate_object_tree(tree)]
            pieces = pull_objects(names, lambda each: pull(about.run_id, each))  # noqa: B023
            confirm(about.run_id, about.message_id)
            asked = from_records(inflate_object_from_contents(about.message_id, pieces).content)
            kind = KINDS[about.message_type]
            answer = ("", b"") if kind == "end" else site.answer(kind, asked.header, asked.payload)
            signature = site.sign(reply_statement(about.message_id, *answer))
            reply = Message(to_records(Content(*answer, signature)), reply_to=message)
            with no_object_id_recompute():
                reply.metadata.__dict__["_message_id"] = reply.object_id
                objects, tree = get_all_nested_objects(reply), get_object_tree(reply)
                wanted, session = send(reply, tree, 0.0)
                push_objects(
                    objects,
                    lambda each, content: push(about.run_id, session, each, content),  # noqa: B023
                    object_ids_to_push=wanted,
                )
            if kind == "end":
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
