"""Data in the forms that people have them: arrays, frames, data sets, dictionaries and functions, by client.

`ClientData` holds the examples of each client under the client's name. Arrays, frames and data sets are
one table whose rows belong to clients; dictionaries and functions give the data of one client at a time.
Memory-mapped arrays, data sets too large for memory and functions are read when examples are needed. The
data of a function are kept in a cache of bounded size.

No package but NumPy and torch is imported: a frame of pandas or polars and a Hugging Face data set are
recognised by their attributes.
"""

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from offbeat import draws, trees
from offbeat.data.client_store import free_ram
from offbeat.data.partition import Partition, parse_partition, parts_by_owner
from offbeat.data.population import (
    Epochs,
    Examples,
    ExampleSource,
    Indices,
    Population,
    Steps,
    check_examples,
    no_examples,
)
from offbeat.errors import InputError, unknown_name
from offbeat.trees import Tree

Columns: TypeAlias = str | Sequence[str] | None
LoadClient: TypeAlias = Callable[[str], Any]

_CACHE_BYTES = 1 << 30
_ROW_BITS = 32  # a row of a client that is loaded on demand has the index (client << 32) + row
_MEMORY_SHARE = 0.25  # of the free memory that a data set may take to be read at once
_READ = 1000  # examples that are read from a data set at once


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
        return _in_memory(self._load(name))

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
        if not _is_frame(frame):
            raise InputError(f"the data is a {type(frame).__name__}: give a pandas or polars frame.")
        clients = _column(frame, by)
        return _from_table(_frame_examples(frame, target, inputs, (by,)), clients, f"the column '{by}'")

    @staticmethod
    def from_arrays(inputs: Tree, targets: Tree, *, by: Sequence[Any]) -> "ClientData":
        """Divide arrays among clients.

        Memory-mapped arrays stay on the disk: only the rows of the current minibatches are read.

        Args:
            inputs: An array or tensor whose first axis is the examples, or a tuple or dictionary of them.
            targets: The same for the targets.
            by: The client of each example.
        """
        return _from_table(_array_examples(inputs, targets), np.asarray(by), "by")

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
            if not _is_hugging_face(dataset):
                raise InputError("a torch data set has no columns: give by= the client of each example.")
            _check_columns(dataset.column_names, [by])
            clients = np.asarray(dataset[by][:])
        else:
            clients = np.asarray(by)
        extra = (by,) if isinstance(by, str) else ()
        return _from_table(_read_dataset(dataset, inputs, target, extra, in_memory), clients, "by")

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

        on_disk = any(_on_disk(value) for value in values.values())
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


def read_examples(
    data: Any, *, inputs: Columns = None, target: str | None = None, in_memory: bool | None = None
) -> Examples | ExampleSource:
    """Data that are not divided among clients, as tensors or, if they stay on the disk, as a source.

    Args:
        data: A pair of arrays, tensors or trees of them; a pandas or polars frame; or a data set.
        inputs: The input columns of a frame or a Hugging Face data set.
        target: Its target column.
        in_memory: Whether to read all examples at once; see `ClientData.from_dataset`.
    """
    if isinstance(data, Examples | tuple | list):
        if len(data) != 2:
            raise InputError(f"the data has {len(data)} parts: give a pair of inputs and targets.")
        examples = _array_examples(*data)
        return _in_memory(examples) if in_memory else examples
    if _is_frame(data):
        if target is None:
            raise InputError("the data is a frame: name the column to predict, as in target='label'.")
        return _frame_examples(data, target, inputs, ())
    if isinstance(data, ExampleSource):
        return data
    return _read_dataset(data, inputs, target, (), in_memory)


def examples_in_memory(data: Any, *, inputs: Columns = None, target: str | None = None) -> Examples:
    """Data that are not divided among clients, read into memory as tensors.

    Args:
        data: A pair of arrays, tensors or trees of them; a pandas or polars frame; or a data set.
        inputs: The input columns of a frame or a Hugging Face data set.
        target: Its target column.
    """
    return _in_memory(read_examples(data, inputs=inputs, target=target))


def labels_of(examples: Examples | ExampleSource) -> Indices:
    """The targets as integer labels, for a partition by label; other targets count as one class."""
    if isinstance(examples, _ArraySource):
        leaves = [np.asarray(leaf) for leaf in trees.leaves(examples.arrays.targets)]
    else:
        leaves = [leaf.numpy() for leaf in trees.leaves(_in_memory(examples).targets)]
    if len(leaves) == 1 and leaves[0].ndim == 1 and np.issubdtype(leaves[0].dtype, np.integer):
        return leaves[0].astype(np.int64)
    return np.zeros(examples.total, np.int64)


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


