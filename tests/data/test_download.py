import gzip
import hashlib
import io
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from offbeat.data.download import Download, cache_folder, downloads, fetch
from offbeat.errors import InputError

CONTENT = np.random.default_rng(0).bytes(300_000)
PACKED = gzip.compress(CONTENT)
NAME = "things"


class Server(ThreadingHTTPServer):
    """Serves one body; `cuts` are the bytes to send before hanging up, one per request; then all."""

    def __init__(self, body, cuts=(), ranges=True, length=True):
        super().__init__(("127.0.0.1", 0), Handler)
        self.body, self.cuts, self.ranges, self.length = body, list(cuts), ranges, length
        self.asked = []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server, wanted = self.server, self.headers.get("Range")
        server.asked.append(wanted)
        if server.body is None:
            return self.send_error(404)
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and server.ranges else 0
        if start and start >= len(server.body):
            return self.send_error(416)
        body = server.body[start:]
        self.send_response(206 if start else 200)
        if server.length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.cuts.pop(0)] if server.cuts else body)
        return None

    def log_message(self, *_):
        pass


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    servers = []

    def start(*arguments, **settings):
        server = Server(*arguments, **settings)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def item(server, archive="things.gz", files=None):
    url = f"http://127.0.0.1:{server.server_address[1]}/data/{archive}"
    return Download(url, files or {NAME: hashlib.sha256(CONTENT).hexdigest()})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("archive", "body"), [("things.gz", PACKED), ("things", CONTENT)])
@pytest.mark.parametrize("length", [True, False])
def test_a_file_arrives_unpacked_checked_and_alone(tmp_path, serve, archive, body, length):
    folder = tmp_path / "new" / "folder"
    fetch(item(serve(body, length=length), archive), folder)
    assert (folder / NAME).read_bytes() == CONTENT
    assert names(folder) == [NAME]


def test_what_is_there_is_not_asked_for_again(tmp_path, serve):
    server = serve(PACKED)
    fetch(item(server), tmp_path)
    fetch(item(server), tmp_path)
    assert server.asked == [None]


def test_a_connection_that_breaks_is_taken_up_where_it_broke(tmp_path, serve):
    server = serve(PACKED, cuts=[1000, 2000])
    fetch(item(server), tmp_path)
    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=1000-", "bytes=3000-"]


def test_a_download_that_was_left_off_is_resumed_by_the_next_one(tmp_path, serve):
    server = serve(PACKED, cuts=[1000, 0, 0])
    with pytest.raises(InputError, match="stopped early 3 times: try again"):
        fetch(item(server), tmp_path)
    assert names(tmp_path) == ["things.gz.part"]
    fetch(item(server), tmp_path)
    assert server.asked[-1] == "bytes=1000-"
    assert names(tmp_path) == [NAME]


def test_a_server_without_ranges_starts_again(tmp_path, serve):
    (tmp_path / "things.gz.part").write_bytes(b"old and useless")
    fetch(item(serve(PACKED, ranges=False)), tmp_path)
    assert (tmp_path / NAME).read_bytes() == CONTENT


def test_a_part_that_is_already_whole_is_used(tmp_path, serve):
    (tmp_path / "things.gz.part").write_bytes(PACKED)
    fetch(item(serve(PACKED)), tmp_path)
    assert names(tmp_path) == [NAME]


@pytest.mark.parametrize(
    "body",
    [
        gzip.compress(CONTENT[:-1]),
        PACKED[:-20],
        b"<html>not found, politely</html>",
        PACKED[:500] + PACKED[700:],
    ],
    ids=["other", "truncated", "page", "corrupt"],
)
def test_a_bad_file_is_removed_and_the_address_named(tmp_path, serve, body):
    server = serve(body)
    with pytest.raises(
        InputError, match=rf"download of {item(server).url} does not match its checksum and was removed"
    ):
        fetch(item(server), tmp_path)
    assert names(tmp_path) == []


