"""The files of data sets: addresses and checksums, downloads that resume, and readers of their formats.

Each unpacked file must have the SHA-256 that is listed here; the sums were computed from MNIST,
Fashion-MNIST and CIFAR-10 files whose MD5 are the published ones. The Shakespeare text is Project
Gutenberg's of 1994, which LEAF splits; the notice in it allows personal and non-commercial use only.
"""

import errno
import gzip
import hashlib
import lzma
import math
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, TypeVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from offbeat.errors import InputError
from offbeat.files import cache_root


@dataclass(frozen=True)
class Download:
    """A URL and the SHA-256 of each file in the archive there."""

    url: str
    files: Mapping[str, str]

    @property
    def archive(self) -> str:
        """The name of the file at the URL."""
        return self.url.rpartition("/")[2]


def downloads(source: str) -> tuple[Download, ...]:
    """The downloads of a data set; none if it needs no files."""
    match source:
        case "mnist":
            return _one_archive_per_file(_MNIST, _MNIST_FILES)
        case "fashion-mnist":
            return _one_archive_per_file(_FASHION, _FASHION_FILES)
        case "cifar10":
            return (Download(_CIFAR10, _CIFAR10_FILES),)
        case "shakespeare":
            return (Download(_SHAKESPEARE, _SHAKESPEARE_FILES),)
        case _:
            return ()


def _one_archive_per_file(root: str, files: Mapping[str, str]) -> tuple[Download, ...]:
    return tuple(Download(f"{root}/{name}.gz", {name: digest}) for name, digest in files.items())


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
_MNIST_FILES = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_FASHION_FILES = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
_CIFAR10 = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_CIFAR10_FILES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
_SHAKESPEARE = (
    "https://raw.githubusercontent.com/riccardomurri/pyspark-intro-course/"
    "55d0c06af8887d9477d58681c593315faec7304b/data/shakespeare.txt.gz"
)
_SHAKESPEARE_FILES = {
    "pg100.txt": "5886dc8d8d2d1726fc93a1b014ff7db691707d5a2ccb8b8888d87037dccc8982",
}

_CHUNK = 1 << 16
_TRIES = 3
_RANGE_NOT_SATISFIABLE = 416  # HTTP: the range starts at or after the end of the file
_PARTIAL_CONTENT = 206
_ARCHIVE_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError)


def cache_folder(source: str) -> Path:
    """The folder of a data set's downloads, under $OFFBEAT_DATA or ~/.cache/offbeat."""
    return cache_root() / source


def fetch(item: Download, folder: Path, timeout: float = 30.0) -> None:
    """Put the files into the folder unless they are present, from the archive there or the network."""
    if all((folder / name).is_file() for name in item.files):
        return
    with _disk_errors(item, folder):
        folder.mkdir(parents=True, exist_ok=True)
        given, part = folder / item.archive, folder / f"{item.archive}.part"
        if given.is_file():
            if not _extract(item, given, folder):
                raise InputError(f"{given} does not match its checksum: put a good copy in its place.")
            return
        _download(item, part, timeout)
        good = _extract(item, part, folder)
        part.unlink()
    if not good:
        raise InputError(
            f"the download of {item.url} does not match its checksum and was removed: "
            f"try again, or put a good copy of {item.archive} in {folder}."
        )


def _download(item: Download, part: Path, timeout: float) -> None:
    for _ in range(_TRIES):
        if _receive(item, part, timeout):
            return
    raise InputError(
        f"the download of {item.url} stopped early {_TRIES} times: "
        f"try again to continue it, or put {item.archive} in {part.parent} yourself."
    )


