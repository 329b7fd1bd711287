"""How often a client may contribute: what privacy without amplification rests on."""

from dataclasses import dataclass

from offbeat.errors import InputError


@dataclass(frozen=True)
class Participation:
    """At most `most` contributions of a client, any two of them at least `apart` server steps apart."""

    most: int | None = None  # None: as often as it is chosen
    apart: int = 0

    def __post_init__(self) -> None:
        if self.most is not None and self.most < 1:
            raise InputError(f"a client must be allowed at least 1 contribution, not {self.most}.")
        if self.apart < 0:
            raise InputError(f"contributions cannot be {self.apart} server steps apart: give at least 0.")
