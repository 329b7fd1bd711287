"""A network that is away is left alone for a while, and given up after a long one."""

from itertools import pairwise

import pytest

from deploy_world import Clock, Log
from offbeat.deploy.protocol.transport import RetryingTransport, TransportClosedError, TransportError
from offbeat.errors import InputError


def fail() -> None:
    raise TransportError("nobody answers")


def make(patience: float = 600.0) -> tuple[RetryingTransport, Clock, Log]:
    clock, log = Clock(), Log()
    return RetryingTransport(clock, patience, log), clock, log


def test_calls_are_held_back_for_half_a_second_and_then_twice_as_long_up_to_thirty() -> None:
    line, clock, log = make(patience=1e6)
    calls: list[float] = []

    def call() -> None:
        calls.append(clock.now)
        fail()

    while len(calls) < 10:
        line.ask(call)
        clock.sleep(0.25)
    assert [after - before for before, after in pairwise(calls)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert log.count("unreachable") == 10


def test_a_success_ends_the_trouble_and_the_next_begins_small() -> None:
    line, clock, log = make()
    for _ in range(4):
        line.ask(fail)
        clock.sleep(40)
    assert line.ask(lambda: 7) == 7
    assert line.up
    assert [event[0] for event in log.events] == ["unreachable"] * 4 + ["reachable"]
    line.ask(fail)
    clock.sleep(0.5)
    assert line.ask(lambda: 7) == 7


def test_patience_ends_with_a_sentence() -> None:
    line, clock, _ = make(patience=100)
    for _ in range(4):
        line.ask(fail)
        clock.sleep(30)
    with pytest.raises(InputError, match=r"away for 120 seconds \(nobody answers\): see that the SuperLink"):
        line.ask(fail)


def test_a_network_that_is_closed_for_this_run_is_not_waited_for() -> None:
    line, _, _ = make()

    def closed() -> None:
        raise TransportClosedError("the run was ended")

    with pytest.raises(TransportClosedError):
        line.ask(closed)
