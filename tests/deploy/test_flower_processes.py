"""Certificates, ports and SuperLinks that do not answer: one sentence each."""

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from offbeat.deploy import keys
from offbeat.deploy.flower.commands import superlink_problem, wait_for_superlink
from offbeat.deploy.keys import find_certificates
from offbeat.deploy.network import bind_socket, format_address, free_port, parse_address
from offbeat.errors import InputError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "keys"
    keys.create_keys(folder, ["localhost"], ["a", "b"], ["localhost"], 3)
    return folder


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *words: object) -> None: ...


@contextmanager
def listening() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_certificates_are_found_where_they_were_made(made: Path) -> None:
    found = find_certificates(made)
    assert [path.parent for path in (*found.tls, found.sites)] == [made] * 3


@pytest.mark.parametrize("name", ["server.pem", "server.key"])
def test_a_missing_certificate_is_named(made: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "keys"
    shutil.copytree(made, folder)
    (folder / name).unlink()
    with pytest.raises(InputError, match=f"there is no file .*{name}: name the server's certificate"):
        find_certificates(folder)


def test_a_certificate_of_another_key_is_refused(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    shutil.copytree(made, folder)
    shutil.copyfile(made / "helper.key", folder / "server.key")
    with pytest.raises(InputError, match="are not a certificate and its key"):
        find_certificates(folder)


def test_keys_of_no_site_are_refused(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    shutil.copytree(made, folder)
    for path in folder.rglob("*.pub"):
        path.unlink()
    with pytest.raises(InputError, match="sites holds 0 public keys"):
        find_certificates(folder)
    shutil.rmtree(folder / "sites")
    with pytest.raises(InputError, match=r"there is no folder .*sites: name the one"):
        find_certificates(folder)


def test_a_superlink_that_answers_is_waited_for(tmp_path: Path) -> None:
    with listening() as port:
        wait_for_superlink(format_address("127.0.0.1", port), 5, lambda: True, tmp_path / "log")


def test_one_that_is_away_is_given_up(tmp_path: Path) -> None:
    address = format_address("127.0.0.1", free_port())
    assert "refused" in str(superlink_problem(address))
    with pytest.raises(InputError, match=r"does not answer \(.*refused.*\); see .*log\."):
        wait_for_superlink(address, 0.3, lambda: True, tmp_path / "log")
    with pytest.raises(InputError, match=r"ended during its start; see .*log\."):
        wait_for_superlink(address, 60, lambda: False, tmp_path / "log")


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            InputError, match=f"port {port} of 127.0.0.1 is in use: choose another with --port"
        ):
            bind_socket("127.0.0.1", port)
    bind_socket("127.0.0.1", free_port()).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_a_host_that_is_not_ours_is_one_sentence(host: str) -> None:
    with pytest.raises(InputError, match="cannot be used"):
        bind_socket(host, 20001)


@pytest.mark.parametrize(
    "text", ["host", "host:", ":80", "host:0", "host:70000", "https://host:80", "host:8o", ""]
)
def test_an_address_is_a_host_and_a_port(text: str) -> None:
    with pytest.raises(InputError, match="--superlink must be an address such as"):
        parse_address(text)


def test_addresses_are_written_as_they_are_read() -> None:
    for text in ("host:80", "127.0.0.1:8000", "[::1]:9"):
        assert format_address(*parse_address(text)) == text
