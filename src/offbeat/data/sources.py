"""The data of users by client: from arrays, frames, data sets, dictionaries and functions.

`ClientData` holds the examples of each client under the client's name. Arrays, frames and data sets are
one table whose rows belong to clients; dictionaries and functions give the data of one client at a time.
Memory-mapped arrays, data sets too large for memory and functions are read when examples are needed. The
data that a function loads are kept in a cache of bounded size.
"""

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from offbeat import draws, trees
from offbeat.data.partition import Partition, parse_partition, parts_by_owner
from offbeat.data.population import (
    Epochs,
    Examples,
    ExampleSource,
    Indices,
    Population,
    Steps,
    no_examples,
)
from offbeat.data.readers import (
    Columns,
    array_examples,
    check_columns,
    frame_column,
    frame_examples,
    in_memory_examples,
    is_frame,
    is_hugging_face,
    is_on_disk,
    labels_of,
    read_dataset,
    read_examples,
)
from offbeat.errors import InputError, error_summary, unknown_name
from offbeat.trees import Tree

LoadClient: TypeAlias = Callable[[str], Any]

_CACHE_BYTES = 1 << 30
_ROW_BITS = 32  # a row of a client that is loaded on demand has the index (client << 32) + row


@dataclass(frozen=True)
class ClientData:
    """The examples of each client, by name; made by one of the `from_...` functions.

    Attributes:
        names: The clients in order, or None if only a function is known that loads a client by name.
    """

    names: tuple[str, ...] | None
    _load: LoadClient = field(repr=False)
    _table: "_Table | None" = field(default=None, repr=False)
    _cache_bytes: int | None = field(default=None, repr=False)  # None: all clients fit into memory

    def __len__(self) -> int:
        return len(self._known_names())

    def examples(self, name: str) -> Examples:
        """The examples of one client as tensors. Nothing of other clients is read.

        Args:
            name: The name of the client.
        """
        if self.names is not None and name not in self.names:
            raise unknown_name("client", name, self.names)
        return in_memory_examples(self._load(name))

    def population(self, work: Steps | Epochs) -> Population:
        """The clients as an engine needs them.

        Args:
            work: The minibatches of a task.
        """
        names = self._known_names()
        if self._table is not None:
            return Population(self._table.data, self._table.parts, work, names)
        if self._cache_bytes is None:
            data, parts = _concatenated([self.examples(name) for name in names], names)
            return Population(data, parts, work, names)
        cache = _ClientCache(names, self.examples, self._cache_bytes)
        return Population(cache, _CachedParts(cache), work, names)

    def split(self, test: float = 0.2, seed: int = 0) -> "tuple[ClientData, ClientData]":
        """Split the examples of each client at random into training and test data.

        Args:
            test: The fraction of each client's examples in the test data: at least one example, unless the
                client has only one.
            seed: The seed of the split.
        """
        if not 0 < test < 1:
            raise InputError(f"the fraction of test examples is {test}: give a number between 0 and 1.")
        train_table = test_table = None
        if self._table is not None and self.names is not None:
            pairs = [
                _split_rows(len(part), test, seed, name)
                for name, part in zip(self.names, self._table.parts, strict=True)
            ]
            both = [
                [part[rows] for part, rows in zip(self._table.parts, column, strict=True)]
                for column in zip(*pairs, strict=True)
            ]
            train_table, test_table = (_Table(self._table.data, parts) for parts in both)

        def half(side: int, table: "_Table | None") -> ClientData:
            if table is not None and self.names is not None:
                return ClientData(self.names, _TableLoader(self.names, table), table)

            def load(name: str) -> Examples:
                examples = self.examples(name)
                return examples.gather(_split_rows(examples.total, test, seed, name)[side])

            return ClientData(self.names, load, None, self._cache_bytes)

        return half(0, train_table), half(1, test_table)

    @staticmethod
    def from_frame(frame: Any, *, by: str, target: str, inputs: Columns = None) -> "ClientData":
        """Divide a pandas or polars frame among clients by a column.

        Args:
            frame: The frame; each row is one example.
            by: The column with the client of each row.
            target: The column to predict.
            inputs: The input columns in order; by default all columns but `by` and `target`.
        """
        if not is_frame(frame):
            raise InputError(f"the data is a {type(frame).__name__}: give a pandas or polars frame.")
        clients = frame_column(frame, by)
        return _from_table(frame_examples(frame, target, inputs, (by,)), clients, f"the column '{by}'")

    @staticmethod
    def from_arrays(inputs: Tree, targets: Tree, *, by: Sequence[Any]) -> "ClientData":
        """Divide arrays among clients.

        Memory-mapped arrays stay on the disk: only the rows of the current minibatches are read.

        Args:
            inputs: An array or tensor whose first axis is the examples, or a tuple or dictionary of them.
            targets: The same for the targets.
            by: The client of each example.
        """
        return _from_table(array_examples(inputs, targets), np.asarray(by), "by")

    @staticmethod
    def from_dataset(
        dataset: Any,
        *,
        by: str | Sequence[Any],
        inputs: Columns = None,
        target: str | None = None,
        in_memory: bool | None = None,
    ) -> "ClientData":
        """Divide a Hugging Face or torch map-style data set (or a DataLoader's) among clients.

        Args:
            dataset: The data set. Items of a torch data set are pairs of input and target.
            by: The client of each example: a column of a Hugging Face data set, or a sequence.
            inputs: The input columns of a Hugging Face data set. The module gets several as keyword
                arguments, and a single one given as a string as its positional argument.
            target: The target column of a Hugging Face data set.
            in_memory: Whether to read all examples at once. By default they are if they take at most a
                quarter of the free memory; a torch data set, whose size is not known, is.
        """
        if isinstance(by, str):
            if not is_hugging_face(dataset):
                raise InputError("a torch data set has no columns: give by= the client of each example.")
            check_columns(dataset.column_names, [by])
            clients = np.asarray(dataset[by][:])
        else:
            clients = np.asarray(by)
        extra = (by,) if isinstance(by, str) else ()
        return _from_table(read_dataset(dataset, inputs, target, extra, in_memory), clients, "by")

    @staticmethod
    def from_dict(
        clients: Mapping[Any, Any], *, inputs: Columns = None, target: str | None = None
    ) -> "ClientData":
        """One entry for each client.

        Args:
            clients: From the name of a client to its data: a pair of arrays, a frame or a data set.
            inputs: The input columns of frames and Hugging Face data sets.
            target: Their target column.
        """
        names = _client_names(clients)
        values = dict(zip(names, clients.values(), strict=True))

        def load(name: str) -> Any:
            return _for_client(name, lambda: read_examples(values[name], inputs=inputs, target=target))

        on_disk = any(is_on_disk(value) for value in values.values())
        return ClientData(names, load, None, _CACHE_BYTES if on_disk else None)

    @staticmethod
    def from_function(
        load: LoadClient,
        names: Iterable[Any] | None = None,
        *,
        inputs: Columns = None,
        target: str | None = None,
        cache_bytes: int = _CACHE_BYTES,
    ) -> "ClientData":
        """Load the data of a client when it is needed.

        Args:
            load: From the name of a client to its data: a pair of arrays, a frame or a data set.
            names: All clients; a simulation needs them, a site of a deployment only its own name.
            inputs: The input columns of frames and Hugging Face data sets.
            target: Their target column.
            cache_bytes: The size of the cache of loaded clients; the newest client is always kept.
        """
        if not callable(load):
            raise InputError(f"the data is a {type(load).__name__}: give a function from a client's name.")

        def checked(name: str) -> Any:
            return _for_client(name, lambda: read_examples(load(name), inputs=inputs, target=target))

        known = None if names is None else _client_names(names)
        return ClientData(known, checked, None, cache_bytes)

    @staticmethod
    def from_partition(
        data: Any,
        partition: Partition | str,
        clients: int,
        seed: int = 0,
        *,
        inputs: Columns = None,
        target: str | None = None,
    ) -> "ClientData":
        """Divide data among simulated clients by a rule.

        Args:
            data: A pair of arrays, a frame or a data set.
            partition: A rule such as `Dirichlet(0.5)`, or its text, such as `dirichlet:0.5`.
            clients: The number of clients; they are named by their numbers.
            seed: The seed of the partition.
            inputs: The input columns of a frame or a Hugging Face data set.
            target: Its target column.
        """
        rule = parse_partition(partition) if isinstance(partition, str) else partition
        examples = read_examples(data, inputs=inputs, target=target)
        parts = rule.split(labels_of(examples), clients, seed)
        table, names = _Table(examples, parts), tuple(str(client) for client in range(clients))
        return ClientData(names, _TableLoader(names, table), table)

    def _known_names(self) -> tuple[str, ...]:
        if self.names is None:
            raise InputError(
                "the names of the clients are not known: give them, as in "
                "ClientData.from_function(load, names=[...])."
            )
        return self.names


