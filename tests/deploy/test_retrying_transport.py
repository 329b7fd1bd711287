"""A transport that is away is left alone for a while, and given up after a long one."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from deploy_world import Clock, Log
from offbeat.deploy.protocol.transport import (
    Reply,
    RetryingTransport,
    Transport,
    TransportClosedError,
    TransportError,
)
from offbeat.errors import InputError

NODES = frozenset({7})


class Faulty:
    """A transport that does what `call` does before it answers."""

    backlog: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.call: Callable[[], None] = fail

    def nodes(self) -> frozenset[int]:
        self.call()
        return NODES

    def key(self, node: int) -> bytes:
        return b""

    def push(self, node: int, kind: str, header: str, payload: bytes, timeout: float) -> str:
        self.call()
        return header

    def pull(self, message_ids: object) -> list[Reply]:
        self.call()
        return []


def fail() -> None:
    raise TransportError("nobody answers")


def succeed() -> None:
    pass


def make(patience: float = 600.0) -> tuple[RetryingTransport, Faulty, Clock, Log]:
    clock, log, faulty = Clock(), Log(), Faulty()
    transport: Transport = faulty
    return (
        RetryingTransport(
            transport,
            patience,
            clock,
            lambda sentence: log.tell("unreachable", sentence=sentence),
            lambda: log.tell("reachable"),
        ),
        faulty,
        clock,
        log,
    )


def test_calls_are_held_back_for_half_a_second_and_then_twice_as_long_up_to_thirty() -> None:
    transport, faulty, clock, log = make(patience=1e6)
    calls: list[float] = []

    def call() -> None:
        calls.append(clock.now)
        fail()

    faulty.call = call
    while len(calls) < 10:
        assert transport.nodes() is None
        clock.sleep(0.25)
    assert [after - before for before, after in pairwise(calls)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert log.count("unreachable") == 10


def test_a_success_ends_the_trouble_and_the_next_begins_small() -> None:
    transport, faulty, clock, log = make()
    for _ in range(4):
        assert transport.pull(["m1"]) is None
        clock.sleep(40)
    faulty.call = succeed
    assert transport.nodes() == NODES
    assert transport.push(1, "task", "header", b"", 9.0) == "header"
    assert transport.pull(["m1"]) == []
    assert transport.reachable
    assert [event[0] for event in log.events] == ["unreachable"] * 4 + ["reachable"]
    faulty.call = fail
    transport.nodes()
    clock.sleep(0.5)
    faulty.call = succeed
    assert transport.nodes() == NODES


def test_patience_ends_with_a_sentence() -> None:
    transport, _, clock, _ = make(patience=100)
    for _ in range(4):
        transport.nodes()
        clock.sleep(30)
    with pytest.raises(
        InputError, match=r"unreachable for 120 seconds \(nobody answers\): see the log of the SuperLink"
    ):
        transport.nodes()


def test_a_transport_that_is_closed_for_this_run_is_not_waited_for() -> None:
    transport, faulty, _, _ = make()

    def closed() -> None:
        raise TransportClosedError("the run was ended")

    faulty.call = closed
    with pytest.raises(TransportClosedError):
        transport.nodes()
