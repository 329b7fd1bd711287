"""A site that is as little as Flower's own connection allows, to compare `offbeat join` with.

    python bare_site.py ADDRESS CA KEY MODULE NAME FOLDER

It uses `http_request_response`, the loop of callbacks that a SuperNode uses, asks for messages every 20 ms,
and gives each to offbeat's `Site.answer`. It recovers from nothing.
"""

import contextlib
import sys
import time
from functools import partial
from pathlib import Path

from flwr.common.serde import message_from_proto, metadata_to_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supernode.fleet_http_connection import http_request_response

from offbeat.deploy.config import make_site_module
from offbeat.deploy.flower.content import KINDS, Content, ContentObjects, from_objects, to_objects
from offbeat.deploy.flower.private_api import FleetClient, OutgoingReply, PendingMessage
from offbeat.deploy.keys import load_site_key, reply_statement
from offbeat.deploy.site.site import Site
from offbeat.training.task import load_task

PAUSE = 0.02  # seconds between two requests for a message


def main(address: str, authority: str, key: str, module: str, name: str, folder: str) -> None:
    """Serve one run."""
    task = load_task(f"{module}:task")
    make = partial(make_site_module, f"{module}:task")
    site = Site(name, Path(folder), task.site_examples, make, task.loss, Path(key))
    private = load_site_key(Path(key))
    with contextlib.closing(FleetClient(address, Path(authority), private)) as registering:
        registering.register()
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
            objects = {name: pull(about.run_id, name) for name in names}
            confirm(about.run_id, about.message_id)
            asked = from_objects(ContentObjects(about.message_id, objects))
            kind = KINDS[about.message_type]
            answer = ("", b"") if kind == "end" else site.answer(kind, asked.header, asked.payload)
            signature = site.sign(reply_statement(about.message_id, *answer))
            own = to_objects(Content(*answer, signature))
            pending = PendingMessage(
                about.message_id, about.run_id, about.message_type, about.ttl, [], metadata_to_proto(about)
            )
            reply = OutgoingReply(pending, *own)
            first, *parts = own.objects
            tree = ObjectTree(object_id=first, children=[ObjectTree(object_id=each) for each in parts])
            wanted, session = send(message_from_proto(reply.message), tree, 0.0)
            for name in wanted:
                push(about.run_id, session, name, own.objects[name])
            if kind == "end":
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
