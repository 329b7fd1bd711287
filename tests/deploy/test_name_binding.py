from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from offbeat.deploy import keys
from offbeat.deploy.protocol.strict_json import Reason, Rejected
from offbeat.deploy.server.registry import NameBinding

SITES = ("hospital-a", "hospital-b")


class Keys:
    """Node 1 has the key of hospital-a, node 2 that of hospital-b, and node 3 none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def key(self, node: int) -> bytes:
        """As Flower tells it."""
        if node == 3:
            return b""
        key = load_ssh_public_key((self._folder / "sites" / SITES[node - 1] / "key.pub").read_bytes())
        return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture(scope="module")
def claims(tmp_path_factory: pytest.TempPathFactory) -> NameBinding:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    keys.create_keys(folder, ["server.example"], SITES, ["helper.example"], 2)
    return NameBinding(folder / "sites", Keys(folder))


def reject(claims: NameBinding, node: int, name: str) -> str:
    with pytest.raises(Rejected) as rejected:
        claims.check(claims.key(node), name)
    assert rejected.value.reason is Reason.SETTINGS
    return rejected.value.sentence


def test_a_name_goes_with_its_key(claims: NameBinding) -> None:
    claims.check(claims.key(1), "hospital-a")
    claims.check(claims.key(2), "hospital-b")
    assert "hospital-b belongs to another key" in reject(claims, 1, "hospital-b")
    assert "hospital-a belongs to another key" in reject(claims, 2, "hospital-a")


def test_a_node_without_a_key_takes_no_name_that_has_one(claims: NameBinding) -> None:
    assert "has no key" in reject(claims, 3, "hospital-a")


@pytest.mark.parametrize("name", ["hospital-c", "../sites/hospital-b", ".", "hospital-b/"])
def test_names_that_no_key_was_made_for_are_anybodys(claims: NameBinding, name: str) -> None:
    claims.check(claims.key(1), name)


def test_a_key_that_cannot_be_read_lets_nobody_in(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "key.pub").write_text("no key")
    assert "cannot read its key.pub of a" in reject(NameBinding(tmp_path, Keys(tmp_path)), 3, "a")
