"""Keys of a deployment: a certificate authority, server certificates, and a key pair for each site.

Sites sign their reports of secure aggregation with their keys, so that a helper knows which clients exist.
"""

import hashlib
import ipaddress
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from offbeat.core import Task
from offbeat.deploy.network import TlsFiles, tls_context
from offbeat.errors import InputError
from offbeat.files import atomic_dir, write_atomic, write_new
from offbeat.privacy.secure.terms import SecureTerms

_MAX_DAYS = 3650
_CLOCK_SKEW = timedelta(hours=1)  # a site's clock may be slow
_TOKEN_BYTES = 32
_AUTHORITY = "offbeat certificate authority"
_LOOPBACK_HOSTS = ("localhost", "127.0.0.1")  # so that the server's own machine can be a site, too
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*")
_SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def create_keys(
    folder: Path, hosts: Sequence[str], sites: Sequence[str], helper_hosts: Sequence[str], days: int
) -> None:
    """Create a folder with all certificates and keys; only its owner can read secret files."""
    for host in (*hosts, *helper_hosts):
        _general_name(host)
    if not hosts or not helper_hosts:
        raise InputError("a certificate needs a host name: give at least one host.")
    _check_sites(sites)
    _check_days(days)
    with atomic_dir(folder, 0o700) as part:
        authority = ec.generate_private_key(ec.SECP256R1())
        issued = _certificate(_AUTHORITY, authority.public_key(), authority, days)
        write_new(part / "ca.crt", issued)
        write_new(part / "ca.key", _private(authority, PrivateFormat.PKCS8), secret=True)
        for name, names in (("server", (*hosts, *_LOOPBACK_HOSTS)), ("helper", helper_hosts)):
            key = ec.generate_private_key(ec.SECP256R1())
            own = _server_extensions(names)
            write_new(
                part / f"{name}.pem", _certificate(f"offbeat {name}", key.public_key(), authority, days, *own)
            )
            write_new(part / f"{name}.key", _private(key, PrivateFormat.PKCS8), secret=True)
        write_new(part / "helper.token", secrets.token_hex(_TOKEN_BYTES).encode() + b"\n", secret=True)
        for site in sites:
            _write_site(part / "sites" / site, site, issued)
        for name in ("sites", *(f"sites/{site}" for site in sites)):
            (part / name).chmod(0o700)


def add_site_keys(folder: Path, site: str) -> None:
    """Add a site to a folder from `create_keys`; the other sites keep their keys."""
    _check_sites([site])
    try:
        authority = (folder / "ca.crt").read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f"{folder} has no ca.crt: name the folder that 'offbeat keys' wrote, or make one with --hosts."
        ) from None
    place = folder / "sites" / site
    if place.exists():
        raise InputError(f"the site '{site}' already has a key in {folder}: name a new site.")
    with atomic_dir(place, 0o700) as part:
        _write_site(part, site, authority)


def revoke_site_keys(folder: Path, site: str) -> None:
    """Move a site out of those whose keys are accepted; its keys are kept in the folder `revoked`."""
    place = folder / "sites" / site
    if not _SITE_NAME.fullmatch(site) or not place.is_dir():
        raise InputError(f"{folder} has no site '{site}': name one of those in {folder / 'sites'}.")
    target = folder / "revoked" / site
    number = 1
    while target.exists():
        number += 1
        target = folder / "revoked" / f"{site}.{number}"
    target.parent.mkdir(mode=0o700, exist_ok=True)
    place.rename(target)


def renew_certificates(folder: Path, days: int) -> None:
    """Issue the certificates of a folder anew, for the same keys and hosts, by the same authority."""
    _check_days(days)
    try:
        authority = load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
        last = {
            name: x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes())
            for name in ("server", "helper")
        }
        if not isinstance(authority, ec.EllipticCurvePrivateKey):
            raise TypeError
    except (OSError, ValueError, TypeError):
        raise InputError(
            f"{folder} has no authority to renew certificates with: name the folder that 'offbeat keys' "
            "wrote, with its ca.key."
        ) from None
    issued = {"ca.crt": _certificate(_AUTHORITY, authority.public_key(), authority, days)}
    for name, before in last.items():
        names = before.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        own = _server_extensions([str(host.value) for host in names])
        issued[f"{name}.pem"] = _certificate(f"offbeat {name}", before.public_key(), authority, days, *own)
    for name, certificate in issued.items():
        write_atomic(folder / name, [certificate])
    for path in (folder / "sites").glob("*/ca.crt"):
        write_atomic(path, [issued["ca.crt"]])


def _check_days(days: int) -> None:
    if not 1 <= days <= _MAX_DAYS:
        raise InputError(f"certificates cannot be valid for {days} days: give 1 to {_MAX_DAYS}.")


def _check_sites(sites: Sequence[str]) -> None:
    """Refuse names that are not valid folder names, or that differ only in case."""
    if not sites:
        raise InputError("no site was named: give at least one, such as hospital-a.")
    for site in sites:
        if not _SITE_NAME.fullmatch(site):
            raise InputError(
                f"'{site}' cannot be the name of a site: use letters, digits, dots, hyphens and underscores, "
                "a letter or digit first, and 63 of them at most."
            )
    if len({site.lower() for site in sites}) < len(sites):
        raise InputError("two sites have the same name: give each its own.")