def _receive(item: Download, part: Path, timeout: float) -> bool:
    """Append the missing bytes to the part; return whether it is complete."""
    have = part.stat().st_size if part.exists() else 0
    request = Request(item.url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response: HTTPResponse = urlopen(request, timeout=timeout)
    except HTTPError as error:
        error.close()
        if error.code == _RANGE_NOT_SATISFIABLE:
            return True
        raise _unreachable(item, part.parent, f"HTTP {error.code} {error.reason}") from error
    except (OSError, HTTPException) as error:
        raise _unreachable(item, part.parent, str(getattr(error, "reason", error))) from error
    with response:
        resumed = response.status == _PARTIAL_CONTENT
        length = response.headers.get("Content-Length")
        total = int(length) + (have if resumed else 0) if length else None
        with part.open("ab" if resumed else "wb") as file, _progress_bar() as bar:
            row = bar.add_task(item.archive, total=total, completed=have if resumed else 0)
            for chunk in _chunks(response):
                file.write(chunk)
                bar.advance(row, len(chunk))
    return total is None or part.stat().st_size >= total


def _unreachable(item: Download, folder: Path, reason: str) -> InputError:
    return InputError(
        f"cannot download {item.url} ({reason}): check the network, "
        f"or fetch {item.archive} from there by other means and put it in {folder}."
    )


def _chunks(response: HTTPResponse) -> Iterator[bytes]:
    """The data until the end or until the connection breaks; the size shows which."""
    try:
        while chunk := response.read(_CHUNK):
            yield chunk
    except (OSError, HTTPException):
        return


def _progress_bar() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    return Progress(*columns, console=Console(stderr=True))


def _extract(item: Download, archive: Path, folder: Path) -> bool:
    """Extract the files whose checksums are right; return whether all of them were."""
    good = set()
    try:
        for name, file in _members(item, archive):
            fresh = folder / f"{name}.new"
            digest = hashlib.sha256()
            with fresh.open("wb") as out:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
            if digest.hexdigest() == item.files[name]:
                fresh.replace(folder / name)
                good.add(name)
    except _ARCHIVE_ERRORS:
        pass
    finally:
        for name in item.files:
            (folder / f"{name}.new").unlink(missing_ok=True)
    return good == set(item.files)


def _members(item: Download, archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if item.archive.endswith(".tar.gz"):
        with tarfile.open(archive) as tar:
            for member in tar:
                name = Path(member.name).name
                file = tar.extractfile(member) if name in item.files else None
                if file is not None:
                    yield name, file
    else:
        (name,) = item.files
        packed = item.archive.endswith(".gz")
        opened: IO[bytes]
        with gzip.open(archive) if packed else archive.open("rb") as opened:  # type: ignore[assignment]
            yield name, opened


@contextmanager
def _disk_errors(item: Download, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = f"no space is left in {folder} for {item.archive}: make room and try again."
        else:
            reason = f"{item.archive} cannot be kept in {folder} ({error.strerror}): choose another folder."
        raise InputError(reason) from error


Parsed = TypeVar("Parsed")


class MissingFileError(InputError):
    """A file that a data set needs is not in its folder."""


def find_file(folder: Path, names: Sequence[str], subfolders: Sequence[str] = (".",)) -> Path:
    """The first existing file of these names, plain or with .gz or .xz, in the given subfolders in order."""
    for subfolder in subfolders:
        for name in names:
            for suffix in ("", ".gz", ".xz"):
                path = folder / subfolder / f"{name}{suffix}"
                if path.is_file():
                    return path
    wanted = " or ".join(names)
    raise MissingFileError(
        f"the data file {wanted} is not in {folder}: put it there (.gz and .xz are accepted), "
        "or leave out the folder to download it."
    )


def parse_file(path: Path, parse: Callable[[bytes], Parsed]) -> Parsed:
    """The decompressed file parsed by `parse`, whose ValueError says what is wrong with the bytes."""
    try:
        return parse(read_file(path))
    except InputError:
        raise
    except ValueError as error:
        raise InputError(
            f"the data file {path} cannot be used, {error}: replace it with a good copy."
        ) from error


def read_file(path: Path) -> bytes:
    """The decompressed content of a file."""
    try:
        packed = path.read_bytes()
        match path.suffix:
            case ".gz":
                return gzip.decompress(packed)
            case ".xz":
                return lzma.decompress(packed)
            case _:
                return packed
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise InputError(
            f"the data file {path} is truncated or corrupt: replace it with a good copy."
        ) from error
    except OSError as error:
        raise InputError(
            f"the data file {path} cannot be read, {error.strerror}: check its permissions."
        ) from error


IDX_CLASSES = 10
_UNSIGNED_BYTES = 8


def parse_idx(data: bytes) -> NDArray[np.uint8]:
    """The array in an idx file of unsigned bytes."""
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != _UNSIGNED_BYTES:
        raise ValueError("it is not an idx file of unsigned bytes")
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise ValueError("its header is truncated")
    shape = [int(size) for size in np.frombuffer(data, ">u4", data[3], offset=4)]
    expected, found = math.prod(shape), len(data) - start
    if found != expected:
        raise ValueError(f"its header announces {expected} values but it has {found}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def parse_idx_images(data: bytes) -> NDArray[np.uint8]:
    """Images of shape (n, 1, height, width)."""
    return _with_axes(parse_idx(data), 3)[:, None]


def parse_idx_labels(data: bytes) -> NDArray[np.uint8]:
    """Labels of shape (n,)."""
    labels = _with_axes(parse_idx(data), 1)
    if (labels >= IDX_CLASSES).any():
        raise ValueError(f"it has a label that is not below {IDX_CLASSES}")
    return labels


def _with_axes(values: NDArray[np.uint8], axes: int) -> NDArray[np.uint8]:
    if values.ndim != axes:
        raise ValueError(f"it has {values.ndim} axes instead of {axes}")
    return values


CIFAR10_CLASSES = 10
_CIFAR10_SHAPE = (3, 32, 32)
_CIFAR10_ROW = 1 + 3 * 32 * 32


def parse_cifar10(data: bytes) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images of shape (n, 3, 32, 32) and labels of shape (n,)."""
    if not data or len(data) % _CIFAR10_ROW:
        raise ValueError(f"its {len(data)} bytes are not whole rows of {_CIFAR10_ROW}")
    rows = np.frombuffer(data, np.uint8).reshape(-1, _CIFAR10_ROW)
    if (rows[:, 0] >= CIFAR10_CLASSES).any():
        raise ValueError(f"it has a label that is not below {CIFAR10_CLASSES}")
    return rows[:, 1:].reshape(-1, *_CIFAR10_SHAPE), rows[:, 0]
