"""The resident process: ready with its data, one request at a time, gone with whoever started it."""

import contextlib
import json
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy_world import site_plan
from offbeat.core import Task
from offbeat.deploy.protocol.messages import (
    TaskMessage,
    byte_size,
    decode_hello,
    decode_upload,
    encode_greeting,
    encode_message,
)
from offbeat.deploy.site import relay
from offbeat.deploy.site.process import listen_on
from offbeat.deploy.site.relay import RelayError, ask_site
from offbeat.errors import InputError

TASK = """
import os, time
import torch

print("loading")

def load(name):
    if name == "bad":
        raise OSError("the disk is gone\\nand more")
    generator = torch.Generator().manual_seed(5)
    return torch.randn(6, 3, generator=generator), torch.tensor([0, 1, 0, 1, 0, 1])

def module():
    return torch.nn.Linear(3, 2)

def losses(outputs, targets):
    if os.path.exists("hang"):
        time.sleep(60)
    if os.path.exists("die"):
        os._exit(7)
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")
"""
PLAN = site_plan()


class Resident:
    def __init__(self, folder: Path, name: str, **more: str) -> None:
        self.folder, self.socket = folder, folder / "run" / "s"
        words = {"data": "task:load", "name": name, "folder": "site", "socket": "run/s"} | more
        options = [word for key, value in words.items() for word in (f"--{key}", value)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "offbeat.deploy.site.process", *options],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.said: dict[str, Any] = json.loads(self.process.stdout.readline())

    def ask(self, kind: str, note: str, payload: bytes = b"", seconds: float = 30.0) -> tuple[str, bytes]:
        return ask_site(self.socket, kind, note, payload, seconds)

    def task(self, seconds: float = 30.0) -> tuple[str, bytes]:
        form = decode_hello(self.ask("hello", "")[0]).form
        note = TaskMessage("run", Task(1, 0, 0), False, -1, PLAN, seconds, form, None)
        return self.ask("task", encode_message(note), bytes(byte_size(form)), seconds)


@contextlib.contextmanager
def resident(folder: Path, name: str = "hospital-a", **more: str) -> Iterator[Resident]:
    (folder / "task.py").write_text(TASK)
    started = Resident(folder, name, **more)
    with started.process:
        try:
            yield started
        finally:
            started.process.kill()


def test_it_serves_and_goes_with_whoever_started_it(tmp_path: Path) -> None:
    with resident(tmp_path) as site:
        assert site.said["ready"] == "hospital-a"
        assert (site.said["examples"], site.said["pid"]) == (6, site.process.pid)
        assert stat.S_IMODE(site.socket.stat().st_mode) == 0o600
        assert stat.S_IMODE(site.socket.parent.stat().st_mode) == 0o700
        hello = decode_hello(site.ask("hello", "")[0])
        assert (hello.site, hello.examples) == (site.said["site"], 6)
        note, payload = site.task()
        upload = decode_upload(note)
        assert upload.error is None
        assert len(payload) == byte_size(upload.form) == 4 * 8
        assert site.task()[1] == payload

        # strangers and broken lines harm nobody
        for bad in (b"", b"\x05", b"\xff" * 20, b"\x02" + bytes(7) + b"{}" + bytes(8)):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
                line.connect(str(site.socket))
                line.sendall(bad)
        assert decode_upload(site.ask("task", "nonsense")[0]).error
        assert site.task()[1] == payload

        # one that hung up before its turn is not worked for
        (tmp_path / "hang").touch()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.connect(str(site.socket))
            relay.send_frame(line, {"kind": "task", "note": "{}", "seconds": 1}, b"", time.monotonic() + 5)
        (tmp_path / "hang").unlink()
        assert site.task()[1] == payload

        assert site.process.stdin is not None
        site.process.stdin.close()
        assert site.process.wait(10) == 0


@pytest.mark.slow
def test_work_that_hangs_or_dies_is_one_sentence_and_the_next_resident_goes_on(tmp_path: Path) -> None:
    with resident(tmp_path) as site:
        identity = site.said["site"]
        (tmp_path / "hang").touch()
        with pytest.raises(RelayError, match="within 3 seconds, and its process was killed"):
            site.task(3)
        assert site.process.wait(10) == -9
    (tmp_path / "hang").unlink()
    with resident(tmp_path) as site:
        assert site.said["site"] == identity
        (tmp_path / "die").touch()
        with pytest.raises(RelayError, match="ended or closed the connection"):
            site.task()
        assert site.process.wait(10) == 7
    (tmp_path / "die").unlink()


def test_a_loader_that_fails_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    with resident(tmp_path, "bad") as site:
        wanted = "the data of site 'bad' could not be loaded: OSError: the disk is gone."
        assert site.said == {"error": wanted}
        assert site.process.wait(10) == 2
        assert site.process.stderr is not None
        assert site.process.stderr.read() == "loading\n"
        assert not site.socket.exists()


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(InputError, match="other users can enter"):
        listen_on(tmp_path / "open" / "s")


def test_a_socket_that_a_kill_left_is_replaced_but_no_file_is(tmp_path: Path) -> None:
    listen_on(tmp_path / "run" / "s").close()
    listen_on(tmp_path / "run" / "s").close()
    (tmp_path / "run" / "file").write_text("mine")
    with pytest.raises(InputError, match="cannot be created"):
        listen_on(tmp_path / "run" / "file")
    assert (tmp_path / "run" / "file").read_text() == "mine"


def test_a_path_that_no_socket_can_have_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="shorter"):
        listen_on(tmp_path / "run" / (200 * "s"))


def test_it_says_once_why_a_server_turned_it_away(tmp_path: Path) -> None:
    with resident(tmp_path) as site:
        for reason in (None, "there is no place.", "there is no place.", None, "another model."):
            assert decode_hello(site.ask("hello", encode_greeting(reason))[0]).error is None
        site.ask("hello", "from another version")
        assert site.process.stdout is not None
        said = [json.loads(site.process.stdout.readline()) for _ in range(2)]
        assert said == [{"refused": "there is no place."}, {"refused": "another model."}]
