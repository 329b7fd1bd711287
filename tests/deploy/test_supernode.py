"""What a site does about each way in which a scripted SuperNode can end."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offbeat.deploy import keys
from offbeat.deploy.flower import supernode
from offbeat.deploy.flower.commands import SuperLinkAddress
from offbeat.deploy.flower.private_api import NodeStatus, node_id_in_log, refusal_in_log
from offbeat.deploy.flower.supernode import (
    SuperNodeProcess,
)
from offbeat.errors import InputError

ADDRESS = "127.0.0.1:23456"
CONNECTED = "INFO : SuperNode ID: 77\n"
REFUSED = "ERROR : Exit Code: 305\nFailed\n[code: 2004] Failed to activate SuperNode.\n"
NO_KEY = "[code: 2001] SuperNode authentication is enabled. All SuperNodes must be registered via the CLI.\n"


class Node:
    """A child that writes its log, and then lives or not."""

    def __init__(self, log: Path, text: str, alive: bool) -> None:
        log.write_text(text)
        self.lives = alive
        self.started = 0.0

    def is_alive(self) -> bool:
        return self.lives

    def stop(self) -> None:
        self.lives = False

    kill = stop


class World:
    """What the SuperLink makes of the site."""

    def __init__(self, folder: Path, key: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self.script: list[tuple[str, bool]] = []
        self.said: list[str] = []
        self.signed_off: list[int] = []
        self.standing = NodeStatus.INACTIVE
        self.away: str | None = None
        self.nodes: list[Node] = []
        self.child = SuperNodeProcess(
            SuperLinkAddress(ADDRESS, Path("ca.crt")), key, folder, {"A": "b"}, self.said.append
        )
        monkeypatch.setattr(supernode, "start_supernode", self._start)
        monkeypatch.setattr(supernode, "deactivate_node", self._sign_off)
        monkeypatch.setattr(supernode, "superlink_problem", lambda link: self.away)
        monkeypatch.setattr(self.child, "_backoff", _Never())

    def _start(
        self, link: SuperLinkAddress, home: Path, key: Path | None, told: dict[str, str], log: Path
    ) -> Node:
        assert told == {"A": "b"}
        self.nodes.append(Node(log, *self.script.pop(0)))
        return self.nodes[-1]

    def _sign_off(self, address: str, authority: Path | None, key: Any, node: int) -> NodeStatus:
        self.signed_off.append(node)
        return self.standing

    def keep_alive(self, times: int = 2) -> None:
        for _ in range(times):
            self.child.keep_alive()


class _Never:
    """Always due."""

    due = True

    def fail(self) -> float:
        return 1.0

    def reset(self) -> None: ...


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "keys"
    keys.create_keys(folder, ["localhost"], ["a"], ["localhost"], 3)
    return folder / "sites" / "a" / "key"


@pytest.fixture
def make(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], World]:
    return lambda: World(tmp_path, key, monkeypatch)


def known(folder: Path, address: str = ADDRESS) -> None:
    (folder / "node.json").write_text(json.dumps({"superlink": address, "node": 77}))


def test_a_site_that_is_connected_says_so_and_notes_its_node(
    make: Callable[[], World], tmp_path: Path
) -> None:
    world = make()
    world.script = [(CONNECTED, True)]
    world.keep_alive(5)
    assert world.said == [f"connected to {ADDRESS} as node 77."]
    assert json.loads((tmp_path / "node.json").read_text()) == {"superlink": ADDRESS, "node": 77}
    assert world.signed_off == []


def test_one_that_was_killed_is_signed_off_before_the_next(make: Callable[[], World]) -> None:
    world = make()
    world.script = [(CONNECTED, True), (CONNECTED, True)]
    world.keep_alive()
    world.nodes[0].lives = False
    world.keep_alive(4)
    assert world.signed_off == [77]
    assert world.said[1:] == [
        "the SuperNode ended and is being restarted.",
        f"connected to {ADDRESS} as node 77.",
    ]


def test_a_site_signs_its_node_from_before_off(make: Callable[[], World], tmp_path: Path) -> None:
    known(tmp_path)
    world = make()
    world.script = [(CONNECTED, True)]
    world.keep_alive()
    assert world.signed_off == [77]


def test_a_node_at_another_superlink_is_no_concern(make: Callable[[], World], tmp_path: Path) -> None:
    known(tmp_path, "127.0.0.1:1")
    world = make()
    world.script = [(CONNECTED, True)]
    world.keep_alive()
    assert world.signed_off == []


def test_a_key_that_was_never_taken_is_one_sentence(make: Callable[[], World]) -> None:
    world = make()
    world.script = [(REFUSED, False)]
    with pytest.raises(InputError, match=r"does not know the key .*: have its public key registered"):
        world.keep_alive()


def test_a_key_that_is_no_longer_known_is_one_sentence(make: Callable[[], World], tmp_path: Path) -> None:
    known(tmp_path)
    world = make()
    world.script, world.standing = [(REFUSED, False)], NodeStatus.UNKNOWN_KEY
    with pytest.raises(InputError, match="does not know the key"):
        world.keep_alive()


def test_a_key_that_is_still_in_use_is_waited_for(make: Callable[[], World], tmp_path: Path) -> None:
    known(tmp_path)
    world = make()
    world.script, world.standing = [(REFUSED, False), (REFUSED, False), (CONNECTED, True)], NodeStatus.UNCLEAR
    world.keep_alive(6)
    assert "still counts the SuperNode that was killed as connected" in world.said[0]
    assert world.said[-1] == f"connected to {ADDRESS} as node 77."


def test_a_superlink_that_forgot_a_site_gets_time_to_be_told(make: Callable[[], World]) -> None:
    world = make()
    world.script, world.standing = (
        [(CONNECTED, True), (REFUSED, False), (CONNECTED, True)],
        NodeStatus.UNKNOWN_KEY,
    )
    world.keep_alive()
    world.nodes[0].lives = False
    world.keep_alive(6)
    assert "next attempt in 1 s" in world.said[2]
    assert world.said[-1] == f"connected to {ADDRESS} as node 77."


def test_a_superlink_that_wants_keys_is_one_sentence(make: Callable[[], World]) -> None:
    world = make()
    world.script = [(NO_KEY, False)]
    with pytest.raises(InputError, match="accepts registered sites only: give --certificate and --key"):
        world.keep_alive()


def test_a_node_that_ends_for_no_reason_is_started_again(make: Callable[[], World]) -> None:
    world = make()
    world.script = [("", False), (CONNECTED, True)]
    world.keep_alive(4)
    assert "will be restarted in 1 s; see " in world.said[0]


@pytest.mark.parametrize(
    ("away", "sentence"),
    [
        (
            "[SSL: CERTIFICATE_VERIFY_FAILED] unable to get local issuer",
            "is not valid under ca.crt",
        ),
        (
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: IP address mismatch, "
            "certificate is not valid for '127.0.0.2'. (_ssl.c:1006)",
            "under ca.crt (IP address mismatch, certificate is not valid for '127.0.0.2'): check",
        ),
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number", "does not speak TLS: give --insecure"),
    ],
)
def test_a_server_that_cannot_be_trusted_is_one_sentence(
    make: Callable[[], World], away: str, sentence: str
) -> None:
    world = make()
    world.away = away
    with pytest.raises(InputError, match=re.escape(sentence)):
        world.keep_alive()
    assert world.nodes == []


def test_a_superlink_that_is_away_is_left_to_the_supernode(make: Callable[[], World]) -> None:
    world = make()
    world.away, world.script = "[Errno 111] Connection refused", [("", True)]
    world.keep_alive(3)
    assert world.said == [f"waiting for the SuperLink at {ADDRESS}."]


def test_the_last_words_of_a_log_count(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("x" * 100_000 + f"\n{CONNECTED}{CONNECTED.replace('77', '78')}{REFUSED}")
    assert node_id_in_log(log) == 78
    assert refusal_in_log(log) == (2004, "Failed to activate SuperNode.")
    log.write_text("")
    assert node_id_in_log(log) is None
    assert refusal_in_log(log) is None


@pytest.mark.parametrize("content", [None, b"", b"-----BEGIN nothing", b"\xff" * 40])
def test_a_file_that_is_no_key_is_one_sentence(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match="key"):
        keys.load_site_key(path)
