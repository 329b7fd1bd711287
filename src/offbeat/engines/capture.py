"""Functions of tensors as CUDA graphs: recorded once per shape, then launched as one."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch

from offbeat import trees
from offbeat.trees import Tree

_IDLE = 4  # times as many other requests as there is room, after which a graph is thought to be done with
_WARM = 2  # runs before recording, in which libraries settle on kernels and take their workspace

Key = TypeVar("Key", bound=Hashable)


class Captured:
    """One function at one shape; what it gives lies where the next launch will write again."""

    def __init__(self, function: Callable[[Any], Tree], example: Tree, stream: torch.cuda.Stream) -> None:
        self._function = function  # whose identity, and its algorithm's, must not be another's meanwhile
        caller = torch.cuda.current_stream(stream.device)
        self._inputs = trees.over(torch.clone, example)
        # On the very stream of the recording: a library's workspace belongs to a stream, and one that
        # was first taken while recording would go with this graph.
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            for _ in range(_WARM):
                function(self._inputs)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._outputs = function(self._inputs)
        caller.wait_stream(stream)

    def __call__(self, given: Tree) -> Tree:
        """Launch on the current stream."""
        for mine, theirs in zip(trees.leaves(self._inputs), trees.leaves(given), strict=True):
            mine.copy_(theirs, non_blocking=True)
        self._graph.replay()
        return self._outputs


class Latest(Generic[Key]):
    """The graphs used last; a shape is recorded when it comes a second time."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._seen: set[Key] = set()
        self._turn = 0
        self._used: dict[Key, int] = {}
        self._graphs: OrderedDict[Key, Captured] = OrderedDict()

    def find(self, key: Key, make: Callable[[], Captured]) -> Captured | None:
        """The graph of this shape, or nothing if it was never seen before."""
        if key not in self._graphs and key not in self._seen:
            self._seen.add(key)
            return None
        return self.make(key, make)

    def make(self, key: Key, make: Callable[[], Captured]) -> Captured:
        """The graph of this shape, recorded if need be."""
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key]
        while len(self._graphs) >= self._room:
            self._graphs.popitem(last=False)
        self._graphs[key] = make()
        return self._graphs[key]

    def welcomes(self, key: Key) -> bool:
        """Whether its graph is there, or may be recorded without the loss of one that is in use.

        Recording costs several runs, so a circle of more shapes than there is room for would be slower with
        graphs than without.
        """
        self._turn += 1
        if key in self._graphs or len(self._graphs) < self._room:
            self._used[key] = self._turn
            return True
        oldest = next(iter(self._graphs))
        if self._turn - self._used.get(oldest, 0) <= _IDLE * self._room:
            return False
        self._used = {each: self._used.get(each, 0) for each in self._graphs if each != oldest}
        self._used[key] = self._turn
        return True

    def __len__(self) -> int:
        return len(self._graphs)

    def clear(self) -> None:
        """Give their memory back."""
        self._graphs.clear()
        self._used.clear()


def signature(tree: Tree) -> tuple[Any, ...]:
    """What a graph depends on besides its function."""
    described = [(tuple(leaf.shape), leaf.dtype) for leaf in trees.leaves(tree)]
    return (trees.shape(tree), *described)