@dataclass(frozen=True)
class _ArraySource:
    """Arrays of which at least one is memory-mapped; rows are read when they are needed."""

    arrays: Examples  # of NumPy arrays

    @property
    def total(self) -> int:
        return self.arrays.total

    def gather(self, indices: Indices) -> Examples:
        read: Examples = trees.map(lambda leaf: _tensor(leaf[indices]), self.arrays)
        return read

    def __reduce__(self) -> tuple[Any, ...]:
        # a memory-mapped array would be pickled with all that it contains
        return _open_arrays, (trees.map(_file_of, self.arrays),)


@dataclass(frozen=True)
class _DatasetSource:
    """A data set whose items are read when they are needed."""

    dataset: Any
    inputs: Columns = None
    target: str | None = None

    @property
    def total(self) -> int:
        return len(self.dataset)

    def gather(self, indices: Indices) -> Examples:
        if self.target is not None:
            return _hugging_face_rows(self.dataset, indices, self.inputs, self.target)
        return _collate([self.dataset[int(index)] for index in indices])


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
            f"the examples of the clients differ in shape or type ({_first_line(error)}): "
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
    """What `read` returns, with errors that name the client."""
    try:
        return read()
    except Exception as error:
        reason = str(error) if isinstance(error, InputError) else f"{_first_line(error)}."
        raise InputError(f"the data of client '{name}' could not be read: {reason}") from error


def _in_memory(data: Examples | ExampleSource) -> Examples:
    return data if isinstance(data, Examples) else data.gather(np.arange(data.total))


def _array_examples(inputs: Tree, targets: Tree) -> Examples | ExampleSource:
    arrays = Examples(inputs, targets)
    leaves: list[Any] = [*trees.leaves(arrays)]
    for leaf in leaves:
        if not isinstance(leaf, np.ndarray | Tensor):
            raise InputError(
                f"the data has a {type(leaf).__name__} in it: give arrays or tensors as inputs and targets."
            )
    if any(isinstance(leaf, np.memmap) for leaf in leaves):
        check_examples(trees.map(lambda leaf: torch.empty(leaf.shape[:1], device="meta"), arrays))
        return _ArraySource(trees.map(np.asanyarray, arrays))
    return check_examples(trees.map(_tensor, arrays))


def _tensor(values: Any) -> Tensor:
    """A tensor with torch's default type for real numbers; integers keep theirs, except targets' sizes."""
    if not isinstance(values, Tensor):
        array = np.ascontiguousarray(values)
        if array.dtype.kind not in "biuf":
            raise InputError(f"the data has {array.dtype} values: encode them as numbers.")
        if array.dtype.kind in "iu" and array.dtype != np.uint8:
            array = array.astype(np.int64)
        if not array.flags.writeable:
            array = array.copy()
        values = torch.from_numpy(array)
    tensor: Tensor = values.to(torch.get_default_dtype()) if values.is_floating_point() else values
    return tensor


def _file_of(array: Any) -> Any:
    """A memory-mapped array as what it takes to open it again."""
    if not isinstance(array, np.memmap) or array.filename is None:
        return array
    base = array
    while isinstance(base.base, np.memmap):
        base = base.base
    start = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    if not array.flags.c_contiguous:
        return np.asarray(array)
    return _MappedFile(str(array.filename), array.dtype.str, array.shape, int(base.offset + start))


@dataclass(frozen=True)
class _MappedFile:
    path: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


def _open_arrays(files: Examples) -> _ArraySource:
    def opened(each: Any) -> Any:
        if not isinstance(each, _MappedFile):
            return each
        return np.memmap(each.path, each.dtype, "r", each.offset, each.shape)

    return _ArraySource(trees.map(opened, files))


def _is_frame(value: Any) -> bool:
    """Whether it is a pandas or polars frame."""
    return hasattr(value, "columns") and hasattr(value, "to_numpy") and hasattr(value, "shape")


def _is_hugging_face(value: Any) -> bool:
    return hasattr(value, "column_names") and hasattr(value, "with_format")


def _on_disk(value: Any) -> bool:
    """Whether a client's data are not in memory."""
    if isinstance(value, Examples | tuple | list):
        return any(isinstance(leaf, np.memmap) for leaf in trees.leaves(tuple(value)))
    return _is_hugging_face(value)


def _check_columns(columns: Iterable[Any], wanted: Iterable[str]) -> None:
    known = [str(column) for column in columns]
    for name in wanted:
        if name not in known:
            shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
            raise InputError(f"the data has no column '{name}': its columns are {shown}.")