def client_data(value: Any) -> ClientData:
    """`ClientData` from itself, from a dictionary of clients, or from a function of a client's name.

    Args:
        value: What to convert; data that are not divided among clients are refused.
    """
    if isinstance(value, ClientData):
        return value
    if isinstance(value, Mapping):
        return ClientData.from_dict(value)
    if callable(value):
        return ClientData.from_function(value)
    raise InputError(
        f"the data is a {type(value).__name__}, which does not say which client has which examples: "
        "use a dictionary of clients, a function of a client's name, or ClientData."
    )


@dataclass(frozen=True)
class _Table:
    """Examples of all clients, and the rows of each client."""

    data: Examples | ExampleSource
    parts: Sequence[Indices]


@dataclass(frozen=True)
class _TableLoader:
    """Loads a client from a table."""

    names: tuple[str, ...]
    table: _Table

    def __call__(self, name: str) -> Examples:
        return self.table.data.gather(self.table.parts[self.names.index(name)])


class _ClientCache:
    """Examples of clients that are loaded on demand; the least recently used are dropped."""

    def __init__(self, names: tuple[str, ...], load: Callable[[str], Examples], limit: int) -> None:
        self.names = names
        self._load, self._limit = load, limit
        self._kept: OrderedDict[int, Examples] = OrderedDict()
        self._sizes: dict[int, int] = {}
        self.nbytes = 0  # of the examples in the cache

    @property
    def total(self) -> int:
        return len(self.names) << _ROW_BITS

    def size(self, client: int) -> int:
        """The number of examples of a client."""
        if client not in self._sizes:
            self.client(client)
        return self._sizes[client]

    def client(self, client: int) -> Examples:
        """The examples of a client."""
        if client not in self._kept:
            examples = self._load(self.names[client])
            if not examples.total:
                raise no_examples(client, self.names)
            self._sizes[client] = examples.total
            self._kept[client] = examples
            self.nbytes += _nbytes(examples)
            while len(self._kept) > 1 and self.nbytes > self._limit:
                self.nbytes -= _nbytes(self._kept.popitem(last=False)[1])
        self._kept.move_to_end(client)
        return self._kept[client]

    def gather(self, indices: Indices) -> Examples:
        clients, owners = np.unique(indices >> _ROW_BITS, return_inverse=True)
        rows = indices & ((1 << _ROW_BITS) - 1)
        parts = [self.client(int(client)).gather(rows[owners == n]) for n, client in enumerate(clients)]
        if len(parts) == 1:
            return parts[0]
        order = torch.from_numpy(np.argsort(np.argsort(owners, kind="stable"), kind="stable"))
        joined: Examples = trees.map(lambda *leaves: torch.cat(leaves)[order], *parts)
        return joined

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": OrderedDict(), "nbytes": 0}