def _write_site(folder: Path, site: str, authority: bytes) -> None:
    """Write a key pair of the curve and format that Flower requires."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    write_new(folder / "key", _private(key, PrivateFormat.OpenSSH), secret=True)
    write_new(folder / "key.pub", public + f" {site}\n".encode())
    write_new(folder / "ca.crt", authority)


def _server_extensions(hosts: Sequence[str]) -> list[x509.ExtensionType]:
    names = x509.SubjectAlternativeName([_general_name(host) for host in dict.fromkeys(hosts)])
    return [names, x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])]


def _certificate(
    name: str, key: Any, authority: ec.EllipticCurvePrivateKey, days: int, *own: x509.ExtensionType
) -> bytes:
    """A certificate as PEM: of a server, which has extensions of its own, or of the authority itself."""
    now, signer = datetime.now(UTC), x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(_AUTHORITY))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=not own, path_length=None if own else 0), critical=True)
        .add_extension(_usage(signs_certificates=not own), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer), critical=False)
    )
    for extension in own:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(authority, hashes.SHA256()).public_bytes(Encoding.PEM)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not _HOST.fullmatch(host) or host.rpartition(".")[2].isdigit():
        raise InputError(
            f"'{host}' is not a host: give names such as server.example or addresses such as 192.0.2.1, "
            "without a port."
        )
    return x509.DNSName(host)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _private(key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> bytes:
    return key.private_bytes(Encoding.PEM, form, NoEncryption())


SIGNATURE_BYTES = 96  # two integers of 384 bits
_HALF_BYTES = SIGNATURE_BYTES // 2
_MAX_KEYS = 10_000


def signed_statement(terms: SecureTerms, task: Task, sealed: bytes) -> bytes:
    """The statement that a site signs: this sealed seed is its report under these terms."""
    return b"offbeat signed report" + terms.binding(task) + sealed


def reply_statement(message_id: str, header: str, payload: bytes) -> bytes:
    """The statement that a site signs: this is its reply to a message."""
    digests = (hashlib.sha384(part).digest() for part in (header.encode(), payload))
    return b"offbeat signed reply\0" + message_id.encode() + b"\0" + b"".join(digests)


def create_site_key(path: Path) -> Path:
    """Create a key for a site that was given none, unless the file exists."""
    if not path.exists():
        write_new(path, _private(ec.generate_private_key(ec.SECP384R1()), PrivateFormat.OpenSSH), secret=True)
    return path


def load_site_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Load the private key of a site."""
    try:
        key = load_ssh_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise InputError(
            f"the site's key {path} cannot be read ({error.strerror}): name a key file."
        ) from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise InputError(
            f"the site's key {path} is not an OpenSSH private key of the curve P-384 without a passphrase: "
            "create one with 'offbeat keys'."
        )
    return key


def read_signer(path: Path) -> tuple[str, Callable[[bytes], bytes]]:
    """Return the public key of a site's private key, in hexadecimal, and a function that signs."""
    private = load_site_key(path)

    def sign(message: bytes) -> bytes:
        numbers = decode_dss_signature(private.sign(message, ec.ECDSA(hashes.SHA384())))
        return b"".join(number.to_bytes(_HALF_BYTES, "big") for number in numbers)

    return fingerprint(private.public_key()), sign


def read_public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """The public key of a site."""
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise InputError(f"{path} is not an OpenSSH public key of the curve P-384: remove it.")
    return key


class FolderKeys(NamedTuple):
    """The public keys in a folder and its subfolders."""

    keys: dict[str, ec.EllipticCurvePublicKey]  # by fingerprint
    problems: list[str]  # a sentence for each file that is not the key of one more site


def find_site_keys(folder: Path) -> FolderKeys:
    """Read the public keys in a folder; a file that cannot be read does not affect the others."""
    found = FolderKeys({}, [])
    for path in sorted(folder.rglob("*.pub")):
        try:
            key = read_public_key(path)
        except InputError as error:
            found.problems.append(str(error))
            continue
        if found.keys.setdefault(fingerprint(key), key) is not key:
            found.problems.append(f"the key in {path} appears twice: every site needs its own key.")
    return found


def read_site_keys(folder: Path) -> Mapping[str, ec.EllipticCurvePublicKey]:
    """The public keys in a folder and its subfolders, by fingerprint; all of its files must be right."""
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}: name the one that holds the sites' public keys.")
    found, problems = find_site_keys(folder)
    if problems:
        raise InputError(problems[0])
    if not found or len(found) > _MAX_KEYS:
        raise InputError(f"{folder} holds {len(found)} public keys: give 1 to {_MAX_KEYS}, as files *.pub.")
    return found


class Certificates(NamedTuple):
    """The files of a server that `offbeat keys` wrote."""

    tls: TlsFiles
    sites: Path  # contains one folder for each site, with its public key


def find_certificates(folder: Path) -> Certificates:
    """Return the files of a folder that `offbeat keys` made, after a check that they can be used."""
    found = Certificates(TlsFiles(folder / "server.pem", folder / "server.key"), folder / "sites")
    tls_context(found.tls)
    read_site_keys(found.sites)
    return found


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """The compressed public key in hexadecimal."""
    return key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint).hex()


def verify_signature(key: ec.EllipticCurvePublicKey, message: bytes, signature: bytes) -> bool:
    """Whether a signature of a message was made with this key."""
    if len(signature) != SIGNATURE_BYTES:
        return False
    numbers = (int.from_bytes(part, "big") for part in (signature[:_HALF_BYTES], signature[_HALF_BYTES:]))
    try:
        key.verify(encode_dss_signature(*numbers), message, ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        return False
    return True
