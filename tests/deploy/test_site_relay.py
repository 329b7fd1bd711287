"""A message goes to the resident and its answer comes back; a resident that hangs is ended, no other."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.deploy.site import relay
from offbeat.deploy.site.relay import FrameError, RelayError, ask_site


def soon() -> float:
    return time.monotonic() + 10


@contextmanager
def listening(path: Path, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    """Something at the socket that treats one line as `serve` says."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()

    def run() -> None:
        line, _ = listener.accept()
        with line:
            serve(line)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        listener.close()
        path.unlink()


def echo(line: socket.socket) -> None:
    head, payload = relay.receive_frame(line, soon())
    assert head["kind"] == "task"
    assert head["seconds"] == 10
    relay.send_frame(line, {"note": head["note"][::-1]}, payload * 2, soon())


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 20_000])
def test_what_goes_down_comes_back(payload: bytes, tmp_path: Path) -> None:
    with listening(tmp_path / "s", echo):
        assert ask_site(tmp_path / "s", "task", "note ä\n", payload, 10) == ("\nä eton", payload * 2)


def test_a_resident_that_is_just_starting_is_waited_for(tmp_path: Path) -> None:
    answers: list[str] = []
    asker = threading.Thread(
        target=lambda: answers.append(ask_site(tmp_path / "s", "task", "ab", b"", 10)[0])
    )
    asker.start()
    time.sleep(0.2)
    with listening(tmp_path / "s", echo):
        asker.join()
    assert answers == ["ba"]


@pytest.mark.parametrize("stale", [False, True])
def test_a_resident_that_does_not_come_is_one_sentence(
    stale: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "CONNECT_TIMEOUT", 0.2)
    if stale:  # the file of a socket that nobody listens at any more
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
            left.bind(str(tmp_path / "s"))
    with pytest.raises(RelayError, match="is not running"):
        ask_site(tmp_path / "s", "task", "", b"", 10)


def test_a_socket_that_cannot_be_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RelayError, match="cannot be reached"):
        ask_site(tmp_path / ("s" * 200), "task", "", b"", 10)


@pytest.mark.parametrize(
    "answer", [b"", b"\x01", b"\x02" + bytes(7) + b"[]" + bytes(8), b"\xff" * 8, b"\x01" + bytes(7) + b"{"]
)
def test_an_answer_that_is_cut_or_odd_is_one_sentence(answer: bytes, tmp_path: Path) -> None:
    def serve(line: socket.socket) -> None:
        relay.receive_frame(line, soon())
        line.sendall(answer)

    with listening(tmp_path / "s", serve), pytest.raises(RelayError, match="ended or closed the connection"):
        ask_site(tmp_path / "s", "task", "", b"", 10)


def test_an_answer_without_a_note_is_one_sentence(tmp_path: Path) -> None:
    def serve(line: socket.socket) -> None:
        relay.receive_frame(line, soon())
        relay.send_frame(line, {"note": 5}, b"", soon())

    with listening(tmp_path / "s", serve), pytest.raises(RelayError, match="has no header"):
        ask_site(tmp_path / "s", "task", "", b"", 10)


HANG = """
import os, pathlib, socket, sys, time
path = pathlib.Path(sys.argv[1])
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind(str(path))
path.with_name(path.name + ".pid").write_text(sys.argv[2] if len(sys.argv) > 2 else str(os.getpid()))
listener.listen()
time.sleep(60)
"""


@contextmanager
def hanging(path: Path, *pid: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", HANG, str(path), *pid]) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_resident_that_hangs_is_ended(tmp_path: Path) -> None:
    with hanging(tmp_path / "s") as process:
        with pytest.raises(RelayError, match=r"within 2 seconds, and its process was killed"):
            ask_site(tmp_path / "s", "task", "", b"", 2)
        assert process.wait(10) == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who holds the other end of a socket")
def test_no_other_process_is_ever_ended(tmp_path: Path) -> None:
    with hanging(tmp_path / "s", str(os.getpid())) as process:
        with pytest.raises(RelayError, match=r"within 2 seconds\.$"):
            ask_site(tmp_path / "s", "task", "", b"", 2)
        assert process.poll() is None


def test_a_hanging_resident_without_a_number_is_left(tmp_path: Path) -> None:
    with hanging(tmp_path / "s", "not a number") as process:
        with pytest.raises(RelayError, match=r"within 2 seconds\.$"):
            ask_site(tmp_path / "s", "task", "", b"", 2)
        assert process.poll() is None


@given(st.binary(max_size=40))
def test_any_bytes_are_a_frame_or_a_frame_error(data: bytes) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(data)
        left.shutdown(socket.SHUT_WR)
        try:
            head, payload = relay.receive_frame(right, soon())
        except FrameError:
            return
        assert data == len(json.dumps(head)).to_bytes(8, "little") + json.dumps(head).encode() + (
            len(payload).to_bytes(8, "little") + payload
        )


def test_a_promise_of_many_bytes_takes_no_memory() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall((2).to_bytes(8, "little") + b"{}" + (1 << 33).to_bytes(8, "little") + b"few")
        left.shutdown(socket.SHUT_WR)
        with pytest.raises(FrameError, match="middle"):
            relay.receive_frame(right, soon())


def test_a_frame_beyond_the_limits_is_refused_before_it_is_read() -> None:
    for size in (relay.MAX_HEADER_BYTES + 1, 2**64 - 1):
        left, right = socket.socketpair()
        with left, right:
            left.sendall(size.to_bytes(8, "little"))
            with pytest.raises(FrameError, match="allowed"):
                relay.receive_frame(right, soon())


@pytest.mark.parametrize("module", ["offbeat.deploy.site.relay", "offbeat.deploy.flower.client"])
def test_passing_on_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'scipy', 'offbeat.core'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_passing_on_needs_the_standard_library_alone() -> None:
    code = (
        f"import sys; sys.path += {sys.path}; import offbeat.deploy.site.relay; "
        "print(sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names))"
    )
    words = [sys.executable, "-I", "-S", "-c", code]  # without what an environment imports at its start
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "['__main__', 'offbeat']\n"