def _nbytes(examples: Examples) -> int:
    return sum(leaf.nbytes for leaf in trees.leaves(examples))


@dataclass(frozen=True)
class _CachedParts:
    """The indices of clients that are loaded on demand."""

    cache: _ClientCache

    def __len__(self) -> int:
        return len(self.cache.names)

    def __getitem__(self, client: int) -> Indices:
        return (client << _ROW_BITS) + np.arange(self.cache.size(client))


def _from_table(data: Examples | ExampleSource, clients: Any, where: str) -> ClientData:
    """Divide a table by the client of each row."""
    if len(clients) != data.total:
        raise InputError(f"{where} has {len(clients)} values for {data.total} examples: give one for each.")
    if not len(clients):
        raise InputError("the data has no rows: give at least one example.")
    if any(value is None or value != value for value in clients):
        raise InputError(f"{where} has missing values: give the client of each example.")
    ids, owners = np.unique(clients if clients.dtype != object else clients.astype(str), return_inverse=True)
    names = _client_names(ids.tolist())
    table = _Table(data, parts_by_owner(owners.reshape(-1), len(names)))
    return ClientData(names, _TableLoader(names, table), table)


def _concatenated(clients: Sequence[Examples], names: Sequence[str]) -> tuple[Examples, list[Indices]]:
    """The examples of all clients as one table, and the rows of each."""
    for client, examples in enumerate(clients):
        if not examples.total:
            raise no_examples(client, names)
    ends = np.cumsum([examples.total for examples in clients])
    try:
        table: Examples = trees.map(lambda *leaves: torch.cat(leaves), *clients)
    except (ValueError, RuntimeError, TypeError) as error:
        raise InputError(
            f"the examples of the clients differ in shape or type ({error_summary(error)}): "
            "give all clients the same columns and shapes."
        ) from None
    return table, np.split(np.arange(ends[-1]), ends[:-1])


def _client_names(clients: Iterable[Any]) -> tuple[str, ...]:
    names = tuple(str(client) for client in clients)
    if not names:
        raise InputError("there are no clients: give at least one.")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"there are two clients named '{twice}': give each its own name.")
    return names


def _for_client(name: str, read: Callable[[], Any]) -> Any:
    """The result of `read`, with errors that name the client."""
    try:
        return read()
    except Exception as error:
        reason = str(error) if isinstance(error, InputError) else f"{error_summary(error)}."
        raise InputError(f"the data of client '{name}' could not be read: {reason}") from error


def _split_rows(count: int, test: float, seed: int, name: str) -> tuple[Indices, Indices]:
    """Training and test rows of a client."""
    order = draws.generator(seed, "split", zlib.crc32(name.encode())).permutation(count)
    held_out = min(count - 1, max(1, round(test * count)))
    return np.sort(order[held_out:]), np.sort(order[:held_out])