def test_a_resumed_file_that_changed_meanwhile_is_removed(tmp_path, serve):
    (tmp_path / "things.gz.part").write_bytes(b"x" * 100)
    with pytest.raises(InputError, match="does not match its checksum"):
        fetch(item(serve(PACKED)), tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("start", [0, 100])
def test_a_missing_page_says_what_to_put_where(tmp_path, serve, start):
    server = serve(None)
    if start:
        (tmp_path / "things.gz.part").write_bytes(PACKED[:start])
    with pytest.raises(InputError, match=rf"cannot download {item(server).url} .*404.*put it in {tmp_path}"):
        fetch(item(server), tmp_path)


def test_no_network_says_what_to_put_where(tmp_path, serve):
    server = serve(PACKED)
    gone = item(server)
    server.server_close()
    server.shutdown()
    with pytest.raises(
        InputError, match=rf"cannot download {gone.url} .*fetch things.gz .*put it in {tmp_path}"
    ):
        fetch(gone, tmp_path)


def test_an_archive_that_the_user_put_there_is_used_without_the_network(tmp_path, serve):
    server = serve(PACKED)
    (tmp_path / "things.gz").write_bytes(PACKED)
    fetch(item(server), tmp_path)
    assert server.asked == []
    assert names(tmp_path) == [NAME, "things.gz"]


def test_a_bad_archive_that_the_user_put_there_is_named_and_kept(tmp_path, serve):
    (tmp_path / "things.gz").write_bytes(PACKED[:100])
    with pytest.raises(InputError, match=rf"{tmp_path / 'things.gz'} does not match its checksum"):
        fetch(item(serve(PACKED)), tmp_path)
    assert names(tmp_path) == ["things.gz"]


def tar_of(files):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def test_only_the_known_files_of_a_tar_are_unpacked_and_never_outside_the_folder(tmp_path, serve):
    server = serve(tar_of({"deep/a.bin": b"one", "../../b.bin": b"two", "../evil": b"three"}))
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in (("a.bin", b"one"), ("b.bin", b"two"))}
    folder = tmp_path / "inside"
    fetch(item(server, "things.tar.gz", sums), folder)
    assert names(folder) == ["a.bin", "b.bin"]
    assert names(tmp_path) == ["inside"]


def test_a_tar_that_lacks_a_file_is_bad(tmp_path, serve):
    sums = {name: hashlib.sha256(b"one").hexdigest() for name in ("a.bin", "b.bin")}
    with pytest.raises(InputError, match="does not match its checksum"):
        fetch(item(serve(tar_of({"a.bin": b"one"})), "things.tar.gz", sums), tmp_path)


def test_a_full_disk_is_named(tmp_path, serve):
    (tmp_path / "things.gz.part").symlink_to("/dev/full")
    with pytest.raises(InputError, match=f"no space is left in {tmp_path} for things.gz"):
        fetch(item(serve(PACKED)), tmp_path)


def test_a_disk_that_fills_up_while_unpacking_is_named_and_the_download_kept(tmp_path, serve):
    (tmp_path / f"{NAME}.new").symlink_to("/dev/full")
    with pytest.raises(InputError, match=f"no space is left in {tmp_path} for things.gz"):
        fetch(item(serve(PACKED)), tmp_path)
    assert names(tmp_path) == ["things.gz.part"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path, serve):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=f"cannot be kept in {tmp_path / 'file' / 'x'}"):
        fetch(item(serve(PACKED)), tmp_path / "file" / "x")


def test_the_cache_is_where_the_user_wants_it_or_at_home(monkeypatch):
    monkeypatch.setenv("OFFBEAT_DATA", "/somewhere")
    assert cache_folder("mnist") == Path("/somewhere/mnist")
    monkeypatch.delenv("OFFBEAT_DATA")
    assert cache_folder("mnist") == Path.home() / ".cache" / "offbeat" / "mnist"


@pytest.mark.parametrize(
    ("source", "count"),
    [("mnist", 4), ("fashion-mnist", 4), ("cifar10", 6), ("shakespeare", 1), ("digits", 0)],
)
def test_every_published_file_has_an_address_and_a_checksum(source, count):
    files = [(entry.url, name, digest) for entry in downloads(source) for name, digest in entry.files.items()]
    assert len(files) == len({digest for *_, digest in files}) == count
    assert all(url.startswith("http") and len(bytes.fromhex(digest)) == 32 for url, _, digest in files)
