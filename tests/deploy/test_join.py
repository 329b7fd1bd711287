"""A site's two processes are kept alive; here both are scripted."""

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from offbeat.deploy.flower import supernode
from offbeat.deploy.flower.commands import SuperLinkAddress
from offbeat.deploy.flower.supernode import SiteOptions, SiteProcess, run_site
from offbeat.deploy.protocol.transport import Backoff
from offbeat.errors import InputError

READY = "import json, sys; print(json.dumps({'ready': 'a', 'examples': 3}), flush=True); sys.stdin.read()"
REFUSED = """
import json, sys, time
for part in ('{"ready": 1, "examples": 3}\\n', '{"refused": "no place."}\\n{"ref', 'used": "no model."}\\n'):
    print(part, end="", flush=True)
    time.sleep(0.2)
sys.stdin.read()
"""
ENDS = "import json; print(json.dumps({'ready': 'a', 'examples': 3}), flush=True)"
FAILS = "import json, sys; print(json.dumps({'error': 'there are no data.'}), flush=True); sys.exit(2)"
CRASHES = "raise SystemExit(1)"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a resident of some code."""

    def put(code: str) -> None:
        monkeypatch.setattr(SiteOptions, "command", lambda self, socket: [sys.executable, "-c", code])

    return put


def tend(resident: SiteProcess, enough: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not enough():
        assert time.monotonic() < limit
        resident.keep_alive()
        time.sleep(0.02)


def test_a_resident_is_told_all_that_a_site_was_given(tmp_path: Path) -> None:
    own = SiteOptions("a", tmp_path, "p.m:load", losses="p.m:losses", helper_key=Path("h"), minimum=4)
    words = own.command(Path("/x/site"))
    assert words[1:3] == ["-m", "offbeat.deploy.site.process"]
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert given == {
        "--name": "a",
        "--folder": str(tmp_path),
        "--data": "p.m:load",
        "--losses": "p.m:losses",
        "--helper-key": "h",
        "--minimum": "4",
        "--socket": "/x/site",
    }


def test_a_resident_says_when_it_is_ready(tmp_path: Path, runs: Callable[[str], None]) -> None:
    runs(READY)
    resident = SiteProcess(SiteOptions("a", tmp_path, "d:l"), tmp_path / "s", print)
    assert resident.start()["examples"] == 3
    resident.stop(kill=False)


@pytest.mark.parametrize(
    ("code", "sentence"), [(FAILS, "there are no data."), (CRASHES, "ended during its start")]
)
def test_a_resident_that_cannot_begin_is_one_sentence(
    tmp_path: Path, runs: Callable[[str], None], code: str, sentence: str
) -> None:
    runs(code)
    with pytest.raises(InputError, match=sentence):
        SiteProcess(SiteOptions("a", tmp_path, "d:l"), tmp_path / "s", print).start()


def test_a_resident_that_ends_is_started_again(tmp_path: Path, runs: Callable[[str], None]) -> None:
    said: list[str] = []
    runs(ENDS)
    resident = SiteProcess(SiteOptions("a", tmp_path, "d:l"), tmp_path / "s", said.append)
    resident.start()
    tend(resident, lambda: bool(said))
    assert said == ["the site's process ended and is being restarted."]
    runs(FAILS)
    tend(resident, lambda: said[-1].startswith("there are no data; next attempt in"))
    resident.stop(kill=True)


class Node:
    def __init__(
        self, link: SuperLinkAddress, key: Path | None, folder: Path, told: Mapping[str, str], say: object
    ) -> None:
        self.told = told
        nodes.append(self)
        self.ended: bool | None = None

    def keep_alive(self) -> None:
        if broken:
            raise InputError("the key is not known.")

    def stop(self, *, kill: bool) -> None:
        self.ended = kill


nodes: list[Node] = []
broken: list[bool] = []


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.clear()
    broken.clear()
    monkeypatch.setattr(supernode, "SuperNodeProcess", Node)


@pytest.mark.usefixtures("node")
def test_both_end_when_told_and_the_socket_goes(tmp_path: Path, runs: Callable[[str], None]) -> None:
    runs(READY)
    left = iter([False, False, True])
    ready: list[int] = []
    own = SiteOptions("a", tmp_path / "site", "d:l")
    run_site(
        own,
        SuperLinkAddress("h:1", None),
        print,
        lambda: next(left),
        lambda facts: ready.append(facts["examples"]),
    )
    assert ready == [3]
    assert [each.ended for each in nodes] == [False]
    assert not Path(nodes[0].told["OFFBEAT_SITE"]).parent.exists()


@pytest.mark.usefixtures("node")
def test_what_only_a_person_can_mend_ends_both(tmp_path: Path, runs: Callable[[str], None]) -> None:
    runs(READY)
    broken.append(True)
    with pytest.raises(InputError, match="not known"):
        run_site(
            SiteOptions("a", tmp_path / "site", "d:l"), SuperLinkAddress("h:1", None), print, lambda: False
        )
    assert [each.ended for each in nodes] == [True]


def test_pauses_double_up_to_a_limit_and_begin_anew() -> None:
    now = [0.0]
    backoff = Backoff(1.0, 5.0, lambda: now[0])
    assert backoff.due
    assert [backoff.fail() for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    assert not backoff.due
    now[0] = 5.0
    assert backoff.due
    backoff.reset()
    assert backoff.fail() == 1.0


def test_what_a_resident_hears_from_the_server_is_passed_on(
    tmp_path: Path, runs: Callable[[str], None]
) -> None:
    runs(REFUSED)
    said: list[str] = []
    resident = SiteProcess(SiteOptions("a", tmp_path, "d:l"), tmp_path / "s", said.append)
    resident.start()
    tend(resident, lambda: len(said) == 2)
    resident.stop(kill=True)
    assert said == [f"the server refused this site: {reason}" for reason in ("no place.", "no model.")]
