"""Downloads that resume, are checked, and appear whole or not at all."""

import errno
import gzip
import hashlib
import os
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from offbeat.errors import InputError
from offbeat.population.published import Published

_CHUNK = 1 << 16
_TRIES = 3
_NOTHING_AFTER = 416  # HTTP: the range asked for begins where the file ends, or later
_PARTIAL = 206
_BROKEN = (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError)


def cache_folder(source: str) -> Path:
    """Where downloads of a source are kept: under $OFFBEAT_DATA, or ~/.cache/offbeat."""
    root = os.environ.get("OFFBEAT_DATA")
    return (Path(root) if root else Path.home() / ".cache" / "offbeat") / source


def fetch(item: Published, folder: Path, timeout: float = 30.0) -> None:
    """Put the item's files into the folder, from its archive there or the network, unless present."""
    if all((folder / name).is_file() for name in item.files):
        return
    with _writing(item, folder):
        folder.mkdir(parents=True, exist_ok=True)
        given, part = folder / item.archive, folder / f"{item.archive}.part"
        if given.is_file():
            if not _unpack(item, given, folder):
                raise InputError(f"{given} does not match its checksum: put a good copy in its place.")
            return
        _download(item, part, timeout)
        good = _unpack(item, part, folder)
        part.unlink()
    if not good:
        raise InputError(
            f"what {item.url} gave does not match its checksum and was removed: "
            f"try again, or put a good copy of {item.archive} in {folder}."
        )


def _download(item: Published, part: Path, timeout: float) -> None:
    for _ in range(_TRIES):
        if _receive(item, part, timeout):
            return
    raise InputError(
        f"the download of {item.url} stopped early {_TRIES} times: "
        f"try again to go on from there, or put {item.archive} in {part.parent} yourself."
    )


def _receive(item: Published, part: Path, timeout: float) -> bool:
    """Add what is missing to the part; say whether it is whole."""
    have = part.stat().st_size if part.exists() else 0
    request = Request(item.url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response: HTTPResponse = urlopen(request, timeout=timeout)
    except HTTPError as error:
        error.close()
        if error.code == _NOTHING_AFTER:
            return True
        raise _unreachable(item, part.parent, f"HTTP {error.code} {error.reason}") from error
    except (OSError, HTTPException) as error:
        raise _unreachable(item, part.parent, str(getattr(error, "reason", error))) from error
    with response:
        resumed = response.status == _PARTIAL
        length = response.headers.get("Content-Length")
        total = int(length) + (have if resumed else 0) if length else None
        with part.open("ab" if resumed else "wb") as file, _bar() as bar:
            row = bar.add_task(item.archive, total=total, completed=have if resumed else 0)
            for chunk in _chunks(response):
                file.write(chunk)
                bar.advance(row, len(chunk))
    return total is None or part.stat().st_size >= total


def _unreachable(item: Published, folder: Path, reason: str) -> InputError:
    return InputError(
        f"cannot download {item.url} ({reason}): check the network, "
        f"or fetch {item.archive} from there by other means and put it in {folder}."
    )


def _chunks(response: HTTPResponse) -> Iterator[bytes]:
    """What arrives until the end or until the connection breaks; the size tells which."""
    try:
        while chunk := response.read(_CHUNK):
            yield chunk
    except (OSError, HTTPException):
        return


def _bar() -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    return Progress(*columns, console=Console(stderr=True))


def _unpack(item: Published, archive: Path, folder: Path) -> bool:
    """Write the archive's files, each only if its checksum is right; say whether all were."""
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
    except _BROKEN:
        pass
    finally:
        for name in item.files:
            (folder / f"{name}.new").unlink(missing_ok=True)
    return good == set(item.files)


def _members(item: Published, archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
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
def _writing(item: Published, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = f"no space is left in {folder} for {item.archive}: make room and try again."
        else:
            reason = f"{item.archive} cannot be kept in {folder} ({error.strerror}): choose another folder."
        raise InputError(reason) from error
