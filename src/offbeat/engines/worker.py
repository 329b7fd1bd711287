"""The life of a worker process: it does orders until there is nobody to give any."""

import contextlib
import os
import sys
import threading
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from offbeat.engines.body import Body, attempt
from offbeat.engines.link import Link, Placed
from offbeat.engines.orders import Done, Failed, Order
from offbeat.engines.segments import Segment, Shelf


def live(line: int) -> None:
    """Serve the line with this handle; end with the process at the other end of standard input."""
    threading.Thread(target=_watch, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):  # nobody is there any more
        _serve(Link(Connection(line)))


def _serve(link: Link) -> None:
    shelf = Shelf()
    taken: dict[int, Segment] = {}  # results that may still be read
    sent: Placed = link.hear()
    body = attempt(0, lambda: Body(link.read(sent), torch.device("cpu")))
    while True:
        order, memories, read = link.hear()
        for number in read:
            shelf.take_off(taken.pop(number))
        answer = _answer(link, body, order, memories)
        if isinstance(answer, Done):
            segment, slots = shelf.put(answer.results)
            taken[segment.number] = segment
            link.show(segment)
            answer = replace(answer, results=Placed(segment.number, slots))
        link.say(answer)


def _answer(link: Link, body: Body | Failed, order: Order, memories: Placed) -> Done | Failed:
    if isinstance(body, Failed):
        return Failed(order.number, body.error)

    def action() -> Done:
        messages = [link.read(message) for message in order.messages]
        return body.do(order._replace(memories=link.read(memories)), messages)

    answer: Done | Failed = attempt(order.number, action)
    return answer


def _watch() -> None:
    sys.stdin.buffer.read()
    os._exit(0)
