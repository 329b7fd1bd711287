"""The live page and what lies beside it."""

import http.client
import json
import re
import socket
from collections.abc import Iterator
from html.parser import HTMLParser
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from offbeat.deploy.monitor.http import load_page, serve_page
from offbeat.deploy.monitor.observer import Monitor
from offbeat.deploy.monitor.state import RunInfo
from offbeat.errors import InputError


@pytest.fixture
def watch() -> Monitor:
    return Monitor(RunInfo("run-1", "fedbuff", clients=4, buffer=2, rounds=10, concurrency=3))


@pytest.fixture
def port(watch: Monitor) -> Iterator[int]:
    with serve_page(watch, 0) as address:
        yield int(urlsplit(address).port or 0)


def ask(
    port: int, path: str, method: str = "GET", host: str = "localhost"
) -> tuple[int, dict[str, str], bytes]:
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        line.request(method, path, headers={"Host": host})
        answer = line.getresponse()
        return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()
    finally:
        line.close()


def test_the_page_has_a_policy_that_lets_nothing_else_run(port: int) -> None:
    status, headers, body = ask(port, "/")
    assert (status, headers["content-type"], body) == (200, "text/html; charset=utf-8", load_page()[0])
    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert re.fullmatch(r"'sha256-[\w+/=]+'", policy["script-src"])
    assert re.fullmatch(r"'sha256-[\w+/=]+'", policy["style-src"])
    assert policy["connect-src"] == "'self'"
    assert headers["x-content-type-options"] == "nosniff"


def test_the_page_asks_nobody_else_and_has_no_inline_handler() -> None:
    text = load_page()[0].decode()
    assert not re.search(r"https?:|//\w|@import|url\(", text)
    for way_in in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert way_in not in text

    class Tags(HTMLParser):
        attributes: list[tuple[str, str | None]] = []  # noqa: RUF012 - of this one parser

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.attributes += attrs

    tags = Tags()
    tags.feed(text)
    assert tags.attributes
    assert [name for name, _ in tags.attributes if name.startswith("on") or name == "style"] == []
    assert {value for name, value in tags.attributes if name in ("href", "src")} == {
        "data:,",
        "status.json",
        "metrics",
    }


def test_everything_that_the_page_reads_is_in_the_status(watch: Monitor) -> None:
    text, status = load_page()[0].decode(), watch.status()
    read = set(re.findall(r"\b(?:s|shown)\.([a-z_]+)\b", text))
    assert read
    assert read <= status.keys()
    assert set(re.findall(r"\brun\.([a-z_]+)\b", text)) <= status["run"].keys()
    assert set(re.findall(r"\bs\.tasks\.([a-z_]+)\b", text)) <= status["tasks"].keys()
    watch.tell("joined", node=1, name="north", client=0)
    assert set(re.findall(r"\bc\.([a-z]+)\b(?!\()", text)) - {"length"} <= watch.status()["clients"][0].keys()


def test_the_status_is_json_and_names_are_only_text(port: int, watch: Monitor) -> None:
    watch.tell("joined", node=1, name="</script><img src=x onerror=alert(1)>", client=0)
    status, headers, body = ask(port, "/status.json?then=1")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(body)["clients"][0]["name"] == "</script><img src=x onerror=alert(1)>"
    assert headers["x-content-type-options"] == "nosniff"


def test_metrics_can_be_read(port: int) -> None:
    status, headers, body = ask(port, "/metrics")
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/plain")
    assert "offbeat_version" in {family.name for family in text_string_to_metric_families(body.decode())}


def test_it_says_that_it_lives(port: int) -> None:
    assert ask(port, "/healthz")[::2] == (200, b"ok\n")


def test_it_says_whether_it_is_ready_and_what_it_waits_for(port: int, watch: Monitor) -> None:
    assert ask(port, "/readyz")[::2] == (200, b"ready\n")
    watch.tell("helper_away", sentence="the helper does not answer")
    assert ask(port, "/readyz")[::2] == (503, b"the helper does not answer\n")
    assert ask(port, "/healthz")[0] == 200
    watch.tell("helper_back")
    assert ask(port, "/readyz")[0] == 200
    watch.tell("ended", sentence=None)
    assert ask(port, "/readyz")[::2] == (503, b"the run has ended\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_done_but_get(port: int, method: str) -> None:
    status, headers, _ = ask(port, "/status.json", method)
    assert (status, headers["allow"]) == (405, "GET")


@pytest.mark.parametrize("path", ["/page.html", "/../watch.py", "/status", "/%2e%2e/watch.py"])
def test_there_is_nothing_else(port: int, path: str) -> None:
    assert ask(port, path)[0] == 404


def test_a_name_made_to_point_here_does_not_open_the_page(port: int) -> None:
    assert ask(port, "/status.json", host="evil.example")[0] == 403
    assert ask(port, "/status.json", host=f"127.0.0.1:{port}")[0] == 200
    assert ask(port, "/status.json", host=f"[::1]:{port}")[0] == 200


def test_a_reader_that_says_nothing_or_rubbish_does_not_keep_others_out(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)) as rude:
        rude.sendall(b"\x00\xff" * 100 + b"\r\n\r\n")
        assert ask(port, "/healthz")[0] == 200


def test_a_port_in_use_is_one_sentence(port: int, watch: Monitor) -> None:
    sentence = rf"port {port} of 127.0.0.1 is in use: choose another with \[watch\] port"
    with pytest.raises(InputError, match=sentence), serve_page(watch, port):
        pass


@pytest.mark.parametrize(("host", "port"), [("no such host", 0), ("127.0.0.1", 70_000), ("", -1)])
def test_a_place_where_nobody_can_listen_is_one_sentence(watch: Monitor, host: str, port: int) -> None:
    with pytest.raises(InputError), serve_page(watch, port, host):
        pass


def test_the_port_is_free_again_afterwards(watch: Monitor) -> None:
    with serve_page(watch, 0) as address:
        port = int(urlsplit(address).port or 0)
        ask(port, "/healthz")
    with serve_page(watch, port) as again:
        assert again == address
