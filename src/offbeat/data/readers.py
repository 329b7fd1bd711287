"""Arrays, frames and data sets as examples: tensors in memory, or a source that is read when it is needed.

No package but NumPy and torch is imported: a frame of pandas or polars and a Hugging Face data set are
recognised by their attributes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from offbeat import trees
from offbeat.data.client_store import free_ram
from offbeat.data.population import Examples, ExampleSource, Indices, check_examples
from offbeat.errors import InputError, error_summary
from offbeat.trees import Tree

Columns: TypeAlias = str | Sequence[str] | None

_MEMORY_SHARE = 0.25  # of the free memory that a data set may take to be read at once
_READ = 1000  # examples that are read from a data set at once


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
        examples = array_examples(*data)
        return in_memory_examples(examples) if in_memory else examples
    if is_frame(data):
        if target is None:
            raise InputError("the data is a frame: name the column to predict, as in target='label'.")
        return frame_examples(data, target, inputs, ())
    if isinstance(data, ExampleSource):
        return data
    return read_dataset(data, inputs, target, (), in_memory)


def labels_of(examples: Examples | ExampleSource) -> Indices:
    """The targets as integer labels, for a partition by label; other targets count as one class."""
    if isinstance(examples, _ArraySource):
        leaves = [np.asarray(leaf) for leaf in trees.leaves(examples.arrays.targets)]
    else:
        leaves = [leaf.numpy() for leaf in trees.leaves(in_memory_examples(examples).targets)]
    if len(leaves) == 1 and leaves[0].ndim == 1 and np.issubdtype(leaves[0].dtype, np.integer):
        return leaves[0].astype(np.int64)
    return np.zeros(examples.total, np.int64)


def in_memory_examples(data: Examples | ExampleSource) -> Examples:
    """The examples as tensors in memory."""
    return data if isinstance(data, Examples) else data.gather(np.arange(data.total))


def array_examples(inputs: Tree, targets: Tree) -> Examples | ExampleSource:
    """Arrays or tensors as examples; memory-mapped arrays stay on the disk."""
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
    """A tensor with torch's default type for real numbers, and int64 for integers other than bytes."""
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


def is_frame(value: Any) -> bool:
    """Whether it is a pandas or polars frame."""
    return hasattr(value, "columns") and hasattr(value, "to_numpy") and hasattr(value, "shape")


def frame_examples(frame: Any, target: str, inputs: Columns, without: tuple[str, ...]) -> Examples:
    """The rows of a frame as examples; by default all columns but the target and `without` are inputs."""
    names = [inputs] if isinstance(inputs, str) else inputs
    if names is None:
        names = [str(name) for name in frame.columns if name not in (target, *without)]
    check_columns(frame.columns, [*names, target])
    if not names:
        raise InputError("the data has no input columns: give at least one.")
    columns = [_number_column(frame, name) for name in names]
    stacked = np.stack([column.astype(np.float64) for column in columns], axis=1)
    return check_examples(Examples(_tensor(stacked), _tensor(_number_column(frame, target))))


def _number_column(frame: Any, name: str) -> Any:
    """A column as an array of numbers without missing values."""
    values = frame_column(frame, name)
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


def frame_column(frame: Any, name: str) -> Any:
    """A column of a frame as an array."""
    check_columns(frame.columns, [name])
    return np.asarray(frame[name].to_numpy())


def check_columns(columns: Iterable[Any], wanted: Iterable[str]) -> None:
    """Reject names that are not among the columns of the data."""
    known = [str(column) for column in columns]
    for name in wanted:
        if name not in known:
            shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
            raise InputError(f"the data has no column '{name}': its columns are {shown}.")


def is_hugging_face(value: Any) -> bool:
    """Whether it is a Hugging Face data set."""
    return hasattr(value, "column_names") and hasattr(value, "with_format")


def read_dataset(
    dataset: Any, inputs: Columns, target: str | None, without: tuple[str, ...], in_memory: bool | None
) -> Examples | ExampleSource:
    """A torch or Hugging Face data set as examples; see `ClientData.from_dataset` for `in_memory`."""
    if isinstance(dataset, DataLoader):
        dataset = dataset.dataset
    if isinstance(dataset, Mapping) and any(is_hugging_face(part) for part in dataset.values()):
        splits = ", ".join(f"'{name}'" for name in dataset)
        raise InputError(f"the data has several splits ({splits}): choose one of them.")
    if is_hugging_face(dataset):
        if target is None:
            raise InputError("the data is a Hugging Face data set: name its target column with target=.")
        if inputs is None:
            inputs = [name for name in dataset.column_names if name not in (target, *without)]
        check_columns(dataset.column_names, [*([inputs] if isinstance(inputs, str) else inputs), target])
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
            f"the items of the data set cannot be stacked ({error_summary(error)}): return tensors or "
            "numbers of one shape."
        ) from None
    examples: Examples = trees.map(_tensor, Examples(inputs, targets))
    return examples


def is_on_disk(value: Any) -> bool:
    """Whether data are read from the disk when they are needed."""
    if isinstance(value, Examples | tuple | list):
        return any(isinstance(leaf, np.memmap) for leaf in trees.leaves(tuple(value)))
    return is_hugging_face(value)
