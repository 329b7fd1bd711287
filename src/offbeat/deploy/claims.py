"""Whose name is whose: where the server has a site's public key, nobody else goes by that site's name."""

import re
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_public_key,
)

from offbeat.deploy.post import Knows
from offbeat.deploy.rejections import Reason, Rejected

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # what a key can be made for; no way out of a folder


@dataclass(frozen=True)
class Claims:
    """`sites` has a folder for each site, with its `key.pub`; `post` knows by which key a node came."""

    sites: Path
    post: Knows

    def check(self, node: int, name: str) -> None:
        """Reject a node that goes by the name of a site whose key it does not have."""
        path = self.sites / name / "key.pub"
        if not _NAME.fullmatch(name) or not path.exists():
            return
        try:
            wanted = load_ssh_public_key(path.read_bytes())
        except (OSError, ValueError, UnsupportedAlgorithm):
            raise _refused(f"the server cannot read its key.pub of {name}: put it back there.") from None
        try:
            given = load_pem_public_key(self.post.key(node))
        except (ValueError, UnsupportedAlgorithm):
            raise _refused(f"the node that calls itself {name} came without a key: join with one.") from None
        form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
        if given.public_bytes(*form) != wanted.public_bytes(*form):
            raise _refused(
                f"the name {name} belongs to another key: join by the name that your key was made for."
            )


def _refused(sentence: str) -> Rejected:
    return Rejected(Reason.SETTINGS, sentence)
