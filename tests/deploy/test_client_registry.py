"""A site keeps its number, whoever else comes and however often the server is restarted."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy_world import ramdisk
from offbeat.deploy.protocol.strict_json import Reason, Rejected
from offbeat.deploy.server.registry import ClientRegistry, RegisteredSite
from offbeat.errors import InputError


def site(number: int) -> str:
    return f"{number:032x}"


@given(st.lists(st.integers(0, 7), max_size=30), st.booleans())
def test_numbers_go_to_sites_in_the_order_of_coming_and_stay(comers: list[int], bound: bool) -> None:
    with ramdisk() as folder:
        come(folder / "roster.json", comers, bound)


def come(path: Path, comers: list[int], bound: bool) -> None:
    roster = ClientRegistry(path, 5, bound)
    order: list[int] = []
    for turn, comer in enumerate(comers):
        if comer not in order and len(order) == 5:
            with pytest.raises(Rejected, match="already has its 5 sites"):
                roster.admit(f"key {comer}", f"site {comer}", site(comer))
            continue
        if comer not in order:
            order.append(comer)
        key = f"key {comer}" if bound else f"key {turn}"  # unbound, a site may come with any key
        assert roster.admit(key, f"site {comer}", site(comer)) == order.index(comer)
        roster = ClientRegistry(path, 5, bound)  # the server was restarted
    assert [member.name for member in roster.members.values()] == [f"site {comer}" for comer in order]


def test_the_file_says_which_name_each_client_has(tmp_path: Path) -> None:
    roster = ClientRegistry(tmp_path / "roster.json", 2, bound=True)
    roster.admit("7", "a", site(1))
    written = json.loads((tmp_path / "roster.json").read_text())
    assert written.pop("checksum")
    assert written == {"0": {"name": "a", "site": site(1), "key": "7"}}
    assert ClientRegistry(tmp_path / "roster.json", 2, bound=True).members == {
        0: RegisteredSite("a", site(1), "7")
    }


@pytest.mark.parametrize(
    ("key", "name", "number", "sentence"),
    [
        ("8", "a", 1, "joined with another key before"),
        ("7", "b", 2, "the key of b belongs to a"),
        ("7", "b", 1, "the site b first joined as a"),
        ("8", "a", 2, "this run has another site a"),
    ],
)
def test_a_bound_site_is_its_key_and_its_name(
    tmp_path: Path, key: str, name: str, number: int, sentence: str
) -> None:
    roster = ClientRegistry(tmp_path / "roster.json", 3, bound=True)
    roster.admit("7", "a", site(1))
    with pytest.raises(Rejected, match=sentence) as refused:
        roster.admit(key, name, site(number))
    assert refused.value.reason is Reason.SETTINGS
    assert len(roster.members) == 1


def test_sites_from_before_keys_were_used_are_bound_when_they_come_again(tmp_path: Path) -> None:
    path = tmp_path / "roster.json"
    ClientRegistry(path, 3, bound=False).admit("7", "a", site(1))
    roster = ClientRegistry(path, 3, bound=True)
    assert roster.admit("8", "a", site(1)) == 0
    with pytest.raises(Rejected, match="joined with another key before"):
        ClientRegistry(path, 3, bound=True).admit("7", "a", site(1))


@pytest.mark.parametrize("text", ["", "[]", '{"0": {}}', '{"1": {"name": "a", "site": "b", "node": 1}}', "{"])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "roster.json"
    path.write_text(text)
    with pytest.raises(InputError, match="restore it"):
        ClientRegistry(path, 3, bound=False)


def test_a_site_that_joined_without_a_key_is_bound_to_the_one_that_it_comes_with(tmp_path: Path) -> None:
    path = tmp_path / "roster.json"
    assert ClientRegistry(path, 3, bound=False).admit("7", "a", site(1)) == 0
    assert ClientRegistry(path, 3, bound=True).admit("8", "a", site(1)) == 0
    assert ClientRegistry(path, 3, bound=True).members == {0: RegisteredSite("a", site(1), "8")}


def test_a_bound_site_has_a_key(tmp_path: Path) -> None:
    with pytest.raises(Rejected, match="has no key"):
        ClientRegistry(tmp_path / "roster.json", 3, bound=True).admit(None, "a", site(1))


def test_a_roster_that_was_changed_is_noticed_and_one_of_before_is_read(tmp_path: Path) -> None:
    path = tmp_path / "roster.json"
    roster = ClientRegistry(path, 2, bound=True)
    roster.admit("7", "a", site(1))
    roster.admit("8", "b", site(2))
    facts = json.loads(path.read_text())
    path.write_text(json.dumps(facts | {"0": facts["1"], "1": facts["0"]}))
    with pytest.raises(
        InputError, match=r"contents have changed since it was written.*restore it from a backup"
    ):
        ClientRegistry(path, 2, bound=True)
    del facts["checksum"]
    path.write_text(json.dumps(facts))
    assert ClientRegistry(path, 2, bound=True).members == roster.members
