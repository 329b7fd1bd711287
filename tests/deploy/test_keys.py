"""Certificates that TLS accepts for their hosts alone, and keys that Flower and OpenSSH read."""

import shutil
import ssl
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from hypothesis import given
from hypothesis import strategies as st

from offbeat.deploy import keys
from offbeat.deploy.keys import add_site_keys, create_keys
from offbeat.errors import InputError

HOSTS = ("localhost", "127.0.0.1", "::1", "server.example")
SITES = ("hospital-a", "hospital-b")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "keys"
    create_keys(folder, HOSTS, SITES, ["helper.example"], 30)
    return folder


def shake_hands(folder: Path, name: str, host: str) -> str | None:
    """A whole TLS handshake in memory, as strict as newer Pythons are by default; its version."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    client = ssl.create_default_context(cafile=folder / "ca.crt")
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(down, up, server_hostname=host), server.wrap_bio(up, down, server_side=True)
    for _ in range(10):
        waiting = 0
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                waiting += 1
        if not waiting:
            return ends[0].version()
    raise AssertionError("the handshake does not come to an end")


@pytest.mark.parametrize("host", HOSTS)
def test_the_server_is_known_by_each_of_its_hosts(folder: Path, host: str) -> None:
    assert shake_hands(folder, "server", host) == "TLSv1.3"


@pytest.mark.parametrize("host", ["helper.example", "127.0.0.2", "a.server.example"])
def test_the_server_is_not_known_by_another_host(folder: Path, host: str) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match=r"mismatch|not valid for"):
        shake_hands(folder, "server", host)


def test_the_server_is_known_on_its_own_machine_whatever_its_hosts(tmp_path: Path) -> None:
    create_keys(tmp_path / "keys", ["server.example"], SITES, ["helper.example"], 30)
    assert shake_hands(tmp_path / "keys", "server", "127.0.0.1") == "TLSv1.3"


def test_the_helper_has_a_certificate_of_its_own(folder: Path) -> None:
    assert shake_hands(folder, "helper", "helper.example") == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(folder, "helper", "server.example")


def test_another_authority_is_not_believed(folder: Path, tmp_path: Path) -> None:
    create_keys(tmp_path / "other", HOSTS, SITES, ["helper.example"], 30)
    for name in ("server.pem", "server.key"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "ca.crt").write_bytes((tmp_path / "other" / "ca.crt").read_bytes())
    with pytest.raises(ssl.SSLCertVerificationError, match=r"signature|issuer"):
        shake_hands(tmp_path, "server", "localhost")


@pytest.mark.parametrize("name", ["ca.crt", "server.pem", "helper.pem"])
def test_certificates_are_good_from_now_for_the_days_asked_for(folder: Path, name: str) -> None:
    certificate = x509.load_pem_x509_certificate((folder / name).read_bytes())
    now, hours = datetime.now(UTC), timedelta(hours=2)
    assert now - hours < certificate.not_valid_before_utc < now
    assert abs(certificate.not_valid_after_utc - now - timedelta(days=30)) < hours


def test_the_authority_signs_certificates_and_servers_do_not(folder: Path) -> None:
    for name, signs in (("ca.crt", True), ("server.pem", False), ("helper.pem", False)):
        extensions = x509.load_pem_x509_certificate((folder / name).read_bytes()).extensions
        assert extensions.get_extension_for_class(x509.BasicConstraints).value.ca == signs
        assert extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign == signs


def test_what_is_secret_is_for_its_owner_alone(folder: Path) -> None:
    secret = {"ca.key", "server.key", "helper.key", "helper.token", "key"}
    files = [each for each in folder.rglob("*") if each.is_file()]
    assert {each.name for each in files} == secret | {"ca.crt", "server.pem", "helper.pem", "key.pub"}
    for each in files:
        assert each.stat().st_mode & 0o777 == (0o600 if each.name in secret else 0o644), each
    assert {each.stat().st_mode & 0o777 for each in (folder, *folder.rglob("*")) if each.is_dir()} == {0o700}


@pytest.mark.parametrize("site", SITES)
def test_a_site_has_its_own_key_on_the_curve_that_flower_wants(folder: Path, site: str) -> None:
    own = folder / "sites" / site
    private = load_ssh_private_key((own / "key").read_bytes(), None)
    public = load_ssh_public_key((own / "key.pub").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(private.curve, ec.SECP384R1)
    assert private.public_key() == public
    assert (own / "key.pub").read_text().split()[2] == site
    assert (own / "ca.crt").read_bytes() == (folder / "ca.crt").read_bytes()


def test_no_two_keys_are_the_same(folder: Path) -> None:
    keys = [load_pem_private_key(path.read_bytes(), None) for path in folder.glob("*.key")]
    keys += [load_ssh_private_key(path.read_bytes(), None) for path in folder.glob("sites/*/key")]
    numbers = {key.private_numbers().private_value for key in keys}
    assert len(numbers) == len(keys) == 5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Flower imports
def test_flower_registers_and_signs_with_a_sites_key(folder: Path) -> None:
    from flwr.cli.supernode.register import try_load_public_key
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, sign_message, verify_signature

    own = folder / "sites" / "hospital-a"
    public = bytes_to_public_key(try_load_public_key(own / "key.pub"))
    signature = sign_message(load_ssh_private_key((own / "key").read_bytes(), None), b"text")
    assert verify_signature(public, b"text", signature)
    assert not verify_signature(public, b"another", signature)


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="OpenSSH is not installed here")
def test_openssh_reads_a_sites_key(folder: Path) -> None:
    own = folder / "sites" / "hospital-a"
    command = ["ssh-keygen", "-y", "-f", str(own / "key")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert told.split()[:2] == (own / "key.pub").read_text().split()[:2]


def test_the_token_cannot_be_guessed(folder: Path, tmp_path: Path) -> None:
    create_keys(tmp_path / "other", ["localhost"], ["a"], ["localhost"], 1)
    tokens = {(each / "helper.token").read_text() for each in (folder, tmp_path / "other")}
    assert len(tokens) == 2
    assert all(len(bytes.fromhex(token.strip())) == 32 for token in tokens)


def test_a_site_is_added_and_the_others_keep_their_keys(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    create_keys(folder, ["localhost"], ["a"], ["localhost"], 1)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    add_site_keys(folder, "b")
    assert {path: path.read_bytes() for path in before} == before
    added = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert added - {str(path.relative_to(folder)) for path in before} == {
        f"sites/b/{name}" for name in ("key", "key.pub", "ca.crt")
    }
    with pytest.raises(InputError, match=r"'b' already has a key in"):
        add_site_keys(folder, "b")


def test_a_site_is_added_to_keys_and_to_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no ca\.crt"):
        add_site_keys(tmp_path, "b")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("hosts", "sites", "days", "sentence"),
    [
        (["server.example:9092"], ["a"], 1, "'server.example:9092' is not a host"),
        (["https://x"], ["a"], 1, "is not a host"),
        (["300.1.1.1"], ["a"], 1, "is not a host"),
        (["bad_name"], ["a"], 1, "is not a host"),
        (["a\n"], ["a"], 1, "is not a host"),
        (["*.example"], ["a"], 1, "is not a host"),
        ([""], ["a"], 1, "'' is not a host"),
        ([], ["a"], 1, "give at least one host"),
        (["localhost"], [], 1, "no site was named"),
        (["localhost"], ["../a"], 1, "cannot be the name of a site"),
        (["localhost"], [".hidden"], 1, "cannot be the name of a site"),
        (["localhost"], ["a b"], 1, "cannot be the name of a site"),
        (["localhost"], ["a", "A"], 1, "same name"),
        (["localhost"], ["a"], 0, "cannot be valid for 0 days"),
        (["localhost"], ["a"], 99_999, "cannot be valid for 99999 days"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_nothing_is_written(
    tmp_path: Path, hosts: Sequence[str], sites: Sequence[str], days: int, sentence: str
) -> None:
    with pytest.raises(InputError, match=sentence):
        create_keys(tmp_path / "keys", hosts, sites, ["localhost"], days)
    assert list(tmp_path.iterdir()) == []


@given(st.text(max_size=70))
def test_no_name_of_a_site_leads_out_of_the_folder(name: str) -> None:
    """Names are refused, or stand for one folder within; no folder is there, so nothing is written."""
    with pytest.raises(InputError) as caught:
        add_site_keys(Path("/nonexistent/keys"), name)
    if "has no ca.crt" in str(caught.value):
        assert Path(name).name == name
        assert name not in (".", "..")
    else:
        assert "cannot be the name of a site" in str(caught.value)


def test_certificates_are_renewed_in_their_folder_for_the_same_keys_and_hosts(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    keys.create_keys(folder, ["server.example", "192.0.2.1"], ["a"], ["helper.example"], 2)
    names = ("ca.crt", "server.pem", "helper.pem")
    before = {name: x509.load_pem_x509_certificate((folder / name).read_bytes()) for name in names}
    private = {path: path.read_bytes() for path in folder.rglob("*key*") if path.is_file()}
    keys.renew_certificates(folder, 300)
    for name in names:
        after = x509.load_pem_x509_certificate((folder / name).read_bytes())
        assert after.public_key() == before[name].public_key()
        assert after.not_valid_after_utc - before[name].not_valid_after_utc > timedelta(days=297)
        after.verify_directly_issued_by(before["ca.crt"])  # sites with the old ca.crt still accept it
    old, new = (
        certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        for certificate in (
            before["server.pem"],
            x509.load_pem_x509_certificate((folder / "server.pem").read_bytes()),
        )
    )
    assert old == new
    assert (folder / "sites" / "a" / "ca.crt").read_bytes() == (folder / "ca.crt").read_bytes()
    assert {path: path.read_bytes() for path in private} == private


def test_certificates_are_not_renewed_without_their_authority(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    keys.create_keys(folder, ["server.example"], ["a"], ["helper.example"], 2)
    with pytest.raises(InputError, match="give 1 to 3650"):
        keys.renew_certificates(folder, 0)
    (folder / "ca.key").unlink()
    with pytest.raises(InputError, match="has no authority to renew certificates with"):
        keys.renew_certificates(folder, 3)


def test_a_site_is_revoked_and_can_get_another_key(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    keys.create_keys(folder, ["server.example"], ["a", "b"], ["helper.example"], 2)
    for _ in range(2):
        keys.revoke_site_keys(folder, "a")
        assert [path.parent.name for path in (folder / "sites").rglob("key.pub")] == ["b"]
        keys.add_site_keys(folder, "a")
    assert sorted(path.name for path in (folder / "revoked").iterdir()) == ["a", "a.2"]
    for name in ("c", "../sites/b", ""):
        with pytest.raises(InputError, match="has no site"):
            keys.revoke_site_keys(folder, name)
