"""Beside what the caller does, or in line with it: where an engine's work is queued."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from offbeat import trees
from offbeat.trees import Tree


class Mark(Protocol):
    """The end of what was queued so far."""

    def take(self, results: Tree) -> None:
        """Make the caller's next work wait for it, and the results the caller's."""
        ...


class Lane(Protocol):
    """An order of work."""

    @contextmanager
    def running(self, used: Tree) -> Iterator[None]:
        """Queue here what is computed inside, after all that the caller has queued so far."""
        ...

    def mark(self) -> Mark: ...


class InLine:
    """Nothing is queued: a CPU computes at once."""

    @contextmanager
    def running(self, used: Tree) -> Iterator[None]:
        yield

    def mark(self) -> "InLine":
        return self

    def take(self, results: Tree) -> None:
        pass


class Beside:
    """A stream of its own on a GPU, so that local work goes on while the server steps and evaluates."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def running(self, used: Tree) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        for leaf in trees.leaves(used):
            if leaf.is_cuda:
                leaf.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> "Passed":
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return Passed(event, self._stream.device)


class Passed:
    """An event on a stream."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def take(self, results: Tree) -> None:
        caller = torch.cuda.current_stream(self._device)
        caller.wait_event(self._event)
        for leaf in trees.leaves(results):
            leaf.record_stream(caller)


def lane_of(device: torch.device) -> Lane:
    """The lane that suits a device."""
    return Beside(device) if device.type == "cuda" else InLine()
