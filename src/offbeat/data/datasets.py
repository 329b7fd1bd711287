"""Data sets by name, as tensors.

Images are scaled to [0, 1] and standardised by the mean and deviation published for the training set
of each; digits are only divided by 16. Sentences are token ids of a vocabulary that is trained on them.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat import draws
from offbeat.data import download, glue, shakespeare
from offbeat.data.download import MissingFileError, cache_folder, downloads, fetch, find_file, parse_file
from offbeat.data.population import Examples
from offbeat.errors import InputError, unknown_name

NAMES = ("cifar10", "digits", "fashion-mnist", "mnist", *glue.NAMES, "shakespeare")


class Source(NamedTuple):
    """A data set; partitions use the `labels` and the natural client ids `groups` of training examples.

    Attributes:
        name: The name of the data set.
        train: The training examples.
        test: The test examples.
        groups: The natural client id of each training example, if there are any.
        labels: The label of each training example, for partitions.
        classes: The number of classes.
    """

    name: str
    train: Examples
    test: Examples
    groups: NDArray[np.int64] | None
    labels: NDArray[np.int64]
    classes: int


def load(name: str, folder: Path | str | None = None, download: bool = True) -> Source:
    """Load a data set from a folder, or from the cache folder, where it is downloaded if it is missing.

    Args:
        name: The name of a data set.
        folder: Where its files are; None: a cache folder of this user.
        download: Whether missing files may be downloaded.
    """
    if name not in NAMES:
        raise unknown_name("data set", name, NAMES)
    if folder is not None:
        try:
            return _read(name, Path(folder))
        except MissingFileError as error:
            raise _with_url(error, name) from None
    cache = cache_folder(name)
    try:
        return _read(name, cache)
    except MissingFileError:
        if not download:
            raise
    for item in downloads(name):
        fetch(item, cache)
    return _read(name, cache)


def _with_url(error: MissingFileError, name: str) -> MissingFileError:
    """The error with the address of the missing file, if it is known."""
    text = str(error)
    known = [item.url for item in downloads(name) if any(file in text for file in item.files)]
    return MissingFileError(f"{text.removesuffix('.')} from {known[0]}.") if known else error


def _read(name: str, folder: Path) -> Source:
    match name:
        case "mnist":
            return _read_idx(name, folder, "MNIST/raw", mean=0.1307, deviation=0.3081)
        case "fashion-mnist":
            return _read_idx(name, folder, "FashionMNIST/raw", mean=0.2860, deviation=0.3530)
        case "cifar10":
            return _read_cifar10(folder)
        case "shakespeare":
            return _read_shakespeare(folder)
        case _ if name in glue.NAMES:
            return load_glue(name, folder)
        case _:
            return _read_digits()


def _read_digits() -> Source:
    """Every fifth image of a shuffled list sorted by label is a test example: 1,437 and 360."""
    from sklearn.datasets import load_digits  # slow to import

    images, labels = load_digits(return_X_y=True)
    shuffled = draws.generator(0, "digits").permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    tested = np.zeros(len(labels), np.bool_)
    tested[by_label[::5]] = True
    inputs = torch.from_numpy(images / 16).float()
    targets = torch.from_numpy(labels.astype(np.int64))
    train, test = (Examples(inputs[rows], targets[rows]) for rows in (~tested, tested))
    return Source("digits", train, test, None, labels[~tested].astype(np.int64), 10)


def _read_idx(name: str, folder: Path, subfolder: str, mean: float, deviation: float) -> Source:
    def read(kind: str) -> Examples:
        image_path = find_file(folder, [f"{kind}-images-idx3-ubyte"], (".", subfolder))
        label_path = find_file(folder, [f"{kind}-labels-idx1-ubyte"], (".", subfolder))
        images, labels = (
            parse_file(image_path, download.parse_idx_images),
            parse_file(label_path, download.parse_idx_labels),
        )
        if len(images) != len(labels):
            raise InputError(
                f"{image_path} has {len(images)} images and {label_path} {len(labels)} labels: "
                "replace them with two files that belong together."
            )
        return _standardised(images, labels, [mean], [deviation])

    train, test = read("train"), read("t10k")
    return Source(name, train, test, None, train.targets.numpy(), 10)


def _read_cifar10(folder: Path) -> Source:
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    paths = [find_file(folder, [name], (".", "cifar-10-batches-bin")) for name in names]
    batches = [parse_file(path, download.parse_cifar10) for path in paths]
    most = max(len(labels) for _, labels in batches)
    for path, (_, labels) in zip(paths, batches, strict=True):
        if len(labels) < most:
            raise InputError(
                f"the data file {path} has {len(labels)} images where others have {most}: "
                "replace it with a good copy."
            )
    mean, deviation = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]
    *trained, tested = batches
    images, labels = (np.concatenate(column) for column in zip(*trained, strict=True))
    train, test = _standardised(images, labels, mean, deviation), _standardised(*tested, mean, deviation)
    return Source("cifar10", train, test, None, train.targets.numpy(), 10)


def _standardised(
    images: NDArray[np.uint8], labels: NDArray[np.uint8], mean: list[float], deviation: list[float]
) -> Examples:
    """Standardise each channel of images of shape (n, channels, height, width)."""
    shift, scale = (torch.tensor(values)[:, None, None] for values in (mean, deviation))
    inputs = torch.tensor(images, dtype=torch.float32).div_(255).sub_(shift).div_(scale)
    return Examples(inputs, torch.tensor(labels, dtype=torch.int64))


def load_glue(name: str, folder: Path, tokenizer: Any = None) -> Source:
    """A GLUE task, tokenized with `tokenizer` or with one that is trained on it."""
    train, test = glue.examples(name, glue.read(name, folder), tokenizer)
    return Source(name, train, test, None, train.targets.numpy(), 2)


def _read_shakespeare(folder: Path) -> Source:
    path = find_file(folder, ["by_role.json", "pg100.txt", "shakespeare.txt"])
    roles = shakespeare.roles_of_json if path.name.startswith("by_role") else shakespeare.roles_of_text
    train, test = parse_file(path, lambda data: shakespeare.windows(roles(data.decode("utf-8-sig"))))
    learnt, tested = (
        Examples(torch.from_numpy(part.inputs), torch.from_numpy(part.targets)) for part in (train, test)
    )
    return Source("shakespeare", learnt, tested, train.roles, train.targets, len(shakespeare.ALPHABET))
