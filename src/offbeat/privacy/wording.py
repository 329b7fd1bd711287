"""Accountants and shapes of noise as text."""

from offbeat.errors import InputError, unknown
from offbeat.privacy.accountant import Accountant, Pld, Rdp
from offbeat.privacy.banded import Banded
from offbeat.privacy.correlated import Independent, Noise
from offbeat.privacy.tree import Tree


def parse_accountant(text: str) -> Accountant:
    """`pld` or `rdp`."""
    for accountant in (Pld(), Rdp()):
        if text == accountant.name:
            return accountant
    raise unknown("accountant", text, ("pld", "rdp"))


def parse_shape(text: str) -> Noise:
    """`independent`, `tree` or `banded:B`."""
    name, colon, bands = text.partition(":")
    if name == "banded":
        if not bands.isascii() or not bands.isdigit():
            raise InputError(
                f"write banded noise as banded:B with B its bands, such as banded:8, not '{text}'."
            )
        return Banded(int(bands))
    for shape in (Independent(), Tree()):
        if name == shape.name:
            if colon:
                raise InputError(f"{name} noise takes no number: write it as {name}, not '{text}'.")
            return shape
    raise unknown("shape of noise", name, ("independent", "tree", "banded"))