def _column(frame: Any, name: str) -> Any:
    _check_columns(frame.columns, [name])
    return np.asarray(frame[name].to_numpy())


def _frame_examples(frame: Any, target: str, inputs: Columns, without: tuple[str, ...]) -> Examples:
    names = [inputs] if isinstance(inputs, str) else inputs
    if names is None:
        names = [str(name) for name in frame.columns if name not in (target, *without)]
    _check_columns(frame.columns, [*names, target])
    if not names:
        raise InputError("the data has no input columns: give at least one.")
    columns = [_numbers(frame, name) for name in names]
    stacked = np.stack([column.astype(np.float64) for column in columns], axis=1)
    return check_examples(Examples(_tensor(stacked), _tensor(_numbers(frame, target))))


def _numbers(frame: Any, name: str) -> Any:
    """A column as an array of numbers without missing values."""
    values = _column(frame, name)
    if values.dtype.kind == "O" and all(isinstance(value, bool | np.bool_) for value in values):
        values = values.astype(np.bool_)
    if values.dtype.kind not in "biuf":
        raise InputError(
            f"the column '{name}' has values that are not numbers: encode it as numbers, or choose other "
            "columns with inputs=."
        )
    if values.dtype.kind == "f" and np.isnan(values).any():
        raise InputError(f"the column '{name}' has missing values: fill them in, or drop these rows.")
    return values.astype(np.int64) if values.dtype.kind == "b" else values


def _read_dataset(
    dataset: Any, inputs: Columns, target: str | None, without: tuple[str, ...], in_memory: bool | None
) -> Examples | ExampleSource:
    if isinstance(dataset, DataLoader):
        dataset = dataset.dataset
    if isinstance(dataset, Mapping) and any(_is_hugging_face(part) for part in dataset.values()):
        splits = ", ".join(f"'{name}'" for name in dataset)
        raise InputError(f"the data has several splits ({splits}): choose one of them.")
    if _is_hugging_face(dataset):
        if target is None:
            raise InputError("the data is a Hugging Face data set: name its target column with target=.")
        if inputs is None:
            inputs = [name for name in dataset.column_names if name not in (target, *without)]
        _check_columns(dataset.column_names, [*([inputs] if isinstance(inputs, str) else inputs), target])
        size: float = dataset.data.nbytes
    elif isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset):
        if inputs is not None or target is not None:
            raise InputError("a torch data set has no columns: leave out inputs= and target=.")
        size = 0
    else:
        raise InputError(
            f"the data is a {type(dataset).__name__}: give a pair of arrays, a pandas or polars frame, or a "
            "torch or Hugging Face data set with random access."
        )
    if not len(dataset):
        raise InputError("the data has no rows: give at least one example.")
    source = _DatasetSource(dataset, inputs, target)
    whole = size <= _MEMORY_SHARE * free_ram() if in_memory is None else in_memory
    if not whole:
        check_examples(source.gather(np.arange(1)))
        return source
    pieces = np.array_split(np.arange(len(dataset)), -(-len(dataset) // _READ))
    read: Examples = trees.map(lambda *leaves: torch.cat(leaves), *map(source.gather, pieces))
    return check_examples(read)


def _hugging_face_rows(dataset: Any, indices: Indices, inputs: Columns, target: str) -> Examples:
    names = [inputs] if isinstance(inputs, str) else list(inputs or ())
    columns = dataset.with_format("numpy", columns=[*names, target])[indices.tolist()]

    def tensor(name: str) -> Tensor:
        values = columns[name]
        if isinstance(values, list) or values.dtype == object:
            raise InputError(
                f"the column '{name}' has rows of different shapes or values that are not numbers: encode "
                "them as numbers and pad them to one length."
            )
        return _tensor(values)

    chosen = tensor(inputs) if isinstance(inputs, str) else {name: tensor(name) for name in names}
    return Examples(chosen, tensor(target))


def _collate(items: list[Any]) -> Examples:
    """Items of a torch data set, stacked."""
    if not all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
        raise InputError("the items of the data set are not pairs of input and target: return pairs.")
    try:
        inputs, targets = default_collate(items)
    except (TypeError, RuntimeError) as error:
        raise InputError(
            f"the items of the data set cannot be stacked ({_first_line(error)}): return tensors or numbers "
            "of one shape."
        ) from None
    examples: Examples = trees.map(_tensor, Examples(inputs, targets))
    return examples


def _split_rows(count: int, test: float, seed: int, name: str) -> tuple[Indices, Indices]:
    """Training and test rows of a client."""
    order = draws.generator(seed, "split", zlib.crc32(name.encode())).permutation(count)
    held_out = min(count - 1, max(1, round(test * count)))
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
