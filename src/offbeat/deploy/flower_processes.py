"""SuperLinks and SuperNodes as child processes."""

import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from cryptography import x509

from offbeat.deploy.children import Child
from offbeat.deploy.flower_home import Link, command, environment
from offbeat.deploy.ports import free_port
from offbeat.errors import InputError

OWN = "127.0.0.1"  # where a SuperLink of ours listens
_ANSWER = 5.0  # seconds for an answer
_LOOK = 0.2  # seconds between two questions


class Certificates(NamedTuple):
    """What `offbeat keys` wrote for a server."""

    authority: Path
    server: Path
    key: Path
    sites: Path  # a folder with a folder for each

    def public_keys(self) -> list[Path]:
        """Of the sites, by name."""
        return sorted(self.sites.glob("*/key.pub"))


def find_certificates(folder: Path) -> Certificates:
    """The files in a folder from `offbeat keys`, or a sentence on the first that is missing."""
    found = Certificates(folder / "ca.crt", folder / "server.pem", folder / "server.key", folder / "sites")
    for path in found[:3]:
        check_readable(path, "make them with 'offbeat keys'")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(found.server, found.key)
        context.load_verify_locations(found.authority)
    except (ssl.SSLError, OSError):
        raise InputError(
            f"the certificates in {folder} do not fit each other: make them anew with 'offbeat keys'."
        ) from None
    if not found.public_keys():
        raise InputError(f"{found.sites} has no key of any site: add one with 'offbeat keys --add-site'.")
    return found


def check_own(certificates: Certificates) -> None:
    """Refuse a certificate that is not good for a SuperLink behind a gate on this machine."""
    server = x509.load_pem_x509_certificate(certificates.server.read_bytes())
    try:
        names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    if OWN not in map(str, names.get_values_for_type(x509.IPAddress)):
        raise InputError(
            f"{certificates.server} is not good for {OWN}, where --start has the SuperLink listen: "
            "make certificates anew with 'offbeat keys', which adds it."
        )


def check_readable(path: Path, remedy: str) -> None:
    """Refuse a file that is not there or not ours to read."""
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error}): {remedy}.") from None


def start_superlink(host: str, port: int, folder: Path, certificates: Certificates | None) -> Child:
    """A SuperLink whose database and log lie in a folder."""
    words = [command("flower-superlink"), "--host", host, "--port", str(port)]
    words += ["--database", str(folder / "superlink.db"), "--disable-runtime-dependency-installation"]
    if certificates is None:
        words += ["--insecure"]
    else:
        words += ["--ssl-ca-certfile", str(certificates.authority.absolute())]
        words += ["--ssl-certfile", str(certificates.server.absolute())]
        words += ["--ssl-keyfile", str(certificates.key.absolute()), "--enable-supernode-auth"]
    return Child(words, environment(folder / "home"), folder / "superlink.log")


def start_supernode(link: Link, folder: Path, key: Path | None, told: Mapping[str, str], log: Path) -> Child:
    """A SuperNode; `told` goes into its environment, and so into that of the apps it starts."""
    words = [command("flower-supernode"), "--superlink", link.address, "--port", str(free_port())]
    if link.authority is None:
        words += ["--insecure"]
    else:
        words += ["--root-certificates", str(link.authority.absolute())]
    if key is not None:
        words += ["--auth-supernode-private-key", str(key.absolute())]
    return Child(words, environment(folder) | dict(told), log)


def answers(link: Link) -> str | None:
    """Why a SuperLink does not answer; None if it does."""
    context = None if link.authority is None else ssl.create_default_context(cafile=str(link.authority))
    scheme = "http" if context is None else "https"
    try:
        with urllib.request.urlopen(f"{scheme}://{link.address}/health", timeout=_ANSWER, context=context):
            return None
    except urllib.error.HTTPError as error:
        return f"it answers with HTTP {error.code}"
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", None) or error)


def await_answer(link: Link, seconds: float, alive: Callable[[], bool], log: Path | None = None) -> None:
    """Wait until a SuperLink answers; a sentence if it does not, or has ended."""
    limit = time.monotonic() + seconds
    while (why := answers(link)) is not None:
        where = f"; see {log}" if log else ""
        if not alive():
            raise InputError(f"the SuperLink ended as it began{where}.")
        if time.monotonic() > limit:
            raise InputError(f"the SuperLink at {link.address} does not answer ({why}){where}.")
        time.sleep(_LOOK)
